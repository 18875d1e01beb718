"""Mano, modular arithmetic by heart: arXiv 2512.17351 (Allen-Zhu), manipulation of knowledge.

A row is the number of operations, an expression in prefix notation, and its value: <2> + 4 × 3 22 = 1. The model must
know the tables of the operations, and combine them without intermediate steps.
"""

import functools
import random
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.arithmetic import OPERATIONS
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_chance, pack_rows


class ManoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: mano`."""

    kind: Literal["mano"] = "mano"
    operations: int = Field(default=3, ge=1, le=2**10)
    """The most operations of an expression; each number from 1 on is equally likely."""
    modulus: int = Field(default=23, ge=2, le=2**10)
    """Numbers are from 0 to modulus - 1. Knowledge is a table of modulus² entries for each of + - ×."""

    @property
    def vocab_size(self) -> int:
        """Padding, the numbers, the signs, "=", and a token for each number of operations."""
        return 1 + self.modulus + len(OPERATIONS) + 1 + self.operations

    @property
    def context(self) -> int:
        return 2 * self.operations + 4


@ManoSettings.register
class ManoData(SyntheticData[ManoSettings]):
    """One expression per row, padded, with one label: its value. Accuracy is also measured for each length.

    Operands are uniform, and the operations are split at random between the two operands of a sign. Expressions of one
    operation are the knowledge itself: training shows all of them, including those held out.
    """

    def __init__(self, settings: ManoSettings) -> None:
        super().__init__(settings)
        numbers = [str(number) for number in range(settings.modulus)]
        lengths = [f"<{length}>" for length in range(1, settings.operations + 1)]
        self.words = ["<pad>", *numbers, *OPERATIONS, "=", *lengths]
        self.ids = {word: token for token, word in enumerate(self.words)}

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance = draw_chance(draw)
        lengths = [chance.randint(1, self.settings.operations) for _ in range(count)]
        expressions = [self.draw_expression(chance, length) for length in lengths]
        prompts = [
            [self.ids[word] for word in (f"<{length}>", *expression, "=")]
            for length, expression in zip(lengths, expressions, strict=True)
        ]
        answers = [[self.ids[str(solve_prefix(words, self.settings.modulus))]] for words in expressions]
        return pack_rows(prompts, answers, self.context)

    def draw_expression(self, chance: random.Random, operations: int) -> list[str]:
        """Draw an expression with this many operations, as words."""
        if not operations:
            return [str(chance.randrange(self.settings.modulus))]
        left = chance.randrange(operations)
        operands = [self.draw_expression(chance, count) for count in (left, operations - 1 - left)]
        return [chance.choice(list(OPERATIONS)), *operands[0], *operands[1]]

    @functools.cached_property
    def held_out_fingerprints(self) -> Tensor:
        """The fingerprints of the rows that training must not show."""
        rows = self.held_out()
        return self.fingerprint_rows(rows)[rows["input_ids"][:, 0] != self.ids["<1>"]]

    def split_positions(self, batch: Batch) -> dict[str, Tensor]:
        rows = batch["input_ids"]
        lengths = range(1, self.settings.operations + 1)
        return {f"operations={n}": (rows[:, :1] == self.ids[f"<{n}>"]).expand_as(rows) for n in lengths}

    def write_token(self, token: int) -> str:
        return self.words[token]


def solve_prefix(words: list[str], modulus: int) -> int:
    """Compute the value of an expression in prefix notation, from its end with a stack."""
    stack: list[int] = []
    for word in reversed(words):
        stack.append(OPERATIONS[word](stack.pop(), stack.pop()) % modulus if word in OPERATIONS else int(word))
    return stack.pop()
