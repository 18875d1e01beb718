"""Cache layers for what headwater layers store, beside transformers' own.

A layer whose cache is the usual K and V uses transformers' own cache layer. The ones here serve the rest: fewer heads
than the model has, values of width zero (a layer that owns none), and a tail, the last raw tokens of K and V that a
mechanism looks back to. They register themselves under the names that `HeadwaterConfig.layer_types` gives, so
`DynamicCache(config=…)`, `StaticCache(config=…)` and plain `generate` build them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from headwater.mechanisms.base import KV


class _TailMixin(CacheLayerMixin):
    """Raw tokens beside the cache: `tail_k` and `tail_v` [B, K, n, d], the last n ≥ `tail_length` before the next.

    n is exactly `tail_length`, except while past is recorded (`activate_past_recording`): then everything since is
    kept until the next `crop`, which can so roll back.
    """

    tail_k: Tensor | None = None
    tail_v: Tensor | None = None
    tail_length: int = 0
    record_past: bool = False

    def activate_past_recording(self) -> None:
        self.record_past = True

    def with_tail(self, kv: KV, length: int) -> KV:
        """`kv` preceded by the `length` raw tokens before it (zeros at the start); remembers the last ones."""
        if self.tail_k is None:
            self.tail_length = length
            self.tail_k = kv.k.new_zeros(*kv.k.shape[:2], length, kv.k.shape[3])
            self.tail_v = None if kv.v is None else kv.v.new_zeros(*kv.v.shape[:2], length, kv.v.shape[3])
        k = torch.cat((self.tail_k, kv.k), dim=2)
        v = None if kv.v is None else torch.cat((self.tail_v, kv.v), dim=2)
        seen = kv.k.shape[2] + length
        self.keep(k, v)
        return KV(k[:, :, -seen:], None if v is None else v[:, :, -seen:])

    def keep(self, k: Tensor, v: Tensor | None) -> None:
        """Remember the end of k and v. Copied: a slice would keep the whole prefill alive."""
        kept = k.shape[2] if self.record_past else self.tail_length
        self.tail_k, self.tail_v = k[:, :, -kept:].clone(), None if v is None else v[:, :, -kept:].clone()

    def map_tail(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.tail_k = None if self.tail_k is None else fn(self.tail_k)
        self.tail_v = None if self.tail_v is None else fn(self.tail_v)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.map_tail(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def offload(self) -> None:
        super().offload()
        self.map_tail(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self.map_tail(lambda t: t.to(self.device, non_blocking=True))

    def crop_tail(self, removed: int) -> None:
        """Forget the last `removed` raw tokens and whatever is older than the tail needs."""
        if self.tail_k is None:
            return
        kept = self.tail_k.shape[2] - removed
        if kept < self.tail_length:
            raise RuntimeError(
                f"The cache cannot take back {removed} tokens: it keeps only the last {self.tail_length} raw keys and "
                "values. Call activate_past_recording() on the cache before the tokens that may be taken back."
            )
        self.map_tail(lambda t: t[:, :, kept - self.tail_length : kept].clone())


class _GrowingTailMixin(_TailMixin):
    """The tail of a layer that grows, and so can be cropped, repeated and selected from."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Four dimensions from the start, so that lengths can be read where heads or widths are zero.
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative integer, not {tokens_to_remove}."
            )
        self.crop_tail(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.map_tail(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.map_tail(lambda t: t[indices])

    def reset(self) -> None:
        super().reset()
        self.tail_k = self.tail_v = None


class HeadwaterLayer(_GrowingTailMixin, DynamicLayer):
    """A growing layer: keys [B, K', S, d] and values [B, K', S, d or 0] of the K' heads the layer owns, and a tail."""

    _layer_type = "headwater_attention"

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0


class HeadwaterSlidingLayer(_GrowingTailMixin, DynamicSlidingWindowLayer):
    """The same, keeping the last `sliding_window` - 1 tokens. The window is told by the first `update`."""

    _layer_type = "headwater_sliding_attention"

    def __init__(self, sliding_window: int = 2**31, **kwargs: Any) -> None:
        super().__init__(sliding_window=sliding_window, **kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.sliding_window = kwargs["sliding_window"]
        return super().update(key_states, value_states, *args, **kwargs)


class HeadwaterStaticLayer(_TailMixin, StaticLayer):
    """The same in buffers allocated once, for `torch.compile`."""

    _layer_type = "headwater_attention"

    def keep(self, k: Tensor, v: Tensor | None) -> None:
        # In place: compiled code reads the tail from a fixed address.
        assert self.tail_k is not None
        self.tail_k.copy_(k[:, :, -self.tail_length :])
        if v is not None and self.tail_v is not None:
            self.tail_v.copy_(v[:, :, -self.tail_length :])

    def with_tail(self, kv: KV, length: int) -> KV:
        is_new = self.tail_k is None
        extended = super().with_tail(kv, length)
        if is_new and not torch.compiler.is_compiling():
            self.map_tail(lambda t: torch._dynamo.mark_static_address(t) or t)
        return extended

    def reset(self) -> None:
        super().reset()
        self.map_tail(lambda t: t.zero_())


class HeadwaterStaticSlidingLayer(HeadwaterStaticLayer):
    """A static layer under a sliding window: the whole length is allocated and the mask hides what is too old."""

    _layer_type = "headwater_sliding_attention"


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors the cache holds: keys, values and tails."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values", "tail_k", "tail_v"))
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
