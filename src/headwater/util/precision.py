"""The precision of a model and of its training, by the names that recipes use: Lightning Fabric's, and bf16-stream."""

from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Precision(StrEnum):
    """A precision, identified by its name."""

    FP32 = "32-true"
    BF16_MIXED = "bf16-mixed"
    BF16_STREAM = "bf16-stream"
    BF16 = "bf16-true"
    FP64 = "64-true"

    @property
    def is_mixed(self) -> bool:
        """Whether matmuls cast the weights."""
        return self in (Precision.BF16_MIXED, Precision.BF16_STREAM)

    @property
    def weights(self) -> torch.dtype:
        """The dtype of parameters, gradients and optimizer state."""
        return {Precision.BF16: torch.bfloat16, Precision.FP64: torch.float64}.get(self, torch.float32)

    @property
    def compute(self) -> torch.dtype:
        """The dtype of matmuls."""
        return torch.bfloat16 if self.is_mixed else self.weights

    @property
    def stream(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.compute if self is Precision.BF16_STREAM else self.weights

    def autocast(self, device_type: str, enabled: bool = True) -> torch.autocast:
        """Enter autocast on a kind of device, if the precision is bf16-mixed and `enabled`."""
        enabled = enabled and self is Precision.BF16_MIXED
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=enabled)

    def cast_activations(self, model: M) -> M:
        """In bf16-stream, let the linear layers, convolutions and embeddings of a model return bf16, from fp32 weights.

        All else follows the dtype of its input: a mechanism casts its other parameters to it. Changes the model, and
        returns it.
        """
        if self is Precision.BF16_STREAM:
            for module in model.modules():
                # Another class and no hook: the compiler traces it, and copies and checkpoints of the model stay alike.
                module.__class__ = _CASTING.get(type(module), type(module))
        return model


class CastingLinear(nn.Linear):
    """A linear layer that casts its input and its weights to bf16 each time."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(*_cast(input, self.weight, self.bias))


class _CastingConv1d(nn.Conv1d):
    """A convolution that casts its input and its weights to bf16 each time."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(*_cast(input, weight, bias))


class _CastingEmbedding(nn.Embedding):
    """A table whose rows are cast to bf16 after they are read."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(torch.bfloat16)


def _cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    half = torch.bfloat16
    return input.to(half), weight.to(half), None if bias is None else bias.to(half)


_CASTING: dict[type, type] = {
    nn.Linear: CastingLinear,
    nn.Conv1d: _CastingConv1d,
    nn.Embedding: _CastingEmbedding,
}
