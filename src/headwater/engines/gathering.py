"""Attention over a paged cache of latents, or of keys that are also values, which servers' kernels cannot read.

The model's own kernel reads a copy of each sequence's history, one sequence after another, on any device. A block holds
what the layers store, except positions, which the engine counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.engines.paged import PagedEngine
from headwater.mechanisms.contract import KV, Context
from headwater.nn.attention_kernel import attention_kernel
from headwater.nn.head_groups import join_groups, select_heads

if TYPE_CHECKING:
    from headwater.config.plan import Heads, LayerPlan
    from headwater.nn.attention import Attention


def needs_gathering(plan: LayerPlan) -> bool:
    """Whether heads of this layer read anything but stored keys and values."""
    return any(plan.all_layers[group.v].value_part != "v" for group in plan.groups)


class GatheringEngine(PagedEngine):
    """A `PagedEngine` that gathers the keys and values of one sequence at a time."""

    def write_tokens(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().write_tokens(layer, k, v[:, :0] if self.page.plans[layer].latent_heads else v)

    def read_layer(self, attention: Attention, q: Tensor) -> Tensor:
        assert self.batch is not None
        queries = q.split((self.batch.ends - self.batch.first_position).tolist())
        sequences = zip(queries, self.batch.table, self.batch.ends.tolist(), strict=True)
        return torch.cat([self.read_sequence(attention, *sequence) for sequence in sequences])

    def read_sequence(self, attention: Attention, q: Tensor, blocks: Tensor, length: int) -> Tensor:
        """Return what each head of a sequence's last tokens, q [T, H, d], reads from all `length` tokens, [T, H, d].

        Blocks before a sliding window are left out: the server may have given them to other sequences.
        """
        plan, size, window = attention.plan, self.page.block_size, attention.sliding_window
        first = 0 if window is None else max(0, length - len(q) - window + 1) // size
        positions = torch.arange(first * size, length, device=q.device)
        blocks = blocks[first : -(-length // size)]
        keys = [self.gather_heads(group.k, "k", group.k_heads, blocks, q.dtype) for group in plan.groups]
        k = join_groups(keys, dim=1)[:, :, : len(positions)]
        if plan.latent_heads:
            v = positions[None, None, :, None]
        else:
            parts = [(group.v, plan.all_layers[group.v].value_part, group.v_heads) for group in plan.groups]
            values = [self.gather_heads(*part, blocks, q.dtype) for part in parts]
            v = join_groups(values, dim=1)[:, :, : len(positions)]
        k, v = attention.transform_history(KV(k, v), Context([]))
        q, mask = q.transpose(0, 1)[None], self.make_mask(attention, q, positions)
        kernel = attention_kernel("sdpa" if attention.softcap is None else "eager", q, k)
        return kernel(attention, q, k, v, mask, scaling=attention.scaling, softcap=attention.softcap)[0][0]

    def gather_heads(self, layer: int, kind: str, heads: Heads, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy some heads of a layer's keys or values from a sequence's blocks, [1, heads, tokens, d]."""
        return select_heads(self.view_store(layer, kind, dtype)[blocks], heads).transpose(0, 1).flatten(1, 2)[None]

    def make_mask(self, attention: Attention, q: Tensor, positions: Tensor) -> Tensor | None:
        """Mask of the last tokens, q [T, H, d], over keys at `positions` [S]; None where sdpa needs no mask."""
        (count, heads, _), window = q.shape, attention.sliding_window
        slopes = self.slopes_of(attention, 0, heads)
        if slopes is None and window is None and attention.softcap is None and count in (1, len(positions)):
            return None
        distance = positions[-count:, None] - positions
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if slopes is None:
            return visible[None, None]
        bias = -slopes.to(q.device)[:, None, None] * distance
        return bias.to(q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)[None]
