"""Calls of the attention kernel: the choice of kernel, its calls for groups of heads, and the eager kernel.

`attn_implementation` names the kernel: transformers', or headwater's "matmul" (`headwater.kernels.fused_attention`) and
"varlen" (`headwater.kernels.varlen`, for packed rows). While a model generates on a CPU in half precision, a few
queries may run "matmul" under "sdpa" too, if it was timed to be faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.config.capabilities import LimitsKernels
from headwater.config.text import HeadwaterConfig
from headwater.kernels.autotune import get_choices
from headwater.kernels.fused_attention import FEW, run_fastest_attention
from headwater.mechanisms.contract import KV, Mechanism
from headwater.nn.documents import is_flash
from headwater.nn.head_groups import KernelInputs, join_groups, of_tokens
from headwater.plugins.mechanisms import resolve

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def supported_kernels(config: HeadwaterConfig) -> tuple[tuple[str, ...] | None, str]:
    """Return the values of `attn_implementation` that support this config (None: all), and what limits them."""
    limits = {
        f"Mechanism {name!r} with its options": _list_kernels(resolve(name), options)
        for name, options in config.mechanisms.items()
    }
    limits["ALiBi"] = ("sdpa", "eager", "matmul") if config.position == "alibi" else None
    limits["attention_softcap"] = ("eager",) if config.attention_softcap is not None else None
    limited = {reason: kernels for reason, kernels in limits.items() if kernels is not None}
    if not limited:
        return None, ""
    reason, fewest = min(limited.items(), key=lambda limit: len(limit[1]))
    return tuple(name for name in fewest if all(name in kernels for kernels in limited.values())), reason


def _list_kernels(mechanism: type[Mechanism], options: Any) -> tuple[str, ...] | None:
    """List the kernels that a mechanism supports; None: all."""
    if isinstance(mechanism, LimitsKernels):
        return mechanism.list_kernels(options)
    changes_weights = mechanism.transform_attention_weights is not Mechanism.transform_attention_weights
    return ("eager",) if changes_weights else None


def attend_in_groups(
    module: nn.Module, implementation: str | None, inputs: Sequence[KernelInputs], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Compute the heads' outputs [B, T, H, d], and the tokens' attention weights if the kernel returns them."""
    if is_flash(implementation):  # transformers would look for documents in them, and wait for the device
        options = options | {"position_ids": None}
    results = [attend_in_group(module, implementation, group, options) for group in inputs]
    out = join_groups([heads for heads, _ in results], dim=2)
    weights = [of_keys for _, of_keys in results if of_keys is not None]
    return out, of_tokens(join_groups(weights, dim=1), inputs) if len(weights) == len(results) else None


