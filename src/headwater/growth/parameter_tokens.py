"""Add parameter tokens to a trained model and remove them. TokenFormer, arXiv 2410.23168, section 3.3.

    K_P → [K_P; K_new],  V_P → [V_P; V_new]        K_new = 0, V_new random, τ unchanged

A pair whose key is zero scores zero, GELU(0) = 0, and zero scores do not change ‖A‖: the function is unchanged, and
GELU's slope of ½ at zero lets the new keys learn from the first step. Departure: appendix B's proof leaves out that the
scale τ = √n of the paper's text changes with n; recomputing it changes the function (`tau="recompute"`).

Every function here returns a new model and does not change its arguments.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from headwater.config.capabilities import Map
from headwater.config.text import HeadwaterConfig
from headwater.growth.methods import GrowthOptions, KeyInit, check_whole
from headwater.mechanisms.pattention import Pattention, default_tau, find_problem
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.nn.block import Block
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator

Model = TypeVar("Model", bound=HeadwaterPreTrainedModel)
# Linear layer -> number of pairs, the same in all layers of a model.
Counts = dict[Map, int]

MAPS: tuple[Map, ...] = get_args(Map)
# Scores under which a zero key still gets a weight: e^0 = 1.
NOT_NEUTRAL = ("exp_l1_norm", "softmax")


def list_pattentions(model: HeadwaterPreTrainedModel) -> Iterator[tuple[int, Map, Pattention]]:
    """List every Pattention of a model: (layer, name of the linear layer it replaces, module)."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for layer, block in enumerate(blocks):
        attention = block.self_attn
        modules = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, block.mlp)
        for name, module in zip(MAPS, modules, strict=True):
            if isinstance(module, Pattention):
                yield layer, name, module


def pairs_of(model: HeadwaterPreTrainedModel | HeadwaterConfig) -> Counts:
    """Count the pairs of each Pattention of a layer. Raises `HeadwaterError` for a model without Pattention."""
    config = model if isinstance(model, HeadwaterConfig) else model.config
    if not has_pairs(config):
        raise HeadwaterError(
            "This model has linear layers and no parameter tokens (mechanism 'pattention') to add or remove; give "
            "its new layers or widths (`headwater grow --help`)."
        )
    options = pattention_options(config)
    return {name: Pattention.count_pairs(options, config, name) for name in MAPS}


def add_pairs(model: Model, growth_options: GrowthOptions) -> Model:
    """Add pairs to a copy of the model. The default, zero keys, random values and τ unchanged, keeps the function.

    The new rows are drawn from (config.initializer_seed, the parameter's name, the new number of pairs).
    Raises `HeadwaterError` as `added_config`.
    """
    config = added_config(model.config, growth_options)
    options, new = pattention_options(model.config), pairs_of(config)
    grown = copy_model(model)
    names = {module: name for name, module in grown.base_model.named_modules()}
    for _, name, module in list_pattentions(grown):
        width, pairs = module.key.shape[1], new[name]
        extra = pairs - module.n
        draw = generator(model.config.initializer_seed, names[module], pairs)
        # New rows are initialized as in a fresh model of the new size, whose fan-in differs.
        module.key_std, module.value_std = Pattention.find_stds(options, model.config, name, width, pairs)
        new_keys, new_values = (module.initial_value(parameter, draw, extra) for parameter in ("key", "value"))
        if growth_options.key_init == "zero":
            new_keys.zero_()
        keys = torch.cat((module.keys, new_keys.to(module.keys)))
        values = torch.cat((module.values, new_values.to(module.values)))
        module.set_pairs(keys, values, frozen=module.n if growth_options.freeze and extra else 0)
        if growth_options.tau == "recompute" and extra:
            module.scale.set_tau(default_tau(module.score, module.score_count))
    _update_config(grown, new, pattention_options(config)["frozen"])
    return grown


def shrink(
    model: Model, weights: Sequence[dict[Map, Tensor]], attention_pairs: int | None = None, ffn_pairs: int | None = None
) -> Model:
    """Keep only the pairs that matter most, in their order.

    weights: importance of each pair, by layer and name, [n] each, from `importance`.
    attention_pairs, ffn_pairs: how many each map keeps; None keeps all.

    τ does not change. In the result all parameters learn, including frozen ones. Raises `HeadwaterError` for a model
    without Pattention, for less than one pair or more than there are, and for weights of another model.
    """
    counts = pairs_of(model)
    sizes = [{name: len(pairs) for name, pairs in layer.items()} for layer in weights]
    if sizes != [counts] * model.config.num_hidden_layers:
        raise HeadwaterError(
            "These weights belong to other pairs than this model's; compute them with importance(model, …)."
        )
    new = _replace_counts(counts, attention_pairs, ffn_pairs)
    for name in MAPS:
        if not 1 <= new[name] <= counts[name]:
            raise HeadwaterError(
                f"A layer can keep 1 to {counts[name]} pairs, not {new[name]} ({name}); "
                "adding pairs is `headwater grow`."
            )
    if new == counts:
        raise HeadwaterError("Nothing would shrink: choose fewer attention_pairs or ffn_pairs than the model has.")
    _check_read(pattention_options(model.config), counts, new)
    small = copy_model(model)
    for layer, name, module in list_pattentions(small):
        chosen = weights[layer][name].to(module.key.device).topk(new[name]).indices.sort().values
        module.set_pairs(module.keys[chosen], module.values[chosen])
    _update_config(small, new)
    return small


