"""Synthetic tasks. Induction: arXiv 2411.19574, section 2 and figure 1 (KV shifting)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater.data.base import ALONE, Batch, Evaluation, Settings, Share
from headwater.seeding import generator


class InductionSettings(Settings):
    """`data:` of a recipe, with `kind: induction`."""

    kind: Literal["induction"] = "induction"
    vocabulary: int = Field(default=64, ge=2)
    """Number of different tokens."""
    length: int = Field(default=32, ge=3)
    """Tokens in a sequence."""
    held_out: int = Field(default=1024, ge=1)
    """Sequences to measure on."""

    def build(self) -> InductionData:
        return InductionData(self)


class InductionData:
    """Sequences in which x_i = x_j implies x_{i+1} = x_{j+1}: a token seen before tells the next one.

    Training and accuracy look only at the predictable positions, where the current token stood earlier in the row.
    """

    measure = "accuracy"
    lower_is_better = False
    tokenizer = None

    def __init__(self, settings: InductionSettings) -> None:
        self.settings = settings
        self.vocab_size = settings.vocabulary
        self.context = settings.length
        self.description: dict[str, Any] = settings.model_dump()

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        own = slice(share.rank * batch_size // share.world, (share.rank + 1) * batch_size // share.world)
        while True:
            whole = self.sample(generator("induction", seed, start), batch_size)
            yield {name: tensor[own] for name, tensor in whole.items()}
            start += batch_size

    def rows(self, seed: int, start: int, count: int) -> list[str]:
        return [str(row) for row in range(start, start + count)]

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        """`count` sequences; shift_labels is -100 where the next token cannot be told."""
        vocabulary, length = self.settings.vocabulary, self.settings.length
        fresh = torch.randint(vocabulary, (count, length + 1), generator=draw)
        follower = torch.full((count, vocabulary), -1)
        tokens = [fresh[:, 0]]
        known = []
        for t in range(length):
            current = tokens[-1][:, None]
            successor = follower.gather(1, current)[:, 0]
            known.append(successor >= 0)
            following = torch.where(known[-1], successor, fresh[:, t + 1])
            follower.scatter_(1, current, following[:, None])
            tokens.append(following)
        row = torch.stack(tokens, dim=1)
        labels = torch.where(torch.stack(known, dim=1), row[:, 1:], -100)
        return {"input_ids": row[:, :-1].contiguous(), "shift_labels": labels}

    def held_out(self) -> Batch:
        """The sequences every model is measured on, whatever its seed."""
        return self.sample(generator("induction", "held out"), self.settings.held_out)

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        # So few that every process measures them all.
        batch = self.held_out()
        labels = batch["shift_labels"]
        scores = logits(batch).float().cpu()
        counted = labels != -100
        accuracy = (scores.argmax(-1) == labels)[counted].double().mean()
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return Evaluation({"accuracy": float(accuracy), "loss": float(loss)})
