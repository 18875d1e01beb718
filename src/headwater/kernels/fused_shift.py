"""The token shift of whole rows, without a padded copy of x or its graph.

`Shift` is for uncompiled code. It works on [B, T, K·d], the memory layout of projections. In half precision the
result is laid out as [B, K, T, d], which attention needs. It takes 0.2 to 0.8 of the plain form's time (AMD Zen 4).

`TracedShift` is for compiled code. Its backward pass is written with gradients shifted the other way, so that the
compiler keeps x and no shifted copy of it, and needs fewer kernels (tests/nn/test_kernel_budget.py counts them).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.kernels.scratch import get_scratch


class Shift(torch.autograd.Function):
    """y_t = Σ_s weight[s]·x_{t-s}, zeros before the first token: x [B, K, T, d], weight [window, K] or with d too.

    It takes a few rows at a time, which stay in the cache.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, taps = torch.promote_types(x.dtype, weight.dtype), _expand_taps(weight, x.shape[-1])
        y = torch.empty_like(x) if wide == x.dtype else x.new_empty(x.shape)
        for x_rows, y_rows in zip(*_split_rows(x, y), strict=True):
            x_BTE = _flatten_heads(x_rows, wide)
            mixed_BTE = torch.mul(x_BTE, taps[0], out=get_scratch(1, x_BTE.shape, wide, x_BTE)[0])
            for back, tap in enumerate(taps[1:], 1):
                mixed_BTE[:, back:].addcmul_(x_BTE[:, :-back], tap)
            y_rows.copy_(_split_heads(mixed_BTE, x.shape[-1]))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide, taps = torch.promote_types(x.dtype, weight.dtype), _expand_taps(weight, x.shape[-1])
        gx_BTE = x.new_empty(len(x), x.shape[2], len(taps[0]))
        gw = torch.zeros(len(taps), len(taps[0]), dtype=wide, device=x.device)
        for x_rows, g_rows, gx_rows in zip(*_split_rows(x, grads[0], gx_BTE), strict=True):
            x_BTE, g_BTE = _flatten_heads(x_rows, wide), _flatten_heads(g_rows, wide)
            mixed_BTE, product_BTE = get_scratch(2, x_BTE.shape, wide, x_BTE)
            torch.mul(g_BTE, taps[0], out=mixed_BTE)
            # Sum one dimension at a time: PyTorch takes many times longer to sum two dimensions of a slice at once.
            gw[0].add_(torch.mul(g_BTE, x_BTE, out=product_BTE).sum(1).sum(0))
            for back, tap in enumerate(taps[1:], 1):
                mixed_BTE[:, :-back].addcmul_(g_BTE[:, back:], tap)
                gw[back].add_(torch.mul(g_BTE[:, back:], x_BTE[:, :-back], out=product_BTE[:, back:]).sum(1).sum(0))
            gx_rows.copy_(mixed_BTE)
        gw = gw.unflatten(1, (-1, x.shape[-1]))
        return _split_heads(gx_BTE, x.shape[-1]), (gw if weight.ndim == 3 else gw.sum(2)).to(weight.dtype)


def shift_back(x: Tensor, steps: int, reach: Tensor | None) -> Tensor:
    """x_{t - steps}, x [B, K, T, d], or 0 where there is no such token or `reach` [B, T] hides it."""
    is_visible = torch.arange(x.shape[2], device=x.device)[None] >= steps
    if reach is not None:
        is_visible = is_visible & (reach >= steps)
    # Roll and mask instead of padding: the compiler makes a single kernel of this, without a copy.
    return torch.where(is_visible[:, None, :, None], x.roll(steps, 2), 0)


class TracedShift(torch.autograd.Function):
    """`Shift` for the compiler; a token at t with reach[t] < s, [B, T], has no token s back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, reach: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, reach)
        current, *taps = weight.view(len(weight), x.shape[1], 1, -1).unbind()
        y = current * x
        for steps, tap in enumerate(taps, 1):
            y = y + tap * shift_back(x, steps, reach)
        # PyTorch 2.11's compiler loses the gradient of an autograd function that returns a cast which changes nothing.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, reach = ctx.saved_tensors
        # Work in the memory layout of projections, which read the result: [B, T, K, d].
        g, x = (t.transpose(1, 2).to(torch.promote_types(x.dtype, weight.dtype)) for t in (grads[0], x))
        current, *taps = weight.view(len(weight), x.shape[2], -1).unbind()
        gx, products = current * g, [g * x]
        # Count anew and not with the forward pass's numbers, which the compiler would then save.
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[None]
        for steps, tap in enumerate(taps, 1):
            is_visible = count <= x.shape[1] - steps
            if reach is not None:
                is_visible = is_visible & (reach.roll(-steps, 1) >= steps)
            ahead = torch.where(is_visible[:, :, None, None], g.roll(-steps, 1), 0)
            gx = gx + tap * ahead
            products.append(ahead * x)
        if weight.ndim == 2:  # sum each head's channels first, in the kernel that writes gx
            gw = torch.stack([product.sum(3) for product in products]).sum((1, 2))
        else:
            gw = torch.stack([product.sum((0, 1)) for product in products])
        return gx.to(grads[0].dtype).transpose(1, 2), gw.to(weight.dtype), None


def _expand_taps(weight: Tensor, width: int) -> tuple[Tensor, ...]:
    """The taps of each channel, [K·width] each."""
    return (weight.flatten(1) if weight.ndim == 3 else weight.repeat_interleave(width, dim=1)).unbind()


def _split_rows(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Split the tensors into the same rows, [rows, …], of about 2^20 numbers at a time."""
    return [x.split(max(1, 2**20 * len(x) // max(1, x.numel()))) for x in tensors]


def _flatten_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K, T, d] -> [B, T, K·d], in `dtype`."""
    return x.transpose(1, 2).to(dtype).flatten(2)


def _split_heads(x: Tensor, width: int) -> Tensor:
    """[B, T, K·d] -> [B, K, T, d], a view."""
    return x.unflatten(2, (-1, width)).transpose(1, 2)
