"""Attention as two batched matmuls around a softmax in the dtype of the queries: `attn_implementation="matmul"`.

It is registered with transformers for any model, takes sdpa's masks, and stores the weights [B, H, T, S] for the
backward pass. While a model generates on a CPU in half precision, `run_fastest_attention` runs it for a few queries if
it was faster than PyTorch's fused kernel in a timing: on an AMD EPYC (Zen 4), up to six times for one query.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headwater.kernels import PLAIN
from headwater.kernels.autotune import Choices, find_fastest, round_up
from headwater.util.errors import HeadwaterError

# The name under which it is registered.
MATMUL = "matmul"
# Try this kernel in place of sdpa for at most this many queries.
FEW = 16
# Arguments of transformers' attention functions that it does not support.
LEFT_OUT = "softcap", "s_aux", "sinks", "position_bias", "cache"


def run_fastest_attention(
    choices: Choices,
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by whichever of `plain` and `matmul_attention` was timed to be faster."""
    key = q.shape, k.shape, q.dtype, attention_mask is None
    if key not in choices.forms:
        kernels = {PLAIN: plain, MATMUL: matmul_attention}
        forms = {name: partial(run, module, q, k, v, attention_mask, **kwargs) for name, run in kernels.items()}
        batch, heads, queries, width = q.shape
        shape = round_up(batch), heads, k.shape[1], queries, round_up(k.shape[2]), width
        visible = "free" if attention_mask is None else "masked"
        choices.forms[key] = kernels[find_fastest(("attention", q.dtype, *shape, visible), lambda: forms)]
    return choices.forms[key](module, q, k, v, attention_mask, dropout=dropout, **kwargs)


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
    """softmax(q·kᵀ·scaling + mask)·v as two batched matmuls, the mask added within the first; takes sdpa's masks.

    q [B, H, T, d], k and v [B, K, S, d] -> [B, T, H, d]. A mask of None means what it means to sdpa: causal, unless
    `is_causal` or the module says otherwise; keys beyond the number of queries are then a static cache's empty slots.
    Raises `HeadwaterError` for what it does not support (`LEFT_OUT`).
    """
    if unsupported := [name for name in LEFT_OUT if kwargs.get(name) is not None]:
        raise HeadwaterError(
            f"attn_implementation {MATMUL} does not support {' and '.join(unsupported)}, which this model needs; load "
            "it with attn_implementation='eager'."
        )
    batch, heads, length, width = q.shape
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and length > 1:
        k, v = k[:, :, :length], v[:, :, :length]
        attention_mask = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril()
    kv_heads, history = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    # Query heads of one key head are stacked along the query axis, so that keys and values are never repeated.
    q = q.reshape(batch * kv_heads, groups * length, width)
    k = k.reshape(batch * kv_heads, history, width)
    v = v.reshape(batch * kv_heads, history, v.shape[-1])
    if attention_mask is None:
        scores = torch.bmm(q, k.transpose(1, 2)) * scaling
    else:
        if attention_mask.dtype == torch.bool:
            # Half of the lowest number, so that adding a score cannot overflow: a query without keys gets no NaN.
            bias = torch.zeros(attention_mask.shape, dtype=q.dtype, device=q.device)
            bias.masked_fill_(~attention_mask, torch.finfo(q.dtype).min / 2)
        else:
            bias = attention_mask.to(q.dtype)
        if bias.ndim == 2:
            bias = bias.repeat(groups, 1)
        else:
            bias = bias.expand(batch, heads, length, history).reshape(batch * kv_heads, groups * length, history)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scaling)
    weights = nn.functional.dropout(scores.softmax(-1), p=dropout, training=module.training)
    out = torch.bmm(weights, v).view(batch, heads, length, v.shape[-1])
    return out.transpose(1, 2), None


AttentionInterface.register(MATMUL, matmul_attention)
AttentionMaskInterface.register(MATMUL, sdpa_mask)
