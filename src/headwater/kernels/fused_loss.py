"""Losses of a few rows at a time, without copies of the logits.

`target_log_probabilities` takes logits, on a CPU. `ChunkedLoss` takes what they are computed from. `Divergence` takes
those of two models.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwater.kernels import can_fuse
from headwater.kernels.scratch import get_scratch

# Logits in a block: as many as fit in the CPU's cache.
BLOCK = 2**20


def can_fuse_loss(logits: Tensor) -> bool:
    """Whether `target_log_probabilities` may run."""
    return can_fuse(logits, cpu_only=True) and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)


def target_log_probabilities(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """log softmax(logits)[target] of each row: logits [N, V], targets [N] -> [N, 1] in fp32.

    Rows whose target is `ignored` hold an arbitrary number.
    """
    return _TargetLogProbabilities.apply(logits, targets, ignored)


class _TargetLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        index = torch.where(targets == ignored, 0, targets)[:, None]
        ctx.save_for_backward(logits, index)
        column = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)
        for rows, log_p in _iterate_log_softmax(logits):
            torch.gather(log_p, 1, index[rows], out=column[rows])
        return column

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (g,), (logits, index) = grads, ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows, log_p in _iterate_log_softmax(logits):
            log_p.exp_().mul_(-g[rows]).scatter_add_(1, index[rows], g[rows])
            out[rows] = log_p
        return out, None, None


def _iterate_log_softmax(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows and their log softmax, in fp32 and in working memory."""
    count, size = logits.shape
    step = max(1, BLOCK // size)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        space = get_scratch(1, (rows.stop - start, size), torch.float32, logits)[0]
        wide = logits[rows] if logits.dtype == torch.float32 else space.copy_(logits[rows])
        yield rows, torch.ops.aten._log_softmax.out(wide, 1, False, out=space)


# (hidden [n, D], weight [V, D], targets [n], weight of the z-loss, divisor, softcap, whose gradients are wanted) ->
# sums [2] of the loss and the z-loss, and the gradients of what is minimized.
Differentiate = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


class ChunkedLoss(torch.autograd.Function):
    """A language model's loss and z-loss, whose gradients the forward pass computes, some rows at a time.

    The backward pass multiplies them by the gradient of the loss. It differentiates once, and the z-loss not at all.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        size: int,
        differentiate: Differentiate,
        z_weight: float,
        *settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, D], weight [V, D], targets [N] with -100 where there is none -> loss + z_weight·z-loss, z-loss.

        Both are sums divided by the divisor. size: rows at a time. differentiate: `differentiate_loss`, perhaps
        compiled. settings: its further ones. Under autocast hidden and weight are cast once.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        cast, totals, grad_hidden, grad_weight = weight.to(dtype), [], [], None
        with torch.autocast(kind, enabled=False):
            for rows, chosen in zip(hidden.to(dtype).split(size), targets.split(size), strict=True):
                sums, gx, gw = differentiate(rows, cast, chosen, z_weight, *settings)
                totals.append(sums)
                if gx is not None:
                    grad_hidden.append(gx)
                if gw is not None:  # many chunks are added up in at least fp32
                    wide = gw.to(totals[0].dtype)
                    grad_weight = wide if grad_weight is None else grad_weight.add_(wide)
        ctx.save_for_backward(
            torch.cat(grad_hidden).to(hidden.dtype) if grad_hidden else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
        )
        loss, z_loss = torch.stack(totals).sum(0)
        z_loss = z_loss.clone()
        ctx.mark_non_differentiable(z_loss)
        return loss + z_weight * z_loss, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return *scaled, *[None] * 7


def differentiate_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_weight: float,
    divisor: Tensor,
    cap: float | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `Differentiate`. The gradient of the logits is written over them, in their dtype; all else is in fp32."""
    logits = nn.functional.linear(hidden, weight)
    learns, sums = any(wanted), []
    on_cpu = logits.is_cpu and not torch.compiler.is_compiling()
    step = max(1, BLOCK // len(weight)) if on_cpu else len(logits)
    for block, chosen in zip(logits.split(step), targets.split(step), strict=True):
        wide = block.to(torch.promote_types(block.dtype, torch.float32))
        bent = None if cap is None else (wide / cap).tanh()
        wide = wide if bent is None else cap * bent
        log_p = wide.log_softmax(-1)
        counts = chosen != -100
        index = chosen.where(counts, 0)[:, None]
        factor = counts.to(wide.dtype) / divisor
        target_log_p = log_p.gather(1, index)[:, 0]
        normalizer = wide.gather(1, index)[:, 0] - target_log_p
        sums.append(torch.stack((-(target_log_p * factor).sum(), (normalizer.square() * factor).sum())))
        if learns:
            grad = log_p.exp_().mul_((factor * (1 + 2 * z_weight * normalizer))[:, None])
            grad.scatter_add_(1, index, -factor[:, None])
            block.copy_(grad if bent is None else grad * (1 - bent.square()))
    total = torch.stack(sums).sum(0)
    return total, logits @ weight if wanted[0] else None, logits.T @ hidden if wanted[1] else None


class Divergence(torch.autograd.Function):
    """T²·Σ KL(softmax(targets / T) ‖ softmax(logits / T)) over the tokens `selected` [B, T]; logits, targets [B, T, V].

    Writes its gradient, T·(q - p), in the forward pass.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, selected: Tensor, temperature: float) -> Tensor:
        gradient, sums = torch.empty_like(logits), []
        for row, visible in enumerate(selected):
            log_q, log_p = (scale_log_softmax(x[row], temperature) for x in (logits, targets))
            p = log_p.exp()
            sums.append(((log_p - log_q) * p).sum(-1).masked_fill(~visible, 0.0).sum())
            gradient[row] = log_q.exp_().sub_(p).mul_(temperature).masked_fill_(~visible[:, None], 0.0)
        ctx.save_for_backward(gradient)
        return temperature**2 * torch.stack(sums).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None


def scale_log_softmax(x: Tensor, temperature: float) -> Tensor:
    """log softmax(x / temperature) over the last dimension, in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).div(temperature).log_softmax(-1)
