"""Attention over a paged cache of latents, or of keys that are also values, which servers' kernels cannot read.

The model's own kernel reads copies of the sequences' histories, on any device. A block holds what the layers store,
except positions, which the engine counts.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwater.engines.paged import FlatBatch, PagedEngine
from headwater.mechanisms.contract import KV, Context
from headwater.nn.attention_kernel import attention_kernel
from headwater.nn.head_groups import join_groups, select_heads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headwater.config.plan import Heads, LayerPlan
    from headwater.nn.attention import Attention

# Tokens of all histories that are copied at once.
MOST_TOKENS = 2**15


def needs_gathering(plans: Sequence[LayerPlan]) -> bool:
    """Whether heads of any layer read anything but stored keys and values."""
    return any(plan.all_layers[group.v].value_part != "v" for plan in plans for group in plan.groups)


class Histories(NamedTuple):
    """R sequences with T new tokens each, and what layers with one window read of them.

    blocks [R, n]. positions, is_token [R, S]: the position in each slot, and whether a token of the sequence is there.
    distance, visible [R, 1, T, S]: how far before a new token a slot is, and whether the token sees it. is_causal:
    whether this is the mask that sdpa makes itself.
    """

    blocks: Tensor
    positions: Tensor
    is_token: Tensor
    distance: Tensor
    visible: Tensor
    is_causal: bool

    @classmethod
    def find(cls, batch: FlatBatch, sequences: slice, count: int, window: int | None) -> Histories:
        """Blocks before the window are left out: the server may have given them to other sequences."""
        size, lengths, table = batch.block_size, batch.ends[sequences], batch.table[sequences]
        first = torch.zeros_like(lengths) if window is None else (lengths - count - window + 1).clamp(min=0) // size
        slots = torch.arange(int((lengths - first * size).max()), device=table.device)
        blocks = (first[:, None] + slots[::size] // size).clamp(max=table.shape[1] - 1)
        positions = first[:, None] * size + slots
        queries = lengths[:, None] - count + torch.arange(count, device=table.device)
        distance = queries[:, None, :, None] - positions[:, None, None]
        visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        is_causal = len(lengths) == 1 and window is None and count in (1, len(slots))
        return cls(table.gather(1, blocks), positions, positions < lengths[:, None], distance, visible, is_causal)


def divide_batch(batch: FlatBatch, window: int | None) -> Iterator[tuple[int, Histories]]:
    """Yield the sequences in groups with as many new tokens each: T, and their `Histories`."""
    counts, lengths = (batch.ends - batch.first_position).tolist(), batch.ends.tolist()
    for count, group in groupby(range(len(counts)), counts.__getitem__):
        rows = [*group]
        size = max(1, MOST_TOKENS // max(lengths[row] for row in rows))
        for start in range(rows[0], rows[-1] + 1, size):
            yield count, Histories.find(batch, slice(start, min(start + size, rows[-1] + 1)), count, window)


class GatheringEngine(PagedEngine):
    """A `PagedEngine` that copies the keys and values of some sequences at a time."""

    def write_tokens(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().write_tokens(layer, k, v[:, :0] if self.page.plans[layer].latent_heads else v)

    def read_layer(self, attention: Attention, q: Tensor) -> Tensor:
        batch, window = self.batch, attention.sliding_window
        assert batch is not None
        if window not in batch.histories:
            batch.histories[window] = [*divide_batch(batch, window)]
        groups = batch.histories[window]
        queries = q.split([count * len(histories.blocks) for count, histories in groups])
        outputs = [
            self.read_histories(attention, rows.unflatten(0, (-1, count)).transpose(1, 2), histories)
            for rows, (count, histories) in zip(queries, groups, strict=True)
        ]
        return torch.cat([heads.flatten(0, 1) for heads in outputs])

    def read_histories(self, attention: Attention, q: Tensor, histories: Histories) -> Tensor:
        """Return what each head of q [R, H, T, d] reads, [R, T, H, d]."""
        plan = attention.plan
        keys = [self.gather_heads(group.k, "k", group.k_heads, histories, q.dtype) for group in plan.groups]
        if plan.latent_heads:
            v = histories.positions[:, None, :, None]
        else:
            parts = [(group.v, plan.all_layers[group.v].value_part, group.v_heads) for group in plan.groups]
            v = join_groups([self.gather_heads(*part, histories, q.dtype) for part in parts], dim=1)
        k, v = attention.transform_history(KV(join_groups(keys, dim=1), v), Context([]))
        mask = self.make_mask(attention, q, histories)
        kernel = attention_kernel("sdpa" if attention.softcap is None else "eager", q, k)
        return kernel(attention, q, k, v, mask, scaling=attention.scaling, softcap=attention.softcap)[0]

    def gather_heads(self, layer: int, kind: str, heads: Heads, histories: Histories, dtype: torch.dtype) -> Tensor:
        """Copy some heads of a layer's keys or values, [R, heads, S, d]; zeros where no token is."""
        x = select_heads(self.view_store(layer, kind, dtype)[histories.blocks].flatten(0, 1), heads)
        x = x.unflatten(0, histories.blocks.shape).transpose(1, 2).flatten(2, 3)
        is_token = histories.is_token[:, None, :, None]
        return x[:, :, : is_token.shape[2]].masked_fill(~is_token, 0.0)

    def make_mask(self, attention: Attention, q: Tensor, histories: Histories) -> Tensor | None:
        """Mask of q [R, H, T, d], with ALiBi's biases; None where sdpa needs none."""
        slopes = self.slopes_of(attention, 0, q.shape[1])
        if slopes is not None:
            bias = (-slopes.to(q.device)[:, None, None] * histories.distance).to(q.dtype)
            return bias.masked_fill(~histories.visible, torch.finfo(q.dtype).min)
        return None if histories.is_causal and attention.softcap is None else histories.visible
