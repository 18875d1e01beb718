"""Whether anything waits for the device: modes that see every operation."""

from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")


class WaitError(AssertionError):
    pass


class NoWaits(TorchDispatchMode):
    """Refuses whatever copies a number to the host, or has a shape that depends on numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in REFUSED:
            raise WaitError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


class CountedWaits(TorchDispatchMode):
    """Counts them instead."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in REFUSED
        return func(*args, **kwargs or {})
