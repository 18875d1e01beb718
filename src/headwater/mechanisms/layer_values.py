"""Values that mechanisms read of this or an earlier layer: which layers have values, and where heads find them."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headwater.config.plan import Heads, LayerPlan, Source
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.util.errors import HeadwaterError


def layers_with_values(
    mechanism: type[Mechanism], options: OptionValues, layers: list[int], plans: Sequence[LayerPlan]
) -> list[int]:
    """List those `layers` that have their own values.

    Raises `HeadwaterError` if none has, or if one that the option `layers` names lacks them.
    """
    name, lacking = mechanism.registered_name(), [layer for layer in layers if not plans[layer].v_heads]
    if lacking and (options["layers"] is not None or lacking == layers):
        raise HeadwaterError(
            f"Mechanism {name!r} adds to a layer's own values, but layer {lacking[0]} has none, because it shares "
            "another layer's, or its keys or a latent are its values; leave that layer out of layers, or remove what "
            "does this."
        )
    return [layer for layer in layers if layer not in lacking]


def find_value_slots(plan: LayerPlan, kind: Literal["raw", "local"]) -> tuple[tuple[int, Heads], ...]:
    """Find where `join_heads` takes the values that each head attends to: each source's slot, and which heads."""
    return tuple((plan.slot(Source(kind, "v", group.v)), group.v_heads) for group in plan.groups)


def check_own_values(mechanism: type[Mechanism], plans: Sequence[LayerPlan]) -> None:
    """Raise `HeadwaterError` if there is a layer whose values are its keys or are made from a latent."""
    if any(plan.value_part != "v" for plan in plans):
        raise HeadwaterError(
            f"Mechanism {mechanism.registered_name()!r} reads the layers' own values, but here heads read keys as "
            "values, or make them from a latent; remove one of the two mechanisms."
        )


def join_heads(sources: Sequence[Tensor], slots: Sequence[tuple[int, Heads]]) -> Tensor:
    """Join heads of several sources, [B, heads, T, d]. slots: of each source its index, and which of its heads."""
    tensors = [sources[slot] if heads is None else sources[slot][:, heads] for slot, heads in slots]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
