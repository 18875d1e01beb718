"""Norms. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from headwater.scratch import scratch

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, `size` wide, in fp32 under autocast; returned in x's dtype."""

    def __init__(self, size: int, eps: float, weight: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        # Elsewhere PyTorch has a kernel of its own, which keeps as little.
        if x.device.type == "cpu" and _wants_gradient(x, self.weight):
            return _RMSNorm.apply(x, self.weight, self.eps)
        return nn.functional.rms_norm(x, (self.size,), self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, weight={self.weight is not None}"


def _wants_gradient(x: Tensor, weight: Tensor | None) -> bool:
    return (
        torch.is_grad_enabled()
        and type(x) is Tensor
        and (weight is None or weight.dtype in (x.dtype, torch.float32))
        and (x.requires_grad or (weight is not None and weight.requires_grad))
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _RMSNorm(torch.autograd.Function):
    """What PyTorch does on a CPU, step by step, keeping x and a number a row instead of two copies of x in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, product = _widened(x, dtype)
        inverse = torch.pow(wide, 2, out=product).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        if weight is None:
            return torch.mul(wide, inverse).to(x.dtype)
        return torch.mul(torch.mul(wide, inverse, out=product), weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        wide, product = _widened(x, inverse.dtype)
        gx = grads[0] * inverse
        torch.mul(gx, wide, out=product)
        gw = None
        if weight is not None:
            gw = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
            product *= weight
            gx *= weight
        # What points along x is taken out.
        along = product.sum(-1, keepdim=True).mul_(inverse.square()).div_(-x.shape[-1])
        return gx.addcmul_(wide, along).to(x.dtype), gw, None


def _widened(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in `dtype`, and working memory of its shape."""
    if x.dtype == dtype:
        return x, scratch(1, x.shape, dtype, x)[0]
    wide, product = scratch(2, x.shape, dtype, x)
    return wide.copy_(x), product


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) · weight + bias over the last dimension; without either, the non-parametric form."""

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
    """The norm the config asks for, over `size` channels (default: the model's width); `final`: the one after all."""
    size = size or config.hidden_size
    weight = config.final_norm_weight if final else config.norm_weight
    if config.norm == "rms_norm":
        return RMSNorm(size, config.norm_eps, weight)
    return LayerNorm(size, config.norm_eps, weight, config.final_norm_bias if final else config.norm_bias)
