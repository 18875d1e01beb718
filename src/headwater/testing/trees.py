"""Rows that branch: trees of tokens under a mask made for the kernel."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.testing.models import tokens


class Tree:
    """Tokens with parents (-1: the root's), each seeing its ancestors and itself."""

    def __init__(self, parents: list[int], seed: int = 0) -> None:
        self.parents = parents
        self.ids = tokens(len(parents), seed=seed)

    @classmethod
    def random(cls, size: int, seed: int, trunk: int = 0) -> Tree:
        """After a trunk of plain tokens any token may be any later one's parent; now and then a new document begins."""
        draw = random.Random(seed)
        return cls([t - 1 if t < trunk else draw.randrange(max(trunk - 1, -1), t) for t in range(size)], seed)

    def path(self, token: int) -> list[int]:
        return [] if token < 0 else [*self.path(self.parents[token]), token]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([len(self.path(token)) - 1 for token in range(len(self.parents))])

    @property
    def seen(self) -> Tensor:
        seen = torch.zeros(len(self.parents), len(self.parents), dtype=torch.bool)
        for token in range(len(self.parents)):
            seen[token, self.path(token)] = True
        return seen

    def expected(self, model: HeadwaterForCausalLM) -> Tensor:
        """Logits [T, V]: each path from the root to a leaf run alone."""
        logits: dict[int, Tensor] = {}
        for leaf in set(range(len(self.parents))) - set(self.parents):
            path = self.path(leaf)
            logits |= zip(path, model(self.ids[path][None], use_cache=False).logits[0], strict=True)
        return torch.stack([logits[token] for token in range(len(self.parents))])


def as_mask(seen: Tensor, kind: str = "bool") -> Tensor:
    if kind == "bool":
        return seen
    dtype = torch.float64 if kind == "additive" else torch.float32
    hidden = torch.finfo(dtype).min if kind == "additive" else -1e9
    # The kernel adds it to fp64 scores.
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden).double()


def batch(trees: list[Tree], kind: str = "bool") -> dict[str, Tensor]:
    """What a model is called with for trees of one size."""
    return {
        "input_ids": torch.stack([tree.ids for tree in trees]),
        "position_ids": torch.stack([tree.positions for tree in trees]),
        "attention_mask": as_mask(torch.stack([tree.seen for tree in trees])[:, None], kind),
    }


def part(given: dict[str, Tensor], start: int, end: int, slots: int | None = None) -> dict[str, Tensor]:
    """Tokens from `start` to `end`; the mask over all up to `end`, or over as many slots as a static cache has."""
    mask = given["attention_mask"][:, :, start:end, :end]
    if slots is not None:
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        mask = torch.nn.functional.pad(mask, (0, slots - end), value=hidden)
    return {
        "input_ids": given["input_ids"][:, start:end],
        "position_ids": given["position_ids"][:, start:end],
        "attention_mask": mask,
    }
