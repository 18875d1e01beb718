"""Code from outside: import "package.module:attribute" if the user trusts it, and hash the code behind such names.

Without trust, a name may still refer to a class that the program has already imported, if it derives from one of
headwater's (`find_loaded`). Entry points are installed, and `headwater.plugins.registry` finds them by itself.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from headwater.plugins.trust import QUALIFIED_NAME, is_trusted, list_texts, list_trusted
from headwater.util.errors import HeadwaterError, NotTrusted
from headwater.util.layout import LIBRARY, is_ours


def import_trusted(name: str, kind: str, base: str | None = None) -> Any:
    """Import the attribute that "package.module:attribute" names.

    kind: of object, for messages. base: the name of the class of headwater's that it derives from, or is an
    instance of.
    Raises `NotTrusted` if the user does not trust it, and `HeadwaterError` if there is none or its import fails.
    """
    if not QUALIFIED_NAME.fullmatch(name):
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
    if name not in list_trusted() and not _is_defined_in(thing, module):
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
    for name in list_texts(values):
        target = installed.get(name, name)
        if QUALIFIED_NAME.fullmatch(target) and (name in installed or is_trusted(name)):
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
