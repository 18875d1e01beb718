"""Code saved in a checkpoint, so that transformers loads it where headwater is not installed."""

import os
from pathlib import Path
from typing import Any

from headwater.config.auto_map import ENTRY, complete_auto_map, has_code
from headwater.util.layout import IS_EXPORTED, LIBRARY

if not IS_EXPORTED:
    from headwater.models.flat_code import make_code


def add_code(config: Any, folder: str | os.PathLike[str]) -> None:
    """Write the code into `folder`, created if missing, and point `config` to it, if it is saved with code.

    Exported code writes itself. Raises `HeadwaterError` as `headwater.models.flat_code.make_code` does.
    """
    if not has_code(config):
        return
    complete_auto_map(config)
    if IS_EXPORTED:
        source = Path(__file__).parent
        files = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.py") if is_code(path.name)}
    else:
        files = make_code(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def is_code(name: str) -> bool:
    """Whether a file of a checkpoint is one that `add_code` writes."""
    return name.endswith(".py") and name.startswith((ENTRY, f"{LIBRARY}_"))
