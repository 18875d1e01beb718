"""Attention: where all mechanisms are composed, in one fixed order of stages.

project → projected → norms → local → RoPE → cache → beside, attend, probabilities → heads → project

At each stage that has a name, mechanisms act in the config's order.

The cache holds what the layer itself projects; what other layers own is read from their caches. With
`config.materialise` each layer first gathers the keys and values of all its heads and caches them as its own. Any cache
will then do, and results are the same, but memory is not saved.

B batch, T new tokens, S all tokens, D model width, H query heads, K key/value heads, d head width
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.config.plan import ATTENTION_STAGES, HeadGroup, Heads, LayerPlan, Source, Stage
from headwater.kernels.attention import FEW
from headwater.mechanisms.contract import KV, Ancestors, Context, Mechanism, Tail
from headwater.mechanisms.named import Named
from headwater.nn.attention_kernel import attention_kernel, attention_weights, eager_attention, read_values
from headwater.nn.cache_name import is_paged
from headwater.nn.linear import apply_linear
from headwater.nn.norm import make_norm
from headwater.nn.position import rotate
from headwater.nn.projection import make_map
from headwater.plugins.registry import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from transformers import Cache

    from headwater.config.text import HeadwaterConfig


class Engine(ABC):
    """A server's cache and attention kernel, which a model is given as `past_key_values`.

    layers: what holds each layer's raw tokens (`Tail`); of layers without any, anything.
    """

    layers: Sequence[Any]

    @abstractmethod
    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' k and v, and return what each head of q reads, [B, T, H, d].

        q [B, H, T, d]; k, v [B, heads, T, d] of the heads that the layer stores, after RoPE. Whose keys and values each
        head attends to is in `attention.plan.groups`.
        """