@torch.no_grad()
def importance(model: HeadwaterForCausalLM, batches: Iterable[dict[str, Tensor]]) -> list[dict[Map, Tensor]]:
    """Measure how much each pair matters: the mean over tokens of |score|·‖V‖, by layer and name, [n] each.

    batches: inputs of the model, at least one. Padding would count like any other token: pass rows without it.
    Raises `HeadwaterError` for a model without Pattention, and without batches.
    """
    pairs_of(model)  # raises if there are no pairs
    sums: dict[nn.Module, Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def add_norms(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        norms = cast(Pattention, module).show_firing(inputs[0]).flatten(0, -2)
        sums[module] = sums.get(module, torch.zeros(())) + norms.sum(0, dtype=torch.float64).cpu()
        counts[module] += len(norms)

    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        for _, _, module in list_pattentions(model):
            stack.enter_context(module.register_forward_hook(add_norms))
        for batch in batches:
            model.eval()(**batch, use_cache=False)
    if not counts.total():
        raise HeadwaterError("Importance is measured on batches, and there are none; pass at least one.")
    means = [dict[Map, Tensor]() for _ in range(model.config.num_hidden_layers)]
    for layer, name, module in list_pattentions(model):
        means[layer][name] = sums[module] / counts[module]
    return means


def _check_read(options: dict[str, Any], counts: Counts, new: Counts, key_init: KeyInit | None = None) -> None:
    """Raise `HeadwaterError` if pairs read by `top_k` cannot be added or removed. key_init: of new pairs."""
    for name in MAPS:
        top_k = Pattention.top_k_of(options, name)
        if top_k is None or new[name] == counts[name]:
            continue
        if Pattention.product_heads_of(options, name):
            raise HeadwaterError(
                f"The pairs of {name!r} have product keys, each of which belongs to many pairs; none can be added "
                "or removed."
            )
        if wrong := find_problem(new[name], top_k, False, 0):
            raise HeadwaterError(f"Too few pairs of {name!r} would remain: {wrong}.")
        if key_init == "zero":
            raise HeadwaterError(
                f"A token reads the {top_k} best pairs of {name!r}, and a zero key beats negative scores, so new "
                "pairs can change the function; use random keys (key_init=random) if the function may change."
            )


def has_pairs(config: HeadwaterConfig) -> bool:
    """Whether parameter tokens replace a model's linear layers."""
    return Pattention.registered_name() in config.mechanisms


def pattention_options(config: HeadwaterConfig) -> dict[str, Any]:
    """Find the mechanism's options in a model that has it."""
    return config.mechanisms[Pattention.registered_name()]


def added_config(config: HeadwaterConfig, growth_options: GrowthOptions) -> HeadwaterConfig:
    """Make the config that `add_pairs` gives a model with this config.

    Raises `HeadwaterError` for a model without Pattention, for fewer pairs than there are, where nothing would grow,
    where zero keys are not neutral under the model's score or among the `top_k`, and for product keys.
    """
    counts, options = pairs_of(config), pattention_options(config)
    new = _replace_counts(counts, growth_options.attention_pairs, growth_options.ffn_pairs)
    _check_grows(counts, new, unfreezes=options["frozen"] is not None and not growth_options.freeze)
    if growth_options.key_init == "zero" and options["score"] in NOT_NEUTRAL:
        raise HeadwaterError(
            f"With the score {options['score']!r} a zero key has weight e^0 = 1, so any new pairs change the "
            f"function; use random keys (key_init=random) if the function may change."
        )
    _check_read(options, counts, new, growth_options.key_init)
    old: Counts = {name: n for name, n in counts.items() if new[name] > n}
    grown = copy.deepcopy(config)
    _write_counts(grown, new, old if growth_options.freeze else None)
    return grown


def copy_model(model: Model) -> Model:
    """Copy a model, without gradients."""
    result = copy.deepcopy(model)
    result.zero_grad()
    return result


def _replace_counts(counts: Counts, attention: int | None, feed_forward: int | None) -> Counts:
    """Replace the counts of attention's maps and of feed-forwards; None keeps them."""
    requested = {name: feed_forward if name == "feed_forward" else attention for name in MAPS}
    for name, pairs in (("attention_pairs", attention), ("ffn_pairs", feed_forward)):
        if pairs is not None:
            check_whole(name, pairs)
    changed: dict[Map, int] = {name: count for name, count in requested.items() if count is not None}
    return counts | changed


def _check_grows(counts: Counts, new: Counts, unfreezes: bool) -> None:
    for name in MAPS:
        if new[name] < counts[name]:
            raise HeadwaterError(
                f"Growing to {new[name]} pairs would remove some of the {counts[name]} of {name!r}; choose at least "
                f"{counts[name]}, or use `headwater shrink`."
            )
    if new == counts and not unfreezes:
        raise HeadwaterError("Nothing would grow: choose more attention_pairs or ffn_pairs than the model has.")


def _update_config(model: HeadwaterPreTrainedModel, counts: Counts, frozen: Counts | None = None) -> None:
    """Update the config to the new sizes, and unfreeze what is no longer frozen."""
    unfrozen = pattention_options(model.config)["frozen"] is not None and frozen is None
    _write_counts(model.config, counts, frozen)
    for module in model.modules() if unfrozen else ():
        for parameter in () if isinstance(module, Pattention) else module.parameters(recurse=False):
            parameter.requires_grad_(True)
    model.freeze_parameters()


def _write_counts(config: HeadwaterConfig, counts: Counts, frozen: Counts | None) -> None:
    options = Pattention.with_pairs(pattention_options(config), counts) | {"frozen": frozen}
    config.mechanisms = config.mechanisms | {Pattention.registered_name(): options}
    config.complete_fields()
