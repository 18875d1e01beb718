"""`Registry`: what names in configs and recipes refer to: built-in objects, entry points, and "package.module:name".

Mechanisms, kinds of data, optimizers, schedules and model families each have a registry next to what it names; that of
mechanisms is in `headwater.plugins.mechanisms`.
"""

import functools
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import resolve_name
from typing import Any

from headwater.util.errors import HeadwaterError, nearest
from headwater.util.layout import IS_EXPORTED

if not IS_EXPORTED:
    from headwater.plugins.external_code import import_trusted


class Registry:
    """Objects of one kind, by name.

    A name is a built-in one; one added by `add`; an entry point of an installed package; or
    "package.module:attribute", which is imported if the user trusts it (`headwater.plugins.trust`).
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: dict[str, str],
        base: str | None = None,
        temporary: dict[str, str] | None = None,
    ) -> None:
        """kind: what the objects are, for messages. group: of entry points. built_in: name -> "module:attribute".

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
            return self._check_kind(name, import_trusted(name, self.kind, self.base))
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
        classes = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
        fits = callable(thing) if self.base is None else any(cls.__name__ == self.base for cls in classes)
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
