"""Induction: after "… a b … a", say b. arXiv 2411.19574 (KV shifting), sections 2 and 3.2, figure 1, appendix D."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_distinct


class InductionSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: induction`."""

    kind: Literal["induction"] = "induction"
    variant: Literal["chain", "periodic", "scattered"] = "chain"
    """chain: a token seen before always determines the next one, so rows end in a cycle; periodic: a segment of half
    the length, repeated; scattered: repeated pairs among new tokens, which no fixed lag predicts."""
    vocab_size: int = Field(default=64, ge=2, le=2**20)
    """Number of different tokens."""
    length: int = Field(default=32, ge=3, le=2**20)
    """Tokens in a sequence."""

    @property
    def distinct(self) -> int:
        """The number of tokens of a row that must be different."""
        return {"chain": 1, "periodic": self.length // 2, "scattered": self.length + 2}[self.variant]

    @model_validator(mode="after")
    def _enough_tokens(self) -> Self:
        if self.vocab_size < self.distinct:
            raise ValueError(
                f"data.variant {self.variant} with data.length={self.length} needs data.vocab_size of "
                f"{self.distinct} or more, not {self.vocab_size}."
            )
        return self

    @classmethod
    def list_variants(cls) -> list[Self]:
        return [cls(), cls(variant="periodic"), cls(variant="scattered")]


@InductionSettings.register
class InductionData(SyntheticData[InductionSettings]):
    """Rows in which an earlier token predicts the next one; labels are where it does.

    chain: x_i = x_j implies x_{i+1} = x_{j+1}, everywhere. From the first repetition on the row is periodic, with a lag
        of its own. Rows of one short cycle (a a a …: one in `vocab_size`) are among those held out and those trained
        on.
    periodic: `length // 2` different tokens, repeated. The lag is the same in all rows, so copying at that lag,
        without looking at any token, does equally well ([A] [B] [A] [B]; the paper's remark after theorem 3).
    scattered: `length // 8` pairs a b, and then at each turn a known pair again (half of the time), a new pair (a
        quarter) or a new token that is no part of a pair. Only an induction head predicts b at the second a ([A] [B]
        [C] [A] [B]). What follows b is free.

    The paper's script (appendix D) is the chain; it pads rows to 512 with zeros and draws again where nothing repeats.
    """

    @property
    def keeps_apart(self) -> bool:  # type: ignore[override]
        return self.settings.variant != "chain"

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        """Draw `count` sequences; shift_labels is -100 where the next token cannot be predicted."""
        forms = {"chain": self.draw_chain, "periodic": self.draw_periodic, "scattered": self.draw_scattered}
        row, predictable = forms[self.settings.variant](draw, count)
        labels = torch.where(predictable, row[:, 1:], -100)
        return {"input_ids": row[:, :-1].contiguous(), "shift_labels": labels}

    def draw_chain(self, draw: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Draw (tokens [count, T + 1], whether the token after each is determined [count, T]), as all forms do."""
        vocab_size, length = self.settings.vocab_size, self.settings.length
        fresh = torch.randint(vocab_size, (count, length + 1), generator=draw)
        follower = torch.full((count, vocab_size), -1)
        tokens = [fresh[:, 0]]
        predictable = []
        for t in range(length):
            current = tokens[-1][:, None]
            successor = follower.gather(1, current)[:, 0]
            predictable.append(successor >= 0)
            following = torch.where(predictable[-1], successor, fresh[:, t + 1])
            follower.scatter_(1, current, following[:, None])
            tokens.append(following)
        return torch.stack(tokens, dim=1), torch.stack(predictable, dim=1)

    def draw_periodic(self, draw: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        length = self.settings.length
        lag = length // 2
        positions = torch.arange(length + 1)
        segment = draw_distinct(draw, count, self.settings.vocab_size, lag)
        return segment[:, positions % lag], (positions[:-1] >= lag).expand(count, -1)

    def draw_scattered(self, draw: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        length = self.settings.length
        pool = draw_distinct(draw, count, self.settings.vocab_size, self.settings.distinct)
        turns = length + 1  # each adds one or two tokens
        chance = torch.rand(count, turns, generator=draw)
        # Rows begin with new pairs. With only one or two pairs to repeat, most repetitions would have lag 2 or 4.
        chance[:, : max(1, length // 8)] = 0.0
        new, repeat = chance < 0.25, chance >= 0.5
        pairs = new.cumsum(1)
        again = (torch.rand(count, turns, generator=draw) * pairs).long()
        pair = torch.where(repeat, again, pairs - 1)
        single = (~new & ~repeat).cumsum(1)
        # Pairs are taken from the front of the pool, single tokens from its back. What exceeds the row is cut off.
        size = pool.shape[1]
        letters = pool.gather(1, torch.where(new | repeat, 2 * pair, size - single).clamp(0, size - 1))
        second = pool.gather(1, (2 * pair + 1).clamp(0, size - 1))
        step = torch.where(new | repeat, 2, 1)
        start = step.cumsum(1) - step
        row = torch.zeros(count, 2 * turns, dtype=torch.long)
        predictable = torch.zeros(count, 2 * turns, dtype=torch.bool)
        row.scatter_(1, start + step - 1, torch.where(step == 2, second, letters))
        row.scatter_(1, start, letters)
        predictable.scatter_(1, start, repeat)
        return row[:, : length + 1], predictable[:, :length]
