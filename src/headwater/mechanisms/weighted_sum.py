"""y = Σ_i w_i·x_i with learnable scalars w: what value residuals and DenseFormer's averages are made of."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.scratch import scratch

# Numbers that are widened at a time on a CPU, so that they stay in its cache.
BLOCK = 2**18


def weighted_sum(weights: Tensor, *tensors: Tensor) -> Tensor:
    """weights: [n]; tensors: n of one shape and dtype -> their weighted sum, in at least fp32 and rounded once."""
    if torch.compiler.is_compiling():
        wide = torch.promote_types(tensors[0].dtype, weights.dtype)
        first, *rest = (w * x.to(wide) for w, x in zip(weights.unbind(), tensors, strict=True))
        for term in rest:
            first = first + term
        return first.to(tensors[0].dtype)
    return _WeightedSum.apply(weights, *tensors)


class _WeightedSum(torch.autograd.Function):
    """The same without the products and their graph. Half precision is widened a few rows at a time."""

    @staticmethod
    def forward(ctx, weights: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *tensors)
        y, wide = torch.empty_like(tensors[-1]), torch.promote_types(tensors[0].dtype, weights.dtype)
        for rows, total, term in _blocks(y, wide, 2):
            if wide == y.dtype:
                total = y
            for i, (weight, x) in enumerate(zip(weights, tensors, strict=True)):
                term = x if wide == y.dtype else term.copy_(x[rows])
                torch.mul(term, weight, out=total) if i == 0 else total.addcmul_(term, weight)
            if wide != y.dtype:
                y[rows] = total
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        weights, *tensors = ctx.saved_tensors
        wide = torch.promote_types(g.dtype, weights.dtype)
        gw = torch.zeros_like(weights)
        gx = [
            torch.empty_like(x) if wanted else None for x, wanted in zip(tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        for rows, g_rows, x_rows in _blocks(tensors[-1], wide, 2):
            widen = wide != g.dtype
            g_rows = g_rows.copy_(g[rows]) if widen else g
            for i, (weight, x, out) in enumerate(zip(weights, tensors, gx, strict=True)):
                gw[i] += torch.mul(g_rows, x_rows.copy_(x[rows]) if widen else x, out=x_rows).sum()
                if out is not None and widen:
                    out[rows] = torch.mul(g_rows, weight, out=x_rows)
                elif out is not None:
                    torch.mul(g_rows, weight, out=out)
        return gw, *gx


def _blocks(x: Tensor, wide: torch.dtype, buffers: int) -> Iterator[tuple[Any, ...]]:
    """Rows of x to work on at a time, all of them where nothing is to be widened, and buffers laid out as they are."""
    count = len(x)
    step = max(1, BLOCK // max(1, x[:1].numel())) if wide != x.dtype and x.device.type == "cpu" else max(1, count)
    # Elementwise work is fastest where all operands lie in memory alike.
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: (dim > 0, -strides[dim]))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        space = scratch(buffers, [x[rows].shape[dim] for dim in order], wide, x)
        back = sorted(range(x.ndim), key=order.__getitem__)
        yield rows, *(buffer.permute(back) for buffer in space)
