"""Look up names in configs and recipes: built-in ones, entry points, and "package.module:name".

Mechanisms, kinds of data, optimizers, schedules and model families have names. Each kind has one `Registry`. The one of
the mechanisms is here, the others are next to what they name. Config, plan, attention and the contract tests find
mechanisms through this table and know none of them by name. A built-in mechanism is one file in `mechanisms/`; one from
outside is any importable class (docs/extending.md).
"""

import functools
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError, nearest
from headwater.util.layout import IS_EXPORTED, LIBRARY

if not IS_EXPORTED:
    from headwater.plugins import outside


class Registry:
    """Objects of one kind, by name.

    A name is a built-in one; one added by `add`; an entry point of an installed package; or
    "package.module:attribute", which is imported if the user trusts it (`headwater.plugins.outside`).
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: dict[str, str],
        base: str | None = None,
        temporary: dict[str, str] | None = None,
    ) -> None:
        """Name a kind, in words for messages. group: of its entry points. built_in: name -> "module:attribute".

        base: the name of the class that these objects are, or are instances of; None: anything callable.
        temporary: like built_in, for objects that a model has only temporarily. Users cannot choose it, and `names`
        omits it.
        """
        self.kind, self.group, self.built_in, self.base = kind, group, built_in, base
        self.temporary = temporary or {}
        self.added: dict[str, Any] = {}

    @property
    def entry_points(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        if IS_EXPORTED:
            return {}
        return {name: point for name, point in _find_entry_points(self.group).items() if name not in self.built_in}

    @property
    def names(self) -> list[str]:
        """All names: built-in ones, added ones, and entry points of installed packages."""
        return list(dict.fromkeys((*self.built_in, *self.added, *self.entry_points)))

    def is_built_in(self, name: str) -> bool:
        """Whether a name is headwater's own."""
        return name in self.built_in or name in self.temporary

    def resolve(self, name: str) -> Any:
        """Return the object that a name refers to.

        Raises `HeadwaterError` for an unknown name, one that the user does not trust, one that cannot be imported, and
        one of another kind.
        """
        if self.is_built_in(name):
            module, _, attribute = (self.built_in.get(name) or self.temporary[name]).partition(":")
            # Passing the package makes this work for exported checkpoints too, whose code lies in a single folder and
            # has relative names.
            return getattr(import_module(module, __package__), attribute)
        if name in self.added:
            return self.added[name]
        # An installed package is trusted under both of its names.
        targets = {point.value.replace(" ", ""): point for point in self.entry_points.values()}
        if (point := self.entry_points.get(name) or targets.get(name)) is not None:
            return self._check_kind(name, _load_entry_point(point, self.kind, name))
        if ":" in name and not IS_EXPORTED:
            return self._check_kind(name, outside.import_trusted(name, self.kind, self.base))
        raise HeadwaterError(
            f"There is no {self.kind} named {name!r}; {nearest(name, self.names)} Name an external one as "
            "package.module:Class, or by its package's entry point."
        )

    def name_of(self, thing: Any) -> str:
        """Return the shortest name by which `resolve` finds a class or function, else "module:name"."""
        target = f"{thing.__module__}:{thing.__qualname__}"
        for name, home in (self.built_in | self.temporary).items():
            module, _, attribute = home.partition(":")
            if target == f"{resolve_name(module, __package__)}:{attribute}":
                return name
        for name, added in self.added.items():
            if added is thing:
                return name
        for name, point in self.entry_points.items():
            if point.value.replace(" ", "") == target or (
                point.module.split(".")[0] == thing.__module__.split(".")[0]
                and point.module in sys.modules
                and _load_entry_point(point, self.kind, name) is thing
            ):
                return name
        return target

    def add(self, name: str, thing: Any) -> Any:
        """Name an object for this process, for example in a notebook, and return it.

        Raises `HeadwaterError` for a built-in name, and for an object of another kind.
        """
        if self.is_built_in(name) or not name.replace("-", "_").isidentifier():
            raise HeadwaterError(
                f"The {self.kind} cannot be named {name!r}; use letters, digits and _, and no built-in name."
            )
        self.added[name] = self._check_kind(name, thing)
        return thing

    def _check_kind(self, name: str, thing: Any) -> Any:
        kinds = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
        fits = callable(thing) if self.base is None else any(kind.__name__ == self.base for kind in kinds)
        if not fits:
            requirement = "can be called" if self.base is None else f"is a {self.base}"
            raise HeadwaterError(f"{name!r} is not a valid {self.kind}: name something that {requirement}.")
        return thing


@functools.cache
def _find_entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load_entry_point(point: EntryPoint, kind: str, name: str) -> Any:
    try:
        return point.load()
    except Exception as error:  # importing a package can raise anything
        reason = " ".join(str(error).split())
        package = point.module if point.dist is None else point.dist.name
        raise HeadwaterError(
            f"The {kind} {name!r} of the package {package} cannot be imported: {type(error).__name__}: {reason}."
        ) from error


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
