"""Attention in packed rows, document by document: `attn_implementation="varlen"`.

Packed rows hold several documents, and attention stays inside each. A mask [B, 1, T, T] says so too, but a kernel under
a mask computes the scores of all pairs of tokens. This one takes the starts of documents (`cu_seq_lens_q`,
transformers' name) and computes no others. Without documents, or under a mask, it is sdpa.

On a GPU it is PyTorch's `varlen_attn` (FlashAttention: half precision only). On a CPU it is one operation, forward and
backward, that calls PyTorch's fused kernel for each document. Half precision is computed there in fp32 and rounded
once, except where the processor has matrix units for it (AMX), because the fused kernel converts more than it gains.
"""

import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headwater.kernels.fused_attention import LEFT_OUT
from headwater.util.errors import HeadwaterError

# The name under which it is registered.
VARLEN = "varlen"
# Shorter rows gain little from this kernel on a CPU.
FROM = 512
HALF = torch.bfloat16, torch.float16
# PyTorch 2.11 does not have this argument yet.
TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document: q [B, H, T, d], k and v [B, K, T, d] -> [B, T, H, d].

    cu_seq_lens_q: int32 [n + 1], where each document begins among all B·T tokens, row after row, and the end, which may
        be repeated. None, or with a mask: sdpa.
    max_length_q: at least the length of the longest; default T.
    Raises `HeadwaterError` for what it cannot compute, dropout for example.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        kwargs |= dict(scaling=scaling, dropout=dropout, sliding_window=sliding_window, is_causal=is_causal)
        return AttentionInterface()["sdpa"](module, q, k, v, attention_mask, **kwargs)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reason = find_refusal(q.device, q.dtype, dropout, q.shape[-1])
    unsupported = [name for name in LEFT_OUT if kwargs.get(name) is not None]
    unsupported += [] if is_causal else ["attention to later tokens"]
    if unsupported or reason:
        raise HeadwaterError(
            f"attn_implementation {VARLEN} {reason or 'does not support ' + ' and '.join(unsupported)}; use sdpa, "
            "which takes the documents of packed rows as a mask."
        )
    kernel = _run_by_documents if q.device.type == "cpu" else _run_flash
    return kernel(q, k, v, cu_seq_lens_q, max_length_q or q.shape[2], scaling, sliding_window), None


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Run PyTorch's kernel for GPUs. A window includes the token itself."""
    rows, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if TAKES_GROUPS:
        options["enable_gqa"] = groups > 1
    else:
        k, v = _repeat_heads(groups, k, v)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    return out.unflatten(0, (rows, length))


