"""Losses of a few rows at a time, without copies of the logits.

`target_log_probabilities` takes logits, on a CPU. `ChunkedLoss` takes what they are computed from, by a model and its
teacher.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.kernels import can_fuse
from headwater.kernels.scratch import get_scratch

# Logits in a block: as many as fit in the CPU's cache.
BLOCK = 2**20

# Tokens at a time where a model learns from a teacher.
DISTILLED_CHUNK = 1024


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


class SoftTargets(NamedTuple):
    """A teacher's predictions (arXiv 1503.02531). With them, what is minimized is

        (1 - share)·(loss + z_weight·z-loss) + share·T²·KL(p ‖ q)        p, q = softmax(logits / T)

    with p of the teacher, q of the model. hidden: [B, T, D], the input of the teacher's output head; weight: [V, D];
    cap: its softcap.
    """

    hidden: Tensor
    weight: Tensor
    cap: float | None
    share: float
    temperature: float

    def cast(self, device: str) -> "SoftTargets":
        """Return them by rows, hidden [N, D], in the dtype in which the teacher computes its logits."""
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        return self._replace(hidden=self.hidden.flatten(0, -2).to(dtype), weight=self.weight.to(dtype))


# (hidden [n, D], weight [V, D], targets [n], soft targets, weight of the z-loss, divisor, softcap, whose gradients are
# wanted) -> sums [3] of the loss, the z-loss and the divergence, and the gradients of what is minimized.
Differentiate = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


class ChunkedLoss(torch.autograd.Function):
    """A language model's losses, whose gradients the forward pass computes, some rows at a time.

    The backward pass multiplies them by the gradient of the first. It differentiates once, and the others not at all.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        soft: SoftTargets | None,
        size: int,
        differentiate: Differentiate,
        z_weight: float,
        *settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, D], weight [V, D], targets [N] with -100 where there is none -> what is minimized, and [3]: the
        loss, the z-loss and the divergence, 0 without soft targets.

        All are sums divided by the divisor. size: rows at a time. differentiate: `differentiate_loss`, perhaps
        compiled. settings: its further ones. Under autocast hidden and weight are cast once.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        cast, totals, grad_hidden, grad_weight = weight.to(dtype), [], [], None
        taught = None if soft is None else soft.cast(kind)
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                lesson = None if taught is None else taught._replace(hidden=taught.hidden[rows])
                sums, gx, gw = differentiate(hidden[rows].to(dtype), cast, targets[rows], lesson, z_weight, *settings)
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
        parts = torch.stack(totals).sum(0)
        ctx.mark_non_differentiable(parts)
        loss, z_loss, divergence = parts
        objective = loss + z_weight * z_loss
        if soft is not None:
            objective = (1 - soft.share) * objective + soft.share * divergence
        return objective, parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return *scaled, *[None] * 8


def differentiate_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    soft: SoftTargets | None,
    z_weight: float,
    divisor: Tensor,
    cap: float | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `Differentiate`. The gradient of the logits is written over them, in their dtype; all else is in fp32."""
    logits = nn.functional.linear(hidden, weight)
    taught = None if soft is None else nn.functional.linear(soft.hidden, soft.weight)
    learns, sums = any(wanted), []
    on_cpu = logits.is_cpu and not torch.compiler.is_compiling()
    step = max(1, BLOCK // len(weight)) if on_cpu else len(logits)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        wide, bent = _widen(logits[rows], cap)
        counts = targets[rows] != -100
        index = targets[rows].where(counts, 0)[:, None]
        factor = counts.to(wide.dtype) / divisor
        divergence, pull = factor.new_zeros(()), None
        if soft is not None and taught is not None:
            divergence, pull = _diverge(wide, _widen(taught[rows], soft.cap)[0], soft.temperature)
        log_p = wide.log_softmax(-1)
        target_log_p = log_p.gather(1, index)[:, 0]
        normalizer = wide.gather(1, index)[:, 0] - target_log_p
        parts = (-target_log_p, normalizer.square(), divergence)
        sums.append(torch.stack([(part * factor).sum() for part in parts]))
        if learns:
            grad = log_p.exp_().mul_((factor * (1 + 2 * z_weight * normalizer))[:, None])
            grad.scatter_add_(1, index, -factor[:, None])
            if soft is not None and pull is not None:
                grad = grad.mul_(1 - soft.share).add_(pull.mul_(soft.share * factor[:, None]))
            logits[rows] = grad if bent is None else grad * (1 - bent.square())
    total = torch.stack(sums).sum(0)
    return total, logits @ weight if wanted[0] else None, logits.T @ hidden if wanted[1] else None


def _widen(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return logits with the softcap, in fp32 or wider, and the softcap's tanh."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cap is None:
        return wide, None
    bent = (wide / cap).tanh()
    return cap * bent, bent


def _diverge(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """T²·KL(softmax(targets / T) ‖ softmax(logits / T)) of each row, [N], and its gradient, T·(q - p), [N, V]."""
    log_q, log_p = (x.div(temperature).log_softmax(-1) for x in (logits, targets))
    p = log_p.exp()
    divergence = temperature**2 * (log_p.sub_(log_q).mul_(p)).sum(-1)
    return divergence, log_q.exp_().sub_(p).mul_(temperature)
