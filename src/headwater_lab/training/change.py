"""How much growing, retrofitting or converting a model has changed what it computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError


@torch.no_grad()
def measure_change(before: PreTrainedModel, after: PreTrainedModel, input_ids: Tensor) -> dict[str, float]:
    """How much two models differ on `input_ids` [B, T], T ≥ 2, or on images [B, C, H, W], without dropout.

    logits: the largest difference of logits, relative to the largest logit of `before`. kl: the mean over tokens or
    images of the Kullback-Leibler divergence of `after`'s distribution from `before`'s, in nats. Of text also
    loss_before, loss_after: the mean loss of predicting the next token, in nats.

    Raises `HeadwaterError` for rows of one token, and for models of different vocabularies or classes.
    """
    of_images = input_ids.is_floating_point()
    if not of_images and input_ids.shape[1] < 2:
        raise HeadwaterError("Rows of one token have no next one to predict; pass rows of two or more.")
    modes = {model: model.training for model in (before, after)}
    try:
        rows = [_compare(before.eval(), after.eval(), row[None]) for row in input_ids]
    finally:
        for model, mode in modes.items():
            model.train(mode)
    difference, largest, kl, *losses = zip(*rows, strict=True)
    means = (sum(values) / len(rows) for values in (kl, *losses))
    names = ("logits", "kl") if of_images else ("logits", "kl", "loss_before", "loss_after")
    return dict(zip(names, (_divide(max(difference), max(largest)), *means), strict=True))


def _divide(largest: float, scale: float) -> float:
    return largest / scale if scale else math.inf if largest else 0.0


def _compare(before: PreTrainedModel, after: PreTrainedModel, ids: Tensor) -> tuple[float, ...]:
    """One row: largest difference, largest logit, mean divergence, and of text both losses."""
    if of_images := ids.is_floating_point():
        logits = [model(pixel_values=ids.to(model.device)).logits for model in (before, after)]
    else:
        logits = [model(ids.to(model.device), use_cache=False).logits[0] for model in (before, after)]
    old, new = (x.to(logits[0].device, torch.promote_types(x.dtype, torch.float32)) for x in logits)
    if old.shape != new.shape:
        raise HeadwaterError(
            f"The models' vocabularies have {old.shape[-1]} and {new.shape[-1]} tokens, so they cannot be compared; "
            f"use two with the same vocabulary."
            if not of_images
            else f"The models have {old.shape[-1]} and {new.shape[-1]} classes, so they cannot be compared; use two "
            "with the same classes."
        )
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    losses = []
    if not of_images:
        losses = [nn.functional.nll_loss(x[:-1], ids[0, 1:].to(p.device)) for x in (p, q)]
    measured = ((old - new).abs().max(), old.abs().max(), (p.exp() * (p - q)).sum(-1).mean(), *losses)
    return tuple(value.item() for value in measured)
