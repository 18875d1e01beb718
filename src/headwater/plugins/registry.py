"""What the names in configs and recipes refer to: headwater's own, entry points, and "package.module:name".

Mechanisms, kinds of data, optimizers, schedules and model families have names. Each kind has one `Registry`; that of
the mechanisms is here, the others are next to what they name. Config, plan, attention and the contract tests find
mechanisms through this table and know none by name. A mechanism of headwater's own is one file in `mechanisms/` and one
line here; an outside one needs neither (docs/extending.md).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import resolve_name
from typing import Any

from headwater.plugins import outside
from headwater.util.errors import HeadwaterError, nearest
from headwater.util.layout import IS_EXPORTED


class Registry:
    """Objects of one kind, by name.

    A name is one of headwater's own; one added by `add`; an entry point of an installed package; or
    "package.module:attribute", which is imported if the user trusts it (`headwater.plugins.outside`).
    """

    def __init__(
        self,
        what: str,
        group: str,
        own: dict[str, str],
        base: str | None = None,
        passing: dict[str, str] | None = None,
    ) -> None:
        """what: the kind, in words. group: of its entry points. own: name -> "module:attribute".

        base: the name of the class that these objects are, or are instances of; None: anything callable.
        passing: as own, of what a model has only temporarily and users cannot choose, so that `names` leaves it out.
        """
        self.what, self.group, self.own, self.base = what, group, own, base
        self.passing = passing or {}
        self.added: dict[str, Any] = {}

    @property
    def brought(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        if IS_EXPORTED:
            return {}
        return {name: point for name, point in _entry_points(self.group).items() if name not in self.own}

    @property
    def names(self) -> list[str]:
        """All names: headwater's own, added ones, and entry points of installed packages."""
        return list(dict.fromkeys((*self.own, *self.added, *self.brought)))

    def has(self, name: str) -> bool:
        """Whether a name is headwater's own."""
        return name in self.own or name in self.passing

    def resolve(self, name: str) -> Any:
        """The object that a name refers to.

        Raises `HeadwaterError` for an unknown name, one that the user does not trust, one that cannot be imported, and
        one of another kind.
        """
        if self.has(name):
            module, _, attribute = (self.own.get(name) or self.passing[name]).partition(":")
            # With the package, it also works in the exported single-folder form of this code, where names are
            # relative.
            return getattr(import_module(module, __package__), attribute)
        if name in self.added:
            return self.added[name]
        if (point := self.brought.get(name)) is not None:
            return self._checked(name, _loaded(point, self.what, name))
        if ":" in name and not IS_EXPORTED:
            point = next((one for one in self.brought.values() if one.value.replace(" ", "") == name), None)
            if point is not None:  # installed, and so trusted by this name too
                return self._checked(name, _loaded(point, self.what, name))
            return self._checked(name, outside.imported(name, self.what, self.base))
        raise HeadwaterError(
            f"There is no {self.what} named {name!r}; {nearest(name, self.names)} Name an outside one as "
            "package.module:Class, or by its package's entry point."
        )

    def name_of(self, thing: Any) -> str:
        """The name of a class or function: the shortest that `resolve` knows it by, else "module:name"."""
        target = f"{thing.__module__}:{thing.__qualname__}"
        for name, own in (self.own | self.passing).items():
            module, _, attribute = own.partition(":")
            if target == f"{resolve_name(module, __package__)}:{attribute}":
                return name
        for name, added in self.added.items():
            if added is thing:
                return name
        for name, point in self.brought.items():
            if point.value.replace(" ", "") == target or (
                point.module.split(".")[0] == thing.__module__.split(".")[0]
                and point.module in sys.modules
                and _loaded(point, self.what, name) is thing
            ):
                return name
        return target

    def add(self, name: str, thing: Any) -> Any:
        """Name an object for this process, for example in a notebook; returns it.

        Raises `HeadwaterError` for a name of headwater's own, and for an object of another kind.
        """
        if self.has(name) or not name.replace("-", "_").isidentifier():
            raise HeadwaterError(
                f"The {self.what} cannot be named {name!r}; use letters, digits and _, and no name of headwater's own."
            )
        self.added[name] = self._checked(name, thing)
        return thing

    def _checked(self, name: str, thing: Any) -> Any:
        kinds = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
        fits = callable(thing) if self.base is None else any(kind.__name__ == self.base for kind in kinds)
        if not fits:
            wanted = "can be called" if self.base is None else f"is a {self.base}"
            raise HeadwaterError(f"{name!r} is not a valid {self.what}: name something that {wanted}.")
        return thing


