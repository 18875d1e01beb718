"""The basis of synthetic tasks: the stream of rows, the held-out rows, the metric, and its value for a guess."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.base import ALONE, Batch, DataSettings, Evaluation, Share, register_kind

# Maximum number of logits to compute at a time for held-out rows.
LOGITS = 2**26
# Maximum tokens of held-out rows.
MOST = 2**27
# Rows to draw at a time, or fewer if they would take more than this many numbers.
BLOCK, DRAWN = 256, 2**22
# How often to redraw a row that equals a held-out one.
TRIES = 100
# Rows of varying length are padded to a multiple of this, to limit the number of shapes.
PADDING = 32


T = TypeVar("T", bound=Callable[[Any], "SyntheticData[Any]"])


class SyntheticSettings(DataSettings):
    """`data:` of a recipe for a synthetic task; each task has `vocab_size` and `length`, as a field or a property."""

    held_out: int = Field(default=1024, ge=1, le=2**20)
    """Sequences to evaluate on."""
    task: ClassVar[Callable[[Any], SyntheticData[Any]]]

    @classmethod
    def list_variants(cls) -> list[Self]:
        """List the task in each of its forms, with defaults."""
        return [cls.model_validate({})]

    @classmethod
    def register(cls, task: T) -> T:
        """Make these settings a kind of data, whose data are of the marked class."""
        register_kind(cls).task = task
        return task

    def build(self) -> SyntheticData[Any]:
        return type(self).task(self)

    @model_validator(mode="after")
    def _held_in_memory(self) -> Self:
        if self.held_out * self.context > MOST:
            raise ValueError(
                f"data.held_out {self.held_out:,} rows of {self.context:,} tokens are too many for memory; lower one"
            )
        return self

    @property
    def context(self) -> int:
        """Tokens in a row of the model's input."""
        return int(self.length)  # type: ignore[attr-defined]


S = TypeVar("S", bound=SyntheticSettings)


