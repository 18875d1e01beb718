"""Cache layers for what transformers' own cannot hold: fewer heads than the model has, different heads for values and
keys, and tails, the last raw tokens for mechanisms that look back. They register under the names in
`HeadwaterConfig.layer_types`, so `DynamicCache(config=…)`, `StaticCache(config=…)` and plain `generate` build them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantoQuantizedLayer,
    StaticLayer,
)
from transformers.utils import is_optimum_quanto_available

from headwater.config.text import HeadwaterConfig
from headwater.util.errors import HeadwaterError

# The tail with the positions of the tokens in all other tails.
POSITIONS = "positions"


class _TailMixin(CacheLayerMixin):
    """Raw tokens next to the cache: `tails[name]` [B, heads, n, d] holds the last n = `tail_lengths[name]`.

    While the past is recorded (`activate_past_recording`), all tokens since are kept, so that `crop` can roll back.
    """

    record_past: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tails: dict[str, Tensor] = {}
        self.tail_lengths: dict[str, int] = {}

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update_tail(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        """See `headwater.mechanisms.contract.Tail`."""
        if name not in self.tails:
            self.tail_lengths[name] = length
            self.tails[name] = x.new_zeros(*x.shape[:2], length, x.shape[3])
        tail = self.tails[name]
        knows_length = not torch.compiler.is_compiling()  # while tracing, the length is not fixed
        if self.record_past:
            self.tails[name] = torch.cat((tail, x), dim=2)
        elif knows_length and x.shape[2] == length:
            self.tails[name] = x
        else:
            tokens = (x if knows_length and x.shape[2] > length else torch.cat((tail, x), dim=2))[:, :, -length:]
            # Clone a slice of a long input, which would otherwise keep the whole prefill in memory.
            self.tails[name] = tokens if x.shape[2] == 1 else tokens.clone()
        return tail if everything or tail.shape[2] == length else tail[:, :, -length:]

    def positions(self) -> Tensor | None:
        """Positions of the tokens in the tails plus 1, [B, n]; 0 where there is none; None before the first call."""
        tail = self.tails.get(POSITIONS)
        return None if tail is None else tail[:, 0, :, 0]

    def put_positions(self, position_ids: Tensor, batch: int, length: int) -> None:
        """Store the positions [B or 1, T] of the tokens that come next."""
        self.update_tail(POSITIONS, (position_ids + 1).expand(batch, -1)[:, None, :, None], length)

    def map_tails(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.tails = {name: fn(tail) for name, tail in self.tails.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.map_tails(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def offload(self) -> None:
        super().offload()
        self.map_tails(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:  # blocking: tails are read before `update`, where the cache waits for its stream
            self.map_tails(lambda t: t.to(self.device))


class _GrowingTailMixin(_TailMixin):
    """The tail of a growing layer, which can be cropped, repeated and indexed."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Start with four dimensions, so that the length is defined even if the number of heads or the width is zero.
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative integer, not {tokens_to_remove}."
            )
        cropped = {}
        for name, tail in self.tails.items():  # keep only what the tails still need
            length_left, length = tail.shape[2] + tokens_to_remove, self.tail_lengths[name]
            if length_left < length:
                raise RuntimeError(
                    f"The cache cannot take back {-tokens_to_remove} tokens: it keeps only the last {length} raw keys "
                    "and values. Call activate_past_recording() on the cache before the tokens that may be taken back."
                )
            cropped[name] = tail[:, :, length_left - length : length_left].clone()
        self.tails = cropped
        if self.is_initialized:  # transformers 5.17 does not ask
            super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.map_tails(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.map_tails(lambda t: t[indices])

    def reset(self) -> None:
        # Drop keys and values, because `update` appends to them. transformers 5.17 only zeroes them.
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()
        self.tails, self.record_past = {}, False


# Number of tokens by which memory grows, so that a step need not copy the whole history: an eighth of its length,
# within these bounds.
LEAST_ROOM, ROOM = 16, 256


class _HistoryBuffer:
    """A history [B, heads, S, d] that is extended in place while its memory has room.

    Only the holder of the latest state writes in place; the holder of any other (cropped, reordered, or shared with a
    copied cache) gets new memory first. So a returned state never changes, as with `torch.cat`.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.latest: Tensor | None = None

    def extend_history(self, stored: Tensor, new: Tensor) -> Tensor:
        """Append `new` [B, heads, T, d] to `stored` [B, heads, S, d]."""
        # With gradients, whatever attention has read must not change, even if these tensors need none.
        # PyTorch's half-precision matmuls on a CPU would copy a history that is not contiguous.
        copies_strided = new.device.type == "cpu" and new.dtype in (torch.bfloat16, torch.float16)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or copies_strided:
            return torch.cat((stored, new), dim=2)
        (*rows, start, width), (*new_rows, length, new_width) = stored.shape, new.shape
        if rows != new_rows or width != new_width:
            return torch.cat((stored, new), dim=2)
        memory, end = self.memory, start + length
        if (
            stored is not self.latest
            or end > memory.shape[2]
            or memory.is_inference() != torch.is_inference_mode_enabled()
        ):
            room = min(ROOM, max(LEAST_ROOM, end // 8))
            memory = new.new_empty(*rows, end + room, width)
            memory.narrow(2, 0, start).copy_(stored)
        memory.narrow(2, start, length).copy_(new)
        self.memory, self.latest = memory, memory.narrow(2, 0, end)
        return self.latest

    def release_memory(self, stored: Tensor) -> None:
        """Free the memory if `stored` is no longer in it."""
        if self.latest is not stored:
            self.memory = self.latest = None


class HeadwaterLayer(_GrowingTailMixin, DynamicLayer):
    """A growing layer: keys and values [B, heads, S, d] of the heads the layer stores, and tails."""

    _layer_type = "headwater_attention"
    # A slot, because exporters take the instance's __dict__ for its state.
    __slots__ = ("_history_buffers",)

    @property
    def history_buffers(self) -> tuple[_HistoryBuffer, _HistoryBuffer]:
        """The memory of keys and values."""
        if not hasattr(self, "_history_buffers"):  # also after an exporter has rebuilt the layer from its state
            self._history_buffers = _HistoryBuffer(), _HistoryBuffer()
        return self._history_buffers

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and exporters, without spare memory."""
        state = dict(vars(self))
        if self.is_initialized:
            state.update(keys=self.keys.contiguous(), values=self.values.contiguous())
        # Programs check strides also where a length is 1, which `contiguous` leaves as they are.
        state["tails"] = {name: tail.clone(memory_format=torch.contiguous_format) for name, tail in self.tails.items()}
        return state

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.history_buffers
        self.keys = keys.extend_history(self.keys, key_states)
        self.values = values.extend_history(self.values, value_states)
        return self.keys, self.values

    def map_tails(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().map_tails(fn)
        for buffer, stored in zip(self.history_buffers, (self.keys, self.values), strict=True):  # replaced as well
            buffer.release_memory(stored)

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self._history_buffers = _HistoryBuffer(), _HistoryBuffer()


class HeadwaterSlidingLayer(_GrowingTailMixin, DynamicSlidingWindowLayer):
    """A growing layer that keeps the last `sliding_window` - 1 tokens. `update` is passed the window."""

    _layer_type = "headwater_sliding_attention"

    def __init__(self, sliding_window: int = 2**31, **kwargs: Any) -> None:
        super().__init__(sliding_window=sliding_window, **kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.sliding_window = kwargs["sliding_window"]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.record_past:  # the mask covers only these; transformers 5.17 returns all recorded tokens
            visible = self.sliding_window - 1 + key_states.shape[2]
            return keys[:, :, -visible:], values[:, :, -visible:]
        if key_states.shape[2] > 1:  # cloned, because a slice would keep the whole prefill alive
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return keys, values


class Centered(NamedTuple):
    """Keys, values or a latent [B, heads, S, d] as shares·mean + difference, except for each row's first tokens.

    first [B, heads, n, d], and their slots [B, 1, n, 1] among the tokens; mean [B, heads, 1, d]; shares [B, 1, S, 1];
    difference: quantized by quanto.
    """

    first: Tensor
    first_slots: Tensor
    mean: Tensor
    shares: Tensor
    difference: Any


class HeadwaterQuantizedLayer(_GrowingTailMixin, QuantoQuantizedLayer):
    """A growing layer whose keys and values, or latents, are quantized by quanto in groups of 64 numbers, or of 32 or
    16 where a token's heads are not a multiple of 64 wide.

    Most of a latent points in one direction in all tokens. So each token's part along the mean is stored as one number,
    and only the difference is quantized. These stay whole: the first tokens, to which many heads attend most (arXiv
    2309.17453); the latest; positions beside a latent; and tails.
    """

    FIRST = 4
    # transformers passes one of these to `_quantize` as an axis. Here it only tells keys from values in `centers`, and
    # quanto always gets axis 0.
    KEYS, VALUES = 0, -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, axis_key=self.KEYS, axis_value=self.VALUES, **kwargs)
        self.centers: dict[int, tuple[Tensor, Tensor]] = {}  # mean and shares: numbers that are quantized again stay
        self.starts: Tensor | None = None  # [B], how many tokens of padding each row begins with; None: none

    def _quantize(self, tensor: Tensor, axis: int) -> Any:
        rows, heads, length, width = tensor.shape
        self.q_group_size = math.gcd(64, heads * width)  # read below
        if length <= self.FIRST or heads * width <= 1:  # nothing, or positions
            return tensor
        if self.q_group_size < 16:
            raise HeadwaterError(
                f"{heads} heads of {width} numbers cannot be quantized, which takes a multiple of 16; use a cache that "
                "is not quantized."
            )
        slots = torch.arange(length, device=tensor.device)
        starts = slots.new_zeros(rows) if self.starts is None else self.starts.to(tensor.device)
        starts = starts.clamp(max=length - self.FIRST)[:, None]
        first_slots = (starts + slots[: self.FIRST])[:, None, :, None]
        first = tensor.take_along_dim(first_slots, dim=2)
        if axis not in self.centers:
            others = slots >= starts + self.FIRST
            others |= ~others.any(dim=1, keepdim=True)  # so few tokens so far: their mean, with padding
            weights = (others / others.sum(dim=1, keepdim=True))[:, None, :, None]
            self.centers[axis] = (tensor * weights).sum(dim=2, keepdim=True).to(tensor.dtype), tensor[:, :1, :0, :1]
        mean, shares = self.centers[axis]
        # Squares of large numbers overflow in half precision.
        direction = mean.to(torch.promote_types(mean.dtype, torch.float32))
        direction = direction / direction.square().sum((1, 3), keepdim=True).clamp(min=1e-9)
        new_shares = (tensor[:, :, shares.shape[2] :] * direction).sum((1, 3), keepdim=True)
        shares = torch.cat((shares, new_shares.to(tensor.dtype)), dim=2)
        self.centers[axis] = mean, shares
        difference = (tensor - shares * mean).scatter_(2, first_slots.expand_as(first), 0)
        return Centered(first, first_slots, mean, shares, super()._quantize(difference, 0))

    def _dequantize(self, qtensor: Any) -> Tensor:
        if not isinstance(qtensor, Centered):
            return qtensor
        history = super()._dequantize(qtensor.difference) + qtensor.shares * qtensor.mean
        return history.scatter_(2, qtensor.first_slots.expand_as(qtensor.first), qtensor.first)

    def reset(self) -> None:
        super().reset()
        self.centers.clear()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        history = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.ndim != 4 or not self.keys.shape[2]:  # all is quantized: keep the shapes and dtypes, no memory
            self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        return history

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not hasattr(self, "_pending_beam_idx"):  # transformers before 5.24 leaves what is quantized as it was
            raise HeadwaterError("Beam search with a quantized cache needs transformers 5.24 or later.")
        super().reorder_cache(beam_idx)
        self.centers = {axis: (mean[beam_idx], shares[beam_idx]) for axis, (mean, shares) in self.centers.items()}
        if not self.keys.numel() and self.values.numel():  # transformers reorders the latest tokens if there are keys
            self.values = self.values.index_select(0, beam_idx.to(self.values.device))

    def crop(self, tokens_to_remove: int) -> None:
        raise _cannot_change("take tokens back")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _cannot_change("repeat rows")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _cannot_change("select rows")


class HeadwaterQuantizedCache(Cache):
    """A growing cache that stores what the model's layers store in 4 or 2 bits a number. Needs optimum-quanto.

    nbits: 2 or 4. residual_length: when so many tokens have come since, they are quantized with their history. With
    padding, pass `attention_mask` as [B, S], which shows each row's first tokens: these stay whole.
    Raises `HeadwaterError` for other numbers of bits, for another library's model or one with sliding windows, and
    without optimum-quanto.
    """

    def __init__(self, config: HeadwaterConfig, nbits: int = 4, residual_length: int = 128) -> None:
        if not isinstance(config, HeadwaterConfig):
            raise HeadwaterError(f"This cache is for headwater's models, and not for a {type(config).__name__}.")
        if nbits not in (2, 4):
            raise HeadwaterError(f"A quantized cache has 2 or 4 bits a number, not {nbits}.")
        if any("sliding" in kind for kind in config.layer_types):
            raise HeadwaterError("A quantized cache cannot have sliding windows; use one that is not quantized.")
        if not is_optimum_quanto_available():
            raise HeadwaterError(
                "A quantized cache needs optimum-quanto; install it with `pip install optimum-quanto`."
            )
        layers = [HeadwaterQuantizedLayer(nbits, residual_length=residual_length) for _ in config.layer_types]
        super().__init__(layers=layers)

    def set_starts(self, attention_mask: Tensor | None) -> None:
        """Set where each row begins, by the mask [B, S] of all tokens so far: padding is not what stays whole."""
        is_known = attention_mask is not None and attention_mask.ndim == 2
        starts = attention_mask.ne(0).cumsum(dim=1).eq(0).sum(dim=1) if is_known else None
        for layer in self.layers:
            layer.starts = starts


class HeadwaterStaticLayer(_TailMixin, StaticLayer):
    """A static layer: buffers that are allocated once, for `torch.compile`.

    Each token of a tail has a buffer of its own, so that a compiled kernel can read them and shift them in one pass. If
    initialized early (for export, or because `generate` splits a prompt), it has room for all heads.
    """

    _layer_type = "headwater_attention"
    keys: Tensor
    values: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_early = False
        self.counts_tokens = True  # False if another layer adds to the count that they share (`share_count`)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Called by `early_initialization` with all heads, since it is not known yet which of them the layer stores.
        self.is_early = key_states.shape[2] == 0
        # transformers gives values the heads and the dtype of keys.
        if (value_states.shape[1], value_states.dtype) != (key_states.shape[1], key_states.dtype):
            self.replace_values(value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.is_early and self.values.is_floating_point() and not value_states.is_floating_point():
            if torch.compiler.is_exporting():
                raise HeadwaterError(
                    "A program that is exported with a static cache has no room for the positions beside a latent; "
                    "export it with a growing cache (transformers.exporters.DynamoExporter)."
                )
            self.replace_values(value_states)  # positions, beside a latent
        history = self.keys, self.values
        if self.is_early:
            history = self.keys[:, : key_states.shape[1]], self.values[:, : value_states.shape[1]]
        slots = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        if self.counts_tokens:
            self.cumulative_length.add_(key_states.shape[2])
        for stored, new in zip(history, (key_states, value_states), strict=True):
            if new.shape[1]:
                stored.index_copy_(2, slots, new)
        return history

    def replace_values(self, like: Tensor) -> None:
        """Make the memory of values [B, heads, S, d] anew, for as many heads, of the width and dtype, of `like`."""
        self.values = like.new_zeros(*like.shape[:2], self.max_cache_len, like.shape[3], device=self.device)
        _mark_static(self.values)

    def update_tail(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        return torch.cat(self.shift_tail(name, x, length), dim=2)

    def shift_tail(self, name: str, x: Tensor, length: int) -> tuple[Tensor, ...]:
        """`update_tail`, as one tensor [B, heads, 1, d] per token."""
        if self.is_early and torch.compiler.is_exporting():
            raise HeadwaterError(
                "A program that is exported with a static cache keeps keys and values only, without the raw tokens to "
                "which this model's mechanisms look back; export it with a growing cache "
                "(transformers.exporters.DynamoExporter), or remove these mechanisms."
            )
        names = [f"{name}.{slot}" for slot in range(length)]
        for slot in names:
            if slot not in self.tails:
                self.tails[slot] = torch.zeros_like(x[:, :, :1], memory_format=torch.contiguous_format)
                _mark_static(self.tails[slot])
        old_tokens = tuple(self.tails[slot].clone() for slot in names)
        last_tokens = (*old_tokens, *x[:, :, -length:].split(1, dim=2))[-length:]
        for slot, token in zip(names, last_tokens, strict=True):
            self.tails[slot].copy_(token)
        return old_tokens

    def positions(self) -> Tensor | None:
        slots = [tail for name, tail in self.tails.items() if name.startswith(POSITIONS)]
        return torch.cat(slots, dim=2)[:, 0, :, 0] if slots else None

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back, as transformers asks from 5.24 on: raw tokens overwrite earlier ones."""
        return getattr(super(), "is_croppable", False) and not self.tails

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.tails:
            raise RuntimeError(
                "A static cache that keeps raw tokens cannot take tokens back; use DynamicCache(config=model.config)."
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.map_tails(lambda t: t.zero_())


class HeadwaterStaticSlidingLayer(HeadwaterStaticLayer):
    """A static layer with a sliding window: it allocates the whole length, and the mask hides older tokens."""

    _layer_type = "headwater_sliding_attention"


def share_count(cache: Cache, device: torch.device) -> None:
    """Let all layers of a new static cache read one count of tokens, to which the last layer adds."""
    count = cache.layers[-1].cumulative_length.to(device)
    for layer in cache.layers:
        layer.cumulative_length = count
        layer.counts_tokens = layer is cache.layers[-1]


def restart_cache(cache: Cache) -> None:
    """Empty a cache. A cache that records its past continues to do so."""
    recording = [layer for layer in cache.layers if getattr(layer, "record_past", False)]
    cache.reset()
    for layer in recording:
        layer.activate_past_recording()


def cache_bytes(cache: Cache, reserved: bool = False) -> int:
    """Bytes of the keys, values and raw tokens that the cache holds. reserved: count spare memory too."""
    stored = [
        piece
        for layer in cache.layers
        for tensor in (
            *(getattr(layer, name, None) for name in ("keys", "values", "_quantized_keys", "_quantized_values")),
            *(tail for name, tail in getattr(layer, "tails", {}).items() if not name.startswith(POSITIONS)),
        )
        if tensor is not None
        for piece in _list_pieces(tensor)
    ]
    if reserved:
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in stored}.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in stored)


def _cannot_change(what: str) -> HeadwaterError:
    """Make the error of an operation that transformers would apply only to the tokens that are not quantized yet."""
    return HeadwaterError(f"A quantized cache cannot {what}; use DynamicCache(config=model.config).")


def _list_pieces(tensor: Any) -> list[Tensor]:
    """The tensors that are stored for one: itself or, of a quantized one, all of its parts."""
    if isinstance(tensor, Centered):
        return [*tensor[:-1], *_list_pieces(tensor.difference)]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [piece for name in names for piece in _list_pieces(getattr(tensor, name))]


def _mark_static(tensor: Tensor) -> None:
    """Tell `torch.compile` that the tensor's address is fixed, as transformers does for keys and values."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
