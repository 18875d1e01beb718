"""Parameter groups, optimisers, clipping, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.precision import KeepsPrecision
from headwater.recipe import Training

# The groups that decay, by the recipe's `weight_decay_on`.
DECAYED = {
    "matrices": ("matrices",),
    "embeddings": ("matrices", "embeddings"),
    "all": ("matrices", "embeddings", "vectors", "scalars"),
}


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_on: Literal["matrices", "embeddings", "all"] = "matrices"
) -> list[dict[str, Any]]:
    """Four groups: "matrices", "embeddings", "vectors" (norms, biases), and the mechanisms' "scalars".

    The last stand apart since they stay fp32, whole in every process. An empty group is left out.
    decay_on: which of them decay, see `DECAYED`. A tied output head is an embedding.
    """
    found: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": [], "scalars": []}
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            if isinstance(module, KeepsPrecision):
                kind = "scalars"
            elif isinstance(module, nn.Embedding):
                kind = "embeddings"
            else:
                kind = "vectors" if parameter.ndim < 2 else "matrices"
            found[kind].append(parameter)
    groups = [
        {"name": kind, "params": parameters, "weight_decay": weight_decay if kind in DECAYED[decay_on] else 0.0}
        for kind, parameters in found.items()
        if parameters
    ]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    grouped = sum(parameter.numel() for parameters in found.values() for parameter in parameters)
    assert grouped == trainable, "the groups must hold every parameter once"
    return groups


def make_optimizers(model: nn.Module, training: Training, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, in its fused form where there is one; with `optimizer: muon`, Muon for the matrices before it.

    Muon (torch.optim.Muon) orthogonalises a matrix's averaged gradient. Its update is scaled to the size of AdamW's
    ("match_rms_adamw"), so that one learning rate and one weight decay fit both.
    """
    groups = parameter_groups(model, training.weight_decay, training.weight_decay_on)
    optimizers: list[torch.optim.Optimizer] = []
    if training.optimizer == "muon":
        matrices = [group for group in groups if group["name"] == "matrices"]
        groups = [group for group in groups if group["name"] != "matrices"]
        if matrices:
            optimizers.append(
                torch.optim.Muon(
                    matrices,
                    lr=training.learning_rate,
                    momentum=training.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
    if groups:
        optimizers.append(
            torch.optim.AdamW(
                groups,
                lr=training.learning_rate,
                betas=training.betas,
                eps=training.epsilon,
                fused=device.type in ("cpu", "cuda"),
            )
        )
    return optimizers


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, 0-d, the same in every process."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # What is split over the processes and what is whole in each are not taken together by PyTorch's own functions.
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    split = [grad for grad in grads if isinstance(grad, DTensor)]
    norms = [nn.utils.get_total_norm(whole)] if whole else []
    if split:
        norms.append(cast(DTensor, nn.utils.get_total_norm(split)).full_tensor())
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])) if len(norms) > 1 else norms[0]


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale the gradient, whose norm is known, down to `limit` if it is longer (as `clip_grad_norm_` does)."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], factor)


def learning_rate(step: int, training: Training) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up, then a half cosine or constant."""
    peak = training.learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    if training.schedule == "constant":
        return peak
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    final = training.final_learning_rate
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))