class SyntheticData(ABC, Generic[S]):
    """A task whose rows are drawn as needed; see `headwater_lab.data.base.Data`.

    A training row is a function of (seed, its number): rows are drawn in blocks of a fixed size, from which batches
    take rows. Training and accuracy use only positions whose label, or its distribution, is determined by the row up to
    there (and a fixed table): `shift_labels` is -100 elsewhere.
    """

    metric = "accuracy"
    lower_is_better = False
    tokenizer = None
    # Whether training rows must differ from held-out ones.
    keeps_apart = True

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self.vocab_size: int = settings.vocab_size  # type: ignore[attr-defined]
        self.context = settings.context
        self.description: dict[str, Any] = settings.model_dump()
        # Rows drawn at a time.
        self.block = max(1, min(BLOCK, DRAWN // (self.context + self.vocab_size)))

    @abstractmethod
    def sample(self, draw: torch.Generator, count: int) -> Batch:
        """Draw `count` rows: input_ids and shift_labels, both [count, T]."""

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        """Yield batches. Raises `HeadwaterError` if nearly all possible rows are held out, and as `held_out` does."""
        self.held_out()  # fail before training if nothing can be evaluated
        while True:
            numbers = range(start // self.block, -(-(start + batch_size) // self.block))
            drawn = [self.draw_block(seed, number) for number in numbers]
            rows = slice(start % self.block, start % self.block + batch_size)
            yield {name: torch.cat([block[name] for block in drawn])[rows][share.part(batch_size)] for name in drawn[0]}
            start += batch_size

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one block, in which the next batch begins
    def draw_block(self, seed: int, number: int) -> Batch:
        """Draw a block of rows; rows that equal a held-out one are drawn again."""
        kind = self.settings.kind
        batch = self.sample(generator(kind, seed, number), self.block)
        if not self.keeps_apart:
            return batch
        for attempt in range(TRIES):
            repeated = torch.isin(self.fingerprint_rows(batch), self.held_out_fingerprints)
            if not bool(repeated.any()):
                return batch
            for name, rows in self.sample(generator(kind, seed, number, attempt), int(repeated.sum())).items():
                batch[name][repeated] = rows
        raise HeadwaterError(
            f"data: nearly every possible row of kind {kind} is among the {self.settings.held_out} held out; lower "
            "data.held_out, or make the task larger."
        )

    def held_out(self) -> Batch:
        """Draw the rows that evaluate all models of any seed. Raises `HeadwaterError` if none has a label."""
        batch = self.sample(generator(self.settings.kind, "held out"), self.settings.held_out)
        if not bool((batch["shift_labels"] != -100).any()):
            raise HeadwaterError(
                "data: no held-out row has anything to predict; raise data.held_out or the length of a row."
            )
        return batch

    def fingerprint_rows(self, batch: Batch) -> Tensor:
        """Compute fingerprints, [B] int64: equal for equal exercises, otherwise different but for a chance of 2^-64."""
        ids = batch["input_ids"]
        weights = torch.randint(-(2**62), 2**62, (ids.shape[1],), generator=generator("prints"))
        return (ids * weights).sum(1)

    @functools.cached_property
    def held_out_fingerprints(self) -> Tensor:
        return self.fingerprint_rows(self.held_out())

    def split_positions(self, batch: Batch) -> dict[str, Tensor]:
        """Select positions [B, T] whose accuracy is measured separately: "k=3" becomes the metric "accuracy/k=3"."""
        return {}

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure accuracy and loss (nats per label) at the labeled positions of the held-out rows."""
        # There are few enough rows for every process to evaluate all of them.
        batch = self.held_out()
        labels = batch["shift_labels"]
        size = max(1, LOGITS // (labels.shape[1] * self.vocab_size))
        nats, right = 0.0, []
        for piece in range(0, len(labels), size):
            inputs = {name: tensor[piece : piece + size] for name, tensor in batch.items()}
            scores = logits(inputs).float().cpu()
            target = inputs["shift_labels"]
            right.append(scores.argmax(-1) == target)
            labels_counted = int((target != -100).sum())
            if labels_counted:
                nats += float(F.cross_entropy(scores.flatten(0, 1), target.flatten())) * labels_counted
        hits, counted_at = torch.cat(right), labels != -100
        metrics = {"accuracy": share_of(hits, counted_at), "loss": nats / int(counted_at.sum())}
        for name, where in self.split_positions(batch).items():
            if bool((where & counted_at).any()):
                metrics[f"accuracy/{name}"] = share_of(hits, where & counted_at)
        return Evaluation(metrics)

    def guess_logits(self, batch: Batch) -> Tensor:
        """Compute logits [B, T, V] of a predictor that knows only how often each token is a label."""
        return self.frequencies.log().expand(*batch["input_ids"].shape, -1)

    @functools.cached_property
    def frequencies(self) -> Tensor:
        """The number of times that each token is a label among 1024 training rows, counted from 1, [V]."""
        labels = self.sample(generator(self.settings.kind, "frequencies"), 1024)["shift_labels"]
        return 1.0 + torch.bincount(labels[labels >= 0], minlength=self.vocab_size)

    def write_token(self, token: int) -> str:
        """Write a token as text."""
        return str(token)

    def write_row(self, batch: Batch, row: int) -> str:
        """Write a row as text, without padding, with an arrow to the label where there is one."""
        pairs = zip(batch["input_ids"][row].tolist(), batch["shift_labels"][row].tolist(), strict=True)
        text = " ".join(self.write_token(x) + ("" if y < 0 else f"→{self.write_token(y)}") for x, y in pairs)
        return text.partition(" <pad>")[0]


class WrittenData(SyntheticData[S]):
    """A task whose accuracy judges the answers that the model writes greedily; the loss is that of drawn answers."""

    # The tokens that end a prompt and an answer.
    mark: int
    end: int

    @abstractmethod
    def is_right(self, number: int, answer: list[int]) -> bool:
        """Judge what the model wrote after the prompt of a held-out row. Its tokens may exceed the vocabulary."""

    @functools.cached_property
    def held_out_prompts(self) -> list[list[int]]:
        return [row[: row.index(self.mark) + 1] for row in self.held_out()["input_ids"].tolist()]

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        loss = super().evaluate(logits, share).metrics["loss"]
        numbers = range(share.rank, self.settings.held_out, share.world)
        prompts = [self.held_out_prompts[number] for number in numbers or [0]]
        rows = self.write_answers(logits, prompts, share)
        right = [
            self.is_right(number, row[len(prompt) :])
            for number, prompt, row in zip(numbers, prompts, rows, strict=False)
        ]
        count = share.total(torch.tensor([sum(right)], dtype=torch.float64))
        return Evaluation({"accuracy": float(count) / self.settings.held_out, "loss": loss})

    @torch.no_grad()
    def write_answers(
        self, logits: Callable[[Batch], Tensor], prompts: list[list[int]], share: Share
    ) -> list[list[int]]:
        """Let the model continue each of the prompts of a process, up to the end or the longest row.

        Models in several processes must run together: all continue until the last has ended.
        """
        rows = [list(prompt) for prompt in prompts]
        open_rows = list(range(len(rows)))
        while float(share.total(torch.tensor([float(len(open_rows))]))):
            turn = open_rows or [0]
            length = pad_length(max(len(rows[row]) for row in turn))
            ids = torch.tensor([rows[row] + [0] * (length - len(rows[row])) for row in turn])
            ends = torch.tensor([len(rows[row]) - 1 for row in turn])
            chosen: list[int] = []
            for part, last in zip(
                *(x.split(max(1, LOGITS // (length * self.vocab_size))) for x in (ids, ends)), strict=True
            ):
                scores = logits({"input_ids": part})
                chosen += scores[torch.arange(len(part)), last.to(scores.device)].argmax(-1).tolist()
            for row, token in zip(open_rows, chosen, strict=False):
                rows[row].append(token)
            open_rows = [row for row in open_rows if rows[row][-1] != self.end and len(rows[row]) < self.context]
        return rows


def pad_length(length: int) -> int:
    """Round a length up to a multiple of `PADDING`."""
    return -(-length // PADDING) * PADDING


def pack_rows(prompts: list[list[int]], answers: list[list[int]], length: int) -> Batch:
    """Write each prompt and its answer as a row of `length` tokens, padded with 0; the labels are the answers."""
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return {"input_ids": ids, "shift_labels": labels}


def draw_chance(draw: torch.Generator) -> random.Random:
    """Draw a generator of Python's own, for tasks that are not tensors."""
    return random.Random(int(torch.randint(2**62, (), generator=draw)))


def share_of(hits: Tensor, where: Tensor) -> float:
    return float(hits[where].double().mean())


def draw_distinct(draw: torch.Generator, rows: int, vocab_size: int, count: int) -> Tensor:
    """Draw [rows, count] tokens below `vocab_size`, different in each row, all choices and orders equally likely."""
    return torch.rand(rows, vocab_size, generator=draw).topk(count).indices