def attend_in_group(
    module: nn.Module, implementation: str | None, inputs: KernelInputs, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Call the kernel once: what its heads read, and the weights of all keys if the kernel returns them."""
    q, k, v, mask, added_kv = inputs
    if added_kv is None:
        return attention_kernel(implementation, q, k)(module, q, k, v, mask, **options)
    if implementation == "eager":
        return eager_attention(module, q, k, v, mask, added_kv=added_kv, **options)
    length, pairs = q.shape[2], added_kv.k.shape[1]
    from_start = mask is None and bool(module.is_causal) and length > 1
    # For one query or a few, eager scores are small compared to the history, which joining the pairs would copy.
    is_few = length == 1 or (not torch.compiler.is_compiling() and length <= FEW)
    if not from_start and not torch.is_grad_enabled() and is_few:
        return eager_attention(module, q, k, v, mask, added_kv=added_kv, **options)[0], None
    keys, values = (x.expand(q.shape[0], -1, -1, -1) for x in added_kv)
    if from_start:  # put the pairs before the first token and drop their queries, so that causal kernels need no mask
        q = nn.functional.pad(q, (0, 0, pairs, 0))
    elif mask is not None:
        mask = nn.functional.pad(mask, (pairs, 0), value=mask.dtype == torch.bool)
    k, v = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
    out, _ = attention_kernel(implementation, q, k)(module, q, k, v, mask, **options)
    # Copy now, because the output projection would copy a slice of several rows.
    return out[:, pairs:].clone() if from_start else out, None


def weigh_keys(inputs: Sequence[KernelInputs], scaling: float, softcap: float | None) -> Tensor:
    """Compute the attention weights of all keys, [B, H, T, S]; added keys come last."""
    weights = [attention_weights(q, k, mask, scaling, softcap, added_kv) for q, k, _, mask, added_kv in inputs]
    return join_groups(weights, dim=1)


def read_groups(
    module: nn.Module, inputs: Sequence[KernelInputs], weights: Tensor, weights_of_keys: Tensor, dropout: float
) -> Tensor:
    """Compute the output of each head [B, T, H, d] from the two parts of the weights from `weigh_keys`."""
    if inputs[0].added_kv is not None:
        weights = torch.cat((weights, weights_of_keys[..., weights.shape[3] :]), dim=3)
    by_group = weights.split([group.q.shape[1] for group in inputs], 1)
    heads = [
        read_values(module, of_group, group.v, dropout, group.added_kv)
        for of_group, group in zip(by_group, inputs, strict=True)
    ]
    return join_groups(heads, dim=2)


def attention_kernel(implementation: str | None, q: Tensor, k: Tensor) -> Kernel:
    """Find a function of (module, q, k, v, mask, scaling, dropout, **kwargs) -> (out [B, T, H, d], weights or None)."""
    plain: Kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    if implementation == "sdpa" and q.shape[2] == 1 and q.shape[1] > k.shape[1]:
        plain = sdpa_of_one
    half = q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu"
    if half and implementation == "sdpa" and q.shape[2] <= FEW and (choices := get_choices()) is not None:
        return partial(run_fastest_attention, choices, plain)
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
    if mask is not None and mask.shape[1] > 1:  # a mask with ALiBi differs between heads
        mask = group_heads(mask, k.shape[1])
    out = nn.functional.scaled_dot_product_attention(group_heads(q, k.shape[1]), k, v, mask, dropout, scale=scaling)
    return out.reshape(q.shape[0], 1, q.shape[1], v.shape[-1]), None


def group_heads(x: Tensor, heads: int) -> Tensor:
    """Group the query heads of each key head: [B, H, T, …] -> [B, heads, H / heads · T, …]."""
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
    added_kv: KV | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ·scaling + mask)·v -> [B, T, H, d], and the weights [B, H, T, S] before dropout.

    softcap: c·tanh(scores / c) replaces the scores.
    added_kv: further keys and values, each [K, n, d], that every query sees; the last n of the weights are theirs.
    """
    weights = attention_weights(q, k, attention_mask, scaling, softcap, added_kv)
    return read_values(module, weights, v, dropout, added_kv), weights


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    added_kv: KV | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scaling + mask): q [B, H, T, d], k [B, K, S, d] -> [B, H, T, S]; softmax in fp32 or wider."""
    by_key = group_heads(q, k.shape[1])

    def scored(keys: Tensor) -> Tensor:
        scores_BHTS = (by_key @ keys.transpose(-1, -2)).view(*q.shape[:3], -1) * scaling
        return scores_BHTS if softcap is None else softcap * (scores_BHTS / softcap).tanh()

    scores_BHTS = scored(k)
    if mask is not None and mask.dtype == torch.bool:
        scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(scores_BHTS.dtype).min)
    elif mask is not None:
        scores_BHTS = scores_BHTS + mask
    if added_kv is not None:  # joining the weights here is cheap
        scores_BHTS = torch.cat((scores_BHTS, scored(added_kv.k)), dim=-1)
    wide = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return scores_BHTS.softmax(dim=-1, dtype=wide).to(q.dtype)


def read_values(module: nn.Module, weights: Tensor, v: Tensor, dropout: float, added_kv: KV | None = None) -> Tensor:
    """weights [B, H, T, S], after dropout, times v [B, K, S, d] -> [B, T, H, d]."""
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    of_tokens = weights if added_kv is None else weights[..., : v.shape[2]]
    out = group_heads(of_tokens, v.shape[1]) @ v
    if added_kv is not None:
        out = out + group_heads(weights[..., v.shape[2] :], v.shape[1]) @ added_kv.v
    return out.view(*weights.shape[:3], -1).transpose(1, 2)
