"""`nn.Linear`, and which matmul kernel it runs on a CPU outside training.

What decoding waits for is the reading of weights. PyTorch hands a fp32 linear map on a CPU to MKL, whose product of a
matrix with one row runs on one thread, and which on other processors than Intel's has less than half of oneDNN's speed
for any number of rows. So one row goes through a batched product of the weight's pieces, one a thread, and more rows
through oneDNN, as under `torch.compile`. In bfloat16 PyTorch uses oneDNN itself, which lays the weight out anew in each
call; `packed` does that once for many. `headwater bench decode` shows what it comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

# What `torch.compile` calls for a linear map: (x, weight, bias, activation, its scalars, its algorithm) -> y; and what
# it lays weights out with beforehand: (weight) -> weight. None where PyTorch was built without oneDNN.
_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)


class Linear(nn.Linear):
    """x [..., d_in] -> x·weightᵀ + bias [..., d_out]; `nn.Linear` in all but the kernel."""

    _packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        packed = self._packed
        if packed is None or torch.is_grad_enabled() or x.dtype is not packed.dtype or torch.compiler.is_compiling():
            return linear(x, self.weight, self.bias)
        return _ONEDNN(x, packed, self.bias, "none", [], "")


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Inside, `Linear`s in bfloat16 on a CPU keep their weights in oneDNN's layout too: for as much memory again, a
    decoding step takes about two thirds of the time. Weights that change inside are not noticed.
    """
    halves = [
        module
        for module in model.modules()
        if isinstance(module, Linear) and module.weight.device.type == "cpu" and module.weight.dtype is torch.bfloat16
    ]
    try:
        for module in halves:
            module._packed = None if _PACK is None else _PACK(module.weight.detach())
        yield
    finally:
        for module in halves:
            module._packed = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by the faster kernel: x [..., d_in], weight [d_out, d_in], bias [d_out]."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or weight.dtype is not torch.float32
        or x.dtype is not torch.float32
        or weight.device.type != "cpu"
        or x.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
        or type(weight) not in (nn.Parameter, Tensor)
        or not weight.is_contiguous()
    ):
        return nn.functional.linear(x, weight, bias)
    d_out, d_in = weight.shape
    if x.numel() == d_in:
        pieces = _pieces(d_out, torch.get_num_threads())
        # As a transposed row: with a last stride of 1 the product would take a four times slower way.
        column = x.reshape(1, d_in).t().expand(pieces, d_in, 1)
        y = torch.bmm(weight.view(pieces, -1, d_in), column).view(*x.shape[:-1], d_out)
        return y if bias is None else y.add_(bias)
    if _ONEDNN is None:
        return nn.functional.linear(x, weight, bias)
    return _ONEDNN(x, weight, bias, "none", [], "")


@lru_cache
def _pieces(rows: int, threads: int) -> int:
    """Into how many equal pieces to cut so many rows: the fewest that keep all threads busy; 1 if there is no way."""
    return next((n for n in range(threads, 8 * threads + 64) if rows % n == 0), 1)
