"""Keys in Triton: RMSNorm (where the model has it), KV shift and RoPE, forward and backward, one kernel each.

    z_t = norm(x_t)        m_t = Σ_s taps[s]·z_{t-s}        y_t = m_t·cos_t + roll(m_t, r/2)·sin_t

The compiler makes one to three kernels of the forward pass, and three to five of the backward pass, in which it writes
the gradient of m in fp32 and reads it two or three times. In bf16 that is 18 bytes a number of x for the backward pass
without a norm and 26 with one, and 4 to 10 for the forward pass; this one moves 6 and 4, and as partial sums of the
gradients of taps and norm (2 + d) / 32 numbers a head and token. What a token's kernel reads of its neighbors it has
in its cache. `headwater bench gpu` times both (`headwater.kernels.gpu`).

Everything between reading and writing is in fp32. A program takes one head of some consecutive tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.gpu import on

# Numbers of x that a program takes.
TILE = 2048


@triton.jit
def _seen(reach_, b, t, steps: tl.constexpr, T, REACH: tl.constexpr):
    """Whether the token `steps` back from t is there, and in the same document."""
    seen = (t >= steps) & (t < T)
    if REACH and steps > 0:
        seen = seen & (tl.load(reach_ + b * T + t, mask=t < T, other=0) >= steps)
    return seen


@triton.jit
def _forward(
    x_,
    taps_,
    weight_,
    reach_,
    cos_,
    sin_,
    y_,
    T,
    K,
    eps,
    x_row,
    x_token,
    x_head,
    turn_row,
    d: tl.constexpr,
    r: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    REACH: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
):
    blocks = tl.cdiv(T, TOKENS)
    b, k = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    t = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, D)
    other = tl.where(c < r, (c + r // 2) % r, c)  # the channel that c is turned with
    mixed = tl.zeros([TOKENS, D], tl.float32)
    mixed_other = tl.zeros([TOKENS, D], tl.float32)
    for steps in tl.static_range(WINDOW):
        seen = _seen(reach_, b, t, steps, T, REACH)[:, None] & (c < d)[None]
        row = x_ + b * x_row + k * x_head + (t - steps)[:, None].to(tl.int64) * x_token
        z = tl.load(row + c[None], mask=seen, other=0.0).to(tl.float32)
        z_other = tl.load(row + other[None], mask=seen, other=0.0).to(tl.float32)
        tap = tl.load(taps_ + steps * K + k).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(z * z, 1) / d + eps)[:, None] * tap
        else:
            scale = tap
        mixed += z * scale
        mixed_other += z_other * scale
    if WEIGHT:
        mixed *= tl.load(weight_ + c, mask=c < d, other=0.0).to(tl.float32)[None]
        mixed_other *= tl.load(weight_ + other, mask=c < d, other=0.0).to(tl.float32)[None]
    turned = (t < T)[:, None] & (c < r)[None]
    turn = b * turn_row + t[:, None] * r + c[None]
    cos = tl.load(cos_ + turn, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ + turn, mask=turned, other=0.0).to(tl.float32)
    y = mixed * cos + mixed_other * sin
    at = ((b * T + t[:, None]) * K + k) * d + c[None]
    tl.store(y_ + at, y.to(y_.dtype.element_ty), mask=(t < T)[:, None] & (c < d)[None])


@triton.jit
def _backward(
    g_,
    x_,
    taps_,
    weight_,
    reach_,
    cos_,
    sin_,
    grad_x_,
    grad_taps_,
    grad_weight_,
    T,
    K,
    eps,
    g_row,
    g_token,
    g_head,
    x_row,
    x_token,
    x_head,
    turn_row,
    d: tl.constexpr,
    r: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    REACH: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
):
    """Gradients of x, and of taps and weight summed over the program's tokens."""
    blocks = tl.cdiv(T, TOKENS)
    b, k = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    t = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, D)
    other = tl.where(c < r, (c + r // 2) % r, c)
    here = (t < T)[:, None] & (c < d)[None]
    x = tl.load(x_ + b * x_row + k * x_head + t[:, None].to(tl.int64) * x_token + c[None], mask=here, other=0.0)
    z = x.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(z * z, 1) / d + eps)[:, None]
        unit = z * inverse
        z = unit
    if WEIGHT:
        weight = tl.load(weight_ + c, mask=c < d, other=0.0).to(tl.float32)[None]
        z = unit * weight
    grad = tl.zeros([TOKENS, D], tl.float32)  # of z
    for steps in tl.static_range(WINDOW):
        later = t + steps  # tokens that read these, `steps` back
        seen = _seen(reach_, b, later, steps, T, REACH)[:, None]
        row = g_ + b * g_row + k * g_head + later[:, None].to(tl.int64) * g_token
        turn = b * turn_row + later[:, None] * r
        turned = seen & (c < r)[None]
        g = tl.load(row + c[None], mask=seen & (c < d)[None], other=0.0).to(tl.float32)
        g *= tl.load(cos_ + turn + c[None], mask=turned, other=1.0).to(tl.float32)
        g_other = tl.load(row + other[None], mask=turned, other=0.0).to(tl.float32)
        g += g_other * tl.load(sin_ + turn + other[None], mask=turned, other=0.0).to(tl.float32)
        grad += g * tl.load(taps_ + steps * K + k).to(tl.float32)
        tl.store(grad_taps_ + (tl.program_id(0) * WINDOW + steps) * K + k, tl.sum(tl.sum(g * z, 1), 0))
    if WEIGHT:
        of_weight = tl.sum(grad * unit, 0)
        tl.store(grad_weight_ + (tl.program_id(0) * K + k).to(tl.int64) * d + c, of_weight, mask=c < d)
        grad *= weight
    if NORM:
        grad = inverse * (grad - unit * (tl.sum(grad * unit, 1) / d)[:, None])
    at = ((b * T + t[:, None]) * K + k) * d + c[None]
    tl.store(grad_x_ + at, grad.to(grad_x_.dtype.element_ty), mask=here)


def _options(x: Tensor, taps: Tensor, weight: Tensor | None, reach: Tensor | None, cos: Tensor, norm: bool) -> dict:
    width = triton.next_power_of_2(x.shape[-1])
    return {
        "d": x.shape[-1],
        "r": cos.shape[-1],
        "WINDOW": len(taps),
        "NORM": norm,
        "WEIGHT": weight is not None,
        "REACH": reach is not None,
        "TOKENS": max(1, TILE // width),
        "D": width,
        "num_warps": 4,
    }


def _near(x: Tensor) -> Tensor:
    """The channels of a head must be next to each other; heads and tokens may be anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _turn_row(x: Tensor, cos: Tensor) -> int:
    """How far apart the angles of two rows are; 0 where all rows have the same."""
    return cos[0].numel() if len(cos) == len(x) else 0


@torch.library.custom_op("headwater::keys", mutates_args=())
def keys(
    x: Tensor,
    taps: Tensor,
    weight: Tensor | None,
    reach: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: bool,
    eps: float,
) -> Tensor:
    """Keys x [B, T, K, d] of a projection, normed if `norm`, shifted and turned -> the same shape and dtype.

    taps [window, K]; weight [d], of the norm, or None; reach [B or 1, T] as in `mechanisms.base.Context`, or None; cos,
    sin [B or 1, 1, T, r] as `nn.position.for_heads` gives them.
    """
    x, taps, cos, sin = _near(x), taps.contiguous(), cos.contiguous(), sin.contiguous()
    reach = None if reach is None else reach.expand(len(x), -1).contiguous()  # [1, T] if all rows are alike
    rows, length, heads, _ = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    options = _options(x, taps, weight, reach, cos, norm)
    if y.numel():
        with on(x):
            _forward[(rows * triton.cdiv(length, options["TOKENS"]), heads)](
                x, taps, weight, reach, cos, sin, y, length, heads, eps, *x.stride()[:3], _turn_row(x, cos), **options
            )
    return y


@keys.register_fake
def _(
    x: Tensor,
    taps: Tensor,
    weight: Tensor | None,
    reach: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: bool,
    eps: float,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("headwater::keys_backward", mutates_args=())
def keys_backward(
    grads: Tensor,
    x: Tensor,
    taps: Tensor,
    weight: Tensor | None,
    reach: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of taps and of weight (empty without one)."""
    grads, x, taps, cos, sin = _near(grads), _near(x), taps.contiguous(), cos.contiguous(), sin.contiguous()
    reach = None if reach is None else reach.expand(len(x), -1).contiguous()  # [1, T] if all rows are alike
    rows, length, heads, width = x.shape
    options = _options(x, taps, weight, reach, cos, norm)
    programs = rows * triton.cdiv(length, options["TOKENS"])
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_taps = taps.new_empty(programs, *taps.shape, dtype=torch.float32)
    of_weight = taps.new_empty(0 if weight is None else programs * heads, width, dtype=torch.float32)
    if grad_x.numel():
        with on(x):
            _backward[(programs, heads)](
                grads,
                x,
                taps,
                weight,
                reach,
                cos,
                sin,
                grad_x,
                of_taps,
                of_weight,
                length,
                heads,
                eps,
                *grads.stride()[:3],
                *x.stride()[:3],
                _turn_row(x, cos),
                **options,
            )
    grad_weight = x.new_empty(0) if weight is None else of_weight.sum(0).to(weight.dtype)
    return grad_x, of_taps.sum(0).to(taps.dtype), grad_weight


@keys_backward.register_fake
def _(
    grads: Tensor,
    x: Tensor,
    taps: Tensor,
    weight: Tensor | None,
    reach: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = x.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(taps), grad_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.norm, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, weight, reach, cos, sin = ctx.saved_tensors
    grad_x, grad_taps, grad_weight = keys_backward(grads, x, taps, weight, reach, cos, sin, ctx.norm, ctx.eps)
    return grad_x, grad_taps, None if weight is None else grad_weight, None, None, None, None, None


keys.register_autograd(_gradients, setup_context=_keep)
