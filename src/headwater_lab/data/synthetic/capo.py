"""Capo, knowledge capacity: arXiv 2512.17351 and 2404.05405 (Allen-Zhu and Li), in bits of knowledge a parameter.

A row is the biography of a synthetic person, with its facts in any order: the name, and after each attribute its value.
Differently: a sentence is an attribute and a value, one token each, and names count as given, not as knowledge.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater.util.seeding import generator, number
from headwater_lab.data.base import ALONE, Batch, Evaluation, Share
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_distinct

# The sizes of bioS in 2404.05405: first, middle and last names, and the values of each attribute.
NAMES = (400, 400, 1000)
VALUES = {
    "birth month": 12,
    "birth day": 28,
    "birth year": 200,
    "birth city": 200,
    "university": 300,
    "major": 100,
    "employer": 263,
}
BITS = sum(map(math.log2, VALUES.values()))
ATTRIBUTE = sum(NAMES)
VALUE = ATTRIBUTE + len(VALUES)


class CapoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: capo`."""

    kind: Literal["capo"] = "capo"
    people: int = Field(default=1000, ge=1, le=2**22)
    """People to know, 46.6 bits each. The paper shows each biography 100 times: steps · batch_size = 100 · people."""
    people_seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the people, who are the same for all seeds of a run."""

    @property
    def vocab_size(self) -> int:
        """The parts of names, the attributes, and the values of each."""
        return VALUE + sum(VALUES.values())

    @property
    def context(self) -> int:
        return len(NAMES) + 2 * len(VALUES)


@CapoSettings.register
class CapoData(SyntheticData[CapoSettings]):
    """Biographies of `people` persons, drawn once, each row one of them; labels are the values.

    Held-out rows are the same people, with their facts in another order: this measures memory. `bits` estimates the
    knowledge of all people: people · max(0, Σ log2(values of an attribute) - Σ loss in bits). A run also records
    `bits_per_parameter`; embeddings count as parameters.
    """

    metric = "bits"

    def __init__(self, settings: CapoSettings) -> None:
        super().__init__(settings)
        chance = random.Random(number("capo", "names", settings.people_seed))
        codes = torch.tensor(chance.sample(range(math.prod(NAMES)), settings.people))
        draw = generator("capo", "values", settings.people_seed)
        names = torch.unravel_index(codes, NAMES[::-1])[::-1]
        values = [torch.randint(size, (settings.people,), generator=draw) for size in VALUES.values()]
        self.names = torch.stack(names, dim=1) + first_tokens(NAMES)
        self.facts = torch.stack(values, dim=1) + first_tokens(VALUES.values()) + VALUE

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        people = torch.randint(self.settings.people, (count,), generator=draw)
        order = draw_distinct(draw, count, len(VALUES), len(VALUES))
        values = self.facts[people].gather(1, order)
        facts = torch.stack([ATTRIBUTE + order, values], dim=2).flatten(1)
        row = torch.cat([self.names[people], facts], dim=1)
        labels = torch.full_like(row, -100)
        labels[:, len(NAMES) :: 2] = values
        return {"input_ids": row, "shift_labels": labels}

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure the bits of knowledge, and the accuracy and loss of the values."""
        metrics = super().evaluate(logits, share).metrics
        bits = self.settings.people * max(0.0, BITS - len(VALUES) * metrics["loss"] / math.log(2))
        return Evaluation({"bits": bits, **metrics}, amounts={"bits": bits})

    def split_positions(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch["input_ids"] == ATTRIBUTE + index for index, name in enumerate(VALUES)}

    def write_token(self, token: int) -> str:
        if ATTRIBUTE <= token < VALUE:
            return list(VALUES)[token - ATTRIBUTE]
        return f"name{token}" if token < ATTRIBUTE else f"v{token - VALUE}"


def first_tokens(sizes: Iterable[int]) -> Tensor:
    """Number consecutive ranges of these sizes from 0, and return where each begins."""
    return torch.tensor([0, *itertools.accumulate(sizes)][:-1])
