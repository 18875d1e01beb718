"""A weighted sum with learned weights that stores neither the products nor their graph."""

import torch
from torch import Tensor

from headwater.kernels.scratch import scratch


def fused_weighted_sum(weights: Tensor, *tensors: Tensor) -> Tensor:
    """Σ_i weights[i]·tensors[i]; weights [n], n tensors of one shape and of the weights' dtype."""
    return _WeightedSum.apply(weights, *tensors)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *tensors)
        y = torch.empty_like(tensors[-1])
        torch.mul(tensors[0], weights[0], out=y)
        for weight, x in zip(weights[1:], tensors[1:], strict=True):
            y.addcmul_(x, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        weights, *tensors = ctx.saved_tensors
        product = scratch(1, g.shape, g.dtype, g)[0].as_strided(g.shape, g.stride()) if _is_dense(g) else g.clone()
        gw = torch.stack([torch.mul(g, x, out=product).sum() for x in tensors])
        wanted = ctx.needs_input_grad[1:]
        return gw, *(g * weight if want else None for weight, want in zip(weights, wanted, strict=True))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of x fill its memory, in whatever order of dimensions."""
    return x.permute(sorted(range(x.ndim), key=lambda dim: x.stride()[dim], reverse=True)).is_contiguous()
