"""Limits of looking back: the number of tokens before each one, and the cache that keeps raw tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import Cache

from headwater.config.plan import LayerPlan
from headwater.config.planner import name_keepers
from headwater.mechanisms.contract import Tail
from headwater.nn.checks import is_replayed, must_wait
from headwater.nn.documents import select_columns
from headwater.nn.engine import Engine
from headwater.util.errors import HeadwaterError

GAP = (
    "Padding lies between the tokens of a row, and mechanisms that look back need the token before it; pass such rows "
    "without compilation and, on a GPU, without gradients."
)


class LookbackLimits(NamedTuple):
    """Number of tokens that the mechanisms of a model look back.

    limit: the longest tail of any; 0 if none looks back.
    tail_lengths: for s = 1, 2, … limit: the length of the shortest tail that still holds the token s back.
    keeper: the plan of the first layer that keeps raw tokens.
    """

    limit: int = 0
    tail_lengths: tuple[int, ...] = ()
    keeper: LayerPlan | None = None

    @classmethod
    def from_plans(cls, plans: Sequence[LayerPlan]) -> Self:
        limit = max(plan.lookback for plan in plans)
        lengths = {length for plan in plans for _, length, _ in plan.tails}
        shortest = tuple(min(length for length in lengths if length >= back) for back in range(1, limit + 1))
        return cls(limit, shortest, next((plan for plan in plans if plan.tails), None))


def find_tail(plan: LayerPlan, past_key_values: Cache | Engine | None) -> Tail | None:
    """Find the cache layer with a layer's raw tokens; None without a cache. Raises `HeadwaterError` if it has none."""
    if past_key_values is None or not plan.tails:
        return None
    layers = past_key_values.layers
    layer = layers[plan.index] if plan.index < len(layers) else None
    if not hasattr(layer, "update_tail"):
        raise HeadwaterError(
            f"{name_keepers([plan])} needs a cache that keeps the last raw keys and values, and this "
            f"{type(past_key_values).__name__} does not; make one with DynamicCache(config=model.config). PEFT's "
            "prefix tuning has no raw keys and values for its tokens: use prompt tuning or LoRA with such a model."
        )
    return layer


def find_reach(
    position_ids: Tensor,
    attention_mask: Tensor | None,
    past: int | Tensor = 0,
    limit: int = 1,
    document_starts: Tensor | None = None,
) -> Tensor | None:
    """Count the tokens of the same document that precede each without a gap, [B, T], from position_ids [B or 1, T].

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
        return _limit_reach(torch.minimum(count_reach(position_ids, attention_mask, past), since), limit)
    # Only with a cache: without one, the first tokens of a row have fewer than `limit` tokens before them.
    looks = isinstance(past, int) and past > 0 and not must_wait(position_ids) and not torch.compiler.is_compiling()
    has_past = looks and bool((position_ids >= limit).all())
    if has_past and (attention_mask is None or is_all_real(attention_mask, past, position_ids.shape[1], limit)):
        return None
    return _limit_reach(count_reach(position_ids, attention_mask, past), limit)


def is_all_real(attention_mask: Tensor, past: int | Tensor, length: int, limit: int) -> bool:
    """Whether none of the `length` new tokens and the `limit` before them is padding; False if that is not known."""
    if isinstance(past, Tensor) or must_wait(attention_mask) or torch.compiler.is_compiling():
        return False
    return bool(attention_mask[:, max(0, past - limit) : past + length].all())


def _limit_reach(reach: Tensor, limit: int) -> Tensor:
    return reach.clamp(max=limit).to(torch.int8 if limit <= torch.iinfo(torch.int8).max else reach.dtype)


def count_reach(position_ids: Tensor, attention_mask: Tensor | None, past: int | Tensor) -> Tensor:
    """`find_reach` without a limit."""
    if attention_mask is None:
        return position_ids
    slot = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    since_gap = slot - last_marked(~attention_mask.bool()) - 1
    return torch.minimum(position_ids, select_columns(since_gap, past, position_ids.shape[1]))


def find_gaps(attention_mask: Tensor, past: int | Tensor, length: int, limit: int) -> tuple[bool, bool]:
    """Whether padding lies between tokens that the `length` new ones look back over, and whether any is new.

    attention_mask: [B, S] of zeros and ones over the whole history. Padding on the left of a row does not count. Code
    that cannot branch on it asserts that there is none. On a GPU, a step that may be replayed does not look: what
    prepares it has to.
    """
    if torch.compiler.is_exporting() or (is_replayed(past, length) and must_wait(attention_mask)):
        return False, False
    if is_all_real(attention_mask, past, length, limit):  # as in most steps of decoding
        return False, False
    real = attention_mask.bool()
    padding = ~real & (real.cumsum(-1) > 0)
    slot = torch.arange(real.shape[1], device=real.device)
    ends = padding[:, :-1] & real[:, 1:] & (slot[:-1] >= past - limit) & (slot[1:] < past + length)
    new = padding & (slot >= past) & (slot < past + length)
    if ends.is_meta:
        return False, False
    is_traced = torch.compiler.is_compiling() or type(ends) is not Tensor
    if is_traced or (must_wait(ends) and torch.is_grad_enabled()):
        torch._assert_async(~ends.any(), GAP)
        return False, False
    return bool(ends.any()), bool(new.any())


def last_marked(marks: Tensor) -> Tensor:
    """Find the last marked slot at or before each slot, -1 before the first: booleans [B, S] -> [B, S]."""
    slot = torch.arange(marks.shape[1], device=marks.device).expand_as(marks)
    if not torch.compiler.is_exporting():
        return torch.where(marks, slot, -1).cummax(-1).values
    # ONNX has no running maximum: each slot looks up the mark of its number.
    count = marks.long().cumsum(-1)
    by_count = slot.new_full((marks.shape[0], marks.shape[1] + 1), -1)
    by_count = by_count.scatter(1, torch.where(marks, count, 0), torch.where(marks, slot, -1))
    return by_count.gather(1, count)
