"""Kernels of ours for GPUs, in Triton: when they run.

There are two, `triton_score` and `triton_keys`, where PyTorch's compiler writes intermediate results to memory that a
kernel need not. They run in compiled training only, and only where `headwater bench gpu` has measured on this GPU that
they give the same result and take less than 0.9 of the time of what the compiler makes of the plain form. It keeps the
times beside those of `headwater.kernels.choose`. Without them, without Triton, or under
`torch.use_deterministic_algorithms` (bits would depend on a timing), the plain form runs.

Triton is imported only for tensors on a GPU, or, for the tests, on a CPU under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from headwater.kernels import MEASURED, applies_traced, choose, mode

DTYPES = torch.bfloat16, torch.float16, torch.float32


def on(x: Tensor) -> AbstractContextManager[object]:
    """Launches kernels on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def runs_on(device: torch.device) -> bool:
    """Whether Triton is there, and can run on this kind of device."""
    return can_run(device.type)


@lru_cache
def can_run(kind: str) -> bool:
    """Whether Triton is installed, and runs on this kind of device."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (kind == "cuda" or (kind == "cpu" and interpreted)) and find_spec("triton") is not None
