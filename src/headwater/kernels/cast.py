"""Under autocast, one cast of x for several linear layers: otherwise each casts and stores its own copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor

from headwater.kernels import can_fuse


def share_cast(x: Tensor, count: int) -> Iterator[Tensor]:
    """x, `count` times, for that many linear layers; under autocast in its dtype, sharing memory."""
    if (
        can_fuse(x)
        and x.dtype == torch.float32
        and x.device.type != "meta"
        and torch.is_autocast_enabled(x.device.type)
    ):
        return iter(_Cast.apply(x, torch.get_autocast_dtype(x.device.type), count))
    return repeat(x, count)


class _Cast(torch.autograd.Function):
    """Copies of x in another dtype; their gradients are added up in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        y = x.to(dtype)
        return tuple(y.detach() for _ in range(count))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        first, *rest = grads
        total = first.to(ctx.dtype)
        for g in rest:
            total += g
        return total, None, None
