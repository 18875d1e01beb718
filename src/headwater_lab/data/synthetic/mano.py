"""Mano, modular arithmetic by heart: arXiv 2512.17351 (Allen-Zhu), manipulation of knowledge.

A row is the number of operations, an expression in prefix notation, and its value: <2> + 4 × 3 22 = 1. The model must
know the tables of the operations, and combine them without intermediate steps. Differently from
facebookresearch/PhysicsLM4 at 7580696: a sign is one token.
"""

import random
from typing import Literal

import torch
from pydantic import Field

from headwater.util.seeding import generator
from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.arithmetic import OPERATIONS
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_chance, pack_rows


class ManoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: mano`."""

    kind: Literal["mano"] = "mano"
    operations: int = Field(default=3, ge=2, le=2**10)
    """The operations of a held-out expression; one of training has 1 to this many, equally likely."""
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
    """One expression per row, padded, with one label: its value.

    Operands are uniform, and the operations are split at random between the two operands of a sign.
    """

    def __init__(self, settings: ManoSettings) -> None:
        super().__init__(settings)
        numbers = [str(number) for number in range(settings.modulus)]
        lengths = [f"<{length}>" for length in range(1, settings.operations + 1)]
        self.words = ["<pad>", *numbers, *OPERATIONS, "=", *lengths]
        self.ids = {word: token for token, word in enumerate(self.words)}

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance = draw_chance(draw)
        return self.draw_rows(chance, [chance.randint(1, self.settings.operations) for _ in range(count)])

    def held_out(self) -> Batch:
        chance = draw_chance(generator(self.settings.kind, "held out"))
        return self.draw_rows(chance, [self.settings.operations] * self.settings.held_out)

    def draw_rows(self, chance: random.Random, lengths: list[int]) -> Batch:
        """Draw a row for each number of operations."""
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

    def write_token(self, token: int) -> str:
        return self.words[token]


def solve_prefix(words: list[str], modulus: int) -> int:
    """Compute the value of an expression in prefix notation, from its end with a stack."""
    stack: list[int] = []
    for word in reversed(words):
        stack.append(OPERATIONS[word](stack.pop(), stack.pop()) % modulus if word in OPERATIONS else int(word))
    return stack.pop()
