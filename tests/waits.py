"""How often something waits for the device."""

from torch.utils._python_dispatch import TorchDispatchMode

from headwater_lab.bench.waits import REFUSED


class CountedWaits(TorchDispatchMode):
    """Counts operations that do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in REFUSED
        return func(*args, **kwargs or {})
