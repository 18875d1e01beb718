"""Pattention's default score, Θ(A) = GELU(τ·A / ‖A‖₂), storing one number per score and one per row.

The backward pass recomputes normed scores and GELU. Matmuls run in the dtype of x, everything between them in at
least fp32, rounded once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.scratch import get_scratch

# Scores to compute at a time on a CPU, to keep working memory small. It changes neither bits nor, by much, the time.
BLOCK = 2**19

gelu, gelu_backward = torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input


def fused_pattention(
    x: Tensor, key: Tensor, value: Tensor, tau: Tensor, approximate: str = "none", guard: float = 1e-24
) -> Tensor:
    """Θ(x·keyᵀ)·value: x [..., d_in], key [n, d_in], value [n, d_out], tau [1] -> [..., d_out].

    approximate: the form of GELU, as PyTorch names it. guard: rows with ‖A‖² up to this count as zero. Under autocast
    x, key and value are cast once.
    """
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        half = torch.get_autocast_dtype(x.device.type)
        x, key, value = x.to(half), key.to(half), value.to(half)
        with torch.autocast(x.device.type, enabled=False):
            return _Pattention.apply(x, key, value, tau, approximate, guard)
    return _Pattention.apply(x, key, value, tau, approximate, guard)


class _Pattention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, key: Tensor, value: Tensor, tau: Tensor, approximate: str, guard: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores = rows.new_empty(len(rows), len(key))
        wide = torch.promote_types(scores.dtype, torch.float32)
        inverse = torch.empty(len(rows), 1, dtype=wide, device=x.device)  # τ / ‖A‖
        out = rows.new_empty(len(rows), value.shape[1])
        for block, z, weights in _iterate_blocks(scores, wide, 2):
            torch.mm(rows[block], key.T, out=scores[block])
            z = scores[block] if z is None else z.copy_(scores[block])
            norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
            inverse[block] = torch.where(norm > guard**0.5, tau / norm, 0.0)
            # Saved for the backward pass: the normed scores, which are then in z. In half precision the raw scores are,
            # since normed ones would be rounded once more.
            gelu(z.mul_(inverse[block]), approximate=approximate, out=weights)
            if wide != scores.dtype:
                weights = get_scratch(1, weights.shape, scores.dtype, scores)[0].copy_(weights)
            torch.mm(weights, value, out=out[block])
        ctx.save_for_backward(rows, key, value, tau, scores, inverse)
        ctx.shape, ctx.approximate = x.shape, approximate
        return out.view(*x.shape[:-1], value.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, value, tau, scores, inverse = ctx.saved_tensors
        wide = inverse.dtype
        g = grads[0].reshape(-1, grads[0].shape[-1])
        if wide != scores.dtype:  # the blocks' buffers then have another dtype, and these stay free
            grad_scores, weights = get_scratch(2, scores.shape, scores.dtype, scores)
        else:
            grad_scores, weights = torch.empty_like(scores), torch.empty_like(scores)
        along, grad_rows = torch.empty_like(inverse), torch.empty_like(rows)
        for block, z, product, grad in _iterate_blocks(scores, wide, 3):
            torch.mm(g[block], value.T, out=grad_scores[block])
            if z is None:
                z, grad = scores[block], grad_scores[block]
                gelu(z, approximate=ctx.approximate, out=weights[block])
            else:
                z.copy_(scores[block]).mul_(inverse[block])
                weights[block] = gelu(z, approximate=ctx.approximate, out=product)
                grad.copy_(grad_scores[block])
            gelu_backward(grad, z, approximate=ctx.approximate, grad_input=grad)
            # ‖z‖ is fixed at τ, so the gradient has no component along z.
            along[block] = torch.mul(grad, z, out=product).sum(-1, keepdim=True) / tau.square()
            grad.addcmul_(z, along[block], value=-1).mul_(inverse[block])
            if wide != scores.dtype:
                grad_scores[block] = grad
            torch.mm(grad_scores[block], key, out=grad_rows[block])
        wants = ctx.needs_input_grad
        return (
            grad_rows.view(ctx.shape) if wants[0] else None,
            grad_scores.T @ rows if wants[1] else None,
            weights.T @ g if wants[2] else None,
            (along.sum() * tau).to(tau.dtype) if wants[3] else None,
            None,
            None,
        )


def _iterate_blocks(scores: Tensor, wide: torch.dtype, buffers: int) -> Iterator[tuple[Any, ...]]:
    """Yield blocks of rows, on a CPU as many as fit in the cache, with buffers of their shape.

    The first buffer is for widened scores, None if they are wide already; likewise a third, for widened gradients.
    """
    rows, pairs = scores.shape
    step = max(1, BLOCK // pairs if scores.device.type == "cpu" else rows)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        space = get_scratch(buffers if wide != scores.dtype else 1, scores[block].shape, wide, scores)
        yield block, *(space if wide != scores.dtype else (None, space[0], None)[:buffers])
