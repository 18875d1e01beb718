"""config -> one `LayerPlan` per layer: the only code that decides which layer owns what. Pure Python.

A layer projects and stores only the heads that some layer attends to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, get_args

from headwater.config.capabilities import Map, StopsRedirection, replaces_linear
from headwater.config.layers import layer_config
from headwater.config.plan import EMBEDDING, Attends, HeadGroup, Heads, LayerPlan, Source, Stage, choose_heads
from headwater.config.text import HeadwaterConfig
from headwater.plugins.mechanisms import has_own, resolve
from headwater.util.errors import HeadwaterError

# Keys or values, as fields of `Attends` and as parts of `Source`.
Letter = Literal["k", "v"]


def plan_layers(config: HeadwaterConfig) -> tuple[LayerPlan, ...]:
    """Plan all layers. Mechanisms are called in the config's order: first for what they share, then for the rest.

    Raises `HeadwaterError` for an unknown mechanism, and where a layer cannot read what its plan names.
    """
    plans = _complete_plans(_share_heads(config))
    for name, options in config.mechanisms.items():
        plans = _plan_stages(name, options, config, plans)
    if config.materialise and (names := name_keepers(plans)):
        raise HeadwaterError(
            f"With materialise, the cache has only keys and values, without the raw tokens of {names}; set it to "
            f"false, or remove {names}."
        )
    for plan in plans:
        _check_replaced(config, plan)
        for source in plan.reads:
            _check_alike(config, plan.index, source)
    sources = {source for plan in plans for source in plan.reads}
    return with_all_layers(
        replace(plan, exports=tuple(sorted(source for source in sources if _gives_tensor(plan, source))))
        for plan in plans
    )


def name_keepers(plans: Iterable[LayerPlan]) -> str:
    """The mechanisms that keep raw tokens next to the cache, joined by "and"."""
    return " and ".join(dict.fromkeys(mechanism for plan in plans for *_, mechanism in plan.tails))


def _share_heads(config: HeadwaterConfig) -> list[LayerPlan]:
    """Resolve what each head attends to: whatever the layer that it takes keys or values from attends to.

    Each mechanism sees layers that share nothing, so none depends on those listed before it. If several redirect a
    head, the last one counts.
    """
    plans = [LayerPlan.vanilla(i, layer_config(config, i).num_key_value_heads) for i in range(config.num_hidden_layers)]
    redirecting = {
        name: redirected
        for name, options in reversed(config.mechanisms.items())
        if (redirected := _redirect_heads(name, options, config, plans)) != plans
    }
    if not redirecting:
        return plans

    stopping = {
        name
        for name in redirecting
        if isinstance(kind := resolve(name), StopsRedirection) and kind.stops_redirection(config.mechanisms[name])
    }

    def follow(layer: int, head: int, letter: Letter) -> int:
        """Find the layer whose keys or values a head attends to. Lower layers are resolved already."""
        skipped = None
        while True:
            for name, redirected in redirecting.items():
                source = getattr(redirected[layer].attends[head], letter)
                if name != skipped and source != layer:
                    break
            else:
                return layer
            _check_alike(config, layer, Source("bank", letter, source))
            if name not in stopping:
                return getattr(plans[source].attends[head], letter)
            layer, skipped = source, name

    for layer, plan in enumerate(plans):
        attends = (Attends(follow(layer, head, "k"), follow(layer, head, "v")) for head in range(len(plan.attends)))
        plans[layer] = replace(_find_stored(plan, redirecting), attends=tuple(attends))
    return plans


def _find_stored(plan: LayerPlan, redirecting: Mapping[str, Sequence[LayerPlan]]) -> LayerPlan:
    """Return the plan with what the layer stores in place of keys and values, if a mechanism says so.

    Raises `HeadwaterError` if two do.
    """
    changed = {
        name: redirected[plan.index]
        for name, redirected in redirecting.items()
        if redirected[plan.index].value_part != "v"
    }
    if len(changed) > 1:
        first, second, *_ = changed
        raise HeadwaterError(f"Mechanisms {second!r} and {first!r} both replace the values of layers; remove one.")
    return next(iter(changed.values()), plan)


def _redirect_heads(
    name: str, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]
) -> Sequence[LayerPlan]:
    """Apply a mechanism's `redirect_heads`. Raises `HeadwaterError` for layers that come later."""
    redirected = resolve(name).redirect_heads(options, config, list(plans))
    heads = [len(plan.attends) for plan in plans]
    if not isinstance(redirected, list) or [len(getattr(plan, "attends", ())) for plan in redirected] != heads:
        raise HeadwaterError(f"Mechanism {name!r}: redirect_heads must return a list with the plan of each layer.")
    for layer, plan in enumerate(redirected):
        for source in {source for attends in plan.attends for source in attends}:
            if not 0 <= source <= layer:
                raise HeadwaterError(
                    f"Mechanism {name!r}: layer {layer} cannot attend to keys or values of layer {source}; in "
                    f"redirect_heads, name a layer from 0 to {layer}."
                )
    return redirected


def _plan_stages(
    name: str, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]
) -> list[LayerPlan]:
    """Apply a mechanism's `plan_stages`. Raises `HeadwaterError` unless it acts where it has methods."""
    mechanism = resolve(name)
    planned = mechanism.plan_stages(options, config, plans)
    if not isinstance(planned, list) or [type(plan) for plan in planned] != [LayerPlan] * len(plans):
        raise HeadwaterError(f"Mechanism {name!r}: plan_stages must return a list with the plan of each layer.")
    acts = [stage for plan in planned for stage, acting in plan.acts if acting == name]
    for stage in acts:
        if not has_own(mechanism, stage.value):
            raise HeadwaterError(f"Mechanism {name!r} acts at {stage.value}, but its class does not define it.")
    defined = [stage.value for stage in Stage if has_own(mechanism, stage.value)]
    if defined and not acts:
        raise HeadwaterError(
            f"Mechanism {name!r} defines {defined[0]} but acts in no layer; in plan_stages, return plans with "
            f"plan.acting(cls, cls.{defined[0]})."
        )
    return planned


