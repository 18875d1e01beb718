"""Larger models from trained ones, in all directions at once: their config, tensors and function.

`methods` maps each new layer, channel, head and unit to an old one; `grown_parameters` fills the tensors.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from headwater.config.capabilities import replaces_linear
from headwater.config.plan import EMBEDDING, LayerPlan, Source, Stage
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.growth.grown_parameters import ParameterGrower, count_tied_copies
from headwater.growth.methods import GrowthOptions, map_growth
from headwater.growth.parameter_tokens import Model, add_pairs, added_config, has_pairs
from headwater.mechanisms.capabilities import GrowsOptions
from headwater.mechanisms.growth_map import GrowthMap
from headwater.models.quantization import check_full_precision
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator


def grow(model: Model, attention_pairs: int | None = None, ffn_pairs: int | None = None, **fields: Any) -> Model:
    """Make a larger model from a trained one: deeper, wider, or with more parameter tokens.

    fields: the others of `headwater.growth.GrowthOptions`, such as num_hidden_layers, hidden_size and method.

    The result is on the model's device, in its dtype and in its mode; the model does not change. Raises
    `HeadwaterError` for sizes that shrink or that the method cannot give, and for a mechanism that it does not fit.

        >>> from headwater import HeadwaterForCausalLM, preset
        >>> from headwater.growth import grow
        >>> sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=256)
        >>> pattention = {"pattention": {"attention_pairs": 7, "ffn_pairs": 28}}
        >>> model = HeadwaterForCausalLM(preset("tokenformer-124m", **sizes, mechanisms=pattention))
        >>> grown = grow(model, attention_pairs=1000, num_hidden_layers=3)
        >>> grown.config.num_hidden_layers, grown.config.mechanisms["pattention"]["attention_pairs"]
        (3, 1000)
    """
    options = GrowthOptions(attention_pairs, ffn_pairs, **fields)
    check_full_precision(model)
    if adds_pairs(model.config, options):
        model = add_pairs(model, options)
        if not options.sizes:
            return model
    return grow_sizes(model, options)


def adds_pairs(config: HeadwaterConfig, options: GrowthOptions) -> bool:
    """Whether parameter tokens are added. Also true if nothing is to grow, for the error or to unfreeze."""
    has_counts = options.attention_pairs is not None or options.ffn_pairs is not None
    return has_counts or (has_pairs(config) and not options.sizes)


def grown_config(
    config: HeadwaterConfig, attention_pairs: int | None = None, ffn_pairs: int | None = None, **fields: Any
) -> HeadwaterConfig:
    """Make the config that `grow` gives a model with this config. Raises the same errors, except those
    that only the model's tensors reveal."""
    options = GrowthOptions(attention_pairs, ffn_pairs, **fields)
    if adds_pairs(config, options):
        config = added_config(config, options)
        if not options.sizes:
            return config
    return plan_growth(config, options)[1]


def plan_growth(config: HeadwaterConfig, options: GrowthOptions) -> tuple[GrowthMap, HeadwaterConfig]:
    """Map the larger model to the smaller one, and make its config.

    Raises `HeadwaterError` for sizes or mechanisms that the method does not fit.
    """
    differ = not {"rope_parameters"}.issuperset(config.sliding_fields or {})
    if differ and options.sizes.keys() - {"num_hidden_layers"}:
        raise HeadwaterError("A model whose layers have different heads (sliding_fields) can become deeper only.")
    if all(size == getattr(config, name) for name, size in options.sizes.items()):
        raise HeadwaterError(
            "Nothing would grow: give more layers (num_hidden_layers), a larger hidden_size or intermediate_size, more "
            "heads (num_attention_heads), or more pairs of a model with parameter tokens."
        )
    growth = map_growth(config, options)
    if growth.extends("units"):
        _check_units(config)
    new = copy.deepcopy(config)
    new.num_hidden_layers, new.hidden_size = len(growth.layers), len(growth.stream)
    new.num_attention_heads, new.num_key_value_heads = len(growth.q), len(growth.kv)
    new.intermediate_size = len(growth.units)
    if config.sliding_layers is not None:
        new.sliding_layers = growth.list_copies(config.sliding_layers)
    if growth.zero_init:
        new.norm_eps *= growth.mean_square_ratio
        if not config.final_norm_weight and isinstance(new.logit_scale, float | int):
            new.logit_scale /= count_tied_copies(config, growth)
    new.mechanisms = {name: _grow_options(name, fields, config, growth) for name, fields in config.mechanisms.items()}
    new.complete_fields()
    new_plans = plan_layers(new)
    if growth.preserves_function:
        _check_plans(plan_layers(config), new_plans, growth)
    return growth, new


def _grow_options(name: str, options: dict[str, Any], config: HeadwaterConfig, growth: GrowthMap) -> dict[str, Any]:
    mechanism = resolve(name)
    if not isinstance(mechanism, GrowsOptions):
        raise HeadwaterError(
            f"Mechanism {name!r} does not define how it grows, so a model with it cannot get more layers or larger "
            "widths; remove it, or give its class grow_options() and describe_axes()."
        )
    return mechanism.grow_options(options, config, growth)


