"""Working memory that is used again: fresh memory costs page faults, longer than the work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_kept = threading.local()


def scratch(count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` uninitialised tensors of `shape`, stacked. They are good until this thread asks again."""
    size = (count, *shape)
    if device.type != "cpu":  # other devices' allocators keep their memory themselves
        return torch.empty(size, dtype=dtype, device=device)
    memory: dict[torch.dtype, Tensor] = _kept.__dict__.setdefault("memory", {})
    if dtype not in memory or memory[dtype].numel() < prod(size):
        memory[dtype] = torch.empty(prod(size), dtype=dtype)
    return memory[dtype][: prod(size)].view(size)
