"""The model's side of a paged cache: the bytes of each block that a token reads and writes.

A server's batch is flat: N new tokens of R sequences, one sequence after another. `FlatBatch` locates them in the
cache, `PagedEngine` is passed to the model as `past_key_values`, and a subclass provides the kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.engines.pages import ALIGNED, Page
from headwater.nn.engine import AttentionLayer, Engine
from headwater.nn.head_groups import join_groups, select_heads
from headwater.nn.position import alibi_slopes
from headwater.util.errors import HeadwaterError


class FlatBatch:
    """N new tokens of R sequences.

    starts [R + 1]: index in the batch of each sequence's first new token, and N. lengths [R]: tokens of each sequence,
    the new ones included. table [R, blocks]: the blocks of each sequence.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, table: Tensor, block_size: int) -> None:
        starts, lengths = starts.long(), lengths.long()
        self.table, self.block_size, self.ends = table.long(), block_size, lengths
        counts = starts.diff()
        self.first_position = lengths - counts  # the position of each sequence's first new token
        self.sequence = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), counts)  # [N]
        self.count = len(self.sequence)
        self.within = torch.arange(self.count, device=starts.device) - starts[self.sequence]  # among its new tokens
        self.position = self.first_position[self.sequence] + self.within
        self.lookbacks: dict[tuple[int, int], Lookback] = {}
        self.histories: dict[int | None, Any] = {}  # by sliding window, for `gathering`

    @cached_property
    def token_blocks(self) -> Tensor:
        """Each token's block, [N]."""
        return self.table[self.sequence, self.position // self.block_size]

    @cached_property
    def token_offsets(self) -> Tensor:
        """Each token's position in its block, [N]."""
        return self.position % self.block_size

    def find_lookback(self, length: int, slots: int) -> Lookback:
        """Find the `length` tokens before each, if a block keeps the last `slots` of its tokens."""
        if (length, slots) in self.lookbacks:
            return self.lookbacks[length, slots]
        size, device = self.block_size, self.position.device
        back = torch.arange(length, 0, -1, device=device)
        # Cached tokens before each sequence's first new one, oldest first.
        position = self.first_position[:, None] - back  # [R, length]
        clamped = position.clamp(min=0)
        block = self.table.gather(1, clamped // size)
        is_own = clamped // size == (self.first_position // size)[:, None]
        # The index of each predecessor: a new token, else a cached one, else the zero after them.
        offsets = self.within[:, None] - back  # [N, length], counted from its sequence's first new token
        cached = self.count + self.sequence[:, None] * length + offsets + length
        index = torch.where(offsets >= 0, torch.arange(self.count, device=device)[:, None] - back, cached)
        index = torch.where(self.position[:, None] < back, self.count + len(self.ends) * length, index)
        # Of a sequence's new tokens in one block, the last `slots` are kept.
        final = torch.minimum(self.ends[self.sequence] - 1, (self.position // size + 1) * size - 1)
        stored = (self.position > final - slots).nonzero().flatten()
        self.lookbacks[length, slots] = Lookback(
            (block, clamped % size % slots),
            is_own[:, :, None],
            index,
            stored,
            (self.token_blocks[stored], self.token_offsets[stored] % slots),
        )
        return self.lookbacks[length, slots]


class Lookback(NamedTuple):
    """The locations of the tokens before each token.

    cached_slots: block and slot of what each sequence needs from the cache, [R, length] each.
    is_own_block [R, length, 1]: whether it is in the block that the sequence's first new token goes into.
    token_index [N, length]: index into the new tokens, the cached ones and zero.
    stored_tokens: the new tokens that the cache keeps. stored_slots: their blocks and slots.
    """

    cached_slots: tuple[Tensor, Tensor]
    is_own_block: Tensor
    token_index: Tensor
    stored_tokens: Tensor
    stored_slots: tuple[Tensor, Tensor]

    def gather_tokens(self, x: Tensor, region: Tensor) -> Tensor:
        """x [N, n] -> the tokens before each, [N, length, n], oldest first; keeps what later steps need.

        region: [blocks, slots, n]. A sequence's own block is read before the new tokens overwrite it. Blocks before it
        are full, and sequences with the same prefix share them: the tokens in them may be written in this very step.
        """
        old = region[self.cached_slots]
        region[self.stored_slots] = x[self.stored_tokens]
        earlier = torch.where(self.is_own_block, old, region[self.cached_slots])
        return torch.cat((x, earlier.flatten(0, 1), x.new_zeros(1, x.shape[1])))[self.token_index]


class RawTokens:
    """The raw tokens of one layer (`Tail`), in the space that the page reserves for them."""

    def __init__(self, engine: PagedEngine, layer: int) -> None:
        self.engine = engine
        room = engine.page.rooms.get(layer, range(0))  # default: a process whose heads keep no raw tokens
        self.layer, self.free, self.end = layer, room.start, room.stop
        self.offsets: dict[str, int] = {}

    def update_tail(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        """Update a tail as `Tail.update_tail`, of x [N, heads, 1, d]."""
        engine, (count, heads, _, width) = self.engine, x.shape
        if engine.memory is None or engine.batch is None or x.numel() == 0:
            return x.new_zeros(count, heads, length, width)
        flat = x.reshape(count, heads * width)
        slots = engine.page.tail_slots(length)
        region = engine.view_bytes(self.find_room(name, flat, length), slots * heads * width, x.dtype)
        earlier = engine.batch.find_lookback(length, slots).gather_tokens(flat, region.unflatten(1, (slots, -1)))
        return earlier.unflatten(2, (heads, width)).transpose(1, 2)

    def find_room(self, name: str, x: Tensor, length: int) -> int:
        """The first byte of a tail in a block. Raises `HeadwaterError` if the plan has no room for it."""
        if name not in self.offsets:
            size = self.engine.page.tail_bytes(length, x.shape[1], x.element_size())
            if self.free + size > self.end:
                raise HeadwaterError(
                    f"The raw tokens {name!r} of layer {self.layer} need {size} bytes in a block, for which the plan "
                    "leaves no room; declare them as tails in the mechanism's plan_stages()."
                )
            self.offsets[name] = self.free
            self.free += size
        return self.offsets[name]


class PagedEngine(Engine):
    """A cache of blocks as `Page` lays them out, and attention over it.

    memory: uint8 [blocks, bytes], set once; batch: set before each forward pass. Without them nothing is kept, and
    attention gives zeros: a dry run.
    """

    def __init__(self, page: Page, slopes: Tensor | None = None) -> None:
        """Take ALiBi's slopes of each query head, where every layer has only some of them; default: of all heads."""
        self.page, self.slopes = page, slopes
        self.memory: Tensor | None = None
        self.batch: FlatBatch | None = None
        self.views: dict[tuple[int, str], Tensor] = {}
        self.layers = [RawTokens(self, plan.index) if plan.tails else None for plan in page.plans]

    def bind_memory(self, memory: Tensor) -> None:
        """Use this memory. Raises `HeadwaterError` if the size of its blocks differs from the page's."""
        if memory.shape[1] != self.page.size:
            raise HeadwaterError(f"A block has {self.page.size} bytes, and this cache's blocks have {memory.shape[1]}.")
        assert memory.dtype == torch.uint8
        assert memory.stride(0) % ALIGNED == 0
        self.memory, self.views = memory, {}

    def release_memory(self) -> None:
        self.memory, self.batch, self.views = None, None, {}

    def view_bytes(self, start: int, numbers: int, dtype: torch.dtype) -> Tensor:
        """A part of each block as numbers of a dtype, [blocks, numbers]."""
        assert self.memory is not None
        return self.memory[:, start : start + numbers * dtype.itemsize].view(dtype)

    def view_store(self, layer: int, kind: str, dtype: torch.dtype) -> Tensor:
        """The keys or values of one layer, [blocks, heads, block_size, d]."""
        if (layer, kind) not in self.views:
            store, size = self.page.stores[layer, kind], self.page.block_size
            numbers = self.view_bytes(store.offset, store.heads * size * store.width, dtype)
            self.views[layer, kind] = numbers.unflatten(1, (store.heads, size, store.width))
        return self.views[layer, kind]

    def attend(self, attention: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.memory is None or self.batch is None:
            return torch.zeros_like(q).transpose(1, 2)
        self.write_tokens(attention.layer_idx, k[:, :, 0], v[:, :, 0])
        return self.read_layer(attention, q[:, :, 0]).unsqueeze(1)

    @abstractmethod
    def read_layer(self, attention: Any, q: Tensor) -> Tensor:
        """Return what each head of q [N, H, d] reads, [N, H, d]. attention: the layer, an `Attention`."""

    def slopes_of(self, attention: AttentionLayer, start: int, count: int) -> Tensor | None:
        """ALiBi's slopes of `count` of a layer's query heads, from `start` on, in fp32; None without ALiBi."""
        if self.page.config.position != "alibi":
            return None
        slopes = self.slopes
        if slopes is None:
            slopes = alibi_slopes(len(attention.plan.attends) * attention.num_key_value_groups, torch.float32)
        return slopes[start : start + count]

    def write_tokens(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values, [N, heads, d] each; heads: those the layer stores, possibly none."""
        assert self.batch is not None
        for kind, x in (("k", k), ("v", v)):
            if x.shape[1]:
                self.view_store(layer, kind, x.dtype)[self.batch.token_blocks, :, self.batch.token_offsets] = x


class KernelEngine(PagedEngine):
    """A `PagedEngine` with a kernel that reads keys and values out of blocks."""

    def read_layer(self, attention: AttentionLayer, q: Tensor) -> Tensor:
        per_key, outputs = attention.num_key_value_groups, []
        for group in attention.plan.groups:
            begin, end = group.first * per_key, (group.first + group.size) * per_key
            keys = select_heads(self.view_store(group.k, "k", q.dtype), group.k_heads)
            values = select_heads(self.view_store(group.v, "v", q.dtype), group.v_heads)
            outputs.append(self.read_heads(attention, q[:, begin:end], keys, values, begin))
        return join_groups(outputs, dim=1)

    @abstractmethod
    def read_heads(self, attention: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Return what each head of q [N, h, d] reads from keys and values [blocks, heads, block_size, d], [N, h, d].

        start: which of the layer's query heads is the first one.
        """
