"""The registry of mechanisms.

Config, plan, attention and the contract tests find mechanisms through it and know none of them by name. A built-in
mechanism is one file in `mechanisms/`; one from outside is any importable class (docs/extending.md).
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwater.plugins.registry import Registry
from headwater.util.errors import HeadwaterError
from headwater.util.layout import IS_EXPORTED, LIBRARY


def scan_mechanisms() -> tuple[dict[str, str], dict[str, str]]:
    """Find the mechanisms of `headwater.mechanisms` by the statements in their files, without importing these.

    A mechanism's file has its name, and its class has a line such as `order = 30`.

    Returns their classes, each with its module, and the mechanisms, name -> "module:Class", sorted by `order`.
    """
    folder, prefix, package = Path(__file__).parent, f"{LIBRARY}_mechanisms_", "."  # in an exported checkpoint
    if not IS_EXPORTED:
        folder, prefix, package = folder.parent / "mechanisms", "", f"{LIBRARY}.mechanisms."
    modules: dict[str, str] = {}
    ordered: list[tuple[int, str, str]] = []
    for path in folder.glob(f"{prefix}*.py"):
        statements = _STATEMENTS.findall(path.read_text(encoding="utf-8"))
        latest = ""
        for class_name, _, order in statements:
            latest = class_name or latest
            if order:
                ordered.append((int(order), path.stem.removeprefix(prefix), f"{package}{path.stem}:{latest}"))
        if any(order for _, _, order in statements):
            classes = [class_name for class_name, bases, _ in statements if re.search(r"\bMechanism\b", bases)]
            modules |= dict.fromkeys(classes, f"{package}{path.stem}")
    return modules, {name: target for _, name, target in sorted(ordered)}


_STATEMENTS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:|^    order = (\d+)", re.MULTILINE)
MECHANISM_CLASSES, _MECHANISMS = scan_mechanisms()
MECHANISMS = Registry(
    "mechanism",
    "headwater.mechanisms",
    _MECHANISMS,
    "Mechanism",
    temporary={"blend": "headwater.mechanisms.blend:Blend"},
)


def has_own(mechanism: type, member: str) -> bool:
    """Whether the class of a mechanism defines a member itself, instead of inheriting the contract's default."""
    definer = next(kind for kind in mechanism.__mro__ if member in vars(kind))
    return definer.__name__ != MECHANISMS.base


def resolve(name: str) -> Any:
    """Return the class behind a mechanism's name, a `Mechanism`. Raises `HeadwaterError` for an unknown one."""
    return MECHANISMS.resolve(name)


def register(name: str, mechanism: type | None = None) -> Any:
    """Name a mechanism for this process, for example in a notebook: `register("mine", Mine)`, or as a decorator.

    Other processes, such as workers of `headwater compare`, do not know it; for them, put the class into a module.
    Raises `HeadwaterError` for a built-in name, and for anything but a `Mechanism`.
    """
    if mechanism is None:
        return functools.partial(MECHANISMS.add, name)
    return MECHANISMS.add(name, mechanism)


def in_order(mechanisms: dict[str, Any], present: Iterable[str]) -> dict[str, Any]:
    """Sort `mechanisms` into their usual order of application; those in `present` keep theirs, which matters."""
    order = list(present)
    rank = list(dict.fromkeys((*MECHANISMS.built_in, *mechanisms)))
    for name in sorted(mechanisms.keys() - set(order), key=rank.index):
        later = (index for index, neighbor in enumerate(order) if rank.index(neighbor) > rank.index(name))
        order.insert(next(later, len(order)), name)
    return {name: mechanisms[name] for name in order}


def as_mapping(mechanisms: Any) -> Any:
    """Return mechanisms as name -> options, also from a list of names or such mappings: [kv_shift, {skip_layer: {}}].

    Anything else is returned unchanged. Raises `HeadwaterError` for a repeated name.
    """
    if not isinstance(mechanisms, list | tuple):
        return mechanisms
    options_by_name: dict[str, Any] = {}
    for entry in mechanisms:
        if not isinstance(entry, str | dict):
            raise HeadwaterError(f"mechanisms must list names, or name: options, not {entry!r}.")
        for name, options in ({entry: {}} if isinstance(entry, str) else entry).items():
            if name in options_by_name:
                raise HeadwaterError(f"mechanisms names {name!r} twice; name it once.")
            options_by_name[name] = options
    return options_by_name
