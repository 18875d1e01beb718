"""hop-k, induction of several hops: arXiv 2402.09268 (Sanford et al.), section 4; arXiv 2411.19574, appendix H."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings


class HopSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: hop`."""

    kind: Literal["hop"] = "hop"
    hops: int = Field(default=4, ge=1, le=2**20)
    """Maximum number of hops; a row has 0 to this many."""
    alphabet: int = Field(default=4, ge=3, le=2**20)
    """Number of different symbols. Neighbors always differ, so two symbols would only alternate."""
    length: int = Field(default=64, ge=3, le=2**20)
    """Symbols in a sequence; a row has one token more, the number of hops."""

    @property
    def vocab_size(self) -> int:
        """The symbols, "nothing", and a token for each number of hops."""
        return self.alphabet + 1 + self.hops + 1

    @property
    def context(self) -> int:
        return self.length + 1


@HopSettings.register
class HopData(SyntheticData[HopSettings]):
    """k X_1 … X_n, and at each position i: hop_k(X)_i.

        find^1(X, i) = max({0} ∪ {j ≤ i : X_{j-1} = X_i})      find^k(X, i) = find^1(X, find^{k-1}(X, i))
        hop_k(X)_i   = X_{find^k(X, i)}, or "nothing" where that is 0

    The first token is k, drawn uniformly from 0 to `hops`; accuracy is also measured for each k. hop_1 at i is what
    followed the last occurrence of X_i, which for k = 1 is induction.
    """

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        alphabet, length, hops = self.settings.alphabet, self.settings.length, self.settings.hops
        steps = torch.randint(1, alphabet, (count, length), generator=draw)
        steps[:, 0] = torch.randint(alphabet, (count,), generator=draw)
        symbols = steps.cumsum(1) % alphabet
        hops_asked = torch.randint(hops + 1, (count, 1), generator=draw)
        find = self.find_previous(symbols)
        position = torch.arange(length + 1).expand(count, -1)
        for hop in range(hops):
            position = torch.where(hops_asked > hop, find.gather(1, position), position)
        # Position 0 means "nothing".
        answers = torch.cat([torch.full((count, 1), alphabet), symbols], dim=1).gather(1, position)
        answers[:, 0] = -100
        return {"input_ids": torch.cat([alphabet + 1 + hops_asked, symbols], dim=1), "shift_labels": answers}

    def find_previous(self, symbols: Tensor) -> Tensor:
        """Compute find^1 of all positions [count, n + 1]; at position 0 it is 0."""
        count, length = symbols.shape
        pointers = torch.zeros(count, length, self.settings.alphabet, dtype=torch.long)
        positions = torch.arange(2, length + 1).expand(count, -1)
        # From position j on, symbol X_{j-1} points to j.
        pointers[:, 1:].scatter_(2, symbols[:, :-1, None], positions[..., None])
        latest = pointers.cummax(1).values.gather(2, symbols[..., None])[..., 0]
        return torch.cat([torch.zeros(count, 1, dtype=torch.long), latest], dim=1)

    def split_positions(self, batch: Batch) -> dict[str, Tensor]:
        hops_asked = batch["input_ids"][:, :1] - self.settings.alphabet - 1
        return {f"k={k}": (hops_asked == k).expand_as(batch["input_ids"]) for k in range(self.settings.hops + 1)}

    def write_token(self, token: int) -> str:
        alphabet = self.settings.alphabet
        if token < alphabet:
            return chr(ord("a") + token) if alphabet <= 26 else str(token)
        return "⊥" if token == alphabet else f"k={token - alphabet - 1}"
