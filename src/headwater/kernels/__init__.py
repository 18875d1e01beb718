"""Kernels: faster forms of a few operations, the guard that decides when they run, and the switch that turns them off.

Each operation also has a plain form in PyTorch, in a mechanism's file or in `nn`. There are two kinds of kernel.

- Autograd functions, a file each: `rotary`, `shift`, `pattention`, `weighted_sum`, `norm`, `activation`, `cast` and
  `loss`. They use fewer of PyTorch's operations and store less for the backward pass. They run wherever `applies`
  allows it (`applies_traced` the one for compiled code), and agree with the plain form up to rounding.
- Forms chosen by timing, `linear` and `attention`: while a model generates on a CPU, `choose` runs the one that was
  fastest on this machine.

The environment variable HEADWATER_KERNELS switches both on ("measured", the default) or off ("plain"). In Python,
`plain()` switches them off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from headwater.util.errors import HeadwaterError

VARIABLE = "HEADWATER_KERNELS"
MEASURED, PLAIN = "measured", "plain"

# Whether kernels are off. Process-wide, because activations recomputed in another thread must use the same form.
_off: bool | None = None  # None: HEADWATER_KERNELS has not been read yet


def off() -> bool:
    """Whether kernels are off: by `plain`, or by HEADWATER_KERNELS=plain when the process first used a kernel.

    Raises `HeadwaterError` for an unknown value of the variable.
    """
    global _off
    if _off is None:
        value = os.environ.get(VARIABLE) or MEASURED
        if value not in (MEASURED, PLAIN):
            raise HeadwaterError(f"The environment variable {VARIABLE} is {value!r}; set it to {MEASURED} or {PLAIN}.")
        _off = value == PLAIN
    return _off


@contextmanager
def plain() -> Iterator[None]:
    """Inside, every operation runs in its plain form, in all threads of the process.

    A backward pass that recomputes activations must run inside as well.
    """
    global _off
    before, _off = off(), True
    try:
        yield
    finally:
        _off = before


def applies(*tensors: Tensor | None, needs_grad: bool = True, cpu_only: bool = False) -> bool:
    """Whether an autograd function may run on these tensors; otherwise the plain form must.

    Autograd functions compute first derivatives of ordinary tensors. So the plain form runs under `torch.compile` and
    `torch.export`, `torch.jit.trace`, functorch (`torch.func.vmap`, `grad`, …) and forward-mode autograd, for fake
    tensors, DTensors and other subclasses, and where kernels are switched off.

    needs_grad: it helps only while autograd records. cpu_only: it helps only on a CPU.
    """
    if torch.compiler.is_compiling():  # first: what follows cannot be traced
        return False
    if needs_grad and not torch.is_grad_enabled():  # soon, because every decoding step asks this many times
        return False
    for x in tensors:
        if x is not None and type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
        if cpu_only and x is not None and not x.is_cpu:
            return False
    return not torch.jit.is_tracing() and _ordinary()


def applies_traced() -> bool:
    """Whether an autograd function that is written for the compiler may run: where `torch.compile` traces training."""
    return torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and _ordinary()


def _ordinary() -> bool:
    """No functorch, no forward-mode autograd, and kernels are on."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0 and not off()
