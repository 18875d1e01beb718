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
from headwater.mechanisms.contract import KV

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def attention_kernel(implementation: str | None, q: Tensor, k: Tensor) -> Kernel:
    """A function of (module, q, k, v, mask, scaling, dropout, **kwargs) -> (out [B, T, H, d], weights or None)."""
    plain: Kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    if implementation == "sdpa" and q.shape[2] == 1 and q.shape[1] > k.shape[1]:
        plain = sdpa_of_one
    half = q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu"
    if half and implementation == "sdpa" and q.shape[2] <= FEW and (memory := remembered()) is not None:
        return partial(attention_of_few, memory, plain)
    return plain


def sdpa_of_one(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's fused attention of one new token whose heads share keys and values: q [B, H, 1, d] -> [B, 1, H, d].

    The query heads of one key head become its queries. Otherwise the whole history would be repeated at every step: of
    the fused kernels for GPUs, flash attention takes fewer key heads than query heads but no mask, and the
    memory-efficient one takes a mask but as many.
    """
    mask = attention_mask
    if mask is not None and mask.shape[1] > 1:  # ALiBi's differs between heads
        mask = grouped(mask, k.shape[1])
    out = nn.functional.scaled_dot_product_attention(grouped(q, k.shape[1]), k, v, mask, dropout, scale=scaling)
    return out.reshape(q.shape[0], 1, q.shape[1], v.shape[-1]), None


def grouped(x: Tensor, heads: int) -> Tensor:
    """[B, H, T, …] -> [B, heads, H / heads · T, …]: what belongs to one key head follows one another."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def eager_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    beside: KV | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ·scaling + mask)·v -> [B, T, H, d], and the weights [B, H, T, S] before dropout.

    softcap: c·tanh(scores / c) in place of the scores.
    beside: further keys and values, each [K, n, d], that every query sees; the last n of the weights are theirs.
    """
    weights = attention_weights(module, q, k, attention_mask, scaling, softcap, beside)
    return read_values(module, weights, v, dropout, beside), weights


def attention_weights(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    beside: KV | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scaling + mask): q [B, H, T, d], k [B, K, S, d] -> [B, H, T, S]; softmax in fp32 or wider."""
    by_key = grouped(q, k.shape[1])

    def scored(keys: Tensor) -> Tensor:
        scores = (by_key @ keys.transpose(-1, -2)).view(*q.shape[:3], -1) * scaling
        return scores if softcap is None else softcap * (scores / softcap).tanh()

    scores = scored(k)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if beside is not None:  # joined here, where they are small
        scores = torch.cat((scores, scored(beside.k)), dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(q.dtype)


def read_values(module: nn.Module, weights: Tensor, v: Tensor, dropout: float, beside: KV | None = None) -> Tensor:
    """weights [B, H, T, S], after dropout, times v [B, K, S, d] -> [B, T, H, d]."""
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    of_tokens = weights if beside is None else weights[..., : v.shape[2]]
    out = grouped(of_tokens, v.shape[1]) @ v
    if beside is not None:
        out = out + grouped(weights[..., v.shape[2] :], v.shape[1]) @ beside.v
    return out.view(*weights.shape[:3], -1).transpose(1, 2)
