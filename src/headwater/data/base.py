"""What training needs from data, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headwater.seeding import generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# input_ids [B, T], shift_labels [B, T] (the label of each position; -100 counts nothing), and where a document starts
# inside a row, position_ids [B, T] that restart there or document_starts [B, T].
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Share:
    """Which of `world` processes this is, and how all of them add up a tensor."""

    rank: int = 0
    world: int = 1
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor


ALONE = Share()


@dataclass(frozen=True)
class Evaluation:
    """What one look at held-out data gives: named measures, and for text the loss of each document."""

    measures: dict[str, float]
    documents: list[dict[str, Any]] = field(default_factory=list)


class Data(Protocol):
    """A source of training rows and of a held-out measure."""

    vocab_size: int
    context: int
    # None where rows are not text.
    tokenizer: PreTrainedTokenizerBase | None
    # The name of the measure that decides, and whether less of it is better.
    measure: str
    lower_is_better: bool
    # Facts for the record: source, hash, sizes.
    description: dict[str, Any]

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        """Batches without end, from row `start` of the order that `seed` fixes.

        batch_size: rows of a batch in all processes together; this one gets its share of them, in the same order.
        """
        ...

    def rows(self, seed: int, start: int, count: int) -> list[str]:
        """The numbers of the `count` rows from `start` on, with the stream's name where there are several."""
        ...

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure a model, given as a function from a batch to logits [B, T, V], on the held-out data.

        All processes call `logits` equally often, and all get the whole result.
        """
        ...


def shuffled(rows: int, seed: int, start: int, *key: str | int) -> Iterator[int]:
    """Row numbers without end: every epoch a new permutation, a function of (seed, epoch, key) alone."""
    epoch, position = divmod(start, rows)
    while True:
        order = torch.randperm(rows, generator=generator("order", seed, epoch, *key))[position:]
        for part in order.split(2**16):  # a list of all of them would take four times the memory
            yield from part.tolist()
        epoch, position = epoch + 1, 0
