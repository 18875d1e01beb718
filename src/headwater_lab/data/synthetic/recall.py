"""Multi-query associative recall, MQAR: arXiv 2312.04927 (Arora et al., Zoology), section 4."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_distinct


class RecallSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: recall`."""

    kind: Literal["recall"] = "recall"
    pairs: int = Field(default=8, ge=1, le=2**20)
    """Keys with their values at the beginning of a row; each key is queried once."""
    power: float = Field(default=0.01, gt=0, le=1)
    """A question comes at distance d from the pairs with probability ∝ d^(power - 1); 1 is uniform."""
    vocab_size: int = Field(default=64, ge=4, le=2**20)
    """Number of different tokens: the lower half are keys, the upper half values and filler."""
    length: int = Field(default=64, ge=3, le=2**20)
    """Tokens in a sequence."""

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"data.pairs={self.pairs} needs data.vocab_size of {2 * self.pairs} or more, not {self.vocab_size}."
            )
        if self.length < 3 * self.pairs:
            raise ValueError(
                f"data.pairs={self.pairs} with as many questions needs data.length of {3 * self.pairs} or more, not "
                f"{self.length}."
            )
        return self


@RecallSettings.register
class RecallData(SyntheticData[RecallSettings]):
    """Key value key value … and then, among other tokens, each key once more, with its value as the label.

    Keys of a row are different, and so are its values. Filler comes from the values' half, so a key after the pairs is
    always a question. The value does not follow the question.
    """

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        pairs, vocab_size, length = self.settings.pairs, self.settings.vocab_size, self.settings.length
        half = vocab_size // 2
        keys = draw_distinct(draw, count, half, pairs)
        values = half + draw_distinct(draw, count, vocab_size - half, pairs)
        row = torch.randint(half, vocab_size, (count, length), generator=draw)
        row[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
        # The Gumbel trick draws without replacement, in order: the first distance belongs to the first key.
        distances = torch.arange(1, length - 2 * pairs + 1)
        noise = -torch.empty(count, len(distances)).exponential_(generator=draw).log()
        queries = 2 * pairs + ((self.settings.power - 1) * distances.log() + noise).topk(pairs).indices
        labels = torch.full((count, length), -100).scatter_(1, queries, values)
        return {"input_ids": row.scatter_(1, queries, keys), "shift_labels": labels}

    def write_token(self, token: int) -> str:
        half = self.settings.vocab_size // 2
        return f"k{token}" if token < half else f"v{token - half}"
