"""Positions, the attention mask, and which token precedes which, derived once per forward pass.

Documents in one row are separated by their position ids alone: a document starts where the position is 0. With C_i the
number of real (unmasked) tokens up to slot i, and p_i the position of token i, token i attends to slot j iff

    j ≤ i,   j is real,   C_i - C_j ≤ p_i

that is, p_i real tokens back and no further. The rule needs no document ids and no state: it is the same for packed
rows, left padding, holes in the mask, and chunks decoded with a cache, wherever they are cut.

Under a kernel's own mask, [B, 1, T, S], rows may branch (trees of candidates, shared prefixes). The previous token is
then not always in the previous slot: `ancestors` finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from headwater.kernels.attention import MATMUL
from headwater.kernels.varlen import VARLEN
from headwater.mechanisms.contract import Ancestors
from headwater.nn.cache_name import CACHE, one_cache
from headwater.nn.position import alibi_slopes
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


# Kernels whose masks are boolean.
TAKE_BOOLEANS = "sdpa", MATMUL, VARLEN
# Kernels that take the borders of documents in place of a mask.
BY_DOCUMENTS = VARLEN, "flash_attention"
# Room for this many tokens a document, on average, in `cu_seq_lens`; and for at least this many documents.
TOKENS, DOCUMENTS = 256, 64


def takes_documents(implementation: str | None) -> bool:
    """Whether attention of this name takes `cu_seq_lens` in place of a mask."""
    return implementation is not None and implementation.startswith(BY_DOCUMENTS)


def cu_seq_lens(position_ids: Tensor) -> Tensor | None:
    """Where each document begins among all B·T tokens of packed rows, row after row, and then the end: int32 [n + 1].

    The end is repeated, as documents of no tokens, up to a length that depends on B and T alone (unless documents are
    shorter than `TOKENS` on average; then it doubles): compiled code sees one shape, whatever the documents.

    position_ids: [B, T] on the CPU; on a GPU the host waits. None if some document is not numbered 0, 1, 2, …; such
    rows need a mask.
    """
    rows, length = position_ids.shape
    slot = torch.arange(length, device=position_ids.device)
    starts = (position_ids == 0) | (slot == 0)
    since = slot - torch.where(starts, slot, 0).cummax(1).values
    # A row may begin inside a document: further back than its first token there is nothing to see.
    if not torch.equal(torch.minimum(position_ids, slot), since):
        return None
    begins = starts.flatten().nonzero().flatten()
    room = rows + max(DOCUMENTS, rows * length // TOKENS)
    while room < len(begins):
        room *= 2
    borders = torch.full((room + 1,), rows * length, dtype=torch.int32, device=position_ids.device)
    borders[: len(begins)] = begins
    return borders


def positions_in(cu_seq_lens: Tensor, rows: int, length: int) -> Tensor:
    """Position ids [B, T] that restart with each document."""
    token = torch.arange(rows * length, dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
    begin = cu_seq_lens[torch.searchsorted(cu_seq_lens, token, right=True) - 1]
    return (token - begin).long().view(rows, length)


def check_documents(cu_seq_lens: Tensor, position_ids: Tensor, rows: int, length: int) -> None:
    """Raise `HeadwaterError` if documents do not begin where positions restart; on a GPU, an assertion fails later.

    Compiled code does not look.
    """
    if torch.compiler.is_compiling() or position_ids.is_meta:
        return
    sentence = (
        "cu_seq_lens_q and position_ids disagree about where documents begin; make the former with "
        "headwater.nn.masking.cu_seq_lens(position_ids), or leave one of them out."
    )
    slot = torch.arange(length, device=position_ids.device)
    same = torch.minimum(position_ids, slot) == positions_in(cu_seq_lens, rows, length)
    try:
        torch._assert_async(same.all(), sentence)
    except RuntimeError as error:
        raise HeadwaterError(sentence) from error


def columns(x: Tensor, past: int | Tensor, length: int) -> Tensor:
    """The columns [B, T] of the `length` new tokens in x [B, S], which covers the whole history.

    past: the number of cached tokens. A static cache has it as a tensor; x may then be as wide as that cache, so that
    its shape is the same at every step. What follows the new tokens is not looked at.
    """
    if isinstance(past, Tensor):
        return x.index_select(1, torch.arange(length, device=x.device) + past.to(x.device))
    return x[:, -length:]


def positions(attention_mask: Tensor | None, past: int | Tensor, length: int, device: torch.device) -> Tensor:
    """Position ids [B or 1, T] of the `length` new tokens: the number of real tokens before each of them."""
    if attention_mask is not None and not is_made(attention_mask):
        return columns((attention_mask.long().cumsum(-1) - 1).clamp(min=0), past, length).to(device)
    return (torch.arange(length, device=device) + past).unsqueeze(0)


def waits(tensor: Tensor) -> bool:
    """Whether the host would wait for the numbers of a tensor: they are on another device, or not there yet (fake)."""
    return tensor.device.type != "cpu" or type(tensor) is not Tensor


def decodes(past: int | Tensor, length: int) -> bool:
    """Whether this is one token after those in a static cache: a step that a device may replay, so nothing looks."""
    return isinstance(past, Tensor) and length == 1


def reach(
    position_ids: Tensor,
    attention_mask: Any,
    past: int | Tensor = 0,
    limit: int = 1,
    document_starts: Tensor | None = None,
) -> Tensor | None:
    """How many tokens of the same document precede each without a gap, [B, T], from position_ids [B or 1, T].

    It counts up to `limit`, in bytes where that is enough: a compiled layer keeps it for the backward pass. None if it
    is `limit` everywhere and finding out does not wait for a device.

    attention_mask: [B, S] of zeros and ones over the whole history, or None.
    past: the number of cached tokens; a static cache has more slots than that before the new ones.
    limit: the longest look back of any mechanism.
    document_starts: [B, T], True where a document starts although positions continue.
    """
    if document_starts is not None:
        slot = torch.arange(document_starts.shape[1], device=document_starts.device)
        begin = last_marked(document_starts)
        since = torch.where(begin < 0, slot + past, slot - begin)
        return _counted(torch.minimum(_reach(position_ids, attention_mask, past), since), limit)
    # Without a cache a row begins within the limit.
    looks = isinstance(past, int) and past > 0 and not waits(position_ids) and not torch.compiler.is_compiling()
    if looks and bool((position_ids >= limit).all()):
        near = None if attention_mask is None else attention_mask[:, -(position_ids.shape[1] + limit) :]
        if near is None or bool(near.all()):
            return None
    return _counted(_reach(position_ids, attention_mask, past), limit)


def _counted(reach: Tensor, limit: int) -> Tensor:
    return reach.clamp(max=limit).to(torch.int8 if limit <= torch.iinfo(torch.int8).max else reach.dtype)


def _reach(position_ids: Tensor, attention_mask: Tensor | None, past: int | Tensor) -> Tensor:
    if attention_mask is None:
        return position_ids
    slot = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    since_gap = slot - last_marked(~attention_mask.bool()) - 1
    return torch.minimum(position_ids, columns(since_gap, past, position_ids.shape[1]))


def last_marked(marks: Tensor) -> Tensor:
    """The last marked slot at or before each slot, -1 before the first: booleans [B, S] -> [B, S]."""
    slot = torch.arange(marks.shape[1], device=marks.device).expand_as(marks)
    if not torch.compiler.is_exporting():
        return torch.where(marks, slot, -1).cummax(-1).values
    # ONNX has no running maximum: each slot looks up the mark of its number.
    count = marks.long().cumsum(-1)
    by_count = slot.new_full((marks.shape[0], marks.shape[1] + 1), -1)
    by_count = by_count.scatter(1, torch.where(marks, count, 0), torch.where(marks, slot, -1))
    return by_count.gather(1, count)


# An additive mask hides slots below this: softmax then gives them a weight of zero in every precision.
HIDDEN = -1e3


def ancestors(
    position_ids: Tensor,
    attention_mask: Any,
    before: Tensor | None = None,
    first: int | Tensor = 0,
    tails: Sequence[int] = (1,),
    document_starts: Tensor | None = None,
) -> Ancestors:
    """The predecessors of each token under a kernel's own mask, which may let rows branch.

    The previous token of one at position p is the one that it sees at position p - 1, and so on from there. Raises
    `HeadwaterError` where p > 0 and it sees no such token, or several, or one whose raw keys and values the cache has
    dropped (in compiled code an assertion fails). A token that does not see itself is padding and has no predecessor.

    position_ids: [B or 1, T] of the new tokens.
    attention_mask: [B or 1, 1 or H, T, S], boolean or additive, or flex attention's block mask.
    before: [B, n], 1 + the positions of the tokens in the cache's tail; 0 where it has none.
    first: the column of the first new token.
    tails: for s = 1, 2, …: the length of the shortest tail that holds the token s back.
    document_starts: [B, T], True where a document starts although positions continue.
    """
    seen = _seen(attention_mask, position_ids)
    length, slots = seen.shape[1:]
    device = seen.device
    position = position_ids.to(device)
    # Candidates: the tokens in the tail, then the new ones.
    kept = 0 if before is None else before.shape[1]
    column = torch.arange(-kept, length, device=device) + first
    visible = seen[:, :, column.clamp(0, slots - 1)] & (column >= 0)
    known = position
    if before is not None:
        nowhere = -(2**40)  # a position that no token has
        known = torch.cat((torch.where(before > 0, before - 1, nowhere), position.expand(before.shape[0], -1)), 1)
    start = position == 0 if document_starts is None else (position == 0) | document_starts.to(device)
    itself = torch.arange(length, device=device)
    padding = ~visible[:, itself, kept + itself]

    def at(back: int, among: Tensor) -> tuple[Tensor, Tensor]:
        """The index of a candidate `back` positions before each token, and how many there are."""
        match = among & (known[:, None, :] == (position - back)[:, :, None])
        return match.int().argmax(-1), match.sum(-1)

    nothing = kept + length
    parent, count = at(1, visible)
    # If a token sees more tokens than there are earlier positions, two share a position, and it is unknown which.
    earlier = (seen & (torch.arange(slots, device=device) < first - kept)).sum(-1)
    earlier = earlier + (visible & (known[:, None, :] < position[:, :, None]) & (known[:, None, :] >= 0)).sum(-1)
    wrong = ~start & ~(padding & (count == 0)) & ((count != 1) | (earlier > position) & (first > kept))
    parent = torch.where(start | (count == 0), nothing, parent)
    found = [parent]
    in_tail = parent < kept
    far = torch.zeros_like(wrong)
    for back, shortest in enumerate(tails, 1):
        if back > 1:
            index, count = at(back, visible & (torch.arange(nothing, device=device) < kept))
            has = position >= back
            wrong = wrong | in_tail & has & (count != 1)
            onward = found[-1].gather(1, (parent - kept).clamp(0, length - 1).expand_as(found[-1]))
            found.append(torch.where(in_tail & has, index, torch.where(in_tail | (parent == nothing), nothing, onward)))
        far = far | (found[-1] < min(kept, len(tails) - shortest))
    refuse_where(
        wrong | far,
        "Under this attention mask a mechanism that looks back cannot tell which token comes before another: among "
        "the tokens that one at position p sees there must be exactly one at position p - 1, new or among the last "
        "that the cache keeps raw. Give position_ids that count along each branch; to continue from a token that is "
        "not the last, call activate_past_recording() on the cache first.",
    )
    return Ancestors(torch.stack(found) - kept)


def _seen(attention_mask: Any, position_ids: Tensor) -> Tensor:
    """A kernel's own mask as a boolean [B or 1, T, S]: which token sees which."""
    if not isinstance(attention_mask, Tensor):
        rows, heads, length, slots = attention_mask.shape
        seen = create_mask(attention_mask.mask_mod, rows, heads, length, slots, device=position_ids.device)
    else:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask > HIDDEN
    if seen.shape[1] > 1:
        refuse_where(
            (seen != seen[:, :1]).any(),
            "This attention mask hides other tokens from other heads, and a mechanism that looks back has one token "
            "before each; give a mask that all heads share.",
        )
    return seen[:, 0]


