"""Rows that branch: trees of tokens under a mask made for the kernel."""

import torch
from torch import Tensor

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.testing.small_models import tokens


class Tree:
    """Tokens with parents (-1: the root's), each seeing its ancestors and itself."""

    def __init__(self, parents: list[int], seed: int = 0) -> None:
        self.parents = parents
        self.ids = tokens(len(parents), seed=seed)

    def list_path(self, token: int) -> list[int]:
        return [] if token < 0 else [*self.list_path(self.parents[token]), token]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([len(self.list_path(token)) - 1 for token in range(len(self.parents))])

    @property
    def visible(self) -> Tensor:
        visible = torch.zeros(len(self.parents), len(self.parents), dtype=torch.bool)
        for token in range(len(self.parents)):
            visible[token, self.list_path(token)] = True
        return visible

    def compute_logits(self, model: HeadwaterForCausalLM) -> Tensor:
        """Compute the logits [T, V] by running each path from the root to a leaf alone."""
        logits: dict[int, Tensor] = {}
        for leaf in set(range(len(self.parents))) - set(self.parents):
            path = self.list_path(leaf)
            logits |= zip(path, model(self.ids[path][None], use_cache=False).logits[0], strict=True)
        return torch.stack([logits[token] for token in range(len(self.parents))])


def batch_trees(trees: list[Tree]) -> dict[str, Tensor]:
    """Return a model's inputs for trees of one size."""
    return {
        "input_ids": torch.stack([tree.ids for tree in trees]),
        "position_ids": torch.stack([tree.positions for tree in trees]),
        "attention_mask": torch.stack([tree.visible for tree in trees])[:, None],
    }


def slice_tokens(inputs: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Take the tokens from `start` to `end`, and the mask over all tokens up to `end`."""
    return {
        "input_ids": inputs["input_ids"][:, start:end],
        "position_ids": inputs["position_ids"][:, start:end],
        "attention_mask": inputs["attention_mask"][:, :, start:end, :end],
    }
