"""Norms. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450."""

import torch
from torch import Tensor, nn

from headwater.config.text import HeadwaterConfig
from headwater.kernels.fused_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight over the last dimension of x [..., size], in at least fp32; returned in x's dtype.

    offset: it multiplies by 1 + weight, which is added in at least fp32.
    """

    def __init__(self, size: int, eps: float, weight: bool = True, offset: bool = False) -> None:
        super().__init__(size, eps, elementwise_affine=weight)
        self.offset = offset
        if weight and offset:
            nn.init.zeros_(self.weight)

    def factor(self) -> Tensor | None:
        """The factor that multiplies x / rms(x)."""
        if self.weight is None or not self.offset:
            return self.weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.factor(), self.eps)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) · weight + bias over the last dimension of x [..., size], in x's dtype."""

    def __init__(self, size: int, eps: float, weight: bool = True, bias: bool = True) -> None:
        super().__init__(size, eps, elementwise_affine=weight, bias=bias)
        if bias and not weight:  # PyTorch's LayerNorm has no bias without a weight
            self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, input: Tensor) -> Tensor:
        factor = self.bias if self.weight is None else self.weight
        if factor is None or factor.dtype == input.dtype:
            return super().forward(input)
        # PyTorch's kernel takes two dtypes only on a CPU, and there not for a bias alone.
        wide = (
            input
            if input.is_cpu and self.weight is not None
            else input.to(torch.promote_types(input.dtype, factor.dtype))
        )
        return super().forward(wide).to(input.dtype)


def make_norm(config: HeadwaterConfig, size: int | None = None, final: bool = False) -> nn.Module:
    """The config's norm over `size` channels (default: the model's width). final: the one after the last block."""
    size = size or config.hidden_size
    weight = config.final_norm_weight if final else config.norm_weight
    if config.norm == "rms_norm":
        return RMSNorm(size, config.norm_eps, weight, config.unit_offset_norm)
    return LayerNorm(size, config.norm_eps, weight, config.final_norm_bias if final else config.norm_bias)
