"""The attention mask, in the form that the attention kernel takes.

Documents in one row are separated only by their position ids: a document starts where the position is 0. With C_i the
number of real (unmasked) tokens up to slot i, and p_i the position of token i, token i attends to slot j iff

    j ≤ i,   j is real,   C_i - C_j ≤ p_i

that is, p_i real tokens back and no further. The rule needs no document ids and no state: it is the same for packed
rows, left padding, holes in the mask, and chunks decoded with a cache, wherever they are cut.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from headwater.config.text import HeadwaterConfig
from headwater.kernels.fused_attention import MATMUL
from headwater.kernels.varlen import VARLEN
from headwater.nn.cache_name import CACHE
from headwater.nn.checks import is_replayed, must_wait
from headwater.nn.documents import is_flash, select_columns
from headwater.nn.position import alibi_slopes
from headwater.util.errors import HeadwaterError

# Kernels whose masks are boolean.
TAKE_BOOLEANS = "sdpa", MATMUL, VARLEN
# Whether a query sees a key: (batch, head, query, key), indices that broadcast -> booleans.
MaskRule = Callable[[Any, Any, Any, Any], Tensor]


class LayerKind(NamedTuple):
    """The layers with a sliding window, or those without: the first of them, and its config."""

    layer: int
    config: HeadwaterConfig


class NewTokens(NamedTuple):
    """The new tokens of a call, inputs_embeds [B, T, D], length T, and the cache of earlier tokens, if there is one.

    past: how many it holds; a static cache has this as a tensor.
    """

    inputs_embeds: Tensor
    length: int
    cache: Cache | None = None
    past: int | Tensor = 0


def find_new_tokens(inputs_embeds: Tensor, cache: Cache | None = None) -> NewTokens:
    """Describe the tokens of inputs_embeds [B, T, D], which follow those in the cache."""
    return NewTokens(inputs_embeds, inputs_embeds.shape[1], cache, 0 if cache is None else cache.get_seq_length())


def is_kernel_mask(attention_mask: Any) -> bool:
    """Whether it is a kernel's own mask, instead of the usual [B, S] of zeros and ones."""
    return attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2)


def find_seen(tokens: NewTokens, attention_mask: Tensor) -> Tensor:
    """Find which real tokens, of attention_mask [B, S], each real new token may see: booleans [B, 1, T, S]."""
    real = attention_mask.bool()
    slot = torch.arange(real.shape[1], device=real.device)
    new = torch.arange(tokens.length, device=real.device) + tokens.past
    return (real[:, new, None] & real[:, None] & (slot <= new[:, None]))[:, None]


def make_mask(kind: LayerKind, tokens: NewTokens, attention_mask: Any, position_ids: Tensor | None) -> Any:
    """Make the mask of one kind of layer in the form that its kernel takes; None where causal attention needs none.

    attention_mask: [B, S] of zeros and ones, None, or a kernel's own mask. Raises `HeadwaterError` for another shape, a
        mask that the kernel does not take (also between documents), and a kernel's own mask under ALiBi.
    position_ids: [B or 1, T] if the caller gave them (they may restart for documents), else None.
    """
    config = kind.config
    if is_kernel_mask(attention_mask):
        check_kernel_mask(config, attention_mask)
        return convert_kernel_mask(config._attn_implementation or "eager", attention_mask, tokens.inputs_embeds.dtype)
    same_document = None if position_ids is None else separate_documents(tokens, attention_mask, position_ids)
    if same_document is not None and is_flash(config._attn_implementation):
        raise HeadwaterError(
            f"attn_implementation {config._attn_implementation} takes no mask between documents; pass cu_seq_lens_q, "
            "made by headwater.nn.documents.make_cu_seq_lens(position_ids), without a mask or cache. Leave out "
            "position_ids that never restart."
        )
    # transformers would run the function under vmap, which takes many times as long for short rows.
    at_once = same_document is not None and config._attn_implementation in TAKE_BOOLEANS
    make = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    mask = make(
        config=config,
        inputs_embeds=tokens.inputs_embeds,
        attention_mask=attention_mask,
        # Not passed on, because transformers would also look for documents in them, but only without a cache.
        position_ids=None,
        and_mask_function=None if at_once else same_document,
        allow_is_causal_skip=config.position != "alibi" and not at_once,
        **{CACHE: tokens.cache},
    )
    if same_document is not None and at_once:
        row = torch.arange(mask.shape[0], device=mask.device)[:, None, None, None]
        query = torch.arange(tokens.length, device=mask.device)[:, None] + tokens.past
        mask = mask & same_document(row, 0, query, find_slots(mask, tokens.cache, kind.layer))
    return add_alibi(kind, tokens, mask, attention_mask) if config.position == "alibi" else mask


def check_kernel_mask(config: HeadwaterConfig, attention_mask: Any) -> None:
    """Raise `HeadwaterError` for a kernel's own mask of another shape, or under ALiBi."""
    if len(attention_mask.shape) != 4:
        raise HeadwaterError(
            "An attention mask is [batch, tokens] of zeros and ones, or [batch, 1, new tokens, tokens] as "
            f"attention kernels take it, not {list(attention_mask.shape)}."
        )
    if config.position == "alibi":
        raise HeadwaterError(
            "ALiBi's distances are part of the mask, and a mask [batch, 1, new tokens, tokens] has none; "
            "give attention_mask [batch, tokens], and position_ids that restart where a document starts."
        )


