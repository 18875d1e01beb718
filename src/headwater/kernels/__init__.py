"""Kernels: faster forms of a few operations, the guard that decides when they run, and the switch that turns them off.

Each operation also has a plain form in PyTorch, in a mechanism's file or in `nn`. There are two kinds of kernel.

- Autograd functions, a file each: `rotary`, `activation`, and `fused_shift`, `_pattention`, `_norm` and `_loss`. They
  use fewer of PyTorch's operations or store less, where `can_fuse` allows it (`can_fuse_traced` for compiled code).
  `ChunkedLoss` runs wherever chunks are asked for.
- Forms chosen by timing, `fused_linear` and `fused_attention`: while a model generates on a CPU, `autotune` runs the
  one that was fastest on this machine, where `can_autotune` allows it.

The environment variable HEADWATER_KERNELS switches both on ("measured", the default) or off ("plain"). In Python,
`disable_kernels()` switches them off.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from headwater.util.errors import HeadwaterError

VARIABLE = "HEADWATER_KERNELS"
MEASURED, PLAIN = "measured", "plain"

# Process-wide, because activations recomputed in another thread must use the same form.
_disabled: bool | None = None  # None: HEADWATER_KERNELS has not been read yet


def are_disabled() -> bool:
    """Whether kernels are off: by `disable_kernels`, or by HEADWATER_KERNELS=plain when the process first used one.

    Raises `HeadwaterError` for an unknown value of the variable.
    """
    global _disabled
    if _disabled is None:
        value = os.environ.get(VARIABLE) or MEASURED
        if value not in (MEASURED, PLAIN):
            raise HeadwaterError(f"The environment variable {VARIABLE} is {value!r}; set it to {MEASURED} or {PLAIN}.")
        _disabled = value == PLAIN
    return _disabled


@contextmanager
def disable_kernels() -> Iterator[None]:
    """Run every operation inside in its plain form, in all threads of the process.

    A backward pass that recomputes activations must run inside as well.
    """
    global _disabled
    old_state, _disabled = are_disabled(), True
    try:
        yield
    finally:
        _disabled = old_state


def can_fuse(*tensors: Tensor | None, needs_grad: bool = True, cpu_only: bool = False) -> bool:
    """Whether an autograd function may run on these tensors; otherwise the plain form must.

    Autograd functions compute first derivatives of ordinary tensors. So the plain form runs under `torch.compile` and
    `torch.export`, `torch.jit.trace`, functorch (`torch.func.vmap`, `grad`, …) and forward-mode autograd, for fake
    tensors, DTensors and other subclasses, and where kernels are switched off.

    needs_grad: it helps only while autograd records operations on one of them. cpu_only: it helps only on a CPU.
    """
    if torch.compiler.is_compiling():  # first, because the calls below cannot be traced
        return False
    if needs_grad and not torch.is_grad_enabled():  # early, because every decoding step asks this many times
        return False
    if needs_grad and not any(x is not None and x.requires_grad for x in tensors):
        return False
    return are_ordinary(*tensors, cpu_only=cpu_only) and not torch.jit.is_tracing() and _can_run()


def can_fuse_traced() -> bool:
    """Whether an autograd function that is written for the compiler may run: where `torch.compile` traces training."""
    return torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and _can_run()


def can_autotune() -> bool:
    """Whether a generation that begins now may run forms chosen by timing.

    Not under dispatch modes, such as counters of operations, nor under `torch.use_deterministic_algorithms`.
    """
    is_restricted = torch._C._len_torch_dispatch_stack() > 0 or torch.are_deterministic_algorithms_enabled()
    return not is_restricted and not torch.jit.is_tracing() and _can_run()


def are_ordinary(*tensors: Tensor | None, cpu_only: bool = False) -> bool:
    """Whether none of these is a tensor subclass and, with cpu_only, all are on a CPU."""
    for x in tensors:
        if x is not None and type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
        if cpu_only and x is not None and not x.is_cpu:
            return False
    return True


def _can_run() -> bool:
    """Whether kernels are on, without functorch or forward-mode autograd."""
    in_transform = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not in_transform and not are_disabled()
