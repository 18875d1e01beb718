"""Checks of a model's arguments, before it runs. Each raises `HeadwaterError`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan
from headwater.config.planner import name_keepers
from headwater.config.rope import FOLLOW_LENGTH
from headwater.config.text import HeadwaterConfig
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.cache_name import CACHE
from headwater.nn.checks import is_replayed, must_wait, refuse_where
from headwater.nn.documents import Positions
from headwater.nn.masks import NewTokens, is_kernel_mask
from headwater.util.errors import HeadwaterError


class CachedLayer(NamedTuple):
    """The numbers of key and value heads in one layer's cache, and its sliding_window, if any."""

    k_heads: int
    v_heads: int
    sliding_window: int | None


def check_position_count(position_ids: Tensor | None, length: int) -> None:
    """Check that there is a position for each of the `length` new tokens, in rows."""
    if position_ids is None:
        return
    if position_ids.ndim != 2:
        raise HeadwaterError(f"position_ids has {position_ids.ndim} dimensions; pass rows of positions, [B or 1, T].")
    if not torch.compiler.is_compiling() and position_ids.shape[-1] != length:
        raise HeadwaterError(
            f"position_ids has {position_ids.shape[-1]} positions, but the input has {length} tokens; pass one for "
            "each token."
        )


def check_cache(layers: list[CachedLayer], cache: Cache | None, inputs_embeds: Tensor) -> None:
    """Check that the cache keeps what this model attends to, and is for the rows of inputs_embeds [B, T, D]."""
    if cache is None or torch.compiler.is_compiling():
        return
    if not isinstance(cache, Cache):
        raise HeadwaterError(
            f"{CACHE} must be a transformers Cache, not {type(cache).__name__}; make it with "
            "DynamicCache(config=model.config)."
        )
    remedy = f"{type(cache).__name__}(config=model.config"
    if cache.layer_class_to_replicate is None and len(cache.layers) < len(layers):
        raise HeadwaterError(
            f"This cache is for {len(cache.layers)} layers, but the model has {len(layers)}; make it with {remedy})."
        )
    rows, length = inputs_embeds.shape[:2]
    for index, (cached, layer) in enumerate(zip(cache.layers, layers, strict=False)):
        keys = getattr(cached, "keys", None)
        size = len(keys) if isinstance(keys, Tensor) and keys.ndim == 4 else rows
        if size != rows:
            raise HeadwaterError(
                f"This cache was made for {size} rows, and the input has {rows}; make a new one with {remedy}, …), "
                "since reset() keeps the number of rows of a static cache."
            )
        if drops_visible_tokens(cached, layer.sliding_window, length):
            raise HeadwaterError(
                f"This cache drops tokens that the model still attends to (sliding_window of layer {index} is "
                f"{layer.sliding_window}); make it with {remedy})."
            )


def drops_visible_tokens(cached: Any, window: int | None, length: int) -> bool:
    """Whether a cache's layer keeps fewer tokens than the model's layer attends to, once it has `length` new ones."""
    if not getattr(cached, "is_sliding", False):
        return False
    if window is None:
        return True
    size = getattr(cached, "sliding_window", None)
    if size is not None:
        return bool(size < window)
    # A static sliding cache may be shorter than the window, which only matters once it is full.
    full = getattr(cached, "cumulative_length_int", 0) + length > cached.get_max_length()
    return bool(full and cached.get_max_length() < window)


def check_cached_heads(layers: list[CachedLayer], cache: Cache | None) -> None:
    """Check that the cache has this model's heads, not another model's or those of PEFT's prefix tuning."""
    for index, (cached, layer) in enumerate(zip(getattr(cache, "layers", ()), layers, strict=False)):
        if cached.is_compileable:  # a static cache may have room for more heads than are used
            continue
        for name, heads in (("keys", layer.k_heads), ("values", layer.v_heads)):
            tensor = getattr(cached, name, None)
            if tensor is not None and tensor.ndim == 4 and tensor.shape[1] != heads:
                raise HeadwaterError(
                    f"Layer {index} caches {layer.k_heads} heads of keys and {layer.v_heads} of values, but this "
                    f"cache has {cached.keys.shape[1]} and {cached.values.shape[1]}; for prefix tuning, or another "
                    "model's cache, load the model with materialise=True."
                )


