"""Tensors that stay in fp32 when a model is cast to half precision."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """A module whose own parameters and buffers stay in fp32 or wider under `.to(bfloat16)`, `.half()` and the like.

    For scalars (in bf16 an update of 2e-4 to a number near 1 is lost) and constants such as frequencies. Weight decay
    does not apply to these parameters.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(moved.device, torch.float32)
            return moved

        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(keep, recurse=False)

    def constants(self) -> dict[str, Tensor]:
        """The initial values of the module's buffers, by name, since loading a checkpoint creates buffers empty."""
        return {}

    @torch.no_grad()
    def restore_constants(self) -> None:
        """Give the buffers their values. headwater's models do this; call it in the `_init_weights` of your own
        `PreTrainedModel`, whose `from_pretrained` leaves buffers that are not in the checkpoint undefined.
        """
        for name, value in self.constants().items():
            buffer = self.get_buffer(name)
            if not getattr(buffer, "_is_hf_initialized", False):  # transformers' mark of what it has loaded
                buffer.copy_(value)


def fp32_parameter(*shape: int) -> nn.Parameter:
    """Make an uninitialized parameter in fp32 (in fp64 models, fp64), whatever precision the model is built in.

    Its module derives from `KeepsPrecision` too, so that casting the model does not round it.
    """
    return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))