@functools.cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _loaded(point: EntryPoint, what: str, name: str) -> Any:
    try:
        return point.load()
    except Exception as error:  # importing a package can raise anything
        said = " ".join(str(error).split())
        package = point.module if point.dist is None else point.dist.name
        raise HeadwaterError(
            f"The {what} {name!r} of the package {package} cannot be imported: {type(error).__name__}: {said}."
        ) from error


MECHANISMS = Registry(
    "mechanism",
    "headwater.mechanisms",
    {
        "pattention": "headwater.mechanisms.pattention:Pattention",
        "kv_shift": "headwater.mechanisms.kv_shift:KVShift",
        "short_conv": "headwater.mechanisms.short_conv:ShortConv",
        "value_residual": "headwater.mechanisms.value_residual:ValueResidual",
        "value_embedding": "headwater.mechanisms.value_embedding:ValueEmbedding",
        "ngram_memory": "headwater.mechanisms.ngram_memory:NGramMemory",
        "svformer": "headwater.mechanisms.svformer:SVFormer",
        "kv_source": "headwater.mechanisms.kv_source:KVSource",
        "skip_layer": "headwater.mechanisms.skip_layer:SkipLayer",
        "persistent_memory": "headwater.mechanisms.persistent_memory:PersistentMemory",
        "neutreno": "headwater.mechanisms.neutreno:NeuTRENO",
        "exclusive": "headwater.mechanisms.exclusive:Exclusive",
        "output_gate": "headwater.mechanisms.output_gate:OutputGate",
        "depth_attention": "headwater.mechanisms.depth_attention:DepthAttention",
        "mudd": "headwater.mechanisms.mudd:MUDD",
        "dense_former": "headwater.mechanisms.dense_former:DenseFormer",
        "smear": "headwater.mechanisms.smear:Smear",
        "embedding_residual": "headwater.mechanisms.embedding_residual:EmbeddingResidual",
        "backout": "headwater.mechanisms.backout:Backout",
    },
    "Mechanism",
    passing={"blend": "headwater.mechanisms.blend:Blend"},
)
# headwater's own, in their usual order of application.
REGISTRY = MECHANISMS.own


def has_own(mechanism: type, member: str) -> bool:
    """Whether the class of a mechanism has a member of its own, and not only the default of the contract."""
    definer = next(kind for kind in mechanism.__mro__ if member in vars(kind))
    return definer.__name__ != MECHANISMS.base


def resolve(name: str) -> Any:
    """The class behind a mechanism's name, a `Mechanism`. Raises `HeadwaterError` for an unknown one."""
    return MECHANISMS.resolve(name)


def register(name: str, mechanism: type | None = None) -> Any:
    """Name a mechanism for this process, for example in a notebook: `register("mine", Mine)`, or as a decorator.

    Other processes, such as those of `headwater compare`, do not know it; for them, put the class into a module.
    Raises `HeadwaterError` for a name of headwater's own, and for anything but a `Mechanism`.
    """
    if mechanism is None:
        return functools.partial(MECHANISMS.add, name)
    return MECHANISMS.add(name, mechanism)


def in_order(mechanisms: dict[str, Any], present: Iterable[str]) -> dict[str, Any]:
    """`mechanisms` in their usual order of application; those in `present` keep theirs, which matters."""
    order = list(present)
    rank = list(dict.fromkeys((*REGISTRY, *mechanisms)))
    for name in sorted(mechanisms.keys() - set(order), key=rank.index):
        later = (at for at, other in enumerate(order) if rank.index(other) > rank.index(name))
        order.insert(next(later, len(order)), name)
    return {name: mechanisms[name] for name in order}


def as_mapping(given: Any) -> Any:
    """Mechanisms as name -> options, also from a list of names or such mappings: [kv_shift, {skip_layer: {}}].

    Anything else is returned unchanged. Raises `HeadwaterError` for a repeated name.
    """
    if not isinstance(given, list | tuple):
        return given
    found: dict[str, Any] = {}
    for one in given:
        if not isinstance(one, str | dict):
            raise HeadwaterError(f"mechanisms must list names, or name: options, not {one!r}.")
        for name, options in ({one: {}} if isinstance(one, str) else one).items():
            if name in found:
                raise HeadwaterError(f"mechanisms names {name!r} twice; name it once.")
            found[name] = options
    return found
