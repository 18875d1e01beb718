"""Muon, batched over all matrices of one shape."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwater_lab.optimization.adamw import adamw
from headwater_lab.optimization.registry import register_optimizer
from headwater_lab.optimization.tensors import list_gradients, local_shard

# Newton-Schulz applies this quintic polynomial five times. It is steep at 0, and values near 1 stay only roughly at 1.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for matrices; updates have the size of AdamW's, so one learning rate fits both.

    Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); learning rate and weight decay as
    in Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, sections 2.2 and 2.3:

        M ← μM + (1 - μ)G        O = NewtonSchulz5(μM + (1 - μ)G)        W ← W - η(0.2·√max(rows, columns)·O + λW)

    `torch.optim.Muon` takes one matrix after another, and under FSDP2 every process orthogonalizes all of them. Here
    all matrices of one shape are one batched product, and under FSDP2 each process orthogonalizes a share of them,
    unsharded, and sends the rows back to their owners.

    Its state is the same as in `torch.optim.Muon`: "momentum_buffer" for each parameter. Like a fused optimizer it
    changes nothing if `found_inf`, 0-d, is 1.
    """

    # Tells GradScaler and the training loop that this optimizer can skip a step on the device.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self, params: Sequence[dict[str, Any]], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        """Take `params`, groups of two-dimensional parameters."""
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        assert all(parameter.ndim == 2 for group in self.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            by_kind: dict[tuple, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    split = parameter.device_mesh if isinstance(parameter, DTensor) else None
                    kind = parameter.shape, parameter.dtype, parameter.device, split
                    by_kind.setdefault(kind, []).append(parameter)
            for parameters in by_kind.values():
                self._step_alike(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_alike(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        weights = [local_shard(parameter) for parameter in parameters]
        buffers = [local_shard(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        grads = [local_shard(grad) for grad in list_gradients(parameters)]
        finite: Tensor | float = 1.0
        if self.found_inf is not None:
            finite = 1.0 - self.found_inf
            # A non-finite gradient must not reach the momentum. Multiplying it by zero would give NaN.
            grads = [torch.where(finite > 0, grad, 0) for grad in grads]
        differences = torch._foreach_sub(grads, buffers)
        torch._foreach_mul_(differences, (1 - momentum) * finite)
        torch._foreach_add_(buffers, differences)
        updates = _orthogonalize_updates(parameters[0], torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
        size = 0.2 * max(parameters[0].shape) ** 0.5
        torch._foreach_mul_(weights, 1 - lr * weight_decay * finite)
        torch._foreach_add_(weights, list((updates.to(weights[0].dtype) * (-lr * size * finite)).unbind()))


def newton_schulz(matrices: Tensor) -> Tensor:
    """U·S·Vᵀ -> U·S'·Vᵀ with S' near 1, in bfloat16; matrices [N, rows, columns]."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def _orthogonalize_updates(like: nn.Parameter, updates: Tensor) -> Tensor:
    """Orthogonalize `updates` [N, rows, columns] of N parameters such as `like`; if sharded, return only our rows."""
    if not isinstance(like, DTensor):
        return newton_schulz(updates)
    assert like.placements == (Shard(0),), "FSDP2 splits the rows"
    group = like.device_mesh.get_group()
    world = dist.get_world_size(group)
    count, (rows, columns) = len(updates), like.shape
    per_process, share = -(-count // world), -(-rows // world)  # matrices; rows, except for the last processes
    # Exchange in bfloat16, the iteration's dtype, padded with zeros.
    padded = updates.new_zeros(per_process * world, share, columns, dtype=torch.bfloat16)
    padded[:count, : updates.shape[1]] = updates
    matrices = torch.empty_like(padded)
    dist.all_to_all_single(matrices, padded, group=group)
    matrices = matrices.view(world, per_process, share, columns).transpose(0, 1)
    result = padded.new_zeros(per_process, world * share, columns)
    result[:, :rows] = newton_schulz(matrices.reshape(per_process, world * share, columns)[:, :rows])
    shards = result.view(per_process, world, share, columns).transpose(0, 1).reshape(padded.shape).contiguous()
    orthogonal = torch.empty_like(shards)
    dist.all_to_all_single(orthogonal, shards, group=group)
    return orthogonal[:count, : updates.shape[1]]


@register_optimizer
def muon(
    groups: list[dict[str, Any]],
    *,
    learning_rate: float,
    momentum: float,
    betas: tuple[float, float],
    epsilon: float,
) -> list[torch.optim.Optimizer]:
    """Muon, which orthogonalizes a matrix's averaged gradient, for the matrices, and AdamW for the rest."""
    matrices = [group for group in groups if group["name"] == "matrices"]
    optimizers = [Muon(matrices, lr=learning_rate, momentum=momentum)] if matrices else []
    remaining = [group for group in groups if group["name"] != "matrices"]
    return [*optimizers, *adamw(remaining, learning_rate=learning_rate, betas=betas, epsilon=epsilon)]
