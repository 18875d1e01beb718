"""The batches of a run, prepared in another thread while the step before them runs."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headwater.data.base import Batch, Data, Share, labels_of, main_input
from headwater.nn.masking import cu_seq_lens
from headwater.recipe import Recipe

T = TypeVar("T")


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
    return ahead(counted(recipe, data, row, share, pinned, by_document))


def counted(recipe: Recipe, data: Data, row: int, share: Share, pinned: bool, by_document: bool) -> Iterator[Counted]:
    size = recipe.training.batch_size
    for batch in data.batches(recipe.seed, size, row, share):
        if by_document:
            batch = with_documents(batch)
        first = row + share.rank * size // share.world
        prints = sum(fingerprint(first + i, tokens) for i, tokens in enumerate(main_input(batch)))
        if pinned:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        yield Counted(batch, labels_of(batch), prints)
        row += size


def with_documents(batch: Batch) -> Batch:
    """With the borders of its documents, for attention that takes them, where position_ids restart inside rows.

    Found here, where the numbers are: looking for them on a GPU would wait for it.
    """
    positions = batch.get("position_ids")
    borders = None if positions is None else cu_seq_lens(positions.expand(len(batch["input_ids"]), -1))
    return batch if borders is None else batch | {"cu_seq_lens_q": borders}


def filled(batch: Batch, rows: int) -> Batch:
    """A batch that repeats its last row to have this many."""
    missing = rows - len(main_input(batch))
    if not missing:
        return batch
    return {name: torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) for name, x in batch.items()}


def fingerprint(place: int, tokens: Tensor) -> int:
    """A 40-bit hash of a row's tokens or pixels and its place in the order: sums of it over a step never overflow."""
    content = place.to_bytes(8, "little") + tokens.numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=5).digest(), "little")


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items, of which another thread prepares up to `depth` in advance."""
    with ThreadPoolExecutor(1, "data") as worker:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            yield waiting.popleft().result()
            waiting.append(worker.submit(next, items))
