"""The interface between training and all kinds of data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.plugins.registry import Registry
from headwater.util.seeding import generator
from headwater_lab.util.settings import Settings

# Text: input_ids [B, T], shift_labels [B, T] (labels already shifted; -100 is ignored), and if documents start inside
# a row, position_ids [B, T] that restart there or document_starts [B, T].
# Images: pixel_values [B, C, H, W] and labels, [B] or [B, classes].
Batch = dict[str, Tensor]
# Fields of a batch that are labels and not inputs.
LABELS = ("labels", "shift_labels")


def main_input(batch: Batch) -> Tensor:
    """The tokens or pixels of a batch, one row after another."""
    return batch["pixel_values"] if "pixel_values" in batch else batch["input_ids"]


def units(batch: Batch) -> int:
    """Count the tokens or images of a batch."""
    return len(batch["pixel_values"]) if "pixel_values" in batch else batch["input_ids"].numel()


def labels_of(batch: Batch) -> int:
    """Count the labels that the loss is a mean over."""
    return len(batch["labels"]) if "pixel_values" in batch else int((batch["shift_labels"] != -100).sum())


@dataclass(frozen=True)
class Share:
    """The rank of this process among `world`, and how all of them sum a tensor."""

    rank: int = 0
    world: int = 1
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def part(self, rows: int) -> slice:
        """Select this process's rows of a batch, in order."""
        return slice(self.rank * rows // self.world, (self.rank + 1) * rows // self.world)


ALONE = Share()


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation: named metrics, and for text the loss of each document.

    amounts: what a run also records per parameter of its model: of `bits`, the metric `bits_per_parameter`.
    """

    metrics: dict[str, float]
    documents: list[dict[str, Any]] = field(default_factory=list)
    amounts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DataShape:
    """The shape that a model must fit: the number of tokens or classes, the tokens of a row, and the tokenizer."""

    vocab_size: int
    context: int = 1
    tokenizer: PreTrainedTokenizerBase | None = None


class Data(Protocol):
    """A source of training rows and of a held-out metric."""

    # The fields of `DataShape`. The tokenizer is None if rows are not text.
    vocab_size: int
    context: int
    tokenizer: PreTrainedTokenizerBase | None
    # The deciding metric, and whether less of it is better.
    metric: str
    lower_is_better: bool
    # Facts for the record: source, hash, sizes.
    description: dict[str, Any]

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        """Yield batches without end, from row `start` of the order that `seed` determines.

        batch_size: rows of a batch over all processes; this one gets its share of them, in order.
        """
        ...

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure a model, given as a function from a batch to logits [B, T, V], on the held-out data.

        All processes call `logits` equally often, and all get the full result.
        """
        ...


class DataSettings(Settings):
    """`data:` of a recipe. Mark a subclass for a new kind of data with `register_kind`."""

    kind: str

    def check_extras(self) -> None:
        """Raise `MissingExtra` if a package is missing that only data of this kind need."""

    def build(self) -> Data:
        """Open the data. Raises `HeadwaterError` for what the user can correct."""
        raise NotImplementedError


K = TypeVar("K", bound=DataSettings)
# The registered values of `data.kind`.
DATA = Registry("kind of data", "headwater.data", {}, "Settings")


def register_kind(settings: type[K]) -> type[K]:
    """Make a class of settings a kind of data, under the default of its field `kind`."""
    DATA.built_in[settings.model_fields["kind"].default] = f"{settings.__module__}:{settings.__qualname__}"
    return settings


def shuffle_rows(rows: int, seed: int, start: int, *key: str | int) -> Iterator[int]:
    """Yield row numbers without end: every epoch is a new permutation, a function of (seed, epoch, key)."""
    epoch, position = divmod(start, rows)
    while True:
        order = torch.randperm(rows, generator=generator("order", seed, epoch, *key))[position:]
        for chunk in order.split(2**16):  # a list of all of them would take four times the memory
            yield from chunk.tolist()
        epoch, position = epoch + 1, 0
