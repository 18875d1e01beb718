"""Norms. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwater.kernels.norm import can_fuse_rms_norm, fused_rms_norm

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension of x [..., size], in at least fp32; returned in x's dtype."""

    def __init__(self, size: int, eps: float, weight: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        if can_fuse_rms_norm(x, self.weight):
            return fused_rms_norm(x, self.weight, self.eps)
        return nn.functional.rms_norm(x, (self.size,), self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, weight={self.weight is not None}"


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) · weight + bias over the last dimension of x [..., size].

    Without weight and bias it is the non-parametric form.
    """

    def __init__(self, size: int, eps: float, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size)) if weight else None
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, weight={self.weight is not None}, bias={self.bias is not None}"


def make_norm(config: HeadwaterConfig, size: int | None = None, final: bool = False) -> nn.Module:
    """The config's norm over `size` channels (default: the model's width). final: the one after the last block."""
    size = size or config.hidden_size
    weight = config.final_norm_weight if final else config.norm_weight
    if config.norm == "rms_norm":
        return RMSNorm(size, config.norm_eps, weight)
    return LayerNorm(size, config.norm_eps, weight, config.final_norm_bias if final else config.norm_bias)
