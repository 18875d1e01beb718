"""`nn.Linear`, and which matmul kernel it runs on a CPU where no gradient is asked for.

What decoding waits for is the reading of weights. PyTorch hands a fp32 linear map on a CPU to MKL, whose product of a
matrix with one row runs on one thread, and which on other processors than Intel's has less than half of oneDNN's speed
for any number of rows. So one row goes through a batched product of the weight's pieces, one a thread, and more rows
through oneDNN, as under `torch.compile`. In bfloat16 PyTorch uses oneDNN itself, which lays the weight out anew in each
call; inside `packed` that is done once. `headwater bench decode` shows what it comes to.

With gradients nothing changes: on a machine with other work to do, MKL's threads get out of each other's way, and
oneDNN's wait for each other (a training step then takes ten times as long).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import flop_registry, register_flop_formula

# What `torch.compile` calls for a linear map: (x, weight, bias, activation, its scalars, its algorithm) -> y; and what
# it lays weights out with beforehand: (weight) -> weight. None where PyTorch was built without oneDNN.
_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)

# Elements of a weight from which on another kernel is worth its overhead.
LARGE = 2**16
# Uses of a weight after which it is packed: laying it out takes the time that some ten uses of it then save.
PATIENCE = 12


class Linear(nn.Linear):
    """x [..., d_in] -> x·weightᵀ + bias [..., d_out]; `nn.Linear` in all but the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if not _is_plain(x, self.weight):
            return super().forward(x)
        if x.dtype is torch.float32:
            return _fp32(x, self.weight, self.bias)
        packs = _PACKS.get()
        weight = None if packs is None else packs.of(self)
        return super().forward(x) if weight is None else _ONEDNN(x, weight, self.bias, "none", [], "")


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether only numbers are wanted of a large matrix on a CPU: no gradient, graph, trace or tangent."""
    return (
        weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype is weight.dtype
        and weight.numel() >= LARGE
        and type(weight) in (nn.Parameter, Tensor)
        and type(x) is Tensor
        and weight.is_contiguous()
        and _ONEDNN is not None
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    d_out, d_in = weight.shape
    pieces = _pieces(d_out, torch.get_num_threads())
    if x.numel() != d_in or pieces == 1:
        return _ONEDNN(x, weight, bias, "none", [], "")
    # As a transposed row: with a last stride of 1 the product would take a four times slower way.
    column = x.reshape(1, d_in).t().expand(pieces, d_in, 1)
    y = torch.bmm(weight.view(pieces, -1, d_in), column).view(*x.shape[:-1], d_out)
    return y if bias is None else y.add_(bias)


@lru_cache
def _pieces(rows: int, threads: int) -> int:
    """Into how many equal pieces to cut so many rows: the fewest that keep all threads busy; 1 if there is no way."""
    return next((n for n in range(threads, 8 * threads + 64) if rows % n == 0), 1)


class _Packs:
    """Weights in oneDNN's layout, each from its `PATIENCE`th use on."""

    def __init__(self) -> None:
        self.uses: dict[Linear, int] = {}
        self.packs: dict[Linear, tuple[tuple[int, int], Tensor]] = {}

    def of(self, module: Linear) -> Tensor | None:
        weight = module.weight
        if weight.dtype is not torch.bfloat16:
            return None
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        known = self.packs.get(module)
        if known is not None and known[0] == state:
            return known[1]
        self.uses[module] = self.uses.get(module, 0) + 1
        if known is not None or self.uses[module] < PATIENCE:  # a weight that changes is not packed again
            return None
        assert _PACK is not None
        self.packs[module] = state, _PACK(weight.detach())
        return self.packs[module][1]


# Of the generation that runs in this thread. Not in the modules: other threads and copies of a model must not see it.
_PACKS: ContextVar[_Packs | None] = ContextVar("packs", default=None)


@contextmanager
def packed() -> Iterator[None]:
    """Inside, `Linear`s in bfloat16 on a CPU keep their weights in oneDNN's layout too, once they have been used a few
    times: for as much memory again, a decoding step takes about two thirds of the time. Results are the same bits.
    """
    supported = _PACK is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    token = _PACKS.set(_Packs() if supported else None)
    try:
        yield
    finally:
        _PACKS.reset(token)


# Copies of this file in checkpoints come here too.
if _ONEDNN is not None and torch.ops.mkldnn._linear_pointwise not in flop_registry:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]
