"""Attention: where all mechanisms are composed, in one fixed order of stages.

project → local (the mechanisms, in the config's order) → RoPE → cache → attend → project

B batch, T new tokens, S all tokens, D model width, H query heads, K key/value heads, d head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from headwater.errors import HeadwaterError
from headwater.mechanisms.base import KV, Local, Mechanism, Tail
from headwater.nn.kernels import attention_kernel
from headwater.nn.norm import make_norm
from headwater.nn.position import rotate
from headwater.plan import LayerPlan, Source
from headwater.registry import resolve

if TYPE_CHECKING:
    from transformers import Cache

    from headwater.config import HeadwaterConfig


class Attention(nn.Module):
    """Multi-head attention of one layer, built from its plan."""

    # Read by transformers' attention kernels.
    is_causal = True

    def __init__(self, config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config = config
        self.plan = plan
        self.layer_idx = plan.index
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // plan.kv_heads
        self.scaling = config.head_dim**-0.5

        q_width = config.num_attention_heads * config.head_dim
        kv_width = plan.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias) if plan.owns_v else None
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.output_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.mechanisms = nn.ModuleDict(
            {name: resolve(name)(config.mechanisms[name], config, plan) for name in plan.mechanisms}
        )

    def forward(
        self,
        x: Tensor,
        *sources: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        reach: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """x [B, T, D], then `plan.reads` -> (out [B, T, D], weights or None, then `plan.exports`)."""
        q, kv = self.project(x)
        given = dict(zip(self.plan.reads, sources, strict=True))
        made: dict[Source, Tensor | None] = {
            Source("raw", "k", self.layer_idx): kv.k,
            Source("raw", "v", self.layer_idx): kv.v,
        }

        context = Local(given, reach, self.tail(past_key_values))
        for mechanism in self.mechanisms.values():
            q, kv = cast(Mechanism, mechanism).local(q, kv, context)

        if position_embeddings is not None:
            q, kv = rotate(q, *position_embeddings), kv._replace(k=rotate(kv.k, *position_embeddings))
        if past_key_values is not None:
            kv = self.remember(kv, past_key_values)

        attend = attention_kernel(self.config._attn_implementation, q, kv.k)
        out, weights = attend(
            self,
            q,
            kv.k,
            kv.v,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.config.sliding_window,
            **kwargs,
        )
        out = self.o_proj(out.reshape(*x.shape[:2], -1))
        return out, weights, *(made[source] for source in self.plan.exports)

    def project(self, x: Tensor) -> tuple[Tensor, KV]:
        """x [B, T, D] -> q [B, H, T, d] and the layer's own k, v [B, K, T, d], raw."""

        def heads(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], -1, self.head_dim)

        q, k = heads(self.q_proj(x)), heads(self.k_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        v = None if self.v_proj is None else heads(self.v_proj(x)).transpose(1, 2)
        return q.transpose(1, 2), KV(k.transpose(1, 2), v)

    def tail(self, past_key_values: Cache | None) -> Tail | None:
        """The cache layer that keeps this layer's raw tokens, if there is a cache and a mechanism looks back."""
        if past_key_values is None or self.plan.tail == 0:
            return None
        layers = past_key_values.layers
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if not hasattr(layer, "with_tail"):
            raise HeadwaterError(
                f"{', '.join(self.plan.mechanisms)} needs a cache that keeps the last raw keys and values, and this "
                f"{type(past_key_values).__name__} does not; make it with DynamicCache(config=model.config)."
            )
        return layer

    def remember(self, kv: KV, past_key_values: Cache) -> KV:
        """Append to the cache; returns keys and values of the whole history (or of the window)."""
        v = kv.k[..., :0] if kv.v is None else kv.v
        k, v = past_key_values.update(kv.k, v, self.layer_idx, sliding_window=self.config.sliding_window)
        return KV(k, None if kv.v is None else v)
