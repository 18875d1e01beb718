"""Pattention's score in Triton, Θ(A) = GELU(τ·A / ‖A‖), for A [rows, n], forward and backward, one kernel each.

Between its two matmuls Pattention only moves memory. With more than 1024 scores a row, the compiler's backward pass
writes them in fp32 and reads them again: 16 bytes a score in bf16 (the gradient and the score, 4; fp32, written and
read, 8; the score again, 2; the gradient, 2), where this one moves 6, and 4 more that it has just read. With up to 1024
the compiler keeps a row in registers too, and nothing is saved. In the forward pass both read a score twice and write
it once. So `headwater bench gpu` times them (`headwater.kernels.gpu`).

Everything between reading and writing is in fp32. Any n works: a program takes a row, `BLOCK` scores at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.gpu import on

# The most scores of a row to work on at once.
BLOCK = 2048


@triton.jit
def _gelu(z, TANH: tl.constexpr):
    if TANH:
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def _gelu_slope(z, TANH: tl.constexpr):
    if TANH:
        gate = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return gate + z * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def _forward(
    scores_,
    tau_,
    weights_,
    scale_,
    n,
    guard,
    L1: tl.constexpr,
    FIRST: tl.constexpr,
    TANH: tl.constexpr,
    B: tl.constexpr,
):
    """Weights of a row, and τ / ‖A‖. L1: the norm's order is 1, not 2. FIRST: GELU comes before the norm."""
    row = tl.program_id(0).to(tl.int64)
    scores_ += row * n
    weights_ += row * n
    total = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        a = tl.load(scores_ + at, mask=at < n, other=0.0).to(tl.float32)
        if FIRST:
            a = _gelu(a, TANH)
        total += tl.abs(a) if L1 else a * a
    norm = tl.sum(total, 0)
    if not L1:
        norm = tl.sqrt(norm)
    seen = norm * norm > guard
    scale = tl.where(seen, tl.load(tau_) / tl.where(seen, norm, 1.0), 0.0)
    tl.store(scale_ + row, scale)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        a = tl.load(scores_ + at, mask=at < n, other=0.0).to(tl.float32)
        weight = _gelu(a, TANH) * scale if FIRST else _gelu(a * scale, TANH)
        tl.store(weights_ + at, weight.to(weights_.dtype.element_ty), mask=at < n)


@triton.jit
def _normed(a, g, scale, FIRST: tl.constexpr, TANH: tl.constexpr):
    """What the norm is of, and the gradient of what it gives."""
    if FIRST:
        return _gelu(a, TANH), g
    return a, g * _gelu_slope(a * scale, TANH)


@triton.jit
def _backward(
    grads_,
    scores_,
    scale_,
    tau_,
    grad_scores_,
    dots_,
    n,
    L1: tl.constexpr,
    FIRST: tl.constexpr,
    TANH: tl.constexpr,
    B: tl.constexpr,
):
    """Gradients of a row of scores, and the dot product that τ's is the sum of."""
    row = tl.program_id(0).to(tl.int64)
    grads_ += row * n
    scores_ += row * n
    grad_scores_ += row * n
    scale = tl.load(scale_ + row)
    total = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        a = tl.load(scores_ + at, mask=at < n, other=0.0).to(tl.float32)
        g = tl.load(grads_ + at, mask=at < n, other=0.0).to(tl.float32)
        a, g = _normed(a, g, scale, FIRST, TANH)
        total += a * g
    dot = tl.sum(total, 0)
    tl.store(dots_ + row, dot)
    inverse = scale / tl.load(tau_)  # 1 / ‖A‖
    along = dot * inverse if L1 else dot * inverse * inverse
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        raw = tl.load(scores_ + at, mask=at < n, other=0.0).to(tl.float32)
        g = tl.load(grads_ + at, mask=at < n, other=0.0).to(tl.float32)
        a, g = _normed(raw, g, scale, FIRST, TANH)
        if L1:  # the norm's gradient is the sign
            a = (a > 0).to(tl.float32) - (a < 0).to(tl.float32)
        grad = scale * (g - a * along)
        if FIRST:
            grad *= _gelu_slope(raw, TANH)
        tl.store(grad_scores_ + at, grad.to(grad_scores_.dtype.element_ty), mask=at < n)


def _options(n: int, score: str, form: str) -> dict[str, Any]:
    block = min(BLOCK, max(128, triton.next_power_of_2(n)))
    return {
        "L1": "l1" in score,
        "FIRST": score.startswith("gelu"),
        "TANH": form == "tanh",
        "B": block,
        "num_warps": 8 if block > 1024 else 4,
    }


@torch.library.custom_op("headwater::pattention_score", mutates_args=())
def pattention_score(scores: Tensor, tau: Tensor, score: str, form: str, guard: float) -> tuple[Tensor, Tensor]:
    """Θ of scores [..., n], in their dtype, and τ / ‖A‖ of each row [...] in fp32; tau [1] in fp32.

    score: l2_norm_gelu, l1_norm_gelu, gelu_l2_norm or gelu_l1_norm. form: of GELU, "none" or "tanh". guard: rows with
    ‖A‖² up to this count as zero.
    """
    scores = scores.contiguous()
    weights, scale = torch.empty_like(scores), scores.new_empty(scores.shape[:-1], dtype=torch.float32)
    n = scores.shape[-1]
    if scale.numel():
        with on(scores):
            _forward[(scale.numel(),)](scores, tau, weights, scale, n, guard, **_options(n, score, form))
    return weights, scale


@pattention_score.register_fake
def _(scores: Tensor, tau: Tensor, score: str, form: str, guard: float) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return weights, scores.new_empty(scores.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("headwater::pattention_score_backward", mutates_args=())
def pattention_score_backward(
    grads: Tensor, scores: Tensor, scale: Tensor, tau: Tensor, score: str, form: str
) -> tuple[Tensor, Tensor]:
    """The gradient of scores [..., n], in their dtype, and of each row Σ ∂Θ·A (after GELU, if that is first) [...]."""
    grads, scores = grads.contiguous(), scores.contiguous()
    grad_scores, dots = torch.empty_like(scores), torch.empty_like(scale)
    n = scores.shape[-1]
    if scale.numel():
        with on(scores):
            _backward[(scale.numel(),)](grads, scores, scale, tau, grad_scores, dots, n, **_options(n, score, form))
    return grad_scores, dots


@pattention_score_backward.register_fake
def _(grads: Tensor, scores: Tensor, scale: Tensor, tau: Tensor, score: str, form: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores, memory_format=torch.contiguous_format), torch.empty_like(scale)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, tau, ctx.score, ctx.form, _ = inputs
    ctx.save_for_backward(scores, output[1], tau)


def _gradients(ctx: Any, grads: Tensor, unused: Tensor | None) -> tuple[Tensor | None, ...]:
    scores, scale, tau = ctx.saved_tensors
    grad_scores, dots = pattention_score_backward(grads, scores, scale, tau, ctx.score, ctx.form)
    grad_tau = (dots * scale).sum() / tau if ctx.needs_input_grad[1] else None
    return grad_scores, grad_tau, None, None, None


pattention_score.register_autograd(_gradients, setup_context=_keep)
