"""Servers that attend to paged caches of their own, through transformers' attention functions."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.config.plan import LayerPlan
from headwater.config.planner import keepers
from headwater.config.text import HeadwaterConfig
from headwater.nn.attention_kernel import supported_kernels
from headwater.util.errors import HeadwaterError


def check_paged(config: HeadwaterConfig, plans: Sequence[LayerPlan]) -> None:
    """Raise `HeadwaterError` if an engine with its own paged cache cannot run this model exactly."""
    if (sentence := keepers(plans)) is not None:
        names, s = sentence
        raise HeadwaterError(
            f"{names} look{s} back to raw tokens, which an engine with paged attention cannot keep, so its output "
            "would be wrong; use generate, which keeps them."
        )
    possible, reason = supported_kernels(config)
    if possible is not None:
        raise HeadwaterError(
            f"{reason} needs masks or attention weights, which an engine with paged attention does not provide; use "
            "generate."
        )
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise HeadwaterError(
            f"The frequencies of rope_type {kind!r} follow the longest sequence of a call, but an engine with paged "
            "attention batches many requests into one call; use generate."
        )
    if not config.materialise:
        raise HeadwaterError(
            "An engine with paged attention keeps ordinary keys and values for each layer; load the model with "
            "materialise=True, or write such a checkpoint with headwater export --materialise (exact, without the "
            "smaller cache)."
        )
