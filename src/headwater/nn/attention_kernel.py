"""Which attention kernel runs, and the eager kernel.

`attn_implementation` names the kernel, as everywhere in transformers: "sdpa" (default), "eager", "flash_attention_2",
"flex_attention", or headwater's "matmul" (`headwater.kernels.attention`) and "varlen" (`headwater.kernels.varlen`, for
packed rows). While a model generates on a CPU in half precision, a few queries may run "matmul" under "sdpa" too, if it
was timed to be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.kernels.attention import FEW, attention_of_few
from headwater.kernels.choose import remembered

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def attention_kernel(implementation: str | None, q: Tensor, k: Tensor) -> Kernel:
    """A function of (module, q, k, v, mask, scaling, dropout, **kwargs) -> (out [B, T, H, d], weights or None)."""
    plain: Kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    half = q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu"
    if half and implementation == "sdpa" and q.shape[2] <= FEW and (memory := remembered()) is not None:
        return partial(attention_of_few, memory, plain)
    return plain


def eager_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ·scaling + mask)·v -> [B, T, H, d], and the weights [B, H, T, S] before dropout."""
    weights = attention_weights(module, q, k, attention_mask, scaling)
    return read_values(module, weights, v, dropout), weights


def attention_weights(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """softmax(q·kᵀ·scaling + mask): q [B, H, T, d], k [B, K, S, d] -> [B, H, T, S]; softmax in fp32 or wider."""
    scores = (q @ _repeated(k, q.shape[1]).transpose(-1, -2)) * scaling
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(q.dtype)


def read_values(module: nn.Module, weights: Tensor, v: Tensor, dropout: float) -> Tensor:
    """weights [B, H, T, S], after dropout, times v [B, K, S, d] -> [B, T, H, d]."""
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ _repeated(v, weights.shape[1])).transpose(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1) if heads > x.shape[1] else x
