"""When our kernels for GPUs run. They are in Triton, where PyTorch's compiler writes to memory what it need not write.

- `triton_score`: Pattention's score. `triton_keys`: the norm, shift and RoPE of keys.

They run in compiled training only, and only where `headwater bench gpu` has found that on this GPU they agree with the
plain form and take less than 0.9 of the time of what the compiler makes of it. `headwater.kernels.choose` keeps these
times. Where nothing was measured, without Triton, under `torch.use_deterministic_algorithms` (bits depend on a timing),
and with HEADWATER_KERNELS=fixed or =plain, the compiler gets the plain form.

Triton is imported for tensors on a GPU alone; with TRITON_INTERPRET=1, for tests, also for those on a CPU.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from headwater.kernels import applies_traced
from headwater.kernels.choose import bucket, cpu

# Operation -> the module of its kernel. As text: code that is exported with checkpoints goes without them.
MODULES = {"score": "headwater.kernels.triton_score", "keys": "headwater.kernels.triton_keys"}
# The name of our form of an operation.
OURS = "triton"
DTYPES = torch.bfloat16, torch.float16, torch.float32


def score_runs(scores: Tensor, score: str, form: str) -> bool:
    """Whether `torch.ops.headwater.pattention_score` computes Pattention's score of scores [..., n]."""
    return may_run(scores) and _faster(scores.device, score_operation(scores.dtype, scores.shape[-1], score, form))


def keys_run(x: Tensor, window: int, norm: bool, packed: bool) -> bool:
    """Whether `torch.ops.headwater.keys` computes keys from those of a projection, x [B, K, T, d], that `may_run`."""
    return _faster(x.device, keys_operation(x.dtype, window, norm, packed))


def score_operation(dtype: torch.dtype, pairs: int, score: str, form: str) -> tuple[Any, ...]:
    return "score", dtype, score, form, bucket(pairs)


def keys_operation(dtype: torch.dtype, window: int, norm: bool, packed: bool) -> tuple[Any, ...]:
    return "keys", dtype, window, norm, packed


def place(device: torch.device) -> tuple[str, ...]:
    """Everything about a device that its timings may depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()
    return name, torch.__version__, str(torch.version.cuda), triton_version() or "no triton"


def triton_version() -> str | None:
    """Of Triton, if it is installed."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return None


def c_compiler() -> str | None:
    """What Triton builds its launchers with, chosen as it chooses: $CC, else gcc, else clang. None: there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def on(x: Tensor) -> AbstractContextManager[object]:
    """Inside, kernels start on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@lru_cache
def available(operation: str, kind: str) -> bool:
    """Whether the kernel of an operation can run on this kind of device. Then it is imported."""
    if (kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1") or kind not in ("cpu", "cuda"):
        return False
    try:
        import_module(MODULES[operation])
    except ImportError:
        return False
    return True


def may_run(x: Tensor) -> bool:
    """Whether a kernel may run on x at all. Ask this first: it is False at once for uncompiled code."""
    # Not DTensors, which have no rule for these operations, nor programs that run where headwater may not be installed.
    return applies_traced() and not torch.compiler.is_exporting() and type(x) is Tensor and x.dtype in DTYPES


def _faster(device: torch.device, operation: tuple[Any, ...]) -> bool:
    # Only traces come here, when PyTorch's compiler, which takes a second to import, has been imported.
    from headwater.kernels.gpu_choice import faster

    return faster(device, operation)
