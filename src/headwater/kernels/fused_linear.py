"""Kernels of a linear layer for a few rows; during generation on a CPU, the fastest one on this machine runs.

Decoding is bound by reading the weights, and kernels differ in how fast they read them for a few rows:

- plain: PyTorch's own, which is MKL's in fp32 and oneDNN's in bfloat16.
- onednn (fp32): what `torch.compile` calls for a linear layer.
- pieces (fp32, one row): a batched product of the weight's pieces, one per thread.
- packed (bfloat16, if the generation may pack weights): the weight is laid out for oneDNN once; plain lays it out in
  each call.

Pieces take 0.4 of plain's time on an AMD EPYC (Zen 4), and 2.3 on an Intel Xeon with AMX. So each machine times them,
by shape, dtype and number of rows (`headwater.kernels.autotune`).
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwater.kernels import PLAIN, are_ordinary
from headwater.kernels.autotune import Choices, find_fastest, round_up

# (x, weight, bias, activation, its scalars, its algorithm) -> y; and (weight) -> the weight in the layout this needs.
# Both are None if PyTorch was built without oneDNN.
_ONEDNN: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PACK: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_has_bf16: Callable[[], bool] = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)

# The smallest weight, in elements, for which another kernel can be worth its overhead.
LARGE = 2**16
# The most rows. With more rows, as in prompts, the time goes into arithmetic and not into reading the weights.
FEW = 64

LinearForm = Callable[[nn.Linear, Tensor], Tensor]


def choose_linear(choices: Choices, module: nn.Linear, x: Tensor) -> LinearForm | None:
    """The fastest form of a linear layer for inputs such as x; None: plain PyTorch."""
    weight, bias = module.weight, module.bias
    if not _is_eligible(weight, x):
        return None
    operation = "linear", weight.dtype, *weight.shape, round_up(x.numel() // weight.shape[1])
    if x.dtype is torch.float32:
        forms = _FP32_ROW if x.numel() == weight.shape[1] else _FP32
        trials = {name: partial(form, x, weight, bias) for name, form in forms.items()}
        fastest = find_fastest(operation, lambda: trials)
        return None if fastest == PLAIN else lambda module, x: forms[fastest](x, module.weight, module.bias)
    pack = _PACK
    if choices.packs is None or pack is None or x.dtype is not torch.bfloat16 or not _has_bf16():
        return None

    def make_forms() -> dict[str, Callable[[], Tensor]]:
        packed = partial(_run_onednn, x, pack(weight.detach()), bias)
        return {PLAIN: partial(linear, x, weight, bias), "packed": packed}

    if find_fastest(operation, make_forms) == PLAIN:
        return None
    if module not in choices.packs:  # pack the weight once for all shapes of x
        choices.packs[module] = PackedLinear(weight)
    return choices.packs[module]


def _is_eligible(weight: Tensor, x: Tensor) -> bool:
    few_rows = 0 < x.numel() <= FEW * weight.shape[1]
    return (
        _ONEDNN is not None
        and torch._C._get_mkldnn_enabled()
        and weight.numel() >= LARGE
        and few_rows
        and x.dtype is weight.dtype
        and are_ordinary(weight, x, cpu_only=True)
        and weight.is_contiguous()
    )


def _run_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _ONEDNN is not None
    return _ONEDNN(x, weight, bias, "none", [], "")


def _run_in_pieces(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    d_out, d_in = weight.shape
    pieces = _count_pieces(d_out, torch.get_num_threads())
    # Pass x as a transposed row: with a last stride of 1 the product takes four times as long.
    column = x.reshape(1, d_in).t().expand(pieces, d_in, 1)
    y = torch.bmm(weight.view(pieces, -1, d_in), column).view(*x.shape[:-1], d_out)
    return y if bias is None else y.add_(bias)


@lru_cache
def _count_pieces(rows: int, threads: int) -> int:
    """Number of equal pieces to cut the rows into: the fewest that keep all threads busy; 1 if they cannot be cut."""
    return next((n for n in range(threads, 8 * threads + 64) if rows % n == 0), 1)


_FP32: dict[str, Callable[..., Tensor]] = {PLAIN: linear, "onednn": _run_onednn}
_FP32_ROW = _FP32 | {"pieces": _run_in_pieces}


class PackedLinear:
    """A bfloat16 layer of one generation, with its weight packed."""

    def __init__(self, weight: Tensor) -> None:
        assert _PACK is not None
        self.state, self.pack = _identify_state(weight), _PACK(weight.detach())

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        changed = self.state != _identify_state(module.weight)
        return linear(x, module.weight, module.bias) if changed else _run_onednn(x, self.pack, module.bias)


def _identify_state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
