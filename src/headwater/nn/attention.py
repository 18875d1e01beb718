"""Attention: where all mechanisms are composed, in one fixed order of stages; at each they act in the config's order.

project → PROJECTIONS → norms → QKV → RoPE → cache → ATTENDED_KV → ADDED_KEY_VALUES → attend → ATTENTION_WEIGHTS →
HEAD_OUTPUTS → project

The cache holds what the layer itself projects (keys and values, or a latent and positions, from which ATTENDED_KV makes
keys that then get their norm and RoPE); what other layers own is read from their caches. With `config.materialise` each
layer first gathers the keys and values of all its heads, and caches them in any cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.config.layers import layer_config
from headwater.config.plan import ATTENTION_STAGES, LayerPlan, Stage
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import KV, QKV, Context, Reach
from headwater.nn.attention_kernel import attend_in_groups, eager_attention, read_groups, weigh_keys
from headwater.nn.cache_name import is_paged
from headwater.nn.engine import Engine
from headwater.nn.head_groups import GroupSlots, KernelInputs, branch_heads, divide_pairs, join_groups, of_tokens
from headwater.nn.linear import JoinsLinears, apply_linear, make_map
from headwater.nn.lookback import find_tail
from headwater.nn.norm import make_norm
from headwater.nn.position import RotaryEmbedding, for_heads, rotate
from headwater.nn.stages import RunsStages
from headwater.util.errors import HeadwaterError


class Attention(RunsStages, JoinsLinears):
    """Multi-head attention of one layer, built from its plan."""

    def __init__(self, config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config = config
        config = layer_config(config, plan.index)
        self.plan = plan
        self.layer_idx = plan.index
        self.is_causal = config.is_causal  # transformers' attention kernels read this
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else float(config.attention_scale)
        self.softcap = config.attention_softcap
        self.sliding_window = config.sliding_window
        self.attention_dropout = config.attention_dropout
        self.materialise = config.materialise

        width, q_width = config.hidden_size, config.num_attention_heads * config.head_dim
        k_width, v_width = len(plan.k_heads) * config.head_dim, len(plan.v_heads) * config.head_dim
        self.q_proj = make_map(config, plan.index, "query", width, q_width, config.qkv_bias)
        self.k_proj = make_map(config, plan.index, "key", width, k_width, config.qkv_bias and not plan.latent_heads)
        self.v_proj = make_map(config, plan.index, "value", width, v_width, config.qkv_bias)
        self.o_proj = make_map(config, plan.index, "output", q_width, width, config.output_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm and plan.has_keys else None

        self.build_mechanisms(config, plan, ATTENTION_STAGES)
        self.exports = tuple(plan.slot(source) for source in plan.exports if source.kind != "stream")
        self.exported_v = {source.kind for source in plan.exports if source.part == "v"}
        has_weights = any(source.kind == "probabilities" for source in plan.exports)
        self.shows_weights = has_weights or bool(self.stages[Stage.ATTENTION_WEIGHTS.value])
        self.stores_positions = plan.stores_positions(config)
        rotates_late = plan.latent_heads and config.position == "rope"
        self.rotary_emb = RotaryEmbedding(config) if rotates_late else None  # of keys that are made from a latent
        self.groups = tuple(GroupSlots.from_plan(plan, group, self.num_key_value_groups) for group in plan.groups)

    def forward(
        self,
        x: Tensor,
        *sources: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        reach: Reach = None,
        past_key_values: Cache | Engine | None = None,
        token_ids: Tensor | None = None,
        key_input: Tensor | None = None,
        value_input: Tensor | None = None,
        left_out: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """x [B, T, D], *`plan.reads` -> (out [B, T, D], weights or None, *`plan.exports` except the stream).

        key_input, value_input: [B, T, D], what keys and values are projected from; default: x, as queries.
        left_out: tokens before x that this layer, which stores nothing, was not called with; its cache counts them.
        """
        tensors = [*sources]  # indexed by `LayerPlan.slot`: what the layer reads, then `LAYER_TENSORS`
        context = Context(tensors, reach, find_tail(self.plan, past_key_values), token_ids, x)
        q, k, v = self.project_inputs(x, key_input, value_input)
        q, k, v = self.run_stage(Stage.PROJECTIONS, QKV(q, k, v), context)
        q = norm_heads(self.q_norm, q)
        k = k if self.plan.latent_heads else norm_heads(self.k_norm, k)
        raw_v, v = branch_heads(v, "raw" in self.exported_v)
        tensors += q, k, raw_v  # the raw tensors
        q, k, v = self.run_stage(Stage.QKV, QKV(q, k, v), context)
        tensors.append(v)  # the local value
        q, k = self.rotate_heads(q, k, position_embeddings)
        v = self.choose_stored(k, v, kwargs.get("position_ids"))

        if isinstance(past_key_values, Engine):
            tensors += k, v  # fill the banks' slots: the engine itself finds the keys and values of each head
            return self.collect_results(past_key_values.attend(self, q, k, v), None, context)
        if self.materialise:  # later layers read the gathered tensors, not this layer's cache
            tensors += k, self.choose_values(k, v)
            k, v = self.gather_kv(context)
        if left_out:
            k = v = x.new_empty(x.shape[0], 0, left_out + x.shape[1], self.head_dim)
        if is_paged(past_key_values):  # the kernel expects these in kwargs
            k, v = past_key_values.update(k, v, self.layer_idx, kwargs)
        elif past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, sliding_window=self.sliding_window)

        dropout = self.attention_dropout if self.training else 0.0
        options = dict(dropout=dropout, sliding_window=self.sliding_window, softcap=self.softcap, **kwargs)
        if self.materialise and not (self.shows_weights or self.stages[Stage.ADDED_KEY_VALUES.value]):
            # Spelled out as one lookup and one call, because vLLM's Transformers backend reads the source of `forward`.
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **options)
            out = out.reshape(*x.shape[:2], -1, self.head_dim)  # servers return joined heads
            return self.collect_results(out, weights, context)
        if self.materialise:
            inputs = [KernelInputs(q, k, v, attention_mask)]
        else:
            bank_v, v = branch_heads(self.choose_values(k, v), "bank" in self.exported_v)
            tensors += k, v  # the banks, cached tokens included
            inputs = self.select_inputs(q, attention_mask, context)
            tensors[-1] = bank_v
        inputs = self.add_pairs(inputs, context)
        out, weights = self.attend(inputs, context, scaling=self.scaling, **options)
        return self.collect_results(out, weights, context)

    def project_inputs(
        self, x: Tensor, key_input: Tensor | None = None, value_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> q [B, H, T, d], and k, v [B, heads, T, d] of the heads that the layer stores; not normed."""
        inputs = x, x if key_input is None else key_input, x if value_input is None else value_input
        outputs = self.apply_joined(x) if key_input is None and value_input is None else None
        if outputs is None:
            maps = zip(self.list_joinable(), inputs, strict=True)
            outputs = [None if projection is None else apply_linear(projection, y) for projection, y in maps]

        def split_heads(y_BTE: Tensor | None) -> Tensor:
            if y_BTE is None:
                return x.new_empty(x.shape[0], 0, x.shape[1], self.head_dim)
            return y_BTE.view(*y_BTE.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k, v = map(split_heads, outputs)
        return q, k, v

    def list_joinable(self) -> tuple[nn.Module | None, ...]:
        """The maps of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def rotate_heads(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Queries and keys after RoPE, if there is any."""
        if angles is None:
            return q, k
        return rotate(q, *angles), k if self.k_proj is None or self.plan.latent_heads else rotate(k, *angles)

    def choose_stored(self, k: Tensor, v: Tensor, position_ids: Tensor | None) -> Tensor:
        """Choose what is stored beside k [B, heads, T, d]: v or, beside a latent from which keys with RoPE are made,
        positions as int32 [B, 1, T, 1]."""
        if not self.stores_positions:
            return v
        if position_ids is None:
            raise HeadwaterError("Keys that are made from a latent need position_ids; pass them to the layer.")
        return position_ids.to(torch.int32).expand(k.shape[0], -1)[:, None, :, None]

    def choose_values(self, k: Tensor, v: Tensor) -> Tensor:
        """Choose what heads read as this layer's values, of its keys and values."""
        return k if self.plan.value_part == "k" else v

    def gather_kv(self, context: Context) -> KV:
        """Keys and values that all heads attend to, [B, K, S, d] each."""
        by_group = [group.select_kv(context.sources) for group in self.groups]
        k, v = (join_groups(tensors, dim=1) for tensors in zip(*by_group, strict=True))
        return self.transform_history(KV(k, v), context)

    def transform_history(self, kv: KV, context: Context) -> KV:
        """Make what heads attend to, [B, K, S, d] each, of what caches hold for all of them."""
        k, v = self.run_stage(Stage.ATTENDED_KV, kv, context)
        return KV(self.finish_keys(k, kv.v) if self.plan.latent_heads else k, v)

    def finish_keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """Norm and rotate keys that were made from a latent, k [B, K, S, d], at positions [B, 1, S, 1]."""
        k = norm_heads(self.k_norm, k)
        if self.rotary_emb is None:
            return k
        if positions.is_floating_point():
            raise HeadwaterError(
                "This cache rounds the positions beside a latent; make it with DynamicCache(config=model.config)."
            )
        return rotate(k, *for_heads(*self.rotary_emb(k, positions[:, 0, :, 0])))

    def select_inputs(self, q: Tensor, attention_mask: Any, context: Context) -> list[KernelInputs]:
        """Make one kernel call per group of heads that attend to the same layers, or a single one once gathered."""
        if self.stages[Stage.ATTENDED_KV.value]:
            return [KernelInputs(q, *self.gather_kv(context), attention_mask)]
        return [group.select_inputs(q, attention_mask, context.sources) for group in self.groups]

    def add_pairs(self, inputs: list[KernelInputs], context: Context) -> list[KernelInputs]:
        """Add learned keys and values, which every token sees, to the calls."""
        pairs = [mechanism.add_key_values(context) for mechanism in self.list_acting(Stage.ADDED_KEY_VALUES)]
        return divide_pairs(inputs, pairs) if pairs else inputs

    def attend(self, inputs: list[KernelInputs], context: Context, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the heads' outputs [B, T, H, d], and the tokens' attention weights if the kernel returns them."""
        if not self.shows_weights:
            return attend_in_groups(self, self.config._attn_implementation, inputs, options)
        if self.config._attn_implementation != "eager":
            raise HeadwaterError(
                "A mechanism of this model reads attention weights, which only the eager kernel has; set "
                'attn_implementation="eager".'
            )
        weights_of_keys = weigh_keys(inputs, self.scaling, self.softcap)
        weights = of_tokens(weights_of_keys, inputs)
        context.sources.append(weights)
        weights = self.run_stage(Stage.ATTENTION_WEIGHTS, weights, context)
        return read_groups(self, inputs, weights, weights_of_keys, options["dropout"]), weights

    def collect_results(self, out_BTHd: Tensor, weights: Tensor | None, context: Context) -> tuple[Tensor | None, ...]:
        """Collect the results of `forward`. out: what each head read, [B, T, H, d]."""
        out_BTHd = self.run_stage(Stage.HEAD_OUTPUTS, out_BTHd, context)
        x_BTD = apply_linear(self.o_proj, out_BTHd.flatten(2))
        return x_BTD, weights, *(context.sources[slot] for slot in self.exports)


def norm_heads(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Norm each head of x [B, heads, T, d], if there is a norm."""
    return x if norm is None else norm(x.transpose(1, 2)).transpose(1, 2)
