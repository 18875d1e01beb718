"""Make the code that is saved in a checkpoint (`headwater.models.remote_code`): what its model needs, in flat files.

transformers copies such code (`trust_remote_code=True`) into one folder, and follows only imports of the form
`from .name import …`. So each module becomes one file next to the weights, headwater.nn.attention ->
headwater_nn_attention.py, with its imports rewritten, and one entry file names them all. Needed are the modules of the
model's classes and of its mechanisms, and what these import, except under `if TYPE_CHECKING` and `if not IS_EXPORTED`,
whose bodies are left out. An external mechanism is included: its module and others of its package, as
headwater_outside_….py.
"""

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from headwater.config.auto_map import ENTRY, auto_classes_of
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError
from headwater.util.layout import LIBRARY, package_folder, top_package


def make_code(config: Any) -> dict[str, str]:
    """Make the files of the code that a model with this config needs: name -> text.

    Raises `HeadwaterError` for an import that has no flat form, and for a mechanism whose code cannot be included.
    """
    targets = tuple(auto_classes_of(config).values())
    modules = {target.partition(":")[0] for target in targets}
    outside = {}
    for name in _list_mechanisms(getattr(config, "mechanisms", None) or {}):
        mechanism = resolve(name)
        modules.add(mechanism.__module__)
        if not _is_ours(mechanism.__module__):
            outside[name] = f"{mechanism.__module__}:{mechanism.__qualname__}"
    if outside:  # somebody may be editing them
        return _make_files(targets, modules, outside)
    return dict(_make_own_files(targets, frozenset(modules)))


def _list_mechanisms(mechanisms: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of mechanisms, and of those that their options name."""
    for name, options in mechanisms.items():
        yield name
        yield from (options or {}).get("mechanisms") or {}


@functools.cache
def _make_own_files(targets: tuple[str, ...], modules: frozenset[str]) -> dict[str, str]:
    """Make headwater's own files once: a registered model writes them with every save."""
    return _make_files(targets, modules, {})


def _make_files(targets: Sequence[str], modules: Iterable[str], outside: Mapping[str, str]) -> dict[str, str]:
    """Make the files of these modules and of what they import. targets: the classes, "module:Class"."""
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = _find_path(module).read_text(encoding="utf-8")
            tree = ast.parse(sources[module])
            if not _is_ours(module):
                _check_carried(module, tree)
            waiting += [name for _, _, names in _find_edits(module, tree, {}) for name in names]
    sources = dict(sorted(sources.items()))

    # Cache layers register under a name in a table of the whole process. A digest of the code in the name keeps them
    # apart from the installed package's and from those of other versions.
    digest = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:8]
    kinds = {name: f"{name}_{digest}" for source in sources.values() for name in _layer_types(ast.parse(source))}
    files = {f"{_flat_name(module)}.py": _rewrite_source(module, source, kinds) for module, source in sources.items()}
    if outside:
        files[f"{_flat_name(resolve.__module__)}.py"] += "".join(
            f'\nMECHANISMS.built_in["{name}"] = ".{_flat_name(target.partition(":")[0])}:{target.partition(":")[2]}"\n'
            for name, target in outside.items()
        )
    return {f"{ENTRY}.py": _make_entry(sources, targets), **files}


def _make_entry(modules: Iterable[str], targets: Sequence[str]) -> str:
    """Make the file that the Auto classes open: the exported classes, and all files, for transformers to copy."""
    names = sorted(target.partition(":")[2] for target in targets)
    lines = ['"""A headwater model as remote code, written by headwater\'s export."""', ""]
    for module in modules:
        classes = [target.partition(":")[2] for target in targets if target.startswith(f"{module}:")]
        lines.append(f"from .{_flat_name(module)} import {', '.join(classes) or '__name__ as _'}")
    return "\n".join([*lines, "", f"__all__ = {names}", ""])