def convert_kernel_mask(implementation: str, attention_mask: Any, dtype: torch.dtype) -> Any:
    """Convert a kernel's own mask to what this kernel takes: eager attention would add a boolean mask to the scores."""
    is_tensor = isinstance(attention_mask, Tensor)
    if is_flash(implementation) or not (is_tensor or "flex" in implementation):
        raise HeadwaterError(
            f"attn_implementation {implementation} does not take such an attention mask; load the model with "
            "attn_implementation='sdpa' and give [batch, 1, new tokens, tokens], or give [batch, tokens]."
        )
    if is_tensor and attention_mask.dtype == torch.bool and implementation not in TAKE_BOOLEANS:
        return torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device).masked_fill_(
            ~attention_mask, torch.finfo(dtype).min
        )
    return attention_mask


def separate_documents(tokens: NewTokens, attention_mask: Tensor | None, position_ids: Tensor) -> MaskRule | None:
    """Return the rule above as a mask function of transformers; None if it hides nothing."""
    device, cache, past, length = position_ids.device, tokens.cache, tokens.past, tokens.length
    if attention_mask is None:
        count = torch.arange(length, device=device) + past + 1
        query_count = count[None].expand_as(position_ids)
        key_count = None
    else:
        key_count = attention_mask.ne(0).cumsum(-1).to(device)
        query_count = select_columns(key_count, past, length)
        if cache is not None and cache.is_compileable:  # pad for slots beyond the tokens, which no query sees
            key_count = torch.nn.functional.pad(key_count, (0, max(0, cache.get_max_length() - key_count.shape[1])))
    hidden = query_count - 1 - position_ids
    # If checking whether the given positions separate documents would make the host wait, assume that they do.
    unchecked = (must_wait(hidden) and torch.is_grad_enabled()) or is_replayed(past, length)
    if not unchecked and not torch.compiler.is_compiling():
        # Ignore padded queries, whose positions mean nothing and whose output is never read.
        real = True if attention_mask is None else select_columns(attention_mask, past, length).to(device).bool()
        if not bool(((hidden > 0) & real).any()):
            return None
    rows = hidden.shape[0]

    def same_document(batch, head, query, key):
        row = batch if rows > 1 else 0
        keys = key + 1 if key_count is None else key_count[batch, key]
        return keys > hidden[row, query - past]

    return same_document


def find_slots(mask: Tensor, cache: Cache | None, layer: int) -> Tensor:
    """Find the tokens of the history for the columns of a mask [B, 1, T, S], [S]: a window's cache drops some."""
    offset = 0 if cache is None else cache.get_mask_sizes(mask.shape[2], layer)[1]
    return torch.arange(mask.shape[3], device=mask.device) + offset


def add_alibi(kind: LayerKind, tokens: NewTokens, mask: Tensor, attention_mask: Tensor | None) -> Tensor:
    """`mask` [B, 1, T, S], boolean or additive, with ALiBi's bias: [B, H, T, S], additive.

    The bias of key j for query i is -slope·(C_i - C_j): the distance in real tokens, not counting padding.
    """
    length, device, dtype = mask.shape[2], mask.device, tokens.inputs_embeds.dtype
    slot = find_slots(mask, tokens.cache, kind.layer)
    query = torch.arange(length, device=device) + tokens.past
    if attention_mask is None:
        distance_BTS = (query[:, None] - slot)[None]
    else:
        count = attention_mask.ne(0).cumsum(-1).to(device)
        query_count = select_columns(count, tokens.past, length)
        distance_BTS = query_count[:, :, None] - count[:, slot.clamp(max=count.shape[1] - 1)][:, None]
    wide = torch.promote_types(dtype, torch.float32)
    slopes = alibi_slopes(kind.config.num_attention_heads, wide, device)
    bias_BHTS = -slopes[:, None, None] * distance_BTS[:, None]
    sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    # Not below bf16's lowest number, even in fp32: autocast may round the mask, and must not round it to -inf.
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.where(sees, bias_BHTS, hidden).to(dtype)


def keep_last_rows(kind: LayerKind, tokens: NewTokens, mask: Any, count: int) -> tuple[bool, Tensor | None]:
    """Return whether the last `count` rows of a mask can be selected, and these; None where they need no mask."""
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return True, mask[:, :, -count:]
    if mask is not None:
        return False, None
    cache, length = tokens.cache, tokens.length
    empty = cache is not None and cache.is_compileable  # a static cache has slots beyond the tokens
    if count == 1 and not empty:
        return True, None
    if kind.config._attn_implementation not in TAKE_BOOLEANS:
        return False, None
    # Build the mask, because kernels that are causal without one would let the first query see only the first key.
    slots = length if cache is None else cache.get_mask_sizes(length, kind.layer)[0]
    end = tokens.past + length if empty else slots
    device = tokens.inputs_embeds.device
    query = torch.arange(count, device=device) + (end - count)
    return True, (torch.arange(slots, device=device) <= query[:, None])[None, None]
