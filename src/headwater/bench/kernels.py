"""Our kernels for GPUs and what PyTorch's compiler makes of their plain forms: trials for `headwater bench gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.kernels import PLAIN
from headwater.kernels.gpu import OURS, keys_operation, score_operation
from headwater.nn.position import for_heads, rotate
from headwater.registry import REGISTRY, resolve

# The dtype that training is timed in.
DTYPE = torch.bfloat16
# What rounding may explain: relative differences, root mean square.
ROUNDING = {torch.float32: 1e-5, DTYPE: 1e-2}

Inputs = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class KernelTrial:
    """An operation in both forms.

    ours, plain: functions of the inputs, one tensor after another. inputs: (dtype, device, whether they are large, to
    time, or small, to compare) -> those that have gradients, and the others.
    """

    operation: tuple[Any, ...]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: Callable[[torch.dtype, torch.device, bool], Inputs]

    def difference(self, dtype: torch.dtype, device: torch.device) -> float:
        """The largest relative difference of our output and gradients from those of the plain form in fp64."""
        learned, fixed = self.inputs(dtype, device, False)
        wide = [x.double() if x.is_floating_point() else x for x in fixed]
        expected = _both_ways(self.plain, [x.double() for x in learned], wide)
        found = _both_ways(self.ours, learned, fixed)
        return max(
            float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
        )

    def steps(self, device: torch.device, backend: str) -> dict[str, Callable[[], object]]:
        """By form, a function to time: a forward and a backward pass, compiled."""
        learned, fixed = self.inputs(DTYPE, device, True)
        learned = [x.requires_grad_() for x in learned]
        grad = torch.randn_like(self.ours(*learned, *fixed))

        def step(form: Callable[..., Tensor]) -> Callable[[], object]:
            compiled = torch.compile(form, backend=backend, fullgraph=True)
            return lambda: torch.autograd.grad(compiled(*learned, *fixed), learned, grad)

        return {PLAIN: step(self.plain), OURS: step(self.ours)}


def _both_ways(form: Callable[..., Tensor], learned: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    learned = [x.detach().requires_grad_() for x in learned]
    out = form(*learned, *fixed)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, learned, grad)]


def _plain_form(operation: str) -> Callable[..., Tensor]:
    """Of the mechanism that has it."""
    return next(forms[operation] for name in REGISTRY if operation in (forms := resolve(name).plain_forms()))


def score_trial(pairs: int, numbers: int, score: str, form: str) -> KernelTrial:
    """A score over `pairs` parameter tokens, and the form of its GELU as PyTorch names it. numbers: to time in all."""
    theta = _plain_form("score")

    def inputs(dtype: torch.dtype, device: torch.device, large: bool) -> Inputs:
        draw = torch.Generator(device).manual_seed(0)
        rows = max(1, numbers // pairs) if large else 3
        scores = torch.randn(rows, pairs, generator=draw, device=device, dtype=dtype)
        return [scores], [torch.full((1,), pairs**0.5, device=device)]

    def plain(scores: Tensor, tau: Tensor) -> Tensor:
        return theta(scores, tau, score, form)

    def ours(scores: Tensor, tau: Tensor) -> Tensor:
        return torch.ops.headwater.pattention_score(scores, tau, score, form, 0.0)[0]

    return KernelTrial(score_operation(DTYPE, pairs, score, form), ours, plain, inputs)


def keys_trial(norm: bool, packed: bool, shape: tuple[int, int, int], width: int = 64) -> KernelTrial:
    """Keys that are normed (if `norm`), shifted and turned, in packed rows or whole ones. shape: B, T, K to time."""
    shift, eps = _plain_form("keys"), 1e-5

    def inputs(dtype: torch.dtype, device: torch.device, large: bool) -> Inputs:
        draw = torch.Generator(device).manual_seed(0)
        rows, length, heads = shape if large else (2, 40, 2)
        turned = width if large else width // 4
        x = torch.randn(rows, length, heads, width, generator=draw, device=device, dtype=dtype)
        taps = torch.rand(2, heads, generator=draw, device=device)
        weight = 1 + 0.1 * torch.randn(width, generator=draw, device=device, dtype=dtype)
        slot = torch.arange(length, device=device)
        positions = (slot % (length // 3) if packed else slot)[None].repeat(rows if packed else 1, 1)
        angles = positions[..., None] * 10000.0 ** -(torch.arange(0, turned, 2, device=device) / turned)
        angles = torch.cat((angles, angles), -1)
        cos, sin = for_heads(angles.cos().to(dtype), angles.sin().to(dtype))
        reach = [positions.clamp(max=1).to(torch.int8)] if packed else []
        return [x, taps, weight] if norm else [x, taps], [cos, sin, *reach]

    def plain(x: Tensor, taps: Tensor, *others: Tensor) -> Tensor:
        if norm:
            x, others = nn.functional.rms_norm(x, x.shape[-1:], others[0], eps), others[1:]
        cos, sin, *reach = others
        return rotate(shift(x.transpose(1, 2), taps, *reach), cos, sin)

    def ours(x: Tensor, taps: Tensor, *others: Tensor) -> Tensor:
        weight, others = (others[0], others[1:]) if norm else (None, others)
        cos, sin, *reach = others
        given = reach[0] if reach else None
        return torch.ops.headwater.keys(x, taps, weight, given, cos, sin, norm, eps).transpose(1, 2)

    return KernelTrial(keys_operation(DTYPE, 2, norm, packed), ours, plain, inputs)
