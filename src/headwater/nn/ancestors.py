"""Predecessors of tokens where rows branch under a kernel's own mask: candidates, or after a shared prefix."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from headwater.mechanisms.contract import Ancestors
from headwater.nn.checks import refuse_where

# A slot counts as hidden if an additive mask is below this: softmax then gives it weight zero in every precision.
HIDDEN = -1e3


def find_ancestors(
    position_ids: Tensor,
    attention_mask: Any,
    tail_positions: Tensor | None = None,
    first_column: int | Tensor = 0,
    tail_lengths: Sequence[int] = (1,),
    document_starts: Tensor | None = None,
) -> Ancestors:
    """The predecessors of each token under a kernel's own mask.

    The previous token of one at position p is the one that it sees at position p - 1, and so on from there. Raises
    `HeadwaterError` where p > 0 and it sees no such token, or several, or one whose raw keys and values the cache has
    dropped (in compiled code an assertion fails). A token that does not see itself is padding and has no predecessor.

    position_ids: [B or 1, T] of the new tokens.
    attention_mask: [B or 1, 1 or H, T, S], boolean or additive, or flex attention's block mask.
    tail_positions: [B, n], 1 + the positions of the tokens in the cache's tail; 0 where it has none.
    first_column: the column of the first new token.
    tail_lengths: for s = 1, 2, …: the length of the shortest tail that holds the token s back.
    document_starts: [B, T], True where a document starts although positions continue.
    """
    sees = read_kernel_mask(attention_mask, position_ids)
    length, slots = sees.shape[1:]
    device = sees.device
    position = position_ids.to(device)
    # Candidates for predecessors: the tokens in the tail, then the new ones.
    in_tail = 0 if tail_positions is None else tail_positions.shape[1]
    column = torch.arange(-in_tail, length, device=device) + first_column
    sees_candidate = sees[:, :, column.clamp(0, slots - 1)] & (column >= 0)
    candidate = position
    if tail_positions is not None:
        nowhere = -(2**40)  # a position that no token has
        earlier = torch.where(tail_positions > 0, tail_positions - 1, nowhere)
        candidate = torch.cat((earlier, position.expand(tail_positions.shape[0], -1)), 1)
    start = position == 0 if document_starts is None else (position == 0) | document_starts.to(device)
    itself = torch.arange(length, device=device)
    padding = ~sees_candidate[:, itself, in_tail + itself]

    def find_at(back: int, among: Tensor) -> tuple[Tensor, Tensor]:
        """The index of a candidate `back` positions before each token, and how many there are."""
        match = among & (candidate[:, None, :] == (position - back)[:, :, None])
        return match.int().argmax(-1), match.sum(-1)

    nothing = in_tail + length
    parent, count = find_at(1, sees_candidate)
    # If a token sees more tokens than there are earlier positions, two share a position, and it is unknown which.
    visible = (sees & (torch.arange(slots, device=device) < first_column - in_tail)).sum(-1)
    is_before = (candidate[:, None, :] < position[:, :, None]) & (candidate[:, None, :] >= 0)
    visible = visible + (sees_candidate & is_before).sum(-1)
    crowded = (visible > position) & (first_column > in_tail)
    wrong = ~start & ~(padding & (count == 0)) & ((count != 1) | crowded)
    parent = torch.where(start | (count == 0), nothing, parent)
    predecessors = [parent]
    from_tail = parent < in_tail
    dropped = torch.zeros_like(wrong)
    for back, shortest in enumerate(tail_lengths, 1):
        if back > 1:
            index, count = find_at(back, sees_candidate & (torch.arange(nothing, device=device) < in_tail))
            exists = position >= back
            wrong = wrong | from_tail & exists & (count != 1)
            index = torch.where(from_tail & exists, index, nothing)
            previous = predecessors[-1]
            onward = previous.gather(1, (parent - in_tail).clamp(0, length - 1).expand_as(previous))
            predecessors.append(torch.where(from_tail | (parent == nothing), index, onward))
        dropped = dropped | (predecessors[-1] < min(in_tail, len(tail_lengths) - shortest))
    refuse_where(
        wrong | dropped,
        "Under this attention mask it is unclear which token precedes another, which a mechanism needs to know: a "
        "token at position p must see exactly one token at position p - 1, either new or among the last ones that the "
        "cache keeps raw. Pass position_ids that count along each branch; to continue from a token that is not the "
        "last, call activate_past_recording() on the cache first, which a static cache does not have.",
    )
    return Ancestors(torch.stack(predecessors) - in_tail)


def read_kernel_mask(attention_mask: Any, position_ids: Tensor) -> Tensor:
    """A kernel's own mask as a boolean [B or 1, T, S]: which token sees which."""
    if isinstance(attention_mask, Tensor):
        sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask > HIDDEN
    else:
        rows, heads, length, slots = attention_mask.shape
        sees = create_mask(attention_mask.mask_mod, rows, heads, length, slots, device=position_ids.device)
    if sees.shape[1] > 1:
        refuse_where(
            (sees != sees[:, :1]).any(),
            "This attention mask differs between heads, but a mechanism that looks back needs one predecessor for each "
            "token; pass a mask that all heads share.",
        )
    return sees[:, 0]
