"""Rows of tokens: streams of documents cut into rows, in an order set by the seed, for any number of processes.

A row is `context` tokens of a stream, with one more for the last label. In packed rows (the default) the position ids
restart where a document starts, so that neither attention nor a shift crosses from one document to the next. In
contiguous rows, as nanoGPT's, attention crosses them. The rows mark where documents start, so that a shift does not.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from headwater.util.seeding import generator
from headwater_lab.data.base import ALONE, Batch, Share, shuffle_rows
from headwater_lab.data.chat import Encoded
from headwater_lab.data.shards import Shards

RowLayout = Literal["packed", "contiguous"]
# Number of mixture draws to make at a time.
BLOCK = 2**16


class TokenArray:
    """A stream of documents in memory, one after another, with the methods of `Shards`."""

    def __init__(self, documents: Sequence[Encoded]) -> None:
        self.stream = np.concatenate([document.ids for document in documents])
        self.borders = np.cumsum([0, *(len(document.ids) for document in documents[:-1])])
        self.tokens = len(self.stream)
        counts = [document.counts for document in documents if document.counts is not None]
        self.counted = np.concatenate(counts) if counts else None

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.stream[start:stop]

    def starts(self, start: int, stop: int) -> np.ndarray:
        low, high = np.searchsorted(self.borders, (start, stop))
        return self.borders[low:high]

    def counts(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.counted is None else self.counted[start:stop]


Tokens = TokenArray | Shards


class Rows:
    """The training rows of one stream, or of several mixed by weight.

    streams: each holds one row or more. weights: how often a row comes from each, independently drawn for every row;
    a stream that is used up starts again in a new order.
    """

    def __init__(self, streams: Sequence[Tokens], weights: Sequence[float], context: int, layout: RowLayout) -> None:
        self.streams, self.context, self.layout = streams, context, layout
        self.counts = [(stream.tokens - 1) // context for stream in streams]
        self.borders = np.cumsum(weights) / np.sum(weights)

    def order_rows(self, seed: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield (stream, row) without end, from the `start`-th on: a function of the seed."""
        if len(self.streams) == 1:
            yield from ((0, row) for row in shuffle_rows(self.counts[0], seed, start))
            return
        drawn_rows = np.zeros(len(self.streams), dtype=np.int64)
        for block in range(start // BLOCK):
            drawn_rows += np.bincount(self.draw_streams(seed, block), minlength=len(drawn_rows))
        block_draws = self.draw_streams(seed, start // BLOCK)
        drawn_rows += np.bincount(block_draws[: start % BLOCK], minlength=len(drawn_rows))
        orders = [
            shuffle_rows(count, seed, int(done), "stream", index)
            for index, (count, done) in enumerate(zip(self.counts, drawn_rows, strict=True))
        ]
        later_draws = (self.draw_streams(seed, block) for block in itertools.count(start // BLOCK + 1))
        for drawn in itertools.chain([block_draws[start % BLOCK :]], later_draws):
            for stream in drawn.tolist():
                yield stream, next(orders[stream])

    def draw_streams(self, seed: int, block: int) -> np.ndarray:
        """Draw which stream each of the rows block·BLOCK, … comes from."""
        chance = torch.rand(BLOCK, generator=generator("mixture", seed, block), dtype=torch.float64).numpy()
        return np.searchsorted(self.borders[:-1], chance, side="right")

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        """Yield batches without end, of which each process gets its share."""
        order = self.order_rows(seed, start)
        while True:
            yield self.make_batch(list(itertools.islice(order, batch_size))[share.part(batch_size)])

    @cached_property
    def has_borders(self) -> bool:
        """Whether some row may have a document that begins inside it."""
        return any(stream.starts(1, stream.tokens).size > 0 for stream in self.streams)

    def fill_borders(self, batch: Batch) -> Batch:
        """Give a batch without borders the tensor of those with borders, so that compiled code sees all alike."""
        if not self.has_borders or batch.keys() & {"position_ids", "document_starts"}:
            return batch
        rows = batch["input_ids"]
        if self.layout == "contiguous":
            return batch | {"document_starts": torch.zeros_like(rows, dtype=torch.bool)}
        return batch | {"position_ids": torch.arange(rows.shape[1]).expand_as(rows).contiguous()}

    def make_batch(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """Make a batch of the rows with these (stream, row) numbers."""
        context = self.context
        tokens = np.empty((len(rows), context + 1), dtype=np.int64)
        ignored = np.zeros((len(rows), context), dtype=bool)
        starts = np.zeros((len(rows), context), dtype=bool)
        for index, (number, row) in enumerate(rows):
            stream, begin = self.streams[number], row * context
            tokens[index] = stream.read(begin, begin + context + 1)
            starts[index, stream.starts(begin, begin + context) - begin] = True
            if (counts := stream.counts(begin + 1, begin + context + 1)) is not None:
                ignored[index] = ~counts
        ids, labels = torch.from_numpy(tokens), torch.from_numpy(np.where(ignored, -100, tokens[:, 1:]))
        batch = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": labels}
        if starts[:, 1:].any():
            begins = torch.from_numpy(starts)
            if self.layout == "contiguous":
                return batch | {"document_starts": begins}
            slot = torch.arange(context)
            batch["position_ids"] = slot - torch.where(begins, slot, 0).cummax(1).values
        return batch
