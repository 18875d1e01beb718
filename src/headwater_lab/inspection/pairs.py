"""Which parameter tokens fire for which text. TokenFormer, arXiv 2410.23168, names reading them as future work.

A pair's contribution at a token is the length of its addition to the layer's output, c_i = |Θ_i|·‖V_i‖. It fires where
that is more than twice the mean over the layer's pairs, c_i > 2·Σ_j c_j / n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater_lab.inspection.sample import Sample

FIRES = 2.0  # times the mean contribution
TOP = 8  # number of pairs to list, and of those that tell texts apart
TOKENS = 3  # tokens to list for each pair


@dataclass(frozen=True)
class FiredBy:
    """A token at which a pair contributes much: the token, its context, its text, and the contribution."""

    before: str
    token: str
    after: str
    text: str
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
    """The pairs of one Pattention.

    effective: mean over tokens of (Σ c)² / Σ c², between 1 and n: how many pairs share the work.
    fires: share of pairs that fire at a token, on average. silent: share that fires nowhere in the sample.
    unread: share that contributes nothing anywhere in it: with `top_k`, the pairs that no token has chosen.
    strongest: pairs by mean contribution. telling: pairs whose mean contribution differs most between texts, by its
    largest over its mean; by_text: [pairs of `telling`][texts], each text's over the mean of the texts'.
    """

    layer: int
    place: str
    pairs: int
    effective: float
    fires: float
    silent: float
    unread: float
    strongest: list[PairContribution]
    telling: list[int]
    by_text: list[list[float]]


class PairCounter:
    """Adds up the contributions of one Pattention's pairs, batch by batch."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.tokens = torch.zeros(len(sample.texts), dtype=torch.float64)
        self.shared = 0.0
        # The rest gets its size with the first batch: by text and pair; tokens a pair fires at; its largest
        # contributions and where they were.
        self.sums = self.fired = self.largest = self.where = torch.zeros(0)

    def add(self, contributions: Tensor, first_row: int) -> None:
        """contributions [B, T, n], of rows from `first_row` on."""
        c = contributions.cpu()
        rows, length, pairs = c.shape
        if not len(self.sums):
            self.sums = torch.zeros(len(self.tokens), pairs, dtype=torch.float64)
            self.fired = torch.zeros(pairs, dtype=torch.long)
            self.largest, self.where = torch.zeros(0, pairs), torch.zeros(0, pairs, dtype=torch.long)
        text_of = self.sample.text_of[first_row : first_row + rows]
        self.sums.index_add_(0, text_of, c.sum(1, dtype=torch.float64))
        self.tokens.index_add_(0, text_of, torch.full((rows,), length, dtype=torch.float64))
        c = c.flatten(0, 1)
        total, square = c.sum(-1, dtype=torch.float64), c.double().square().sum(-1)
        self.shared += float(torch.where(square > 0, total.square() / square, 0.0).sum())
        self.fired += (c > FIRES * c.mean(-1, keepdim=True)).sum(0)
        largest, where = c.topk(min(TOKENS, len(c)), dim=0)
        largest, where = torch.cat((self.largest.to(c), largest)), torch.cat((self.where, where + first_row * length))
        self.largest, order = largest.topk(min(TOKENS, len(largest)), dim=0)
        self.where = where.gather(0, order)

    def result(self, layer: int, place: str) -> Firing:
        tokens = float(self.tokens.sum())
        mean = self.sums.sum(0) / tokens
        by_text = self.sums / self.tokens[:, None]
        relative = by_text / by_text.mean(0).clamp(min=torch.finfo(torch.float64).tiny)
        telling = relative.amax(0).argsort(descending=True, stable=True)[:TOP]
        strongest = mean.argsort(descending=True, stable=True)[:TOP].tolist()
        return Firing(
            layer,
            place,
            pairs=len(mean),
            effective=self.shared / tokens,
            fires=float(self.fired.sum()) / tokens / len(mean),
            silent=float((self.fired == 0).double().mean()),
            unread=float((mean == 0).double().mean()),
            strongest=[self.pair(pair, float(mean[pair]), tokens) for pair in strongest],
            telling=telling.tolist(),
            by_text=relative[:, telling].T.tolist(),
        )

    def pair(self, pair: int, mean: float, tokens: float) -> PairContribution:
        found = []
        for contribution, where in zip(self.largest[:, pair].tolist(), self.where[:, pair].tolist(), strict=True):
            row, place = divmod(where, self.sample.length)
            text = self.sample.texts[int(self.sample.text_of[row])]
            found.append(FiredBy(*self.sample.words(row, place), text, contribution))
        return PairContribution(pair, mean, int(self.fired[pair]) / tokens, found)
