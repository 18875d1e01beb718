"""The language-modelling loss over a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.loss.loss_utils import ForCausalLMLoss

from headwater.scratch import scratch

# Logits that are worked on at a time on a CPU, so that they stay in its cache.
BLOCK = 2**20


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss`, the same number, without copies of the logits.

    logits [B, T, V]; labels [B, T]. As written the logits, their widened copy and their logarithmic softmax exist at
    once, and autograd keeps the last; here it keeps the logits, in their own dtype.
    """
    if not _applies(logits):
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = shifted(labels, ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    # A column of logarithms, from which the mean or sum is taken as it would be from the whole matrix.
    column = _Chosen.apply(logits.reshape(-1, vocab_size), targets, ignore_index)
    zeros = torch.where(targets == ignore_index, ignore_index, 0)
    if num_items_in_batch is None:
        return nn.functional.nll_loss(column, zeros, ignore_index=ignore_index)
    loss = nn.functional.nll_loss(column, zeros, ignore_index=ignore_index, reduction="sum")
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def shifted(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels [B, T] -> for each position the label of the next one, `ignore_index` for the last."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def counted(targets: Tensor, num_items: Tensor | int | None = None) -> Tensor | int:
    """What a sum over the tokens is divided by: `num_items`, or the number of targets that count."""
    if num_items is None:
        return (targets != -100).sum()
    return num_items.to(targets.device) if isinstance(num_items, Tensor) else num_items


def squared_normalizers(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of logsumexp(logits)², 0-d, over the tokens that have a target; logits [B, T, V], targets [B, T]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide).logsumexp(-1).square() * (targets != -100)).sum()


def _applies(logits: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and logits.device.type == "cpu"
        and type(logits) is Tensor
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.requires_grad
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _Chosen(torch.autograd.Function):
    """log softmax(logits)[target] of each row: logits [N, V], targets [N] -> [N, 1] in fp32; any where ignored."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        index = torch.where(targets == ignored, 0, targets)[:, None]
        ctx.save_for_backward(logits, index)
        column = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)
        for rows, logarithms in _logarithms(logits):
            torch.gather(logarithms, 1, index[rows], out=column[rows])
        return column

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (g,), (logits, index) = grads, ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows, logarithms in _logarithms(logits):
            logarithms.exp_().mul_(-g[rows]).scatter_add_(1, index[rows], g[rows])
            out[rows] = logarithms
        return out, None, None


def _logarithms(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """log softmax of some rows at a time, in fp32, in working memory."""
    count, size = logits.shape
    step = max(1, BLOCK // size)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        space = scratch(1, (rows.stop - start, size), torch.float32, logits)[0]
        wide = logits[rows] if logits.dtype == torch.float32 else space.copy_(logits[rows])
        yield rows, torch.ops.aten._log_softmax.out(wide, 1, False, out=space)
