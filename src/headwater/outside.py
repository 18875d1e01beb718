"""Import "package.module:attribute", and decide who may import what.

Names written by the user (in a recipe, an option or a Python config) are imported as usual, from the current folder
too. Names in a checkpoint's config may come from anyone. Their module is imported only if

- the module is imported already, or
- it is installed or in a folder of PYTHONPATH, and imports headwater, so is meant for it;
- or it is a file in the current folder that the user has named before. Such files are listed in
  $XDG_CACHE_HOME/headwater/modules or ~/.cache/headwater/modules, one path a line.

So no module beside a checkpoint runs because of it. Entry points are installed, and always allowed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError

# Whether names come from a file instead of the user.
_of_a_file: ContextVar[bool] = ContextVar("of_a_file", default=False)
_HEADWATER = re.compile(r"^\s*(?:from|import)\s+headwater\b", re.MULTILINE)


@contextmanager
def names_of_a_file() -> Iterator[None]:
    """Inside this context, names count as coming from an untrusted file, such as a recipe stored in a checkpoint."""
    token = _of_a_file.set(True)
    try:
        yield
    finally:
        _of_a_file.reset(token)


def imported(name: str, what: str, trusted: bool, advice: str = "") -> Any:
    """The attribute that "package.module:attribute" names.

    what: the kind of object, for messages. trusted: whether the user wrote the name.
    advice: what to suggest if the module is missing.
    Raises `HeadwaterError` if there is none, if its import fails, or if an untrusted file may not import it.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise HeadwaterError(f"The {what} {name!r} is not a valid name; write package.module:Class.")
    if module not in sys.modules:
        _check_there(module, name, what, advice)
        if trusted and not _of_a_file.get():
            _remember(module)
        elif not may_import(module):
            raise HeadwaterError(
                f"A file names the {what} {name!r}; checkpoints may only use modules that import headwater and "
                f"are installed or in a folder of PYTHONPATH. If you trust {module!r}, set PYTHONPATH to its folder."
            )
    try:
        with_folder(os.getcwd())
        found = importlib.import_module(module)
    except Exception as error:  # the module can raise anything
        said = " ".join(str(error).split())
        raise HeadwaterError(
            f"The {what} {name!r} cannot be imported: {type(error).__name__}: {said}; correct {module!r}."
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), found)
    except AttributeError as error:
        raise HeadwaterError(f"The module {module!r} has no {attribute!r}, which the {what} {name!r} names.") from error


def with_folder(folder: str) -> None:
    """Add a folder to the end of Python's path, so that it hides nothing installed."""
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def may_import(module: str) -> bool:
    """Whether an untrusted file may import a module: see the top of this file."""
    if module in sys.modules:
        return True
    spec = _found(module, own_path())
    if spec is None or spec.origin is None:
        here = _found(module, [os.getcwd()])
        return here is not None and str(here.origin) in _remembered()
    try:
        return bool(_HEADWATER.search(Path(spec.origin).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def own_path() -> list[str]:
    """Python's module path without the current folder and the script's, unless PYTHONPATH has them."""
    said = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    script = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()
    without = {os.getcwd(), script} - set(said)
    return [place for place in map(os.path.abspath, sys.path) if place not in without]


def source_of(module: str) -> Path | None:
    """The file of a module's source; None if it has none, as in a notebook."""
    known = sys.modules.get(module)
    file = getattr(known, "__file__", None)
    return Path(file) if file and file.endswith(".py") and Path(file).is_file() and module != "__main__" else None


def _found(module: str, path: list[str]) -> ModuleSpec | None:
    """The location of a module, without running any code, not even its packages."""
    parts = module.split(".")
    spec = PathFinder.find_spec(parts[0], path)
    if spec is None:  # installed by a link to its source
        finders = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
        spec = next((s for f in finders if (s := f.find_spec(parts[0], None)) is not None), None)
    for end in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), list(spec.submodule_search_locations))
    return spec


def _check_there(module: str, name: str, what: str, advice: str) -> None:
    top = module.split(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None or _found(top, [os.getcwd()]) is not None:
        return
    raise HeadwaterError(
        f"The {what} {name!r} needs the module {top!r}, which is not installed; {advice or 'install its package'}, "
        f"or set PYTHONPATH to its folder."
    )


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "modules"


def _remembered() -> list[str]:
    with suppress(OSError, ValueError, RuntimeError):
        return _memory().read_text(encoding="utf-8").splitlines()
    return []


def _remember(module: str) -> None:
    """Remember that the user has named a module in the current folder."""
    spec = _found(module, [os.getcwd()])
    if spec is None or spec.origin is None or _found(module, own_path()) is not None or spec.origin in _remembered():
        return
    with suppress(OSError, RuntimeError):  # then the next command asks for PYTHONPATH
        _memory().parent.mkdir(parents=True, exist_ok=True)
        with _memory().open("a", encoding="utf-8") as file:
            file.write(f"{spec.origin}\n")
