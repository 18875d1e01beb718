"""Add mechanisms to a trained model without changing its function.

Each mechanism states its own identity (`AddsToTrainedModel`).
"""

import copy
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from headwater.config.capabilities import Map, replaces_linear
from headwater.config.options import parse_options
from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.conversion.transformers_models import assemble_model, untied_state_dict
from headwater.mechanisms.capabilities import AddsToTrainedModel
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.stages import find_owner
from headwater.plugins.mechanisms import as_mapping, in_order, resolve
from headwater.util.errors import HeadwaterError

ModelT = TypeVar("ModelT", bound=HeadwaterPreTrainedModel)


def add_mechanisms(model: ModelT, mechanisms: Any, allow_change: bool = False) -> ModelT:
    """Return a copy of `model` with more mechanisms, each initialized as the identity.

    Parameters of `model` are copied, dtype and device kept; new ones are initialized by the mechanism.
    New mechanisms are inserted in the registry's order; existing ones keep their order.

    mechanisms: name -> options, or a list of names; any option that the identity does not determine may be set.
    allow_change: also add mechanisms or options that change the function; parameters that the model no longer
        has are left out.

    Raises `HeadwaterError` for a mechanism that is unknown, already present, in contradiction with the rest or
    a replacement of linear layers, and without `allow_change` for one that would change the model's function.
    """
    if not isinstance(requested := as_mapping(mechanisms), dict):
        raise HeadwaterError(f"mechanisms must be names, or name -> options, not {mechanisms!r}.")
    config = copy.deepcopy(model.config)
    present = config.mechanisms
    if "blend" in present:
        raise HeadwaterError(
            "The model is being converted to a smaller cache, and the result would lack the new mechanism; finish the "
            "conversion first."
        )
    added = {name: _choose_options(name, options, config, allow_change) for name, options in requested.items()}
    config.mechanisms = in_order(present | added, present)
    config.complete_fields()
    possible, _ = supported_kernels(config)
    if possible is not None and config._attn_implementation not in possible:
        config._attn_implementation = None  # the model then chooses a supported kernel
    return assemble_model(type(model), config, make_tensors(model, config), model)


def _choose_options(
    name: str, fields: dict[str, Any] | None, config: HeadwaterConfig, allow_change: bool
) -> dict[str, Any]:
    """Choose the options with which a mechanism is added."""
    mechanism = resolve(name)
    if name in config.mechanisms:
        raise HeadwaterError(f"The model already has mechanism {name!r}; leave it out.")
    options, width = parse_options(mechanism, fields), config.hidden_size
    if any(replaces_linear(mechanism, options, config, 0, map_name, width) for map_name in get_args(Map)):
        raise HeadwaterError(
            f"Mechanism {name!r} replaces the model's linear layers and cannot be added to them; train a model with it."
        )
    identity = mechanism.find_identity_options(fields or {}) if isinstance(mechanism, AddsToTrainedModel) else None
    if identity is None and not allow_change:
        raise HeadwaterError(
            f"Mechanism {name!r} with these options changes what the model computes; choose others, or allow it with "
            f"--allow-change (allow_change=True)."
        )
    return options if identity is None else identity


def make_tensors(model: HeadwaterPreTrainedModel, config: HeadwaterConfig) -> dict[str, Tensor]:
    """Make all tensors of a model with `config`: copies where `model` has them, else initial values."""
    skeleton = type(model).make_skeleton(config)
    stored, plans = untied_state_dict(model), list(zip(model.plans, skeleton.plans, strict=True))
    tensors = {}
    for name, target in untied_state_dict(skeleton).items():
        if name in stored:
            tensors[name] = select_stored_heads(name, stored[name], target.shape, plans)
            continue
        if find_owner(skeleton, name)[0] is None:
            raise HeadwaterError(
                f"With these mechanisms the model needs {name!r}, which it does not have; leave out the mechanism that "
                "shares its keys and values."
            )
        module, _, parameter = name.rpartition(".")
        tensors[name] = skeleton.initial_value(skeleton.get_submodule(module), parameter)
    return tensors


def select_stored_heads(
    name: str, tensor: Tensor, shape: torch.Size, plans: list[tuple[LayerPlan, LayerPlan]]
) -> Tensor:
    """Copy a tensor of the model, or its slice of the heads that are still stored."""
    if tensor.shape == shape:
        return tensor.detach().clone()
    choices = set()
    for old_plan, new_plan in (plan for plan in plans if f".layers.{plan[0].index}." in f".{name}"):
        for old, new in ((old_plan.k_heads, new_plan.k_heads), (old_plan.v_heads, new_plan.v_heads)):
            for dim, size in enumerate(tensor.shape[: len(shape)]):
                fits = shape == (*tensor.shape[:dim], size * len(new) // max(1, len(old)), *tensor.shape[dim + 1 :])
                if fits and set(new) <= set(old):
                    choices.add((dim, len(old), tuple(old.index(head) for head in new)))
    if len(choices) != 1:
        raise HeadwaterError(
            f"With these mechanisms {name!r} would have shape {list(shape)}, but it has {list(tensor.shape)}; remove "
            f"the mechanism that changes it."
        )
    ((dim, heads, indices),) = choices
    by_head = tensor.detach().unflatten(dim, (heads, -1))
    return by_head.index_select(dim, torch.tensor(indices, device=tensor.device)).flatten(dim, dim + 1)
