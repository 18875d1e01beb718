"""Models split by heads: the plans and the config of a process that has some consecutive key/value heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from headwater.config.plan import LayerPlan
from headwater.config.planner import groups_of
from headwater.config.text import HeadwaterConfig


def narrowed(plans: Sequence[LayerPlan], heads: range) -> tuple[LayerPlan, ...]:
    """The plans of a process that has only some consecutive key/value heads, counted from zero.

    Reads and exports stay as they are: a tensor may then have no heads.
    """

    def kept(stored: Sequence[int]) -> tuple[int, ...]:
        return tuple(head - heads.start for head in stored if head in heads)

    narrow = [
        replace(
            plan,
            attends=plan.attends[heads.start : heads.stop],
            k_heads=kept(plan.k_heads),
            v_heads=kept(plan.v_heads),
        )
        for plan in plans
    ]
    return tuple(replace(plan, groups=groups_of(plan, narrow)) for plan in narrow)


def narrow_config(config: HeadwaterConfig, plans: tuple[LayerPlan, ...], queries: int, heads: int) -> HeadwaterConfig:
    """The config of a process that has some heads only."""
    narrow = copy.copy(config)
    narrow.__class__ = type("NarrowConfig", (_Narrow, type(config)), {})
    narrow.__dict__.update(narrow_plans=plans, num_attention_heads=queries, num_key_value_heads=heads)
    return narrow


@dataclass(frozen=True)
class SomeHeads:
    """Consecutive key/value heads of a model, and the query heads that read them.

    heads: key/value heads, counted in the whole model.
    """

    config: HeadwaterConfig
    heads: range

    @classmethod
    def share(cls, config: HeadwaterConfig, rank: int, size: int) -> SomeHeads:
        """Those of one of `size` processes."""
        own = config.num_key_value_heads // size
        return cls(config, range(rank * own, (rank + 1) * own))

    @cached_property
    def queries(self) -> range:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return range(self.heads.start * group, self.heads.stop * group)

    @cached_property
    def narrow(self) -> HeadwaterConfig:
        """The config of a model with these heads only."""
        plans = narrowed(self.config.layer_plans, self.heads)
        return narrow_config(self.config, plans, len(self.queries), len(self.heads))

    def places(self, plan: LayerPlan) -> dict[str, tuple[int, list[int]]]:
        """How many heads' queries ("q"), keys, values and attention weights ("a") a layer makes; which are these."""
        queries = range(self.config.num_attention_heads)
        made = {"q": queries, "k": plan.k_heads, "v": plan.v_heads, "a": queries}
        own = {"q": self.queries, "k": self.heads, "v": self.heads, "a": self.queries}
        return {part: (len(of), [at for at, head in enumerate(of) if head in own[part]]) for part, of in made.items()}


class _Narrow:
    narrow_plans: tuple[LayerPlan, ...]

    @property
    def layer_plans(self) -> tuple[LayerPlan, ...]:
        return self.narrow_plans
