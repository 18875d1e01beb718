"""config -> one `LayerPlan` per layer: the only place that decides which layer owns what. Pure Python.

Each mechanism states whose keys and values each head attends to (`share`), and where it acts (`plan`). From that
follows what to build: a layer projects and stores only the heads that some layer attends to.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError
from headwater.plan import EMBEDDING, HeadGroup, LayerPlan, Source, choose
from headwater.registry import resolve

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


# The latest plans, by the classes and the bytes of all that they are made from, since a config's fields may be set at
# any time. Building one model asks for its plan many times.
_LATEST: OrderedDict[Hashable, tuple[LayerPlan, ...]] = OrderedDict()
_MOST = 16


def plan_layers(config: HeadwaterConfig) -> tuple[LayerPlan, ...]:
    """The plans of all layers. Mechanisms are asked in the config's order: first what they share, then the rest.

    Raises `HeadwaterError` for a mechanism that cannot be found.
    """
    try:
        key = tuple(map(resolve, config.mechanisms)), pickle.dumps(vars(config))
    except (pickle.PicklingError, AttributeError, TypeError):  # something of the user's own is attached to the config
        return _plan_layers(config)
    if (plans := _LATEST.get(key)) is None:
        plans = _LATEST[key] = _plan_layers(config)
        if len(_LATEST) > _MOST:
            _LATEST.popitem(last=False)
    return plans


def _plan_layers(config: HeadwaterConfig) -> tuple[LayerPlan, ...]:
    plans = [LayerPlan.vanilla(i, config.at(i).num_key_value_heads) for i in range(config.num_hidden_layers)]
    for name, options in config.mechanisms.items():
        plans = resolve(name).share(options, config, plans)
    for plan in plans:
        for k, v in plan.attends:
            _check_alike(config, plan.index, {k, v}, _OF_CACHE)
    plans = _settle(plans)
    for name, options in config.mechanisms.items():
        plans = resolve(name).planned(options, config, plans)
    for plan in plans:
        _check_inside(config, plan)
        _check_alike(config, plan.index, {s.layer for s in plan.reads if s.kind in ("raw", "local")}, _OF_CACHE[:3])
        _check_alike(config, plan.index, {s.layer for s in plan.reads if s.kind == "probabilities"}, _OF_CACHE)
    wanted = {source for plan in plans for source in plan.reads}
    return tuple(
        replace(plan, exports=tuple(sorted(source for source in wanted if _gives(plan, source)))) for plan in plans
    )


def _gives(plan: LayerPlan, source: Source) -> bool:
    return source.layer == plan.index or (source == EMBEDDING and bool(plan.at("embedded")))


def _check_inside(config: HeadwaterConfig, plan: LayerPlan) -> None:
    """Raise `HeadwaterError` if a mechanism acts inside a feed-forward that another one replaces."""
    width = config.hidden_size
    for inside in plan.at("feed_forward_hidden"):
        for name, options in config.mechanisms.items():
            if resolve(name).map_cost(options, config, plan.index, "feed_forward", width, width) is not None:
                raise HeadwaterError(
                    f"Mechanism {inside!r} acts inside the feed-forward of layer {plan.index}, which {name!r} "
                    f"replaces; remove one of them, or what {inside!r} does there."
                )


def output_only_from(config: HeadwaterConfig) -> int:
    """The first of the layers at the end that only tokens whose output is asked for have to go through.

    Later tokens need nothing of what these layers make, and what they read of lower ones is there for all tokens (keys
    and values as attended to) or token by token. The number of layers if there are none.
    """
    plans = config.layer_plans
    first = len(plans)
    if config.materialise:  # every layer caches keys and values
        return first

    def reads_what_ids_give(plan: LayerPlan) -> bool:
        """Whether it reads a tensor for all layers that has a token's part at a place that only its maker knows."""
        return any(source.kind == "shared" and resolve(source.part).reads_ids for source in plan.reads)

    while first and plans[first - 1].leaves_nothing and not reads_what_ids_give(plans[first - 1]):
        first -= 1
    return first


# In what layers must agree if one attends to what the other caches; the first three, if it reads its new tokens'.
_OF_CACHE = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters")


def _check_alike(config: HeadwaterConfig, layer: int, others: set[int], names: Sequence[str]) -> None:
    """Raise `HeadwaterError` if `layer` would read a layer of another kind."""
    if config.sliding_layers is None:
        return
    for other in sorted(others):
        for name in names:
            own, there = (getattr(config.at(index), name) for index in (layer, other))
            if own != there:
                raise HeadwaterError(
                    f"Layer {layer} would read layer {other}, whose {name} is {there!r} and not {own!r} "
                    "(sliding_layers); let layers of one kind share."
                )


def _settle(plans: list[LayerPlan]) -> list[LayerPlan]:
    """The plans with what follows from `attends`: the heads that each layer stores, kernel calls, banks to read."""
    k_heads: dict[int, set[int]] = {plan.index: set() for plan in plans}
    v_heads: dict[int, set[int]] = {plan.index: set() for plan in plans}
    for plan in plans:
        for head, (k, v) in enumerate(plan.attends):
            k_heads[k].add(head)
            v_heads[v].add(head)
    stored = [
        replace(plan, k_heads=tuple(sorted(k_heads[plan.index])), v_heads=tuple(sorted(v_heads[plan.index])))
        for plan in plans
    ]

    def with_groups(plan: LayerPlan) -> LayerPlan:
        groups = _groups(plan, stored)
        banks = [s for g in groups for s in (Source("bank", "k", g.k), Source("bank", "v", g.v))]
        plan = replace(plan, groups=groups)
        return plan.reading(*(source for source in banks if source.layer != plan.index))

    return [with_groups(plan) for plan in stored]


def _groups(plan: LayerPlan, stored: Sequence[LayerPlan]) -> tuple[HeadGroup, ...]:
    """`attends` as calls of the kernel. stored: all plans, with the heads that each stores."""
    groups = []
    for (k, v), run in groupby(range(len(plan.attends)), key=lambda head: plan.attends[head]):
        heads = list(run)
        at = choose(heads, stored[k].k_heads), choose(heads, stored[v].v_heads)
        groups.append(HeadGroup(heads[0], len(heads), k, v, *at))
    return tuple(groups)


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
    return tuple(replace(plan, groups=_groups(plan, narrow)) for plan in narrow)


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