def refuse_where(wrong: Tensor, sentence: str) -> None:
    """Raise `HeadwaterError` if anything is `wrong`; compiled code, which cannot branch on it, asserts."""
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), sentence)
    elif not wrong.is_meta and bool(wrong.any()):
        raise HeadwaterError(sentence)


def attention_mask_for(
    config: HeadwaterConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
    layer: int = 0,
    **unused: Any,
) -> Any:
    """The mask in the form that the config's attention kernel takes; None where causal attention needs none.

    config: as `layer` sees it.
    attention_mask: [B, S] of zeros and ones, None, or a kernel's own mask. Raises `HeadwaterError` for another shape, a
        mask that the kernel does not take, and a kernel's own mask under ALiBi.
    position_ids: [B or 1, T] if the caller gave them (they may restart for documents), else None.
    """
    if is_made(attention_mask):
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
        return _for_kernel(config._attn_implementation, attention_mask, inputs_embeds.dtype)
    length = inputs_embeds.shape[1]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    make = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    same_document = None
    if position_ids is not None:
        same_document = _same_document(position_ids, attention_mask, past_key_values, past, length)
    # transformers would run the function under vmap, which takes many times as long for short rows.
    at_once = same_document is not None and config._attn_implementation in TAKE_BOOLEANS
    mask = make(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        # Not passed on: transformers would look for documents in them too, but only without a cache.
        position_ids=None,
        and_mask_function=None if at_once else same_document,
        allow_is_causal_skip=config.position != "alibi" and not at_once,
        **{CACHE: past_key_values},
    )
    if at_once:
        row = torch.arange(mask.shape[0], device=mask.device)[:, None, None, None]
        query = torch.arange(length, device=mask.device)[:, None] + past
        mask = mask & same_document(row, 0, query, _slots(mask, past_key_values, layer))
    return (
        mask
        if config.position != "alibi"
        else _with_alibi(config, mask, inputs_embeds, attention_mask, past_key_values, layer)
    )


