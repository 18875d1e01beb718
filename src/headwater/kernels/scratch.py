"""Reused memory: on a CPU, the page faults of fresh memory take longer than an elementwise operation.

Also a measurement of what autograd stores.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

_memory = threading.local()
# The most numbers of one dtype that a thread keeps. For larger tensors page faults matter little next to the work.
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


def saved_bytes(run: Callable[[], Tensor], excluded: Iterable[Tensor] = ()) -> int:
    """Count the bytes that autograd stores while `run` computes its result, each storage once, except `excluded`."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    # Keep the tensors alive, so that no address is reused while counting.
    stored: dict[int, Tensor] = {}

    def pack_tensor(tensor: Tensor) -> Tensor:
        stored.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # a graph that saves its own tensors is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in stored.items() if address not in ignored)
