"""Working memory that is used again: fresh memory costs page faults, which on a CPU take longer than the work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

_kept = threading.local()
# Numbers of one dtype that a thread keeps at most; for more the work outweighs the page faults.
KEEP = 2**23


def scratch(count: int, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """`count` uninitialised tensors of `shape` on the device of `like`, stacked. Good until this thread asks again."""
    size = (count, *shape)
    # Other devices' allocators keep their memory themselves; tensors of other classes (fake ones) want their own kind.
    if like.device.type != "cpu" or type(like) not in (Tensor, nn.Parameter) or prod(size) > KEEP:
        return like.new_empty(size, dtype=dtype)
    memory: dict[torch.dtype, Tensor] = _kept.__dict__.setdefault("memory", {})
    if dtype not in memory or memory[dtype].numel() < prod(size):
        with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside of it
            memory[dtype] = torch.empty(prod(size), dtype=dtype, device="cpu")
    return memory[dtype][: prod(size)].view(size)