def last_rows(
    config: HeadwaterConfig,
    mask: Any,
    tokens: int,
    length: int,
    cache: Cache | None,
    device: torch.device,
    layer: int = 0,
) -> tuple[bool, Tensor | None]:
    """The rows of the last `tokens` of `length` new tokens in a mask as `attention_mask_for` gives it.

    config, layer: as there. Returns whether they can be taken, and the mask; None where these tokens need none.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return True, mask[:, :, -tokens:]
    if mask is not None:
        return False, None
    empty = cache is not None and cache.is_compileable  # a static cache has slots beyond the tokens
    if tokens == 1 and not empty:
        return True, None
    if config._attn_implementation not in TAKE_BOOLEANS:
        return False, None
    # Kernels that are causal without a mask let the first query see the first key alone.
    past, slots = (0, length) if cache is None else (cache.get_seq_length(), cache.get_mask_sizes(length, layer)[0])
    end = past + length if empty else slots
    query = torch.arange(tokens, device=device) + (end - tokens)
    return True, (torch.arange(slots, device=device) <= query[:, None])[None, None]


def _for_kernel(implementation: str | None, attention_mask: Any, dtype: torch.dtype) -> Any:
    """A kernel's own mask, in the form this kernel takes: eager attention would add a boolean mask to the scores."""
    implementation = implementation or "eager"
    if implementation.startswith("flash") or (not isinstance(attention_mask, Tensor) and "flex" not in implementation):
        raise HeadwaterError(
            f"attn_implementation {implementation} does not take such an attention mask; load the model with "
            "attn_implementation='sdpa' and give [batch, 1, new tokens, tokens], or give [batch, tokens]."
        )
    takes_boolean = implementation in TAKE_BOOLEANS
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and not takes_boolean:
        return torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device).masked_fill_(
            ~attention_mask, torch.finfo(dtype).min
        )
    return attention_mask


