"""Lano, sentences of a context-free grammar: arXiv 2512.17351 (Allen-Zhu), structure of language.

The grammar is drawn once. On each of its levels a symbol becomes, with equal chance, one of a few sequences of two or
three symbols of the level below; those of the lowest level are the tokens of a sentence. Differently: the paper's
grammars are fixed, and it also judges sampled continuations with a parser.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from headwater.util.seeding import number
from headwater_lab.data.base import ALONE, Batch, Evaluation, Share
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_chance, pack_rows

PAD, END, BEGIN, TERMINAL = range(4)
# Maximum numbers of the charts of all symbols to compute at a time, and of those of one sentence.
CHART, LARGEST_CHART = 2**24, 2**27


class LanoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: lano`."""

    kind: Literal["lano"] = "lano"
    levels: int = Field(default=4, ge=1, le=6)
    """Levels of rules. A sentence has 2^levels to 3^levels tokens."""
    symbols: int = Field(default=3, ge=2, le=64)
    """Symbols on each level, and different tokens of a sentence."""
    rules: int = Field(default=2, ge=1, le=64)
    """Sequences that a symbol may become. No two symbols of a level share one."""
    grammar_seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the grammar, which is the same for all seeds of a run."""
    held_out: int = Field(default=256, ge=1, le=2**20)
    """Sentences to evaluate on. Their true probabilities take 6 seconds each at 6 levels, of 2^6 to 3^6 tokens."""

    @model_validator(mode="after")
    def _grammar_fits(self) -> Self:
        if (self.context * self.symbols) ** 2 > LARGEST_CHART:
            raise ValueError(
                f"data.levels={self.levels} with data.symbols={self.symbols} takes gigabytes for the true "
                "probabilities of a sentence; lower one."
            )
        if self.symbols * self.rules > (most := self.symbols**2 + self.symbols**3):
            raise ValueError(
                f"data.symbols={self.symbols} with data.rules={self.rules} is more than the {most} sequences of two or "
                "three symbols; lower data.rules."
            )
        return self

    @property
    def vocab_size(self) -> int:
        """Padding, the end, the beginning, and the tokens of sentences."""
        return TERMINAL + self.symbols

    @property
    def context(self) -> int:
        return 3**self.levels + 2


@LanoSettings.register
class LanoData(SyntheticData[LanoSettings]):
    """One sentence per row, padded; labels on all its tokens and its end.

    The metric `kl` compares the model's distribution of each next token with the true one, which is computed from the
    grammar: the mean of KL(true ‖ model) in nats, 0 at best. `loss` exceeds it by about the entropy of the language.
    With up to 3 levels, sentences are so few that training without the held-out ones would be another language, so
    training shows them as well.
    """

    metric = "kl"
    lower_is_better = True

    @property
    def keeps_apart(self) -> bool:  # type: ignore[override]
        return self.settings.levels > 3

    def __init__(self, settings: LanoSettings) -> None:
        super().__init__(settings)
        chance = random.Random(number("lano", "grammar", settings.grammar_seed))
        below = range(settings.symbols)
        sequences = [sequence for length in (2, 3) for sequence in itertools.product(below, repeat=length)]
        # grammar[level][symbol]: its sequences; the lowest level is the first, and symbol 0 of the last is the root.
        self.grammar = []
        for _ in range(settings.levels):
            chosen = chance.sample(sequences, settings.symbols * settings.rules)
            self.grammar.append([chosen[symbol :: settings.symbols] for symbol in below])

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance = draw_chance(draw)
        sentences = [self.draw_sentence(chance) for _ in range(count)]
        answers = [[*(TERMINAL + symbol for symbol in sentence), END] for sentence in sentences]
        return pack_rows([[BEGIN]] * count, answers, self.context)

    def draw_sentence(self, chance: random.Random) -> list[int]:
        """Draw a sentence, as symbols of the lowest level."""
        symbols = [0]
        for rules in reversed(self.grammar):
            symbols = [symbol for parent in symbols for symbol in chance.choice(rules[parent])]
        return symbols

    def next_probabilities(self, rows: Tensor) -> Tensor:
        """Compute the true distribution of the token after each position, [B, T, V]; 0 after the end.

        For each symbol, `inside` [B, i, j] is the probability that it becomes tokens i to j - 1, and `ahead`
        [B, i, j, v] that it becomes at least one token more than these, the first of which is v.
        """
        tokens = rows[:, 1:] - TERMINAL  # below 0 where there is none
        count, length = tokens.shape
        chart = torch.zeros(count, length + 1, length + 1, dtype=torch.float64)
        insides, aheads = [], []
        for symbol in range(self.settings.symbols):
            insides.append(torch.diag_embed((tokens == symbol).double(), offset=1))
            aheads.append(torch.zeros(*chart.shape, self.settings.symbols, dtype=torch.float64))
            aheads[-1].diagonal(dim1=1, dim2=2)[:, symbol] = 1
        for rules in self.grammar:
            pairs = [self.combine_children(sequences, insides, aheads) for sequences in rules]
            insides, aheads = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        probabilities = torch.zeros(count, length + 1, self.vocab_size, dtype=torch.float64)
        probabilities[..., END], probabilities[..., TERMINAL:] = insides[0][:, 0], aheads[0][:, 0]
        return probabilities / probabilities.sum(-1, keepdim=True).clamp(min=1e-300)

    def combine_children(
        self, sequences: list[tuple[int, ...]], insides: list[Tensor], aheads: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute `inside` and `ahead` of a symbol from those of the level below."""
        inside, ahead = torch.zeros_like(insides[0]), torch.zeros_like(aheads[0])
        for sequence in sequences:
            span = torch.eye(inside.shape[1], dtype=inside.dtype).expand_as(inside)  # of the children so far
            for child in sequence:
                ahead += torch.einsum("bij,bjkv->bikv", span, aheads[child]) / len(sequences)
                span = span @ insides[child]
            inside += span / len(sequences)
        return inside, ahead

    @functools.cached_property
    def held_out_probabilities(self) -> Tensor:
        size = max(1, CHART // (self.context * self.settings.symbols) ** 2)
        return torch.cat([self.next_probabilities(rows) for rows in self.held_out()["input_ids"].split(size)])

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure the divergence from the true distributions, and the loss."""
        divergences: list[Tensor] = []

        def measure(batch: Batch) -> Tensor:
            scores = logits(batch)
            start = sum(map(len, divergences))
            true = self.held_out_probabilities[start : start + len(scores)]
            guessed = scores.double().cpu().log_softmax(-1)[..., : self.vocab_size]
            divergences.append(torch.where(true > 0, true * (true.log() - guessed), 0).sum(-1))
            return scores

        loss = super().evaluate(measure, share).metrics["loss"]
        labeled = self.held_out()["shift_labels"] != -100
        return Evaluation({"kl": float(torch.cat(divergences)[labeled].mean()), "loss": loss})

    def write_token(self, token: int) -> str:
        return ("<pad>", "<end>", "<begin>")[token] if token < TERMINAL else str(token - TERMINAL + 1)
