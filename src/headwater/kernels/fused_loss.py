"""The log-probabilities of target tokens on a CPU, one block of rows at a time and without copies of the logits."""

from collections.abc import Iterator

import torch
from torch import Tensor

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
