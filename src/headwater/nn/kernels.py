"""Which attention kernel runs, in this one place.

`attn_implementation` names the kernel, as everywhere in transformers: "sdpa" (default), "eager", "flash_attention_2",
"flex_attention", or ours, registered with transformers for any of its models: "matmul", two batched matmuls around a
softmax in the dtype of the queries. It keeps the weights [B, H, T, S] for the backward pass and takes sdpa's masks.
While a model generates on a CPU in half precision, a few queries go through it also under "sdpa", if it was timed to
win over PyTorch's fused kernel (`headwater.choose`).

In bfloat16 one query over 128, 512 and 2048 keys (12 heads, 64 wide) took two cores of an AMD EPYC (Zen 4) 0.08, 0.11
and 0.22 ms so, 0.09, 0.34 and 1.31 ms fused; in float16 eight queries over 128 keys took 0.66 ms so and 0.22 ms fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.choose import PLAIN, bucket, remembered, timed
from headwater.errors import HeadwaterError

# The name of ours.
MATMUL = "matmul"
# Queries up to which it is tried in the place of sdpa.
FEW = 16
# What models may ask attention for beside a mask, and it does not do.
LEFT_OUT = "softcap", "s_aux", "sinks", "position_bias", "cache"

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def attention_kernel(implementation: str | None, q: Tensor, k: Tensor) -> Kernel:
    """A function of (module, q, k, v, mask, scaling, dropout, **kwargs) -> (out [B, T, H, d], weights or None)."""
    plain: Kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    half = q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu"
    if half and implementation == "sdpa" and q.shape[2] <= FEW and (memory := remembered()) is not None:
        return partial(_attention_of_few, memory, plain)
    return plain


def _attention_of_few(
    memory: dict[Any, Any],
    plain: Kernel,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    key = q.shape, k.shape, q.dtype, attention_mask is None
    if key not in memory:
        forms = {
            name: partial(kernel, module, q, k, v, attention_mask, **kwargs)
            for name, kernel in ((PLAIN, plain), (MATMUL, matmul_attention))
        }
        batch, heads, queries, width = q.shape
        shape = bucket(batch), heads, k.shape[1], queries, bucket(k.shape[2]), width
        visible = "free" if attention_mask is None else "masked"
        best = timed(("attention", q.dtype, *shape, visible), lambda: forms).best
        memory[key] = plain if best == PLAIN else matmul_attention
    return memory[key](module, q, k, v, attention_mask, dropout=dropout, **kwargs)


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
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same as two batched matmuls with the mask folded into the first; takes sdpa's masks.

    None is what it is to sdpa: causal unless `is_causal`, or the module, says otherwise; and the keys behind as many as
    there are queries are the empty slots of a static cache. Raises `HeadwaterError` for what it would leave out.
    """
    if asked := [name for name in LEFT_OUT if kwargs.get(name) is not None]:
        raise HeadwaterError(
            f"attn_implementation {MATMUL} leaves out {' and '.join(asked)}, which this model asks for; load it with "
            "attn_implementation='eager'."
        )
    batch, heads, length, width = q.shape
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and is_causal and length > 1
    if causal:
        k, v = k[:, :, :length], v[:, :, :length]
    kv_heads, history = k.shape[1], k.shape[2]
    if causal:
        attention_mask = torch.ones(length, history, dtype=torch.bool, device=q.device).tril()
    groups = heads // kv_heads
    # Query heads of one key head are stacked along the query axis, so that keys and values are never repeated.
    q = q.reshape(batch * kv_heads, groups * length, width)
    k = k.reshape(batch * kv_heads, history, width)
    v = v.reshape(batch * kv_heads, history, v.shape[-1])
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


AttentionInterface.register(MATMUL, matmul_attention)
AttentionMaskInterface.register(MATMUL, sdpa_mask)
