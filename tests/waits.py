"""Contexts in which waiting for the device raises an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")


class WaitError(AssertionError):
    """An operation waits for the device."""


class NoWaits(TorchDispatchMode):
    """A mode that refuses, on any device, copies of a number to the host and shapes that depend on numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in REFUSED:
            raise WaitError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise an error inside this context if anything waits for the device: by CUDA's check or by `NoWaits`.

    Waiting for an event is allowed: it is how the host reads what was copied earlier.
    """
    if device.type != "cuda":
        with torch.compiler.set_stance("force_eager"), NoWaits():  # a compiler does not take such modes
            yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class CountedWaits(TorchDispatchMode):
    """Counts operations that do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in REFUSED
        return func(*args, **kwargs or {})
