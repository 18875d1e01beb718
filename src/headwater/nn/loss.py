"""The losses: of language models, and of classifiers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from headwater.kernels.fused_loss import can_fuse_loss, target_log_probabilities
from headwater.nn.checks import require_all
from headwater.util.errors import HeadwaterError


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss`: the same number, on a CPU without copies of the logits.

    logits [B, T, V]; labels [B, T]; returns a scalar. The kernel keeps only the logits, in their own dtype.
    """
    if not can_fuse_loss(logits):
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = shift_targets(labels, ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    # The loss of one column of log-probabilities has the same reduction as that of the whole matrix.
    column = target_log_probabilities(logits.reshape(-1, vocab_size), targets, ignore_index)
    zeros = torch.where(targets == ignore_index, ignore_index, 0)
    if num_items_in_batch is None:
        return nn.functional.nll_loss(column, zeros, ignore_index=ignore_index)
    loss = nn.functional.nll_loss(column, zeros, ignore_index=ignore_index, reduction="sum")
    return loss / count_targets(targets, num_items_in_batch)


def shift_targets(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels [B, T] -> for each position the label of the next one, `ignore_index` for the last."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def count_targets(targets: Tensor, num_items: Tensor | int | None = None) -> Tensor | int:
    """Find the divisor of a sum over the tokens: `num_items`, or the number of targets that count."""
    if num_items is None:
        return (targets != -100).sum()
    return num_items.to(targets.device) if isinstance(num_items, Tensor) else num_items


def squared_normalizers(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum logsumexp(logits)², 0-d, over the tokens that have a target; logits [B, T, V], targets [B, T]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide).logsumexp(-1).square() * (targets != -100)).sum()


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy of logits [B, classes], in at least fp32.

    labels: [B], numbers of classes, or [B, classes], probabilities. Raises `HeadwaterError` for others; on a GPU an
    assertion fails later.
    """
    rows, classes = logits.shape
    labels = labels.to(logits.device)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if labels.is_floating_point() and labels.shape == logits.shape:
        # The tolerance allows for rounding: a thousand probabilities in half precision need not add up to one.
        sums = labels.sum(-1, dtype=logits.dtype)
        require_all(
            ((sums - 1).abs() < 0.05) & (labels >= 0).all(-1), "The probabilities of an image must add up to 1."
        )
        return nn.functional.cross_entropy(logits, labels.to(logits.dtype))
    if labels.is_floating_point() or labels.shape != (rows,):
        raise HeadwaterError(
            f"labels must be [{rows}] whole numbers, or [{rows}, {classes}] probabilities, not {list(labels.shape)} "
            f"of {labels.dtype}."
        )
    require_all(
        (labels >= 0) & (labels < classes),
        f"A label is out of range: this model has {classes} classes, 0 to {classes - 1}; correct the labels, or set "
        "num_labels.",
    )
    return nn.functional.cross_entropy(logits, labels.long())
