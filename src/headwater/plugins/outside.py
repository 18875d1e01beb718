"""Import "package.module:attribute", and decide which of these names may be imported, and which files read.

Importing runs code, and names may come from other people: from a checkpoint's config or history, or from the recipe of
a record. So may the path of a private file. Therefore headwater imports, and reads outside the current folder, only
what the user trusts:

- names that the user wrote: on the command line, or in a recipe that was named or passed (`trust_names_in`);
- modules, names and paths that the user passed as `--trust NAME` or `trust=["NAME"]` (`trust_names`).

In addition, a name may refer to a class that the program has already imported, if it derives from one of headwater's
(`find_loaded`). Entry points are installed, and `headwater.plugins.registry` finds them without this module.

The list is in the environment of this process, so that its child processes trust the same names. It ends with them.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from headwater.util.errors import HeadwaterError, NotTrusted, shown
from headwater.util.layout import LIBRARY, is_ours

# The trusted names, separated by commas: "package.module", "package.module:attribute" or paths.
VARIABLE = "HEADWATER_TRUST"
_PART = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAME = re.compile(f"{_PART}:{_PART}")
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
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*_list_trusted(), *names]))


def trust_names_in(values: Any) -> None:
    """Trust each "package.module:attribute", and each path out of this folder, in nested values that a user wrote."""
    for text in _texts_in(values):
        # Ignore texts that happen to name a folder above the current one, such as the title "/".
        is_elsewhere = _is_path(text) and _leads_out(text) and not _is_below(os.curdir, text)
        if is_elsewhere or _NAME.fullmatch(text):
            trust_names([text])


def may_read(path: str) -> bool:
    """Whether a path that a file names is below the current folder and not hidden, or the user trusts it."""
    current = Path.cwd()
    below = str(Path(path).relative_to(current)) if Path(path).is_relative_to(current) else path
    return not _leads_out(below) or _is_trusted_path(path)


def check_paths(values: Any) -> None:
    """Raise `NotTrusted` for the first path that may not be read in the nested settings of a file."""
    for path in _texts_in(values):
        if not may_read(path):
            raise NotTrusted(
                f"A file names {shown(path)}, which is not below the current folder; if it may be read, add "
                f"--trust {shlex.quote(path)} (in Python: trust=[{path!r}])."
            )


def is_trusted(name: str) -> bool:
    """Whether the user trusts a name: as it stands, or by its module or a package above."""
    segments = name.partition(":")[0].split(".")
    above = {".".join(segments[:end]) for end in range(1, len(segments) + 1)}
    return not (above | {name}).isdisjoint(_list_trusted())


def import_trusted(name: str, kind: str, base: str | None = None) -> Any:
    """Import the attribute that "package.module:attribute" names.

    kind: of object, for messages. base: the name of the class of headwater's that it derives from, or is an
    instance of.
    Raises `NotTrusted` if the user does not trust it, and `HeadwaterError` if there is none or its import fails.
    """
    if not _NAME.fullmatch(name):
        raise HeadwaterError(f"The {kind} {name!r} is not a valid name; write package.module:Class.")
    if not is_trusted(name):
        if base is not None and (thing := find_loaded(name, base)) is not None:
            return thing
        raise _make_refusal(name, kind, base)
    module, _, attribute = name.partition(":")
    with _search_current_folder(module):
        try:
            parent = importlib.import_module(module)
        except Exception as error:  # importing can raise anything
            reason = " ".join(str(error).split())
            raise HeadwaterError(
                f"The {kind} {name!r} cannot be imported: {type(error).__name__}: {reason}; correct {module!r}, "
                "install its package, or set PYTHONPATH to its folder."
            ) from error
    try:
        thing = functools.reduce(getattr, attribute.split("."), parent)
    except AttributeError as error:
        raise HeadwaterError(f"The module {module!r} has no {attribute!r}, which the {kind} {name!r} names.") from error
    if name not in _list_trusted() and not _is_defined_in(thing, module):
        raise _make_refusal(name, kind, base)
    return thing


def find_loaded(name: str, base: str) -> Any:
    """Find what a name means in a module that is imported already, if it derives from headwater's class `base` or is
    an instance of it; else None. No code runs: not even a module's `__getattr__`.
    """
    module, _, attribute = name.partition(":")
    thing: Any = sys.modules.get(module)
    for segment in attribute.split("."):
        if not isinstance(thing, ModuleType if thing is sys.modules.get(module) else type):
            return None
        thing = vars(thing).get(segment)
    kind = thing if isinstance(thing, type) else type(thing)
    bases = type.__dict__["__mro__"].__get__(kind)
    derives = any(base_class.__name__ == base and is_ours(base_class.__module__) for base_class in bases)
    return thing if derives else None


def hash_code(values: Any) -> dict[str, str]:
    """Hash the code from outside that nested values name, and that may be imported: by name, the SHA-256 of the
    statements of its module, or of all of its package. Comments and layout do not count.
    """
    groups = entry_points()
    installed = {
        point.name: point.value.replace(" ", "")
        for group in groups.groups
        if group.startswith(f"{LIBRARY}.")
        for point in groups.select(group=group)
    }
    hashes = {}
    for name in _texts_in(values):
        target = installed.get(name, name)
        if _NAME.fullmatch(target) and (name in installed or is_trusted(name)):
            files = _list_files(target.partition(":")[0])
            if digests := [_hash_statements(path, path.stat().st_mtime_ns) for path in files]:
                hashes[name] = hashlib.sha256(b"".join(digests)).hexdigest()
    return hashes


@functools.cache  # a comparison asks for every one of its runs
def _hash_statements(path: Path, changed: int) -> bytes:
    """Hash a file's statements. changed: when it was."""
    source = path.read_bytes()
    with suppress(SyntaxError, ValueError):  # a template in a package, for example
        source = ast.unparse(ast.parse(source)).encode()
    return hashlib.sha256(source).digest()


