"""JSON files that detect changes: the last field is the SHA-256 of the file with that field empty."""

import hashlib
import json
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text

SEAL = "check"
_EMPTY = f'"{SEAL}": ""'.encode()


def write_sealed(file: Path, values: dict[str, Any]) -> None:
    """Write `values` with a seal, atomically."""
    text = json.dumps({**values, SEAL: ""}, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    replace_text(file, text[: text.rindex('"')] + digest + text[text.rindex('"') :])


def read_sealed(file: Path) -> dict[str, Any] | None:
    """Read the values of a sealed file, without the seal; None if there is no such file.

    Raises `HeadwaterError` if the file is damaged or cannot be read.
    """
    try:
        if not file.exists():
            return None
        if not file.is_file():  # to open a pipe would wait for its writer
            raise HeadwaterError(f"{str(file)!r} is not a regular file; remove it.")
        data = file.read_bytes()
        values = json.loads(data.decode())
    except HeadwaterError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise describe_damage(file) from error
    if not isinstance(values, dict):
        raise describe_damage(file)
    seal = values.pop(SEAL, None)
    head, match, tail = data.rpartition(f'"{SEAL}": "{seal}"'.encode(errors="replace"))
    if not match or hashlib.sha256(head + _EMPTY + tail).hexdigest() != seal:
        raise describe_damage(file)
    return values


def describe_damage(file: Path) -> HeadwaterError:
    """Make the error for a file of a prepared folder that has changed."""
    return HeadwaterError(
        f"{str(file)!r} has changed since it was written; copy it again, or prepare the folder again."
    )
