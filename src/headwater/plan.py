"""config -> one `LayerPlan` per layer: what each layer projects, stores, hands on and reads. Pure Python.

The plan is the only place where "who owns what" is decided. Attention builds its projections from it, the cache
stores what it says, the depth loop carries the tensors it names, and `cost` prices it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from headwater.registry import resolve

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class Source(NamedTuple):
    """Keys or values of one layer that a later layer reads.

    kind: "raw" = as projected, the new tokens only, [B, K, T, d];
          "bank" = as attended to (shifted, roped), the whole history, [B, K, S, d].
    part: "k" or "v".
    """

    kind: Literal["raw", "bank"]
    part: Literal["k", "v"]
    layer: int


@dataclass(frozen=True)
class LayerPlan:
    """What layer `index` projects, stores and reads.

    kv_heads: key/value heads this layer projects and caches (the last ones may be left out, if nobody reads them).
    owns_v: False where the layer has no value projection and caches no V.
    tail: raw tokens of K and V kept beside the cache for the mechanism that looks back (window - 1).
    reads: tensors of earlier layers this layer needs, in the order they are passed.
    exports: tensors of this layer that later layers read, in the order they are returned.
    mechanisms: names of the mechanisms that act in this layer, in order of application.
    """

    index: int
    kv_heads: int
    owns_v: bool = True
    tail: int = 0
    reads: tuple[Source, ...] = ()
    exports: tuple[Source, ...] = ()
    mechanisms: tuple[str, ...] = ()

    def reading(self, *sources: Source) -> LayerPlan:
        """This plan with `sources` added to what it reads."""
        new = tuple(s for s in dict.fromkeys(sources) if s not in self.reads)
        return replace(self, reads=self.reads + new)

    def acting(self, mechanism: str, **changes) -> LayerPlan:
        """This plan with `mechanism` added to those that act, and any other fields changed."""
        return replace(self, mechanisms=(*self.mechanisms, mechanism), **changes)

    @property
    def is_ordinary(self) -> bool:
        """True where the cache of this layer is the usual K and V, so that any cache implementation will do."""
        return self.owns_v and self.tail == 0


def plan_layers(config: HeadwaterConfig) -> tuple[LayerPlan, ...]:
    """The plans of all layers: every mechanism, in the config's order, amends the vanilla plan."""
    plans = [LayerPlan(i, config.num_key_value_heads) for i in range(config.num_hidden_layers)]
    for name, options in config.mechanisms.items():
        plans = resolve(name).plan(options, plans)
    wanted = {source for plan in plans for source in plan.reads}
    return tuple(
        replace(plan, exports=tuple(sorted(source for source in wanted if source.layer == plan.index)))
        for plan in plans
    )
