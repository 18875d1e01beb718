"""What a trace asks of the timings. Apart, because to say so imports PyTorch's compiler."""

from typing import Any

import torch

from headwater.kernels import MEASURED, mode
from headwater.kernels.choose import recorded
from headwater.kernels.gpu import OURS, available, place


@torch.compiler.assume_constant_result  # it cannot be traced, and nothing that it reads changes while a model trains
def faster(device: torch.device, operation: tuple[Any, ...]) -> bool:
    """Whether our form of an operation can run on a device, was measured there, and was faster."""
    return (
        mode() == MEASURED
        and not torch.are_deterministic_algorithms_enabled()
        and available(operation[0], device.type)
        and recorded(place(device), operation).best == OURS
    )
