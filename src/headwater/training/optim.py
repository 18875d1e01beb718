"""Parameter groups, optimiser, learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from headwater.precision import KeepsPrecision
from headwater.recipe import Training


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices, which decay, and the rest (norms, biases, embeddings, mechanism scalars), which do not."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            is_matrix = parameter.ndim >= 2 and not isinstance(module, nn.Embedding | KeepsPrecision)
            (decayed if is_matrix else kept).append(parameter)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(p.numel() for p in decayed + kept) == trainable, "the groups must hold every parameter once"
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, training: Training, device: torch.device) -> torch.optim.AdamW:
    """AdamW, in its fused form where there is one."""
    return torch.optim.AdamW(
        parameter_groups(model, training.weight_decay),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.epsilon,
        fused=device.type in ("cpu", "cuda"),
    )


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
