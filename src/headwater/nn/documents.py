"""Position ids, and the documents of packed rows: a document starts wherever position ids restart at 0.

Some attention kernels take the borders of documents instead of a mask, as transformers' `cu_seq_lens_q`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.kernels.varlen import VARLEN
from headwater.nn.checks import require_all
from headwater.util.errors import HeadwaterError

# FlashAttention 3 of the hub, with a backward pass and as operations that compile; that of the name flash_attention_3,
# where no package is installed, has neither.
FLASH3 = "kernels-community/flash-attn3"
# `make_cu_seq_lens` leaves room for one document per this many tokens, and for at least this many documents.
TOKENS, DOCUMENTS = 256, 64


def is_flash(implementation: str | None) -> bool:
    """Whether this is the name of FlashAttention in some version, from a package or from the hub."""
    return implementation is not None and "flash" in implementation  # transformers' own rule


def takes_documents(implementation: str | None) -> bool:
    """Whether attention of this name takes `cu_seq_lens_q` instead of a mask."""
    return implementation == VARLEN or is_flash(implementation)


def make_cu_seq_lens(position_ids: Tensor) -> Tensor | None:
    """Make the starts of documents among all B·T tokens of packed rows, row after row, and the end: int32 [n + 1].

    The end is repeated up to a length that depends on B and T alone (unless documents are shorter than `TOKENS` on
    average; then it doubles), so that compiled code sees one shape.

    position_ids: [B, T] on the CPU; on a GPU the host waits. None if some document is not numbered 0, 1, 2, …
    """
    rows, length = position_ids.shape
    slot = torch.arange(length, device=position_ids.device)
    starts = (position_ids == 0) | (slot == 0)
    since = slot - torch.where(starts, slot, 0).cummax(1).values
    # A row may begin inside a document, and no token sees further back than the row's first one.
    if not torch.equal(torch.minimum(position_ids, slot), since):
        return None
    begins = starts.flatten().nonzero().flatten()
    room = rows + max(DOCUMENTS, rows * length // TOKENS)
    while room < len(begins):
        room *= 2
    cu_seq_lens = torch.full((room + 1,), rows * length, dtype=torch.int32, device=position_ids.device)
    cu_seq_lens[: len(begins)] = begins
    return cu_seq_lens


def restarted_positions(cu_seq_lens: Tensor, rows: int, length: int) -> Tensor:
    """Compute position ids [B, T] that restart with each document."""
    token = torch.arange(rows * length, dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
    begin = cu_seq_lens[torch.searchsorted(cu_seq_lens, token, right=True) - 1]
    return (token - begin).long().view(rows, length)


def check_documents(cu_seq_lens: Tensor, position_ids: Tensor, rows: int, length: int) -> None:
    """Raise `HeadwaterError` (see `require_all`) if documents do not begin where positions restart."""
    if torch.compiler.is_compiling() or position_ids.is_meta:
        return
    slot = torch.arange(length, device=position_ids.device)
    require_all(
        torch.minimum(position_ids, slot) == restarted_positions(cu_seq_lens, rows, length),
        "cu_seq_lens_q and position_ids disagree about where documents begin; make cu_seq_lens_q with "
        "headwater.nn.documents.make_cu_seq_lens(position_ids), or leave one of them out.",
    )


def select_columns(x: Tensor, past: int | Tensor, length: int) -> Tensor:
    """Select the columns [B, T] of the `length` new tokens in x [B, S], which covers the whole history.

    past: the number of cached tokens. A static cache has it as a tensor. x may be wider, such as a mask for a whole
    static cache. Raises `HeadwaterError` if it is narrower.
    """
    if isinstance(past, Tensor):
        return x.index_select(1, torch.arange(length, device=x.device) + past.to(x.device))
    if x.shape[1] < past + length:
        raise HeadwaterError(
            f"The attention mask has {x.shape[1]} columns, but there are {past} cached tokens and {length} new ones; "
            "pass a mask of all of them."
        )
    return x[:, past : past + length]


class Positions(NamedTuple):
    """Position ids [B or 1, T]; are_slots: they depend only on the number of cached tokens."""

    ids: Tensor
    are_slots: bool


def count_positions(attention_mask: Tensor | None, past: int | Tensor, length: int, device: torch.device) -> Tensor:
    """Count the position ids [B or 1, T] of the `length` new tokens: the number of real tokens before each.

    attention_mask: [B, S] of zeros and ones over the whole history; None: all tokens are real.
    """
    if attention_mask is not None:
        return select_columns((attention_mask.ne(0).cumsum(-1) - 1).clamp(min=0), past, length).to(device)
    return (torch.arange(length, device=device) + past).unsqueeze(0)
