"""AdamW for large tables of which a step reads few rows: gradients and steps of these rows only.

    m ← β1^k·m + (1 - β1)·g        v ← β2^k·v + (1 - β2)·g²        w ← (1 - ηλ)·w - η·m̂ / (√v̂ + ε)

for the rows that the step's tokens have read, k steps after they were read last; m̂ and v̂ are corrected for the step's
number, as in AdamW (arXiv 1711.05101). So m and v are AdamW's at every step that reads a row. What is left out are the
moves of rows that nothing has read, which AdamW makes with what remains of m, and their weight decay. Where every step
reads every row, it is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.mechanisms.base import Mechanism


def tables(model: nn.Module) -> list[nn.Embedding]:
    """The tables in which mechanisms look tokens up."""
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    held = dict.fromkeys(module for mechanism in mechanisms for module in mechanism.modules())
    return [module for module in held if isinstance(module, nn.Embedding)]


class SparseAdamW(torch.optim.Optimizer):
    """AdamW of the rows that a step has read; departures from it at the head of this file.

    Its state for each parameter: "step", 0-d; "exp_avg" and "exp_avg_sq", like the parameter, and "last_read" [rows],
    the step that last read each row. Like a fused optimizer it changes nothing if `found_inf`, 0-d, is 1.
    """

    # How GradScaler and our loop tell that an optimizer can skip a step on the device.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; closure: recomputes the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, parameter.grad, group)
        return loss

    def _step_of(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["last_read"] = torch.zeros(len(parameter), dtype=torch.int64, device=parameter.device)
        rows, grad = rows_of(gradient)
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        taken = torch.ones_like(state["step"]) if self.found_inf is None else 1 - self.found_inf.to(state["step"])
        step = state["step"] + 1

        def put(held: Tensor, new: Tensor) -> None:
            """Write rows, unless the step is to change nothing."""
            held.index_copy_(0, rows, torch.where(taken > 0, new.to(held.dtype), held[rows]))

        missed = (step - state["last_read"][rows]).unsqueeze(1)
        mean = state["exp_avg"][rows].to(grad) * (first**missed).to(grad) + (1 - first) * grad
        square = state["exp_avg_sq"][rows].to(grad) * (second**missed).to(grad) + (1 - second) * grad * grad
        bias, root = (1 - first**step).to(grad), (1 - second**step).to(grad).sqrt()
        move = group["lr"] * (mean / bias) / (square.sqrt() / root + group["eps"])
        put(parameter, parameter[rows].to(grad) * (1 - group["lr"] * group["weight_decay"]) - move)
        put(state["exp_avg"], mean)
        put(state["exp_avg_sq"], square)
        put(state["last_read"], step.to(torch.int64).expand(len(rows)))
        state["step"] += taken


def rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have a gradient, [n], each once, and their gradients [n, numbers]."""
    if not grad.is_sparse:
        return torch.arange(len(grad), device=grad.device), grad
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
