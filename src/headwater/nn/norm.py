"""Norms. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, `size` wide, in fp32 under autocast; returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(config: HeadwaterConfig, size: int | None = None) -> nn.Module:
    """The norm the config asks for, over `size` channels (default: the model's width)."""
    size = size or config.hidden_size
    if config.norm == "rms_norm":
        return RMSNorm(size, config.norm_eps)
    return nn.LayerNorm(size, config.norm_eps, bias=config.norm_bias)