class Attention(nn.Module):
    """Multi-head attention of one layer, built from its plan."""

    def __init__(self, config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config = config
        config = config.at(plan.index)
        self.plan = plan
        self.layer_idx = plan.index
        self.is_causal = config.is_causal  # read by transformers' attention kernels
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
        self.k_proj = make_map(config, plan.index, "key", width, k_width, config.qkv_bias)
        self.v_proj = make_map(config, plan.index, "value", width, v_width, config.qkv_bias)
        self.o_proj = make_map(config, plan.index, "output", q_width, width, config.output_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm and plan.k_heads else None

        self.stages = {stage: plan.at(stage) for stage in ATTENTION_STAGES}
        self.mechanisms = Named(
            {
                name: resolve(name).build_module(config.mechanisms[name], config, plan)
                for name in plan.at(*ATTENTION_STAGES)
            }
        )
        weights = [source for source in plan.exports if source.kind == "probabilities"]
        self.shows_weights = bool(weights or self.stages[Stage.ATTENTION_WEIGHTS])
        self.exports = tuple(plan.slot(source) for source in plan.exports if source.kind != "stream")
        self.calls = tuple(self.call(group) for group in plan.groups)
        # The key/value heads of each call, or of the only one if all are gathered.
        spans = [(group.first, group.first + group.size) for group in plan.groups]
        self.spans = [(0, len(plan.attends))] if config.materialise or self.stages[Stage.ATTENDED_KV] else spans

    def call(self, group: HeadGroup) -> Call:
        """One group of heads as a call of the kernel."""
        q = slice(group.first * self.num_key_value_groups, (group.first + group.size) * self.num_key_value_groups)
        return Call(
            None if group.size == len(self.plan.attends) else q,
            (self.plan.slot(Source("bank", "k", group.k)), group.k_heads),
            (self.plan.slot(Source("bank", "v", group.v)), group.v_heads),
        )

    def at(self, stage: Stage) -> Sequence[Mechanism]:
        """The mechanisms that act at a stage, in the order of application."""
        names = self.stages[stage]
        return [cast(Mechanism, self.mechanisms[name]) for name in names] if names else ()

    def forward(
        self,
        x: Tensor,
        *sources: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        reach: Tensor | Ancestors | None = None,
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
        known = [*sources]  # each at its `LayerPlan.slot`
        context = Context(known, reach, tail_of(self.plan, past_key_values), token_ids, x)
        q, k, v = self.project(x, key_input, value_input)
        for mechanism in self.at(Stage.PROJECTIONS):
            q, (k, v) = mechanism.transform_projections(q, KV(k, v), context)
        q = q if self.q_norm is None else self.q_norm(q.transpose(1, 2)).transpose(1, 2)
        k = k if self.k_norm is None else self.k_norm(k.transpose(1, 2)).transpose(1, 2)
        known += q, k, v

        for mechanism in self.at(Stage.QKV):
            q, (k, v) = mechanism.transform_qkv(q, KV(k, v), context)
        known.append(v)
        if position_embeddings is not None:
            q = rotate(q, *position_embeddings)
            if self.k_proj is not None:
                k = rotate(k, *position_embeddings)
        if isinstance(past_key_values, Engine):
            known += k, v  # in the banks' places: the engine itself knows whose a head attends to
            return self.results(past_key_values.attend(self, q, k, v), None, known, context)
        if self.materialise:  # later layers read what the layer computed, not its cache
            known += k, v
            k, v = self.gathered(q, known, context)
        if left_out:
            k = v = x.new_empty(x.shape[0], 0, left_out + x.shape[1], self.head_dim)
        if is_paged(past_key_values):  # says in kwargs what the kernel needs to know
            k, v = past_key_values.update(k, v, self.layer_idx, kwargs)
        elif past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, sliding_window=self.sliding_window)
        if self.materialise and not (self.shows_weights or self.stages[Stage.ADDED_KEY_VALUES]):
            # One lookup and one call, spelled out: vLLM's Transformers backend reads the source of `forward`.
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            dropout, window = self.attention_dropout if self.training else 0.0, self.sliding_window
            given = dict(dropout=dropout, sliding_window=window, softcap=self.softcap, **kwargs)
            out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **given)
            out = out.reshape(*x.shape[:2], -1, self.head_dim)  # servers join the heads
            return self.results(out, weights, known, context)
        if self.materialise:
            inputs = [(q, k, v, attention_mask)]
        elif self.stages[Stage.ATTENDED_KV]:
            known += k, v
            inputs = [(q, *self.gathered(q, known, context), attention_mask)]
        else:
            known += k, v
            inputs = [(*call.select(q, known), call.select_mask(attention_mask)) for call in self.calls]

        pairs = None
        if self.stages[Stage.ADDED_KEY_VALUES]:
            more = [mechanism.add_key_values(context) for mechanism in self.at(Stage.ADDED_KEY_VALUES)]
            keys, values = (join([one[part] for one in more], dim=1).to(q.dtype) for part in (0, 1))
            pairs = [KV(keys[first:end], values[first:end]) for first, end in self.spans]
        out, weights = self.attend(inputs, context, pairs, **kwargs)
        return self.results(out, weights, known, context)

    def results(
        self, out: Tensor, weights: Tensor | None, known: Sequence[Tensor], context: Context
    ) -> tuple[Tensor | None, ...]:
        """What `forward` returns. out: what each head read, [B, T, H, d]. known: each tensor at its slot."""
        for mechanism in self.at(Stage.HEAD_OUTPUTS):
            out = mechanism.transform_head_outputs(out, context)
        out = apply_linear(self.o_proj, out.flatten(2))
        return out, weights, *(known[slot] for slot in self.exports)

    def gathered(self, q: Tensor, known: list[Tensor], context: Context) -> KV:
        """What all heads attend to, [B, K, S, d] each."""
        each = [call.select(q, known) for call in self.calls]
        kv = KV(*(join([one[part] for one in each], dim=1) for part in (1, 2)))
        for mechanism in self.at(Stage.ATTENDED_KV):
            kv = mechanism.transform_attended_kv(kv, context)
        return kv

    def project(
        self, x: Tensor, key_input: Tensor | None = None, value_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> q [B, H, T, d], and k, v [B, heads, T, d] of the heads that the layer stores; not normed."""

        def heads(projection: nn.Module | None, given: Tensor | None = None) -> Tensor:
            if projection is None:
                return x.new_empty(x.shape[0], 0, x.shape[1], self.head_dim)
            y = apply_linear(projection, x if given is None else given)
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        return heads(self.q_proj), heads(self.k_proj, key_input), heads(self.v_proj, value_input)

    def attend(
        self,
        inputs: list[tuple[Tensor, Tensor, Tensor, Any]],
        context: Context,
        pairs: list[KV] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What each head reads [B, T, H, d], and the attention weights of the tokens if the kernel returns them.

        inputs: q, k, v and the mask of each group of heads that attend to the same layers; one kernel call each.
        pairs: keys and values beside the tokens' for each group, if there are any.
        """
        dropout = self.attention_dropout if self.training else 0.0
        groups = list(zip(inputs, pairs or [None] * len(inputs), strict=True))
        if self.shows_weights:
            shown = [
                attention_weights(self, q, k, mask, self.scaling, self.softcap, more)
                for (q, k, _, mask), more in groups
            ]
            every = join(shown, dim=1)
            weights = of_tokens(every, pairs)
            context.sources.append(weights)
            for mechanism in self.at(Stage.ATTENTION_WEIGHTS):
                weights = mechanism.transform_attention_weights(weights, context)
            every = weights if pairs is None else torch.cat((weights, every[..., weights.shape[3] :]), dim=3)
            sizes = [q.shape[1] for (q, *_), _ in groups]
            read = [
                read_values(self, w, v, dropout, more)
                for w, ((_, _, v, _), more) in zip(every.split(sizes, 1), groups, strict=True)
            ]
            return join(read, dim=2), weights
        given = dict(dropout=dropout, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs)
        given |= {} if self.softcap is None else {"softcap": self.softcap}
        results = [self.attend_group(one, more, given) for one, more in groups]
        out, found = join([out for out, _ in results], dim=2), [weights for _, weights in results]
        if any(weights is None for weights in found):
            return out, None
        return out, of_tokens(join(found, dim=1), pairs)

    def attend_group(
        self, inputs: tuple[Tensor, Tensor, Tensor, Any], more: KV | None, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """One kernel call: what its heads read, and the weights of all keys if the kernel returns them."""
        implementation, (q, k, v, mask) = self.config._attn_implementation, inputs
        if more is None:
            return attention_kernel(implementation, q, k)(self, q, k, v, mask, **given)
        if implementation == "eager":
            return eager_attention(self, q, k, v, mask, beside=more, **given)
        length, pairs = q.shape[2], more.k.shape[1]
        first = mask is None and self.is_causal and length > 1
        if not first and not torch.is_grad_enabled() and is_few(length):  # a decoding step does not copy the history
            return eager_attention(self, q, k, v, mask, beside=more, **given)[0], None
        keys, values = (x.expand(q.shape[0], -1, -1, -1) for x in more)
        if first:  # as tokens before the first, whose queries are dropped: so the kernel needs no mask
            q = nn.functional.pad(q, (0, 0, pairs, 0))
        elif mask is not None:
            mask = nn.functional.pad(mask, (pairs, 0), value=mask.dtype == torch.bool)
        k, v = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        out, _ = attention_kernel(implementation, q, k)(self, q, k, v, mask, **given)
        # The output projection would copy a slice of several rows.
        return out[:, pairs:].clone() if first else out, None


class Call(NamedTuple):
    """One call of the attention kernel: its query heads, and the slots of its keys and values with the heads to take.

    None stands for all heads.
    """

    q: Heads
    k: tuple[int, Heads]
    v: tuple[int, Heads]

    def select(self, q: Tensor, known: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Its q, k and v, [B, heads, …] each."""
        return taken(q, self.q), taken(known[self.k[0]], self.k[1]), taken(known[self.v[0]], self.v[1])

    def select_mask(self, mask: Any) -> Any:
        """Its heads of a mask that differs between heads."""
        if self.q is None or not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] == 1:
            return mask
        return mask[:, self.q]


def tail_of(plan: LayerPlan, past_key_values: Cache | Engine | None) -> Tail | None:
    """The cache layer that holds the raw tokens of a layer; None without a cache, or if no mechanism looks back.

    Raises `HeadwaterError` for a cache that does not keep them.
    """
    if past_key_values is None or not plan.tails:
        return None
    layers = past_key_values.layers
    layer = layers[plan.index] if plan.index < len(layers) else None
    if not hasattr(layer, "before"):
        keepers = dict.fromkeys(mechanism for *_, mechanism in plan.tails)
        raise HeadwaterError(
            f"{' and '.join(keepers)} needs a cache that keeps the last raw keys and values, and this "
            f"{type(past_key_values).__name__} does not; make it with DynamicCache(config=model.config). The tokens of "
            "PEFT's prefix tuning have none: use prompt tuning or LoRA with such a model."
        )
    return layer


def is_few(length: int) -> bool:
    """Whether new tokens are so few that their scores are small beside the history: a step, or some candidates."""
    return length == 1 or (not torch.compiler.is_compiling() and length <= FEW)


def of_tokens(weights: Tensor, pairs: list[KV] | None) -> Tensor:
    """The weights of the tokens among those of all keys, of which pairs are the last."""
    return weights if pairs is None else weights[..., : weights.shape[3] - pairs[0].k.shape[1]]


def taken(x: Tensor, heads: Heads) -> Tensor:
    return x if heads is None else x[:, heads]


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)
