"""The precision of a model and of its training, by the names that Lightning Fabric and recipes use."""

from __future__ import annotations

from enum import StrEnum

import torch


class Precision(StrEnum):
    """A precision, which is also its name.

    weights: dtype of parameters, gradients, optimizer state and the residual stream. compute: dtype of matmuls.
    """

    weights: torch.dtype
    compute: torch.dtype

    FP32 = "32-true", torch.float32, torch.float32
    BF16_MIXED = "bf16-mixed", torch.float32, torch.bfloat16
    BF16 = "bf16-true", torch.bfloat16, torch.bfloat16
    FP64 = "64-true", torch.float64, torch.float64

    def __new__(cls, name: str, weights: torch.dtype, compute: torch.dtype) -> Precision:
        precision = str.__new__(cls, name)
        precision._value_ = name
        precision.weights, precision.compute = weights, compute
        return precision

    @property
    def is_mixed(self) -> bool:
        """Whether matmuls cast the weights."""
        return self.weights != self.compute

    def autocast(self, device_type: str, enabled: bool = True) -> torch.autocast:
        """Enter autocast on a kind of device, if the precision is mixed and `enabled`."""
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=enabled and self.is_mixed)
