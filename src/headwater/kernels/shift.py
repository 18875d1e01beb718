"""The token shift of whole rows, without a padded copy of x or its graph.

`fused_shift` is for uncompiled code. It works on [B, T, K·d], the memory layout of projections. Half precision is
widened a few rows at a time, and the result is laid out as [B, K, T, d], which attention needs.

On an AMD EPYC (Zen 4), forward and backward take 0.2 to 0.8 of the plain form's time.

`traced_shift` is for compiled code. Its backward pass is written with gradients shifted the other way, so that the
compiler keeps x and no shifted copy of it, and needs fewer kernels (tests/nn/test_kernel_budget.py counts them).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.scratch import get_scratch

# Numbers widened at a time on a CPU: as many as `get_scratch` keeps memory for.
BLOCK = 2**20


def fused_shift(x: Tensor, weight: Tensor) -> Tensor:
    """y_t = Σ_s weight[s]·x_{t-s}, zeros before the first token: x [B, K, T, d], weight [window, K] or with d too."""
    return _Shift.apply(x, weight)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        width, taps = x.shape[-1], _expand_taps(weight, x.shape[-1])
        wide = torch.promote_types(x.dtype, weight.dtype)
        if wide == x.dtype:
            flat = _flatten_heads(x)
            return _split_heads(_mix_taps(flat, taps, torch.empty_like(flat)), width)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows, x_rows, y_rows in _iterate_blocks(x, wide, 2):
            _split_heads(x_rows, width).copy_(x[rows])
            y[rows] = _split_heads(_mix_taps(x_rows, taps, y_rows), width)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = grads
        x, weight = ctx.saved_tensors
        width, taps = x.shape[-1], _expand_taps(weight, x.shape[-1])
        wide = torch.promote_types(x.dtype, weight.dtype)
        gw = torch.zeros(len(taps), len(taps[0]), dtype=wide, device=x.device)
        if wide == x.dtype:
            flat, g = _flatten_heads(x), _flatten_heads(g)
            gx, product = torch.empty_like(flat), get_scratch(1, flat.shape, wide, flat)[0]
            _mix_taps_back(g, flat, taps, gx, product, gw)
        else:
            gx = torch.empty(len(x), x.shape[2], len(taps[0]), dtype=x.dtype, device=x.device)
            for rows, x_rows, g_rows, gx_rows, product in _iterate_blocks(x, wide, 4):
                _split_heads(x_rows, width).copy_(x[rows])
                _split_heads(g_rows, width).copy_(g[rows])
                _mix_taps_back(g_rows, x_rows, taps, gx_rows, product, gw)
                gx[rows] = gx_rows
        gw = gw.unflatten(1, (-1, width))
        return _split_heads(gx, width), (gw if weight.ndim == 3 else gw.sum(2)).to(weight.dtype)


def traced_shift(x: Tensor, weight: Tensor, reach: Tensor | None) -> Tensor:
    """`fused_shift` for the compiler; a token at t with reach[t] < s, [B, T], has no token s back."""
    return _TracedShift.apply(x, weight, reach)


def fused_dynamic_shift(x: Tensor, taps: Tensor, more: Tensor, reach: Tensor | None) -> Tensor:
    """y_t = Σ_s (taps[s] + more[s]_t)·x_{t-s}: x [B, K, T, d], taps [window, K, 1, d], more [window, B, K, T, 1]."""
    return _DynamicShift.apply(x, taps, more, reach)


class _DynamicShift(torch.autograd.Function):
    """Keeps x and the weights, and no shifted copy of x."""

    @staticmethod
    def forward(ctx, x: Tensor, taps: Tensor, more: Tensor, reach: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, taps, more, reach)
        y = (taps[0] + more[0]) * x
        for steps in range(1, len(taps)):
            y = y + (taps[steps] + more[steps]) * shift_back(x, steps, reach)
        return _cast_like(x, y)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, taps, more, reach = ctx.saved_tensors
        g = grads[0].to(torch.promote_types(x.dtype, taps.dtype))
        gx, of_taps, of_more = torch.zeros_like(g), [], []
        for steps in range(len(taps)):
            product = g * shift_back(x, steps, reach)
            of_taps.append(product.sum((0, 2)).unsqueeze(1))
            of_more.append(product.sum(3, keepdim=True))
            ahead = torch.where(_has_earlier(x, steps, reach), (taps[steps] + more[steps]) * g, 0)
            gx = gx + ahead.roll(-steps, 2)
        return gx.to(x.dtype), torch.stack(of_taps).to(taps.dtype), torch.stack(of_more).to(more.dtype), None


def shift_back(x: Tensor, steps: int, reach: Tensor | None) -> Tensor:
    """x_{t - steps}, x [B, K, T, d], or 0 where there is no such token or `reach` [B, T] hides it."""
    # Rolled and hidden, not padded: the compiler makes one kernel of it, without a copy.
    return torch.where(_has_earlier(x, steps, reach), x.roll(steps, 2), 0)


def _has_earlier(x: Tensor, steps: int, reach: Tensor | None) -> Tensor:
    """Whether there is a token `steps` back that `reach` does not hide, [B or 1, 1, T, 1]."""
    seen = torch.arange(x.shape[2], device=x.device)[None] >= steps
    if reach is not None:
        seen = seen & (reach >= steps)
    return seen[:, None, :, None]


class _TracedShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, reach: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, reach)
        current, *others = weight.view(len(weight), x.shape[1], 1, -1).unbind()
        y = current * x
        for steps, tap in enumerate(others, 1):
            y = y + tap * shift_back(x, steps, reach)
        return _cast_like(x, y)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, reach = ctx.saved_tensors
        # In the memory layout of projections, which read the result. [B, T, K, d]
        g, x = (t.transpose(1, 2).to(torch.promote_types(x.dtype, weight.dtype)) for t in (grads[0], x))
        current, *others = weight.view(len(weight), x.shape[2], -1).unbind()
        over = (0, 1) if weight.ndim == 3 else (0, 1, 3)
        gx, gw = current * g, [(g * x).sum(over)]
        # Not the numbers that `back` compares: the compiler would keep those from the forward pass.
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[None]
        for steps, tap in enumerate(others, 1):
            seen = count <= x.shape[1] - steps
            if reach is not None:
                seen = seen & (reach.roll(-steps, 1) >= steps)
            ahead = torch.where(seen[:, :, None, None], g.roll(-steps, 1), 0)
            gx = gx + tap * ahead
            gw.append((ahead * x).sum(over))
        return gx.to(grads[0].dtype).transpose(1, 2), torch.stack(gw).to(weight.dtype), None


def _cast_like(x: Tensor, y: Tensor) -> Tensor:
    """y in the dtype of x."""
    # PyTorch 2.11's compiler loses the gradient of an autograd function that returns a cast which changes nothing.
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _expand_taps(weight: Tensor, width: int) -> Sequence[Tensor]:
    """The taps of each channel, [K·width] each."""
    return (weight.flatten(1) if weight.ndim == 3 else weight.repeat_interleave(width, dim=1)).unbind()


def _mix_taps(x: Tensor, taps: Sequence[Tensor], y: Tensor) -> Tensor:
    """y_t = Σ_s taps[s]·x_{t-s}; x, y [B, T, W], each of the taps [W]."""
    torch.mul(x, taps[0], out=y)
    for back, tap in enumerate(taps[1:], 1):
        y[:, back:].addcmul_(x[:, :-back], tap)
    return y


def _mix_taps_back(g: Tensor, x: Tensor, taps: Sequence[Tensor], gx: Tensor, product: Tensor, gw: Tensor) -> None:
    """The gradients of `_mix_taps`: gx is written, gw [window, W] added to; `product` is working memory."""
    torch.mul(g, taps[0], out=gx)
    # One dimension at a time: PyTorch sums two dimensions of a slice many times more slowly.
    gw[0].add_(torch.mul(g, x, out=product).sum(1).sum(0))
    for back, tap in enumerate(taps[1:], 1):
        gx[:, :-back].addcmul_(g[:, back:], tap)
        gw[back].add_(torch.mul(g[:, back:], x[:, :-back], out=product[:, back:]).sum(1).sum(0))


def _flatten_heads(x: Tensor) -> Tensor:
    """[B, K, T, d] -> [B, T, K·d]."""
    return x.transpose(1, 2).flatten(2)


def _split_heads(x: Tensor, width: int) -> Tensor:
    """[B, T, K·d] -> [B, K, T, d], a view."""
    return x.unflatten(2, (-1, width)).transpose(1, 2)


def _iterate_blocks(x: Tensor, wide: torch.dtype, buffers: int) -> Iterator[tuple[Any, ...]]:
    """Blocks of rows of x [B, K, T, d], and `buffers` buffers [rows, T, K·d] for each."""
    batch, heads, length, width = x.shape
    step = max(1, BLOCK // max(1, heads * length * width)) if x.device.type == "cpu" else max(1, batch)
    for start in range(0, batch, step):
        rows = slice(start, min(start + step, batch))
        yield rows, *get_scratch(buffers, (rows.stop - start, length, heads * width), wide, x)
