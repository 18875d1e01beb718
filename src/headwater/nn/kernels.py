"""Which attention kernel runs, chosen by device, dtype and length in this one place.

`attn_implementation` names the kernel family, as everywhere in transformers: "sdpa" (default), "eager",
"flash_attention_2", "flex_attention". Under "sdpa" on a CPU in half precision, PyTorch's fused kernel is slower below
about a thousand tokens, and for a few queries at any number of tokens, than two batched matmuls around a softmax, so
those run instead (`headwater bench attention` measures where the line is on a machine).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Keys of a half-precision CPU attention from which on the fused kernel is the faster one.
FUSED_FROM = 1024
# Queries up to which the two matmuls are faster at any number of keys.
FEW = 16


def attention_kernel(implementation: str | None, q: Tensor, k: Tensor) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A function of (module, q, k, v, mask, scaling, dropout, **kwargs) -> (out [B, T, H, d], weights or None)."""
    if implementation == "sdpa" and q.device.type == "cpu":
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
        if half in (torch.bfloat16, torch.float16) and (k.shape[2] < FUSED_FROM or q.shape[2] <= FEW):
            return matmul_attention
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)


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
    """softmax(q·kᵀ·scaling + mask)·v as written, with the weights [B, H, T, S] before dropout."""
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


def matmul_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same as two batched matmuls with the mask folded into the first; takes sdpa's boolean mask or None."""
    batch, heads, length, width = q.shape
    kv_heads, history = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    # Query heads of one key head are stacked along the query axis, so that keys and values are never repeated.
    q = q.reshape(batch * kv_heads, groups * length, width)
    k = k.reshape(batch * kv_heads, history, width)
    v = v.reshape(batch * kv_heads, history, v.shape[-1])
    if attention_mask is None and length > 1:
        attention_mask = torch.ones(length, history, dtype=torch.bool, device=q.device).tril(history - length)
    if attention_mask is None:
        scores = torch.bmm(q, k.transpose(1, 2)) * scaling
    else:
        bias = attention_mask
        if bias.dtype == torch.bool:
            # Half of the lowest number, to which a score can be added: a query that sees nothing must not see NaN.
            hidden = torch.finfo(q.dtype).min / 2
            bias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill_(~bias, hidden)
        if bias.ndim == 2:
            bias = bias.repeat(groups, 1)
        else:
            bias = bias.expand(batch, heads, length, history).reshape(batch * kv_heads, groups * length, history)
        scores = torch.baddbmm(bias.to(q.dtype), q, k.transpose(1, 2), alpha=scaling)
    weights = nn.functional.dropout(scores.softmax(-1), p=dropout, training=module.training)
    out = torch.bmm(weights, v).view(batch, heads, length, v.shape[-1])
    return out.transpose(1, 2), None
