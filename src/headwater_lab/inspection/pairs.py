"""Which parameter tokens fire. TokenFormer, arXiv 2410.23168, names reading them as future work.

A pair's contribution at a token is the length of its addition to the layer's output, c_i = |Θ_i|·‖V_i‖. It fires where
that is more than twice the mean over the layer's pairs, c_i > 2·Σ_j c_j / n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater_lab.inspection.sample import Sample

FIRES = 2.0  # times the mean contribution
TOP = 8  # number of pairs to list
TOKENS = 3  # tokens to list for each pair


@dataclass(frozen=True)
class FiredBy:
    """A token at which a pair contributes much: the token, its context, and the contribution."""

    before: str
    token: str
    after: str
    contribution: float


@dataclass(frozen=True)
class PairContribution:
    """One pair: its mean contribution, the share of tokens it fires at, and where it contributes most."""

    pair: int
    contribution: float
    fires: float
    tokens: list[FiredBy]


@dataclass(frozen=True)
class Firing:
    """The pairs of one Pattention: docs/inspect.md defines the figures. strongest: pairs by mean contribution."""

    layer: int
    place: str
    pairs: int
    effective: float
    fires: float
    silent: float
    strongest: list[PairContribution]


class PairCounter:
    """Adds up the contributions of one Pattention's pairs, batch by batch."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.tokens, self.shared = 0, 0.0
        # The rest gets its size with the first batch: by pair, sums, tokens it fires at, its largest contributions and
        # where they were.
        self.sums = self.fired = self.largest = self.where = torch.zeros(0)

    def add(self, contributions: Tensor, first_row: int) -> None:
        """contributions [B, T, n], of rows from `first_row` on."""
        length, pairs = contributions.shape[1:]
        c = contributions.cpu().flatten(0, 1)
        if not self.tokens:
            self.sums = torch.zeros(pairs, dtype=torch.float64)
            self.fired = torch.zeros(pairs, dtype=torch.long)
            self.largest, self.where = torch.zeros(0, pairs), torch.zeros(0, pairs, dtype=torch.long)
        self.tokens += len(c)
        self.sums += c.sum(0, dtype=torch.float64)
        total, square = c.sum(-1, dtype=torch.float64), c.double().square().sum(-1)
        self.shared += float(torch.where(square > 0, total.square() / square, 0.0).sum())
        self.fired += (c > FIRES * c.mean(-1, keepdim=True)).sum(0)
        largest, where = c.topk(min(TOKENS, len(c)), dim=0)
        largest, where = torch.cat((self.largest.to(c), largest)), torch.cat((self.where, where + first_row * length))
        self.largest, order = largest.topk(min(TOKENS, len(largest)), dim=0)
        self.where = where.gather(0, order)

    def result(self, layer: int, module_name: str) -> Firing:
        mean = self.sums / self.tokens
        strongest = mean.argsort(descending=True, stable=True)[:TOP].tolist()
        return Firing(
            layer,
            module_name,
            pairs=len(mean),
            effective=self.shared / self.tokens,
            fires=float(self.fired.sum()) / self.tokens / len(mean),
            silent=float((self.fired == 0).double().mean()),
            strongest=[self.pair(pair, float(mean[pair])) for pair in strongest],
        )

    def pair(self, pair: int, mean: float) -> PairContribution:
        tokens = []
        for contribution, index in zip(self.largest[:, pair].tolist(), self.where[:, pair].tolist(), strict=True):
            row, position = divmod(index, self.sample.length)
            tokens.append(FiredBy(*self.sample.words(row, position), contribution))
        return PairContribution(pair, mean, int(self.fired[pair]) / self.tokens, tokens)