def _rewrite_source(module: str, source: str, kinds: dict[str, str]) -> str:
    text = source.encode()  # ast counts columns in bytes, not characters
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = [
        (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset, new)
        for node, new, _ in _find_edits(module, ast.parse(text), kinds)
    ]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    return f"# Written from {module} by headwater's export.\n{text.decode()}"


def _find_edits(module: str, tree: ast.Module, kinds: dict[str, str]) -> Iterator[tuple[Any, str, list[str]]]:
    """List the edits of a module: (node, replacement, modules of the package that it names)."""
    package = module if _find_path(module).name == "__init__.py" else module.rpartition(".")[0]
    packages = LIBRARY, module.split(".")[0]
    for node in _walk(tree):
        if isinstance(node, ast.Pass):
            yield node, "pass", []
        elif isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if top_package(alias.name) in packages):
                raise HeadwaterError(f"{module}: write import {name} as from … import …, which has a flat form.")
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            if source.split(".")[0] in packages:
                yield node, *_rewrite_import(node, source)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := re.fullmatch(rf"({LIBRARY}(?:\.\w+)+):(\w+)", node.value):
                yield node, f'".{_flat_name(match[1])}:{match[2]}"', []
            elif node.value in kinds:
                yield node, f'"{kinds[node.value]}"', []


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, with `pass` in place of what never runs in an export."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "not IS_EXPORTED"):
        end = tree.body[-1]
        left_out = ast.copy_location(ast.Pass(), tree.body[0])
        left_out.end_lineno, left_out.end_col_offset = end.end_lineno, end.end_col_offset
        tree.body = [left_out]
    yield tree
    for node in ast.iter_child_nodes(tree):
        yield from _walk(node)


def _rewrite_import(node: ast.ImportFrom, source: str) -> tuple[str, list[str]]:
    """Return the flat form of `from source import …`, where a name may be a module, and the modules that it names."""
    lines, modules = [], []
    names: dict[str, list[str]] = {}
    for alias in node.names:
        module = f"{source}.{alias.name}"
        if _is_module(module):
            lines.append(f"from . import {_flat_name(module)} as {alias.asname or alias.name}")
            modules.append(module)
        else:  # import names that the package re-exports from where they are defined
            home = getattr(import_module(LIBRARY), alias.name).__module__ if source == LIBRARY else source
            names.setdefault(home, []).append(ast.unparse(alias))
    from_names = [f"from .{_flat_name(home)} import {', '.join(imported)}" for home, imported in names.items()]
    return "; ".join(from_names + lines), [*modules, *names]


def _layer_types(tree: ast.Module) -> set[str]:
    """The names under which cache layers register: strings assigned to `_layer_type`."""
    return {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "_layer_type" in map(ast.unparse, node.targets)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _check_carried(module: str, tree: ast.Module) -> None:
    """Raise `HeadwaterError` if an external module imports something that is neither included nor installable."""
    packages = {LIBRARY, module.split(".")[0]}
    installed = packages_distributions()
    for node in _walk(tree):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported = [node.module]
        for name in imported:
            top = name.split(".")[0]
            if top not in packages and top not in sys.stdlib_module_names and top not in installed:
                raise HeadwaterError(
                    f"{module} imports {name}, a neighboring file that would be missing from the checkpoint; put "
                    f"both into one package or one file."
                )


def _is_ours(module: str) -> bool:
    return top_package(module) == LIBRARY


def _find_path(module: str) -> Path:
    if not _is_ours(module):
        spec = None if module == "__main__" else find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise HeadwaterError(
                f"A mechanism is defined in {module!r}, which is not a file, so it cannot be saved with a "
                f"checkpoint; move its class to a module."
            )
        return Path(spec.origin)
    path = package_folder(__name__).joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    if _is_ours(name):
        return _find_path(name).exists()
    try:
        return find_spec(name) is not None
    except ImportError:  # its parent is not a package
        return False


def _flat_name(module: str) -> str:
    return ("" if _is_ours(module) else f"{LIBRARY}_outside_") + module.replace(".", "_")
