"""Who sees whom: positions, reach and the attention mask, derived once per forward for all layers.

Documents in one row are told apart by their position ids alone: a document starts where the position is 0. With C_i
the number of real (unmasked) tokens up to slot i and p_i the position of token i, token i sees slot j iff

    j ≤ i,   j is real,   C_i - C_j ≤ p_i

that is, p_i real tokens back and no further. The rule needs no document ids and no state: it is the same for packed
rows, left padding, holes in the mask, and for a chunk decoded with a cache, wherever its border falls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from headwater.nn.position import alibi_slopes

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


def positions(attention_mask: Tensor | None, past: int | Tensor, length: int, device: torch.device) -> Tensor:
    """Position ids [B or 1, T] of the `length` new tokens: the number of real tokens before each of them."""
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:].to(device)
    return (torch.arange(length, device=device) + past).unsqueeze(0)


def reach(
    position_ids: Tensor,
    attention_mask: Any,
    past: int | Tensor = 0,
    limit: int = 1,
    document_starts: Tensor | None = None,
) -> Tensor | None:
    """How many tokens back the same document goes without a gap, [B, T], from position_ids [B or 1, T].

    None where that is `limit` or more everywhere, and where looking costs no wait for a device.

    attention_mask: [B, S] of zeros and ones over the whole history; or a mask made for the kernel, [B or 1, 1, T, S]
        boolean or additive, in which the slot before is seen or not; anything else says nothing of gaps.
    past: cached tokens, which with a static cache are fewer than the slots before the new ones.
    limit: nobody looks back further than this.
    document_starts: [B, T], True where a document starts though its position goes on.
    """
    if document_starts is not None:
        slot = torch.arange(document_starts.shape[1], device=document_starts.device) + past
        since = slot - torch.where(document_starts, slot, 0).cummax(-1).values
        return torch.minimum(_reach(position_ids, attention_mask, past, limit), since)
    if position_ids.device.type == "cpu" and type(position_ids) is Tensor and not torch.compiler.is_compiling():
        near = attention_mask[:, -(position_ids.shape[1] + limit) :] if _is_row_mask(attention_mask) else None
        if bool((position_ids >= limit).all()) and (near is not None and bool(near.all())):
            return None
    return _reach(position_ids, attention_mask, past, limit)


def _is_row_mask(attention_mask: Any) -> bool:
    """Whether it is the [B, S] of zeros and ones that a user gives, and no mask made for a kernel."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 2


def _reach(position_ids: Tensor, attention_mask: Any, past: int | Tensor, limit: int) -> Tensor:
    if not isinstance(attention_mask, Tensor):
        return position_ids
    length, slots = position_ids.shape[1], attention_mask.shape[-1]
    if attention_mask.ndim == 2:
        slot = torch.arange(slots, device=attention_mask.device)
        last_gap = torch.where(attention_mask.bool(), -1, slot).cummax(-1).values
        return torch.minimum(position_ids, (slot - last_gap - 1)[:, -length:])
    seen = attention_mask[:, 0]
    if seen.dtype != torch.bool:  # below: what a kernel adds to hide a slot; ALiBi's distances are far above
        seen = seen > torch.finfo(seen.dtype).min / 2
    here = torch.arange(length, device=seen.device) + past
    run = torch.zeros(seen.shape[:2], dtype=torch.long, device=seen.device)
    unbroken = torch.ones_like(run, dtype=torch.bool)
    for back in range(1, limit + 1):
        before = (here - back).clamp(min=0).expand(seen.shape[:2])[..., None]
        unbroken = unbroken & seen.gather(2, before)[..., 0]
        run = run + unbroken
    return torch.minimum(position_ids, run)


def attention_mask_for(
    config: HeadwaterConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
    **unused: Any,
) -> Any:
    """The mask in the form the config's attention kernel wants; None where plain causal attention needs none.

    attention_mask: [B, S] of zeros and ones, None, or an already prepared mask, which is returned as it is.
    position_ids: [B or 1, T] if the caller gave them (documents may restart in them), else None.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        return attention_mask
    length = inputs_embeds.shape[1]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    make = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    same_document = None
    if position_ids is not None:
        same_document = _same_document(position_ids, attention_mask, past_key_values, past, length)
    mask = make(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        # Not passed on: transformers would look for documents in them too, without a cache only.
        position_ids=None,
        and_mask_function=same_document,
        allow_is_causal_skip=config.position != "alibi",
    )
    return (
        mask
        if config.position != "alibi"
        else _with_alibi(config, mask, inputs_embeds, attention_mask, past_key_values)
    )


def _with_alibi(
    config: HeadwaterConfig, mask: Tensor, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None
) -> Tensor:
    """`mask` [B, 1, T, S], boolean or additive, with ALiBi's bias: [B, H, T, S], additive.

    The bias of key j for query i is -slope·(C_i - C_j): the distance in real tokens, whatever padding is between.
    """
    length, slots, device, dtype = mask.shape[2], mask.shape[3], mask.device, inputs_embeds.dtype
    past = 0 if cache is None else cache.get_seq_length()
    offset = 0 if cache is None else cache.get_mask_sizes(length, 0)[1]  # slots that a window's cache has dropped
    slot = torch.arange(slots, device=device) + offset
    query = torch.arange(length, device=device) + past
    if attention_mask is None:
        distance = (query[:, None] - slot)[None]
    else:
        count = attention_mask.long().cumsum(-1).to(device)
        here, there = count[:, -length:], count[:, slot.clamp(max=count.shape[1] - 1)]
        distance = here[:, :, None] - there[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    slopes = torch.tensor(alibi_slopes(config.num_attention_heads), dtype=wide, device=device)
    bias = -slopes[:, None, None] * distance[:, None]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    # The lowest number of bf16 also where dtype is fp32: autocast may round the mask, and must not round it to -inf.
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.where(seen, bias, hidden).to(dtype)


def _same_document(
    position_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, past: int | Tensor, length: int
) -> Any:
    """The rule above as a mask function of transformers (batch, head, query, key -> bool), None if it hides nothing."""
    device = position_ids.device
    if attention_mask is None:
        count = torch.arange(length, device=device) + past + 1
        query_count = count[None].expand_as(position_ids)
        key_count = None
    else:
        key_count = attention_mask.long().cumsum(-1).to(device)
        query_count = key_count[:, -length:]
        if cache is not None and cache.is_compileable:  # its slots go on behind the tokens, where no query looks
            key_count = torch.nn.functional.pad(key_count, (0, max(0, cache.get_max_length() - key_count.shape[1])))
    hidden = query_count - 1 - position_ids
    if not torch.compiler.is_compiling():
        # A padded query has no position of its own; what it sees is never read.
        real = True if attention_mask is None else attention_mask[:, -length:].to(device).bool()
        if not bool(((hidden > 0) & real).any()):
            return None
    rows = hidden.shape[0]

    def same_document(batch, head, query, key):
        row = batch if rows > 1 else 0
        seen = key + 1 if key_count is None else key_count[batch, key]
        return seen > hidden[row, query - past]

    return same_document
