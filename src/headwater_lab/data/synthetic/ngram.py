"""Memorised n-grams: arXiv 2411.19574 (KV shifting), section 3.3 and figure 3."""

import random
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from headwater.util.seeding import generator, number
from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings


class NgramSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: ngram`."""

    kind: Literal["ngram"] = "ngram"
    order: int = Field(default=3, ge=2, le=8)
    """Tokens of an n-gram; the last one follows from the others."""
    entries: int = Field(default=200, ge=1, le=2**20)
    """n-grams in the table."""
    table_seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the table, which is the same for all seeds of a run."""
    vocab_size: int = Field(default=64, ge=2, le=2**16)
    """Number of different tokens."""
    length: int = Field(default=32, ge=3, le=2**20)
    """Tokens in a sequence."""

    @model_validator(mode="after")
    def _table_fits(self) -> Self:
        beginnings = self.vocab_size ** (self.order - 1)
        if beginnings >= 2**62:
            raise ValueError(f"data.order={self.order} with data.vocab_size={self.vocab_size} is too large; lower one.")
        if self.entries > beginnings:
            raise ValueError(
                f"data.entries={self.entries} is more than the {beginnings} possible sequences of {self.order - 1} "
                f"tokens out of {self.vocab_size}; lower it."
            )
        if self.length < self.order - 1:
            raise ValueError(f"data.length={self.length} is shorter than an n-gram; make it {self.order - 1} or more.")
        return self


@NgramSettings.register
class NgramData(SyntheticData[NgramSettings]):
    """A table of n-grams, drawn once: `entries` beginnings of n - 1 tokens, and the token that follows each.

    Rows are beginnings out of the table, one after another, chosen at random. Wherever the last n - 1 tokens are in the
    table, even by chance across two of them, the next token follows the table and is the label. Held-out
    rows test the same table in other sequences: this measures memory, not inference.
    """

    def __init__(self, settings: NgramSettings) -> None:
        super().__init__(settings)
        vocab_size, width = settings.vocab_size, settings.order - 1
        chosen = random.Random(number("ngram", "table", settings.table_seed)).sample(
            range(vocab_size**width), settings.entries
        )
        # A beginning is a number whose digits, to the base `vocab_size`, are its tokens.
        self.codes = torch.tensor(sorted(chosen))
        powers = vocab_size ** torch.arange(width - 1, -1, -1)
        self.beginnings = self.codes[:, None] // powers % vocab_size
        draw = generator("ngram", "followers", settings.table_seed)
        self.followers = torch.randint(vocab_size, (settings.entries,), generator=draw)

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        settings, width = self.settings, self.settings.order - 1
        chosen = torch.randint(settings.entries, (count, settings.length + 1), generator=draw)
        began = torch.zeros(count, dtype=torch.long)  # start of the current beginning
        code = torch.zeros(count, dtype=torch.long)
        tokens, labels = [], []
        for t in range(settings.length + 1):
            entry = torch.searchsorted(self.codes, code).clamp_(max=settings.entries - 1)
            is_stored = (self.codes[entry] == code) & (t >= width)
            beginning = chosen.gather(1, began[:, None])[:, 0]
            following = self.followers[entry]
            token = torch.where(is_stored, following, self.beginnings[beginning, (t - began) % width])
            tokens.append(token)
            labels.append(torch.where(is_stored, following, -100))
            began = torch.where(is_stored, t + 1, began)
            code = (code * settings.vocab_size + token) % settings.vocab_size**width
        return {"input_ids": torch.stack(tokens[:-1], dim=1), "shift_labels": torch.stack(labels[1:], dim=1)}
