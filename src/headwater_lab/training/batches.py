"""The batches of a run, prepared in another thread while the step before them runs, unless their data wants none."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headwater.nn.documents import make_cu_seq_lens
from headwater_lab.data.base import Batch, Data, Share, labels_of, main_input
from headwater_lab.recipe.schema import Recipe

T = TypeVar("T")
# Threads that hash a batch: pixels at 224 x 224 take a core about a millisecond an image.
HASHING = 4


class Counted(NamedTuple):
    """A batch of this process, its number of labels, and its part of the hash of all rows in order."""

    batch: Batch
    labels: int
    fingerprint: int


def batches(
    recipe: Recipe, data: Data, row: int, share: Share, pinned: bool, by_document: bool
) -> Generator[Counted, None, None]:
    """This process's batches from row `row` of the seed's order on.

    pinned: in page-locked memory, from which copies to a GPU are asynchronous.
    by_document: packed rows come `with_documents`.
    """
    made = data.batches(recipe.seed, recipe.training.batch_size, row, share)
    found = counted(made, recipe.training.batch_size, row, share, pinned, by_document)
    return ahead(found) if getattr(data, "reads_ahead", True) else found


def counted(
    made: Iterator[Batch], size: int, row: int, share: Share, pinned: bool, by_document: bool
) -> Generator[Counted, None, None]:
    """size: rows of a batch over all processes."""
    with ThreadPoolExecutor(HASHING, "hash") as pool:
        for batch in made:
            if by_document:
                batch = with_documents(batch)
            parts = main_input(batch).chunk(HASHING)
            firsts = accumulate(map(len, parts), initial=row + share.rank * size // share.world)
            prints = sum(pool.map(fingerprint, firsts, parts))
            if pinned:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield Counted(batch, labels_of(batch), prints)
            row += size


def with_documents(batch: Batch) -> Batch:
    """With the borders of its documents, for attention that takes them, where position_ids restart inside rows.

    Found here, where the numbers are: looking for them on a GPU would wait for it.
    """
    positions = batch.get("position_ids")
    borders = None if positions is None else make_cu_seq_lens(positions.expand(len(batch["input_ids"]), -1))
    return batch if borders is None else batch | {"cu_seq_lens_q": borders}


def filled(batch: Batch, rows: int) -> Batch:
    """A batch that repeats its last row to have this many."""
    missing = rows - len(main_input(batch))
    if not missing:
        return batch
    return {name: torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) for name, x in batch.items()}


def fingerprint(first: int, rows: Tensor) -> int:
    """The sum of a 40-bit hash for each row's tokens or pixels and its place in the order, counted from `first`: sums
    over a step never overflow."""
    total = 0
    for place, row in enumerate(rows.contiguous().numpy(), first):
        content = hashlib.blake2b(place.to_bytes(8, "little"), digest_size=5)
        content.update(row)  # outside Python's lock
        total += int.from_bytes(content.digest(), "little")
    return total


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items, of which another thread prepares up to `depth` in advance."""
    with ThreadPoolExecutor(1, "data") as worker:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            yield waiting.popleft().result()
            waiting.append(worker.submit(next, items))