def masks_for_generate(
    config: HeadwaterConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
    **unused: Any,
) -> dict[str, Any]:
    """What `generate` computes outside compiled code: the mask, and the reach, which does not follow from it."""
    past_key_values = one_cache(past_key_values, cache)
    given = inputs_embeds, attention_mask, past_key_values, position_ids
    kinds = config.kinds
    made = {MASK[slides]: attention_mask_for(config.at(layer), *given, layer) for slides, layer in kinds.items()}
    if any(plan.tails for plan in config.layer_plans):
        length, device = inputs_embeds.shape[1], inputs_embeds.device
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = positions(attention_mask, past, length, device)
        # In a mask's shape, so that it is concatenated like one.
        made[REACH] = _reach(position_ids, attention_mask, past)[:, None, :, None]
    return made


# The keys of what `masks_for_generate` returns: the mask by whether a layer has the sliding window, and the reach.
MASK = {False: "headwater_mask", True: "headwater_sliding_mask"}
REACH = "headwater_reach"


def is_made(attention_mask: Any) -> bool:
    """Whether it is a kernel's own mask, and not the usual [B, S] of zeros and ones."""
    return attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2)


def _slots(mask: Tensor, cache: Cache | None, layer: int) -> Tensor:
    """Which token of the history each column of a mask [B, 1, T, S] stands for, [S]: a window's cache drops some."""
    offset = 0 if cache is None else cache.get_mask_sizes(mask.shape[2], layer)[1]
    return torch.arange(mask.shape[3], device=mask.device) + offset