def _list_files(module: str) -> list[Path]:
    """List the files of a module's package, or its own if it is in none; [] if there are none, or it is ours."""
    for name in () if is_ours(module) else (module.partition(".")[0], module):
        with _search_current_folder(name), suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            path = Path(str(spec and spec.origin))
            if path.suffix == ".py":
                return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return []


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


def _list_trusted() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def _texts_in(values: Any) -> Iterator[str]:
    """Yield the texts in nested values, keys of mappings included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts_in(key)
            yield from _texts_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts_in(value)


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
    return any(path == folder or _is_below(path, folder) for folder in _list_trusted())


def _is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or inside it, after following links."""
    real_path, real_folder = (os.path.realpath(os.path.expanduser(name)) for name in (path, folder))
    return Path(real_path).is_relative_to(real_folder)


def _is_path(name: str) -> bool:
    """Whether a name is a path that can be trusted."""
    return "," not in name and "\0" not in name and (_leads_out(name) or os.path.lexists(name))


def _is_defined_in(thing: Any, module: str) -> bool:
    """Whether code is from the module's own package, instead of imported, such as os.system."""
    if isinstance(thing, ModuleType):
        return False
    if not callable(thing):
        return True
    return str(getattr(thing, "__module__", None)).split(".")[0] == module.split(".")[0]


def _make_refusal(name: str, kind: str, base: str | None) -> NotTrusted:
    return NotTrusted(
        f"The {kind} {name!r} is code from outside headwater; if you trust it, add --trust {name} (in Python: "
        f"trust=[{name!r}]){' or import its module' if base else ''}."
    )


@contextmanager
def _search_current_folder(module: str) -> Iterator[None]:
    """Put the current folder on Python's path too in this context, if the module is not elsewhere.

    It comes last, so that it hides nothing installed, and is removed afterwards, so that other imports do not find
    files in it.
    """
    top = module.split(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        yield
        return
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        for index in reversed(range(len(sys.path))):
            if sys.path[index] == folder:
                del sys.path[index]
                break
