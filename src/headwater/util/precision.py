"""The precision of a model and of its training, by the names that Lightning Fabric and recipes use."""

from enum import StrEnum

import torch


class Precision(StrEnum):
    """A precision, identified by its name."""

    FP32 = "32-true"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16-true"
    FP64 = "64-true"

    @property
    def is_mixed(self) -> bool:
        """Whether matmuls cast the weights."""
        return self is Precision.BF16_MIXED

    @property
    def weights(self) -> torch.dtype:
        """The dtype of parameters, gradients, optimizer state and the residual stream."""
        return {Precision.BF16: torch.bfloat16, Precision.FP64: torch.float64}.get(self, torch.float32)

    @property
    def compute(self) -> torch.dtype:
        """The dtype of matmuls."""
        return torch.bfloat16 if self.is_mixed else self.weights

    def autocast(self, device_type: str, enabled: bool = True) -> torch.autocast:
        """Enter autocast on a kind of device, if the precision is mixed and `enabled`."""
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=enabled and self.is_mixed)
