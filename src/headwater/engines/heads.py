"""Models split by heads: the plans and the config of a process that has some consecutive key/value heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from headwater.config.plan import LayerPlan
from headwater.config.planner import groups_of, plan_layers, with_all_layers
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
    return with_all_layers(replace(plan, groups=groups_of(plan, narrow)) for plan in narrow)


@dataclass(frozen=True)
class SomeHeads:
    """The key/value heads of process `rank` of `size`, and the query heads that read them."""

    config: HeadwaterConfig
    rank: int = 0
    size: int = 1

    @cached_property
    def heads(self) -> range:
        """Key/value heads, counted in the whole model."""
        count = self.config.num_key_value_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    @cached_property
    def queries(self) -> range:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return range(self.heads.start * group, self.heads.stop * group)

    @cached_property
    def model_plans(self) -> tuple[LayerPlan, ...]:
        """The plans of the whole model."""
        return plan_layers(self.config)

    @cached_property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The plans of a model with these heads only. One process has all, and its layers may differ in heads."""
        return self.model_plans if self.size == 1 else narrowed(self.model_plans, self.heads)

    @cached_property
    def narrow(self) -> HeadwaterConfig:
        """The config of a model with these heads only."""
        narrow = copy.copy(self.config)
        narrow.num_attention_heads, narrow.num_key_value_heads = len(self.queries), len(self.heads)
        return narrow

    def places(self, plan: LayerPlan) -> dict[str, tuple[int, list[int]]]:
        """How many heads' queries ("q"), keys, values and attention weights ("a") a layer makes; which are these."""
        queries = range(self.config.num_attention_heads)
        made = {"q": queries, "k": plan.k_heads, "v": plan.v_heads, "a": queries}
        own = {"q": self.queries, "k": self.heads, "v": self.heads, "a": self.queries}
        return {part: (len(of), [at for at, head in enumerate(of) if head in own[part]]) for part, of in made.items()}
