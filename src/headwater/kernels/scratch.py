"""Reused memory: on a CPU, the page faults of fresh memory take longer than an elementwise operation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

_memory = threading.local()
# The most numbers of one dtype that a thread keeps; for more, the work outweighs the page faults.
KEEP = 2**23


def get_scratch(count: int, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """`count` stacked uninitialized tensors of `shape` on the device of `like`, valid until the thread's next call."""
    size = (count, *shape)
    # Other devices' allocators reuse memory themselves; subclasses (fake tensors) need tensors of their own class.
    if like.device.type != "cpu" or type(like) not in (Tensor, nn.Parameter) or prod(size) > KEEP:
        return like.new_empty(size, dtype=dtype)
    memory: dict[torch.dtype, Tensor] = _memory.__dict__.setdefault("memory", {})
    if dtype not in memory or memory[dtype].numel() < prod(size):
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written to outside it
            memory[dtype] = torch.empty(prod(size), dtype=dtype, device="cpu")
    return memory[dtype][: prod(size)].view(size)