def _gives_tensor(plan: LayerPlan, source: Source) -> bool:
    return source.layer == plan.index or (source == EMBEDDING and bool(plan.at(Stage.EMBEDDING)))


def _check_replaced(config: HeadwaterConfig, plan: LayerPlan) -> None:
    """Raise `HeadwaterError` if two mechanisms replace one linear layer, or one acts inside a replaced feed-forward."""
    width, replacing = config.hidden_size, {}
    for map_name in get_args(Map):
        replacing[map_name] = [
            name
            for name, options in config.mechanisms.items()
            if replaces_linear(resolve(name), options, config, plan.index, map_name, width)
        ]
        if len(replacing[map_name]) > 1:
            first, second, *_ = replacing[map_name]
            raise HeadwaterError(
                f"Mechanisms {first!r} and {second!r} both replace the {map_name} map of layer {plan.index}; remove "
                "one of them."
            )
    for inside in plan.at(Stage.FEED_FORWARD_HIDDEN):
        for name in replacing["feed_forward"]:
            raise HeadwaterError(
                f"Mechanism {inside!r} acts inside the feed-forward of layer {plan.index}, which {name!r} "
                f"replaces; remove one of them, or change {inside!r} so that it does not act there."
            )


def output_only_from(config: HeadwaterConfig, plans: Sequence[LayerPlan]) -> int:
    """Find the first of the last layers that run only for tokens whose output is requested; the depth if there is none.

    Later tokens need nothing from these layers, and what these layers read from lower ones exists for all tokens (keys
    and values as attended to) or token by token.
    """
    first_layer = len(plans)
    if config.materialise:  # every layer caches keys and values
        return first_layer

    def reads_what_ids_give(plan: LayerPlan) -> bool:
        """Whether it reads a shared tensor whose layout of tokens only the mechanism that makes it knows."""
        return any(source.kind == "shared" and resolve(source.part).needs_input_ids for source in plan.reads)

    while first_layer and plans[first_layer - 1].leaves_nothing and not reads_what_ids_give(plans[first_layer - 1]):
        first_layer -= 1
    return first_layer


# The fields that must be equal in a layer and the layer it reads, by kind and part of the tensor. Attention weights
# must cover the same tokens, and cached keys are already rotated by RoPE.
_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
_ALIKE: dict[tuple[str, str], tuple[str, ...]] = {
    **{(kind, part): (heads, "head_dim") for kind in ("raw", "local") for part, heads in _HEADS.items()},
    **{("bank", part): (_HEADS[part], "head_dim", "sliding_window", "rope_parameters") for part in "kv"},
    ("probabilities", "a"): ("num_attention_heads", "sliding_window"),
}


def _check_alike(config: HeadwaterConfig, layer: int, source: Source) -> None:
    """Raise `HeadwaterError` if `layer` would read a tensor of a layer of another kind that does not fit it."""
    if source.layer < 0 or config.slides(layer) == config.slides(source.layer):
        return
    reader, owner = layer_config(config, layer), layer_config(config, source.layer)
    for name in _ALIKE.get(source[:2], ()):
        if getattr(reader, name) != getattr(owner, name):
            raise HeadwaterError(
                f"Layer {layer} would read layer {source.layer}, which has another {name} (sliding_layers); share only "
                "between layers of one kind."
            )


def _complete_plans(plans: list[LayerPlan]) -> list[LayerPlan]:
    """Add to the plans what follows from `attends`: the heads that each layer stores, kernel calls, banks to read."""
    k_heads: dict[int, set[int]] = {plan.index: set() for plan in plans}
    v_heads: dict[int, set[int]] = {plan.index: set() for plan in plans}
    for plan in plans:
        for head, (k, v) in enumerate(plan.attends):
            k_heads[k] |= {*range(plans[k].latent_heads)} or {head}
            if plans[v].value_part != "position":
                (k_heads if plans[v].value_part == "k" else v_heads)[v].add(head)
    stored = [
        replace(plan, k_heads=tuple(sorted(k_heads[plan.index])), v_heads=tuple(sorted(v_heads[plan.index])))
        for plan in plans
    ]

    def with_groups(plan: LayerPlan) -> LayerPlan:
        groups = groups_of(plan, stored)
        banks = [s for g in groups for s in (Source("bank", "k", g.k), Source("bank", "v", g.v))]
        plan = replace(plan, groups=groups)
        return plan.reading(*(source for source in banks if source.layer != plan.index))

    return [with_groups(plan) for plan in stored]


def with_all_layers(plans: Iterable[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Give each layer's plan the plans of all layers."""
    plans = tuple(replace(plan, all_layers=()) if plan.all_layers else plan for plan in plans)
    return tuple(replace(plan, all_layers=plans) for plan in plans)


def groups_of(plan: LayerPlan, stored: Sequence[LayerPlan]) -> tuple[HeadGroup, ...]:
    """`attends` as calls of the kernel. stored: all plans, with the heads that each stores."""
    groups = []
    for (k, v), run in groupby(range(len(plan.attends)), key=lambda head: plan.attends[head]):
        heads = list(run)
        if stored[k].latent_heads:  # each head is made from all of the latent
            indices: tuple[Heads, Heads] = (None, None)
        else:
            indices = choose_heads(heads, stored[k].k_heads), choose_heads(heads, stored[v].stored_values)
        groups.append(HeadGroup(heads[0], len(heads), k, v, *indices))
    return tuple(groups)