def check_mask_size(attention_mask: Any, length: int, slots: int) -> None:
    """Check that a kernel's mask is for `length` new tokens among `slots`."""
    if tuple(attention_mask.shape[2:]) != (length, slots):
        raise HeadwaterError(
            f"The attention mask is for {attention_mask.shape[2]} new tokens among {attention_mask.shape[3]}, but "
            f"there are {length} among {slots}; pass a mask of that size."
        )


def check_gaps(attention_mask: Any, input_ids: Tensor | None, has_window: bool) -> None:
    """Check that embeddings have no padding between them if a layer has a window (PEFT's prompts before padded rows).

    Windows count such padding, so the row would differ from the row alone.
    """
    if input_ids is not None or attention_mask is None or is_kernel_mask(attention_mask) or not has_window:
        return
    real = attention_mask.bool()
    refuse_where(
        real[:, 1:] & ~real[:, :-1] & (real.cumsum(-1)[:, :-1] > 0),
        "A model with a sliding window takes no embeddings with padding between them, such as PEFT's virtual tokens "
        "before a padded row; give it rows of equal length, or one at a time.",
    )


def check_document_starts(document_starts: Tensor | None, past: int | Tensor, limit: int) -> None:
    """Check that no mechanism needs document starts that a cache does not record."""
    if document_starts is not None and limit > 1 and bool(past > 0):
        raise HeadwaterError(
            "With a window longer than 2, a cache does not record where earlier documents started; pass "
            "document_starts only without a cache."
        )


def check_learned_positions(config: HeadwaterConfig, tokens: NewTokens, positions: Positions) -> None:
    """Check that each learned position has an embedding: on a GPU a failed lookup would abort the device.

    In training, and where a GPU may replay a step, the host does not wait, and an assertion fails later.
    """
    if config.position != "learned" or torch.compiler.is_compiling():
        return
    position_ids, size, past = positions.ids, config.max_position_embeddings, tokens.past
    if position_ids.is_meta or not position_ids.numel():
        return
    advice = f"give it at most {size} tokens, or train with a larger max_position_embeddings or position=rope."
    later = torch.is_grad_enabled() or is_replayed(past, tokens.length)
    if not positions.are_slots and later and must_wait(position_ids):
        torch._assert_async(
            (position_ids < size).all(), f"A position is beyond this model's {size} learned positions; {advice}"
        )
        return
    largest = int(past + tokens.length - 1 if positions.are_slots else position_ids.max())
    if largest >= size:
        raise HeadwaterError(f"Position {largest} is beyond this model's {size} learned positions; {advice}")


def check_paged(config: HeadwaterConfig, plans: Sequence[LayerPlan], remedy: str = "") -> None:
    """Raise `HeadwaterError` if an engine with its own paged cache cannot run this model exactly.

    remedy: what to do first, such as "leave out an option, and ".
    """
    possible, limit = supported_kernels(config)
    parameters = (layer_config(config, layer).rope_parameters or {} for layer in config.kinds.values())
    rope_types = [kind for kind in (each.get("rope_type") for each in parameters) if kind in FOLLOW_LENGTH]
    needs = {
        "the raw tokens that it looks back to": name_keepers(plans),
        "masks or attention weights": "" if possible is None else limit,
        "the length of each sequence": f"rope_type {rope_types[0]!r}" if rope_types else "",
    }
    for need, name in needs.items():
        if name:
            raise HeadwaterError(
                f"{name}: an engine with paged attention lacks {need}, so its output would be wrong; {remedy}use "
                "generate or headwater serve."
            )
    if not config.materialise:
        raise HeadwaterError(
            "An engine with paged attention keeps ordinary keys and values for each layer; load the model with "
            "materialise=True, or write such a checkpoint with headwater export --materialise (exact, without the "
            "smaller cache)."
        )