def _with_alibi(
    config: HeadwaterConfig,
    mask: Tensor,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    layer: int,
) -> Tensor:
    """`mask` [B, 1, T, S], boolean or additive, with ALiBi's bias: [B, H, T, S], additive.

    The bias of key j for query i is -slope·(C_i - C_j): the distance in real tokens, not counting padding.
    """
    length, device, dtype = mask.shape[2], mask.device, inputs_embeds.dtype
    past = 0 if cache is None else cache.get_seq_length()
    slot = _slots(mask, cache, layer)
    query = torch.arange(length, device=device) + past
    if attention_mask is None:
        distance = (query[:, None] - slot)[None]
    else:
        count = attention_mask.long().cumsum(-1).to(device)
        here, there = columns(count, past, length), count[:, slot.clamp(max=count.shape[1] - 1)]
        distance = here[:, :, None] - there[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    slopes = alibi_slopes(config.num_attention_heads, wide, device)
    bias = -slopes[:, None, None] * distance[:, None]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    # At least the lowest number of bf16, in fp32 too: autocast may round the mask, and must not round it to -inf.
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.where(seen, bias, hidden).to(dtype)


def _same_document(
    position_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, past: int | Tensor, length: int
) -> Any:
    """The rule above as a mask function of transformers (batch, head, query, key -> bool); None if it hides nothing."""
    device = position_ids.device
    if attention_mask is None:
        count = torch.arange(length, device=device) + past + 1
        query_count = count[None].expand_as(position_ids)
        key_count = None
    else:
        key_count = attention_mask.long().cumsum(-1).to(device)
        query_count = columns(key_count, past, length)
        if cache is not None and cache.is_compileable:  # it has slots beyond the tokens, which no query sees
            key_count = torch.nn.functional.pad(key_count, (0, max(0, cache.get_max_length() - key_count.shape[1])))
    hidden = query_count - 1 - position_ids
    # Where the host must not wait to check whether given positions separate documents, it is assumed that they do.
    waited = (waits(hidden) and torch.is_grad_enabled()) or decodes(past, length)
    if not waited and not torch.compiler.is_compiling():
        # Padded queries have no meaningful position, and their output is never read.
        real = True if attention_mask is None else columns(attention_mask, past, length).to(device).bool()
        if not bool(((hidden > 0) & real).any()):
            return None
    rows = hidden.shape[0]

    def same_document(batch, head, query, key):
        row = batch if rows > 1 else 0
        seen = key + 1 if key_count is None else key_count[batch, key]
        return seen > hidden[row, query - past]

    return same_document
