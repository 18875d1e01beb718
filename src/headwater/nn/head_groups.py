"""Calls of the attention kernel: one for each group of heads that attend to the same layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from headwater.config.plan import HeadGroup, Heads, LayerPlan, Source
from headwater.kernels import can_fuse_traced
from headwater.mechanisms.contract import KV


class KernelInputs(NamedTuple):
    """Arguments of one kernel call: q [B, h, T, d]; k, v [B, K, S, d]; added keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    attention_mask: Any = None
    added_kv: KV | None = None


class GroupSlots(NamedTuple):
    """Slots of a group's queries, keys and values among a layer's tensors (`LayerPlan.slot`).

    None stands for all heads.
    """

    q_heads: Heads
    k_slot: int
    k_heads: Heads
    v_slot: int
    v_heads: Heads

    @classmethod
    def from_plan(cls, plan: LayerPlan, group: HeadGroup, queries_per_key: int) -> Self:
        q_heads = slice(group.first * queries_per_key, (group.first + group.size) * queries_per_key)
        k_slot, v_slot = plan.slot(Source("bank", "k", group.k)), plan.slot(Source("bank", "v", group.v))
        has_all = group.size == len(plan.attends)
        return cls(None if has_all else q_heads, k_slot, group.k_heads, v_slot, group.v_heads)

    def select_kv(self, tensors: Sequence[Tensor]) -> KV:
        """Select the group's keys and values, [B, heads, S, d] each."""
        return KV(select_heads(tensors[self.k_slot], self.k_heads), select_heads(tensors[self.v_slot], self.v_heads))

    def select_inputs(self, q: Tensor, attention_mask: Any, tensors: Sequence[Tensor]) -> KernelInputs:
        """Select the group's call, with its heads of all queries and of a mask that differs between heads."""
        k, v = self.select_kv(tensors)
        if self.q_heads is None:
            return KernelInputs(q, k, v, attention_mask)
        by_head = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[1] > 1
        return KernelInputs(q[:, self.q_heads], k, v, attention_mask[:, self.q_heads] if by_head else attention_mask)


def divide_pairs(inputs: Sequence[KernelInputs], pairs: Sequence[KV]) -> list[KernelInputs]:
    """Add to each call the keys and values, from [K, n, d], of its own key/value heads."""
    keys, values = (join_groups([pair[index] for pair in pairs], dim=1).to(inputs[0].q.dtype) for index in (0, 1))
    calls: list[KernelInputs] = []
    start = 0
    for group in inputs:
        end = start + group.k.shape[1]
        calls.append(group._replace(added_kv=KV(keys[start:end], values[start:end])))
        start = end
    return calls


def of_tokens(weights: Tensor, inputs: Sequence[KernelInputs]) -> Tensor:
    """Select the tokens' weights from the weights of all keys, of which added keys are the last."""
    added_kv = inputs[0].added_kv
    return weights if added_kv is None else weights[..., : weights.shape[3] - added_kv.k.shape[1]]


def select_heads(x: Tensor, heads: Heads) -> Tensor:
    """Select some heads of x [B, heads, …]."""
    return x if heads is None else x[:, heads]


def branch_heads(x: Tensor, is_exported: bool) -> tuple[Tensor, Tensor]:
    """Return x [B, heads, T, d] for later layers and for its own.

    In compiled training both are views of one tensor in the layout of projections, [B, T, heads, d]: there the compiler
    adds the two gradients, and need not copy the sum.
    """
    if not is_exported or not can_fuse_traced():
        return x, x
    x_BTHd = x.transpose(1, 2)
    return x_BTHd.transpose(1, 2), x_BTHd.transpose(1, 2)


def join_groups(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate the parts. A single part is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)
