"""What autograd stores for a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], Tensor], excluded: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd stores while `run` computes its result, each storage once, without those of `excluded`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    # The tensors are kept, so that no address is used twice.
    stored: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        stored.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # a graph that holds tensors of its own is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in stored.items() if address not in known)
