"""Which code from outside may be imported, and which files read: what the user trusts.

Importing runs code, and names may come from other people: from a checkpoint's config or history, or from the recipe of
a record. So may the path of a private file. Therefore headwater imports, and reads outside the current folder, only
what the user trusts:

- names that the user wrote: on the command line, or in a recipe that was named or passed (`trust_names_in`);
- modules, names and paths that the user passed as `--trust NAME` or `trust=["NAME"]` (`trust_names`).

The list is in the environment of this process, so that its child processes trust the same names. It ends with them.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError, NotTrusted, shown

# The trusted names, separated by commas: "package.module", "package.module:attribute" or paths.
VARIABLE = "HEADWATER_TRUST"
_PART = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
QUALIFIED_NAME = re.compile(f"{_PART}:{_PART}")
_MODULE_OR_NAME = re.compile(f"{_PART}(?::{_PART})?")


def trust_names(names: Iterable[str]) -> None:
    """Let files name these from now on: "package.module:attribute", or "package.module" or a path and all below it.

    Raises `HeadwaterError` for anything else.
    """
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str) or not (_MODULE_OR_NAME.fullmatch(name) or _is_path(name)):
            raise HeadwaterError(
                f"{shown(name)} cannot be trusted; name a package.module, a package.module:Class or a path, without a "
                f"comma."
            )
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*list_trusted(), *names]))


def trust_names_in(values: Any) -> None:
    """Trust each "package.module:attribute", and each path out of this folder, in nested values that a user wrote."""
    for text in list_texts(values):
        # Ignore texts that happen to name a folder above the current one, such as the title "/".
        is_elsewhere = _is_path(text) and _leads_out(text) and not _is_below(os.curdir, text)
        if is_elsewhere or QUALIFIED_NAME.fullmatch(text):
            trust_names([text])


def may_read(path: str) -> bool:
    """Whether a path that a file names is below the current folder and not hidden, or the user trusts it."""
    current = Path.cwd()
    below = str(Path(path).relative_to(current)) if Path(path).is_relative_to(current) else path
    return not _leads_out(below) or _is_trusted_path(path)


def check_paths(values: Any) -> None:
    """Raise `NotTrusted` for the first path that may not be read in the nested settings of a file."""
    for path in list_texts(values):
        if not may_read(path):
            raise NotTrusted(
                f"A file names {shown(path)}, which is not below the current folder; if it may be read, add "
                f"--trust {shlex.quote(path)} (in Python: trust=[{path!r}])."
            )


def check_link(path: Path, folder: Path) -> None:
    """Raise `NotTrusted` if a file in a folder is a link out of it, other than to the files of the hub's cache, and the
    user does not trust where it leads.
    """
    real, inside = path.resolve(), folder.resolve()
    cached = [above.parent / "blobs" for above in (inside, *inside.parents) if above.name == "snapshots"]
    if any(real.is_relative_to(root) for root in (inside, *cached)) or _is_trusted_path(str(real)):
        return
    raise NotTrusted(
        f"{str(path)!r} is a link to {shown(str(real))}, outside its folder; if it may be read, add --trust "
        f"{shlex.quote(str(real))} (in Python: trust=[{str(real)!r}])."
    )


def is_trusted(name: str) -> bool:
    """Whether the user trusts a name: as it stands, or by its module or a package above."""
    segments = name.partition(":")[0].split(".")
    above = {".".join(segments[:end]) for end in range(1, len(segments) + 1)}
    return not (above | {name}).isdisjoint(list_trusted())


def list_trusted() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def list_texts(values: Any) -> Iterator[str]:
    """Yield the texts in nested values, keys of mappings included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from list_texts(key)
            yield from list_texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from list_texts(value)


def _leads_out(name: str) -> bool:
    """Whether a name is a path that, as written, leaves the current folder, or a hidden one inside it."""
    segments = Path(name).parts
    if not segments or "\0" in name:
        return False
    if name.startswith("~") or Path(name).is_absolute() or ".." in segments:
        return True
    return any(segment.startswith(".") for segment in segments) or not _is_below(name, os.curdir)


def _is_trusted_path(path: str) -> bool:
    """Whether the user trusts a path: as it stands, or by a folder above."""
    return any(path == folder or _is_below(path, folder) for folder in list_trusted())


def _is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or inside it, after following links."""
    real_path, real_folder = (os.path.realpath(os.path.expanduser(name)) for name in (path, folder))
    return Path(real_path).is_relative_to(real_folder)


def _is_path(name: str) -> bool:
    """Whether a name is a path that can be trusted."""
    return "," not in name and "\0" not in name and (_leads_out(name) or os.path.lexists(name))