def _run_by_documents(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Run the operation for CPUs."""
    k, v = _repeat_heads(q.shape[1] // k.shape[1], k, v)
    return _run_forward(q, k, v, borders, scale, window or 0)[0]


def _repeat_heads(groups: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def find_refusal(device: torch.device, dtype: torch.dtype, dropout: float, width: int) -> str | None:
    """Return the reason why it cannot compute attention with heads of `width` channels; None if it can."""
    if dropout > 0:
        return "has no dropout"
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"does not run on {device.type}"
    if dtype not in HALF:
        return f"takes bfloat16 and float16 on a GPU, and not {str(dtype).removeprefix('torch.')}"
    return None if width <= 256 and width % 8 == 0 else f"takes heads of 8, 16, … 256 channels on a GPU, not of {width}"


class FusedCall(NamedTuple):
    """One call of the fused kernel: tokens of a row, causal or under a mask that is added to the scores."""

    row: int
    tokens: slice
    mask: Tensor | None

    def select_tokens(self, x: Tensor) -> Tensor:
        """Select this call's tokens: x [B, H, T, …] -> [1, H, tokens, …]."""
        return x[self.row : self.row + 1, :, self.tokens]

    def gather_tokens(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Select them from each tensor, in `dtype`. The fused kernel needs each head's channels next to each other."""
        selected = [self.select_tokens(x).to(dtype) for x in tensors]
        return [x if x.stride(-1) == 1 else x.contiguous() for x in selected]


@lru_cache(maxsize=2)
def _plan_calls(borders: tuple[int, ...], rows: int, length: int, window: int, dtype: torch.dtype) -> list[FusedCall]:
    """The calls for documents between `borders`, the same in every layer. window: 0 for none."""
    if borders[0] != 0 or borders[-1] != rows * length or any(a > b for a, b in pairwise(borders)):
        raise HeadwaterError(
            f"cu_seq_lens_q must rise from 0 to {rows * length}, the number of tokens, not from {borders[0]} to "
            f"{borders[-1]}."
        )
    calls: list[FusedCall] = []
    for begin, end in pairwise(sorted(set(borders))):  # skip empty documents
        row, column = divmod(begin, length)
        if column + end - begin > length:
            raise HeadwaterError(
                f"cu_seq_lens_q has a document from token {begin} to {end}, across rows of {length} tokens; begin a "
                "new document at the start of each row."
            )
        mask = None
        if 0 < window < end - begin:  # each token sees itself and the window - 1 before it
            hidden = ~torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(1 - window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        calls.append(FusedCall(row, slice(column, column + end - begin), mask))
    return calls


def _plan_dtype_and_calls(q: Tensor, borders: Tensor, window: int) -> tuple[torch.dtype, list[FusedCall]]:
    """The dtype in which a CPU computes, and the calls."""
    dtype = torch.float32 if q.dtype in HALF and not torch.cpu._is_amx_tile_supported() else q.dtype
    return dtype, _plan_calls(tuple(borders.tolist()), q.shape[0], q.shape[2], window, dtype)


def _allocate_heads(x: Tensor) -> Tensor:
    """Memory for x [B, H, T, d], by tokens as a projection leaves it."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


# Named after the module, since a checkpoint exported with its code registers its own copy.
_LIBRARY = re.sub(r"\W", "_", __name__)
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op(f"{_LIBRARY}::forward", mutates_args=())
def _run_forward(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, H, T, d], borders [n + 1] -> (what each head reads [B, T, H, d], logsumexp of scores [B, H, T])."""
    dtype, calls = _plan_dtype_and_calls(q, borders, window)
    out, sums = _allocate_outputs(q)
    for call in calls:
        inputs = call.gather_tokens((q, k, v), dtype)
        heads, total = _fused(*inputs, 0.0, call.mask is None, attn_mask=call.mask, scale=scale)
        call.select_tokens(out.transpose(1, 2)).copy_(heads)
        call.select_tokens(sums).copy_(total)
    return out, sums


@_run_forward.register_fake
def _allocate_outputs(q: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    """Memory for what `_run_forward` returns."""
    sums = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return _allocate_heads(q).transpose(1, 2), sums


@torch.library.custom_op(f"{_LIBRARY}::backward", mutates_args=())
def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, borders: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each [B, H, T, d]. grad: of out [B, T, H, d]."""
    dtype, calls = _plan_dtype_and_calls(q, borders, window)
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    grads = _allocate_gradients(grad, q, k, v)
    for call in calls:
        inputs = call.gather_tokens((grad, q, k, v, out), dtype)
        grads_of_call = _fused_backward(
            *inputs, call.select_tokens(sums), 0.0, call.mask is None, attn_mask=call.mask, scale=scale
        )
        for target, source in zip(grads, grads_of_call, strict=True):
            call.select_tokens(target).copy_(source)
    return grads


@_run_backward.register_fake
def _allocate_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what `_run_backward` returns."""
    return _allocate_heads(q), _allocate_heads(k), _allocate_heads(v)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _compute_gradients(ctx: Any, grad: Tensor, unused: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, borders, out, sums = ctx.saved_tensors
    return *_run_backward(grad, q, k, v, out, sums, borders, ctx.scale, ctx.window), None, None, None


_run_forward.register_autograd(_compute_gradients, setup_context=_save_context)

AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
