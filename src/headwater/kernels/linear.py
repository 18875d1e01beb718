"""Kernels of a linear layer for a few rows; during generation on a CPU, the fastest one on this machine runs.

Decoding is bound by reading the weights, and kernels differ in how fast they read them for a few rows:

- plain: PyTorch's own, which is MKL's in fp32 and oneDNN's in bfloat16.
- onednn (fp32): what `torch.compile` calls for a linear layer.
- pieces (fp32, one row): a batched product of the weight's pieces, one per thread.
- packed (bfloat16, inside `packed`): the weight is laid out for oneDNN once; plain lays it out in each call.

For a weight [2048, 768] and one row, two cores of an AMD EPYC (Zen 4) took 0.46 ms plain, 0.25 onednn and 0.19 pieces,
in bfloat16 0.23 plain and 0.15 packed; those of an Intel Xeon with AMX 0.25 plain and 0.58 pieces. So each machine
times them, by shape, dtype and number of rows (`headwater.kernels.choose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwater.kernels import PLAIN
from headwater.kernels.choose import bucket, having, timed

# (x, weight, bias, activation, its scalars, its algorithm) -> y, and the layout it wants: (weight) -> weight.
# None where PyTorch was built without oneDNN.
_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)

# The smallest weight, in elements, for which another kernel can be worth its overhead.
LARGE = 2**16
# The most rows: with more, as in prompts, arithmetic takes the time.
FEW = 64
# Packing a weight may take this share of the time that its uses have taken.
PRICE = 0.02

LinearForm = Callable[[nn.Linear, Tensor], Tensor]


def fastest(module: nn.Linear, x: Tensor) -> LinearForm | None:
    """The fastest form of a linear layer for inputs such as x; None: plain PyTorch."""
    weight, bias = module.weight, module.bias
    if (
        _ONEDNN is None
        or not torch._C._get_mkldnn_enabled()
        or weight.numel() < LARGE
        or not 0 < x.numel() <= FEW * weight.shape[1]
        or x.dtype is not weight.dtype
        or type(weight) not in (Tensor, nn.Parameter)
        or weight.device.type != "cpu"
        or x.device.type != "cpu"
        or not weight.is_contiguous()
    ):
        return None
    if x.dtype is torch.float32:
        forms = _FP32_ROW if x.numel() == weight.shape[1] else _FP32
        trials = {name: partial(form, x, weight, bias) for name, form in forms.items()}
        best = timed(_operation(x, weight), lambda: trials).best
        return None if best == PLAIN else lambda module, x: forms[best](x, module.weight, module.bias)
    packs = _packs.get()
    return packs.form(module, x) if packs is not None and x.dtype is torch.bfloat16 else None


def _operation(x: Tensor, weight: Tensor) -> tuple[str | int | torch.dtype, ...]:
    return "linear", weight.dtype, *weight.shape, bucket(x.numel() // weight.shape[1], base=8)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _ONEDNN is not None
    return _ONEDNN(x, weight, bias, "none", [], "")


def _in_pieces(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    d_out, d_in = weight.shape
    pieces = _pieces(d_out, torch.get_num_threads())
    # As a transposed row: with a last stride of 1 the product takes four times as long.
    column = x.reshape(1, d_in).t().expand(pieces, d_in, 1)
    y = torch.bmm(weight.view(pieces, -1, d_in), column).view(*x.shape[:-1], d_out)
    return y if bias is None else y.add_(bias)


@lru_cache
def _pieces(rows: int, threads: int) -> int:
    """How many equal pieces to cut the rows into: the fewest that keep all threads busy; 1 if they cannot be cut."""
    return next((n for n in range(threads, 8 * threads + 64) if rows % n == 0), 1)


_FP32: dict[str, Callable[..., Tensor]] = {PLAIN: linear, "onednn": _onednn}
_FP32_ROW = _FP32 | {"pieces": _in_pieces}


class _Packs:
    """Weights in oneDNN's layout, each packed as soon as that takes no more than `PRICE` of the time of its uses."""

    def __init__(self) -> None:
        self.packs: dict[nn.Linear, tuple[tuple[int, int], Tensor]] = {}

    def form(self, module: nn.Linear, x: Tensor) -> LinearForm | None:
        assert _PACK is not None
        weight, bias, pack = module.weight, module.bias, partial(_PACK, module.weight.detach())

        def trials() -> dict[str, Callable[[], Tensor]]:
            return {PLAIN: partial(linear, x, weight, bias), "packed": partial(_onednn, x, pack(), bias)}

        found = timed(_operation(x, weight), trials)
        price = timed(("packing", weight.dtype, *weight.shape), lambda: {PLAIN: pack}).seconds.get(PLAIN)
        if found.best == PLAIN or price is None:
            return None
        return self.after(math.ceil(price / (PRICE * found.seconds[PLAIN])))

    def after(self, uses: int) -> LinearForm:
        """A form that packs the weight after this many uses. Until then it only counts, to delay no decoding step."""

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            nonlocal uses
            weight, bias = module.weight, module.bias
            if uses > 1:
                uses -= 1
                return linear(x, weight, bias)
            state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
            if module not in self.packs:
                assert _PACK is not None
                self.packs[module] = state, _PACK(weight.detach())
            packed_in, pack = self.packs[module]
            # A weight that changes is not packed again.
            return _onednn(x, pack, bias) if packed_in == state else linear(x, weight, bias)

        return forward


# Those of this thread's generation. Not stored in the modules: other threads and copies must not see them.
_packs: ContextVar[_Packs | None] = ContextVar("packs", default=None)


def packed() -> AbstractContextManager[None]:
    """In this context and that of `choose.measured`, linear layers in bfloat16 may pack their weights for oneDNN.

    That happens after about a hundred uses, if it was timed to be faster, and takes the weight's memory a second
    time. The result has the same bits.
    """
    supported = _PACK is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return having(_packs, _Packs() if supported else None)
