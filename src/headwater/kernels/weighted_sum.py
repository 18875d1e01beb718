"""A weighted sum with learned weights that stores neither the products nor their graph."""

import torch
from torch import Tensor


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
        # In one dimension, in the order in which the elements of g lie in memory: no copies of tensors laid out alike.
        order = sorted(range(g.ndim), key=g.stride().__getitem__, reverse=True)
        flat, *others = (x.permute(order).reshape(-1) for x in (g, *tensors))
        gw = torch.stack([torch.dot(flat, x) for x in others])
        wanted = ctx.needs_input_grad[1:]
        return gw, *(g * weight if want else None for weight, want in zip(weights, wanted, strict=True))
