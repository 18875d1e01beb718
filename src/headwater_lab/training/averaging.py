"""An exponential moving average of the weights: `training.ema_decay`. The average is what is evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwater_lab.training.parallel import local


class Average:
    """The average of a model's trainable parameters, sharded as they are.

    While it is `in_place`, it is in the model, and the trained weights are here.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int, taken: Tensor) -> None:
        """After optimizer step `step`, counted from 1. taken: whether it changed the weights, 0-d."""
        weight = (1 - min(self.decay, (1 + step) / (10 + step))) * taken
        means = [local(tensor) for tensor in self.tensors.values()]
        moves = torch._foreach_sub([local(parameter) for parameter in self.parameters.values()], means)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(means, moves)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model with those here."""
        for name, parameter in self.parameters.items():
            own, other = local(parameter), local(self.tensors[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @property
    def state(self) -> dict[str, Tensor]:
        """What is saved beside the model, by name."""
        return {f"trained.{name}": tensor for name, tensor in self.tensors.items()}
