"""Conversion of a trained model to one with a smaller cache: shared layers, or fewer key/value heads.

`blend_model` adds the mechanism `blend`, which mixes each layer's keys and values with those of the smaller model, the
goal. At weight 0 the function is unchanged. At weight 1 it is the goal's, and `finish_model` removes keys and values
that no head attends to.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.conversion.add import add_mechanisms, make_tensors
from headwater.conversion.transformers_models import assemble_model, untied_state_dict
from headwater.mechanisms.blend import Blend
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.plugins.mechanisms import as_mapping
from headwater.util.errors import HeadwaterError

BLEND = Blend.registered_name()


def blend_config(
    config: HeadwaterConfig, mechanisms: Any = None, num_key_value_heads: int | None = None, weight: float = 0.0
) -> HeadwaterConfig:
    """Make the config of `blend_model`. Raises `HeadwaterError` if the goal contradicts it, or shares nothing."""
    if blend_options(config) is not None:
        raise HeadwaterError("The model is already being converted; finish that first (finish_conversion: true).")
    if not isinstance(config, HeadwaterConfig) or not config.is_causal:
        raise HeadwaterError("Only text models have a cache to make smaller; choose a text model.")
    goal = {"mechanisms": as_mapping(mechanisms) or None, "num_key_value_heads": num_key_value_heads}
    result = copy.deepcopy(config)
    result.mechanisms = {BLEND: goal | {"weight": weight}} | config.mechanisms
    result.complete_fields()
    plan_layers(result)
    return result


def blend_options(config: HeadwaterConfig) -> dict[str, Any] | None:
    """Find the options of `blend`, which describe the goal; None if the model is not being converted."""
    return config.mechanisms.get(BLEND)


def check_conversion(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` if a blended model of this config cannot be finished; no weights are needed."""
    _check_pooling(HeadwaterForCausalLM.make_skeleton(config))
    make_tensors(HeadwaterForCausalLM.make_skeleton(pooled_config(config)), finish_config(config))


def finish_config(config: HeadwaterConfig) -> HeadwaterConfig:
    """Make the config of `finish_model`. Raises `HeadwaterError` if the model is not being converted."""
    if (options := blend_options(config)) is None:
        raise HeadwaterError(
            "The model is not being converted, so there is nothing to finish; leave out finish_conversion."
        )
    return Blend.goal_config(options, config)


def blend_model(
    model: HeadwaterForCausalLM, mechanisms: Any = None, num_key_value_heads: int | None = None, weight: float = 0.0
) -> HeadwaterForCausalLM:
    """Return a copy of `model` whose keys and values are mixed with those of a model with these `mechanisms` and heads.

    weight: progress of the conversion, 0 to 1. At 0 the function is unchanged.
    Raises `HeadwaterError` for mechanisms that contradict the model, share nothing, or cannot be combined with its own.
    """
    config = blend_config(model.config, mechanisms, num_key_value_heads, weight)
    names = [name for name in HeadwaterForCausalLM.make_skeleton(config).state_dict() if f".{BLEND}." in name]
    weights = {name: torch.full((1,), weight) for name in names}
    tensors = {name: tensor.detach().clone() for name, tensor in untied_state_dict(model).items()}
    blended = assemble_model(type(model), config, tensors | weights, model)
    _check_pooling(blended)
    return blended


def finish_model(model: HeadwaterForCausalLM) -> HeadwaterForCausalLM:
    """Return the goal of a blended model: the same function as at weight 1, with a smaller cache.

    Raises `HeadwaterError` if the conversion is not complete, or was never begun.
    """
    finish_config(model.config)  # raises unless the model is being converted
    weights = {float(module.weight) for module in model.modules() if isinstance(module, Blend)}
    if min(weights, default=1.0) < 1:
        raise HeadwaterError(
            f"The conversion is {min(weights):.0%} complete; continue training until its weight is 1 "
            "(convert: {anneal: true})."
        )
    config = pooled_config(model.config)
    tensors = {name: tensor for name, tensor in untied_state_dict(model).items() if f".{BLEND}." not in name}
    pooled = assemble_model(type(model), config, pool_tensors(tensors, model.config), model)
    mechanisms = blend_options(model.config)["mechanisms"]
    return add_mechanisms(pooled, mechanisms, allow_change=True) if mechanisms else pooled


def pooled_config(config: HeadwaterConfig) -> HeadwaterConfig:
    """Make the config of a blended model with the heads of its goal, but without sharing between layers."""
    pooled = Blend.remove_blend(config)
    pooled.num_key_value_heads = blend_options(config)["num_key_value_heads"] or pooled.num_key_value_heads
    pooled.complete_fields()
    return pooled


def find_pool_size(config: HeadwaterConfig) -> int:
    """Find how many key/value heads of a blended model become one."""
    return Blend.find_pool_size(blend_options(config), config)


def pool_tensors(
    tensors: Mapping[str, Tensor], config: HeadwaterConfig, are_moments: bool = False
) -> dict[str, Tensor]:
    """Pool the tensors of a blended model, by name: its key and value projections get one head per group.

    are_moments: the tensors are Adam's moments; a head's gradient is the mean head's, divided by the group's size.
    """
    pool_size, heads = find_pool_size(config), config.num_key_value_heads

    def pool_tensor(name: str, x: Tensor) -> Tensor:
        x = x.detach()
        if pool_size == 1 or not (".k_proj." in name or ".v_proj." in name) or x.ndim == 0 or x.shape[0] % heads:
            return x.clone()
        mean = x.unflatten(0, (heads // pool_size, pool_size, -1)).mean(1)
        power = (2 if name.endswith("exp_avg_sq") else 1) if are_moments else 0
        return (mean * float(pool_size) ** power).flatten(0, 1)

    return {name: pool_tensor(name, tensor) for name, tensor in tensors.items()}


def _check_pooling(model: HeadwaterForCausalLM) -> None:
    """Raise `HeadwaterError` if heads to be pooled have parameters other than linear projections."""
    if find_pool_size(model.config) == 1:
        return
    goal = untied_state_dict(HeadwaterForCausalLM.make_skeleton(pooled_config(model.config)))
    for name, tensor in pool_tensors(untied_state_dict(model), model.config).items():
        if f".{BLEND}." not in name and (name not in goal or goal[name].shape != tensor.shape):
            raise HeadwaterError(
                f"{name!r} is not a plain linear map to key/value heads, so they cannot be pooled; let layers share "
                "instead, and leave num_key_value_heads out."
            )