def grow_sizes(model: Model, options: GrowthOptions) -> Model:
    """Make a deeper or wider model, in the dtype, on the device and in the mode of the old one, which does not change.

    New parameters start as in a fresh model of the new size, or at zero. Raises `HeadwaterError` as `plan_growth`.
    """
    growth, config = plan_growth(model.config, options)
    grown = type(model)(config).to(model.device, model.dtype)
    grower = ParameterGrower(model, grown, growth)
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if (tensor := grower.grow_tensor(name, parameter)) is not None:
                parameter.copy_(tensor)
        buffers = dict(model.named_buffers())
        for name in grown.state_dict().keys() & dict(grown.named_buffers()).keys():  # buffers such as τ
            if (old := buffers.get(grower.find_source_name(name))) is not None:
                grown.get_buffer(name).copy_(old)
    if growth.preserves_function and (unused := grower.parameters.keys() - grower.used_names):
        raise HeadwaterError(
            f"{min(unused)} of this model has no counterpart in the larger one; remove its mechanism, or use another "
            "method."
        )
    if model.can_generate():
        grown.generation_config = copy.deepcopy(model.generation_config)
    if growth.preserves_function:
        _check_function(model, grown)
    return grown.train(model.training)


def _check_units(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` if mechanisms replace all feed-forwards."""
    width = config.hidden_size
    for name, options in config.mechanisms.items():
        layers = range(config.num_hidden_layers)
        mechanism = resolve(name)
        if all(replaces_linear(mechanism, options, config, layer, "feed_forward", width) for layer in layers):
            raise HeadwaterError(
                f"Mechanism {name!r} replaces the feed-forwards, so intermediate_size does nothing; leave it out"
                f"{', and grow ffn_pairs' if 'ffn_pairs' in options else ''}."
            )


def _check_plans(old_plans: Sequence[LayerPlan], new_plans: Sequence[LayerPlan], growth: GrowthMap) -> None:
    """Raise `HeadwaterError` if a layer would attend to, read or end with anything else than its source does."""
    changes = [
        _find_change(old_plans, new_plans, layer, growth)
        for layer in range(len(new_plans))
        if layer not in growth.identity_layers
    ]
    # Mechanisms at the end of the last layer must run after its identity layers, and the others still before.
    at_source, at_end = (
        new_plans[layer].at(Stage.BLOCK_OUTPUT) for layer in (growth.first_copy(growth.old_depth - 1), -1)
    )
    ends = old_plans[-1].at(Stage.BLOCK_OUTPUT)
    if growth.deepens and tuple(dict.fromkeys((*at_source, *at_end))) != ends:
        changes.append(f"After the last layer {' and '.join(ends)} act in an order")
    if change := next(filter(None, changes), None):
        raise HeadwaterError(
            f"{change} that the larger model cannot reproduce; remove the mechanism, or use a method that does not "
            "keep the function."
        )


def _find_change(
    old_plans: Sequence[LayerPlan], new_plans: Sequence[LayerPlan], layer: int, growth: GrowthMap
) -> str | None:
    """Describe what a new layer's source attends to or reads and the new layer does not; None if nothing."""
    source = growth.layers[layer]
    attends = old_plans[source].attends
    # Layers differ in heads only in models whose number of heads cannot grow.
    for head, copied in enumerate(growth.kv if growth.extends("kv") else range(len(attends))):
        if copied >= 0 and tuple(new_plans[layer].attends[head]) != tuple(map(growth.first_copy, attends[copied])):
            layers = " and ".join(map(str, dict.fromkeys(attends[copied])))
            return f"Head {copied} of layer {source} attends to layers {layers} in a way"
    # A mechanism at the end of the last layer acts after its identity layers.
    copies = [new_plans[new] for new in growth.list_copies([source]) if new == layer or new in growth.identity_layers]
    for read in old_plans[source].reads:
        is_read = any(_is_read(plan, read, growth, old_plans) for plan in copies)
        if read.kind in ("raw", "local", "probabilities", "stream") and not is_read:
            return f"Layer {source} reads layer {read.layer} in a way"
    return None


class FunctionChanged(HeadwaterError):
    """Raised if a larger model computes something else than the smaller one although its method keeps the function."""


@torch.no_grad()
def _check_function(old: Model, new: Model) -> None:
    """Raise `FunctionChanged` if two models differ by more than rounding on a few tokens, as no check foresaw."""
    draw, config = generator(0, "grown"), old.config
    if isinstance(config, HeadwaterVisionConfig):
        sample = torch.randn(1, config.num_channels, *config.image_shape, generator=draw)
    else:
        sample = torch.randint(0, config.vocab_size, (1, min(8, config.max_position_embeddings)), generator=draw)
    mode, options = old.training, {} if sample.is_floating_point() else {"use_cache": False}
    try:
        old_logits, new_logits = (
            model.eval()(sample.to(model.device), **options).logits.double() for model in (old, new)
        )
    finally:
        old.train(mode)
    # 1.5e-8 in fp64, 0.03 % in fp32, 20 % in bf16, relative to the largest logit.
    tolerance = torch.finfo(old.dtype).eps ** (1 / 2 if old.dtype.itemsize >= 4 else 1 / 3)
    difference = float((old_logits - new_logits).abs().max())
    if old_logits.isfinite().all() and not difference <= tolerance * float(old_logits.abs().max()):
        external = [name for name in config.mechanisms if not MECHANISMS.is_built_in(name)]
        cause = f"Check describe_axes() and grow_options() of {', '.join(external)}, or"
        if not external:
            cause = "This is a bug in headwater: report it with the model's config, and"
        raise FunctionChanged(
            f"The larger model's logits differ by {difference:.1e} although this method should keep them. {cause} use "
            "another method or other sizes."
        )


def _is_read(plan: LayerPlan, source: Source, growth: GrowthMap, old_plans: Sequence[LayerPlan]) -> bool:
    """Whether a new layer reads what has become of an old source."""
    if source == EMBEDDING:
        return source in plan.reads
    layer = growth.first_copy(source.layer)
    if source._replace(layer=layer) in plan.reads:
        return True
    if source.kind != "stream" or old_plans[source.layer].at(Stage.BLOCK_OUTPUT):
        return False
    while layer + 1 in growth.identity_layers:
        layer += 1
        if source._replace(layer=layer) in plan.reads:
            return True
    return False
