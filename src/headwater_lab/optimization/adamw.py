"""AdamW."""

from typing import Any

import torch

from headwater_lab.optimization.registry import register_optimizer


@register_optimizer
def adamw(
    groups: list[dict[str, Any]], *, learning_rate: float, betas: tuple[float, float], epsilon: float
) -> list[torch.optim.Optimizer]:
    """AdamW, fused if available."""
    if not groups:
        return []
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
    return [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)]
