"""Keys and values of all heads from one cached vector, which is expanded when heads read it. arXiv 2407.21118 (Palu).

    c = A·x        k_h = RoPE(U_h·c)        v_h = M_h·c        the cache holds c and the token's position

A is the layer's key projection, `heads`·d numbers wide, and there is no value projection. With `qkv_bias`, keys and
values have biases and A none; with `qk_norm`, the norm follows U. The layer is a plain one whose key and value
projections have a low rank, and trains as fast; `headwater.conversion.latent` converts plain models to it and back.
Unlike `mla`, it keeps RoPE on whole keys, so each decoding step multiplies all cached vectors by U.

Departures: keys and values have one vector in common, as in `mla`, and all heads read it; Palu has one for the keys and
one for the values of each group of heads.
"""

from typing import Self

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import Cost, LayerPlan
from headwater.config.planner import plan_layers
from headwater.config.rope import FOLLOW_LENGTH
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import KV, Context, Mechanism, OptionValues
from headwater.mechanisms.growth_map import SAME, Dim, GrowthMap
from headwater.mechanisms.shared_options import check_least
from headwater.util.errors import HeadwaterError


class LowRankKV(Mechanism):
    """Makes the keys and values of all heads from one vector per token.

    Args
        rank: width of the vector. heads, head_dim: K and d. bias: whether keys and values have biases.

    Parameters: `keys` and `values`, U and M, [K, d, rank] each, initialized with standard deviation 1/√rank;
    `keys_bias` and `values_bias` [K, d], initialized with 0.

        >>> import torch
        >>> from headwater.mechanisms import LowRankKV
        >>> LowRankKV(96, heads=3, head_dim=64)(torch.randn(2, 16, 96)).k.shape
        torch.Size([2, 3, 16, 64])
    """

    source = "the current token, through a vector that is expanded when it is read"
    order = 86
    paper = "2407.21118"

    class Options:
        heads: int | None = None  # width of the cached vector, in heads; default: as many as keys have

    def __init__(self, rank: int, heads: int, head_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, head_dim, rank))
        self.values = nn.Parameter(torch.empty(heads, head_dim, rank))
        self.keys_bias = nn.Parameter(torch.empty(heads, head_dim)) if bias else None
        self.values_bias = nn.Parameter(torch.empty(heads, head_dim)) if bias else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        if parameter.endswith("bias"):
            return torch.zeros(self.keys.shape[:2])
        return torch.normal(0.0, self.keys.shape[2] ** -0.5, self.keys.shape, generator=generator)

    def forward(self, x: Tensor) -> KV:
        """x [B, S, rank] -> keys, before their norm and RoPE, and values, [B, K, S, d] each."""
        return KV(expand_heads(x, self.keys, self.keys_bias), expand_heads(x, self.values, self.values_bias))

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_least(cls, options, heads=1)
        layers = [layer_config(config, layer) for layer in config.kinds.values()]
        most = min(layer.num_key_value_heads for layer in layers)
        if options["heads"] is not None and options["heads"] > most:
            raise HeadwaterError(
                f"Mechanism 'low_rank_kv': heads must be at most the {most} heads that keys have, which is half of the "
                f"cache, not {options['heads']}."
            )
        if config.position == "rope" and not config.is_causal:
            raise HeadwaterError("Mechanism 'low_rank_kv' has no RoPE of images; set position to learned.")
        kinds = {(layer.rope_parameters or {}).get("rope_type") for layer in layers}
        for kind in sorted(kinds & {*FOLLOW_LENGTH}):
            raise HeadwaterError(
                f"Mechanism 'low_rank_kv' rotates keys when they are read, and the frequencies of rope_type {kind!r} "
                "depend on the length at which they are made; use another rope_type."
            )

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plan.caching_latent(options["heads"] or len(plan.attends)) for plan in plans]

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        for plan in plans:
            if len({source for attends in plan.attends for source in attends}) > 1:
                raise HeadwaterError(
                    f"Mechanism 'low_rank_kv' makes the keys and values of all heads from one layer's vector, but in "
                    f"layer {plan.index} they come from several layers; remove the mechanism that shares them."
                )
        return [plan.acting(cls, cls.transform_attended_kv) for plan in plans]

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(plan.latent_heads * config.head_dim, len(plan.attends), config.head_dim, config.qkv_bias)

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        numbers, rank = 2 * len(plan.attends) * config.head_dim, plan.latent_heads * config.head_dim
        angles = 2 * config.rotary_dim if config.position == "rope" else 0
        saved = numbers + angles + config.qk_norm * numbers // 2
        return Cost(numbers * rank + config.qkv_bias * numbers, 2 * numbers * rank, saved)

    def transform_attended_kv(self, kv: KV, context: Context) -> KV:
        """k: the vectors, as heads [B, n, S, d]."""
        return self(kv.k.transpose(1, 2).flatten(2))

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        shares = any(plan.attends[0].k != plan.index for plan in plan_layers(config))
        if growth.extends("kv") and (shares or options["heads"] is not None):
            raise HeadwaterError(
                "A model with low_rank_kv grows in key/value heads only if its layers share nothing and heads is null."
            )
        return options

    # Capabilities

    def choose_group(self, parameter: str) -> str | None:
        return "vectors" if parameter.endswith("bias") else None

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        return (Dim("kv"), SAME) if parameter.endswith("bias") else (Dim("kv"), SAME, Dim("k", reads=True))


def expand_heads(x: Tensor, maps: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, S, rank], maps [K, d, rank], bias [K, d] -> [B, K, S, d]."""
    bias = None if bias is None else bias.flatten().to(x.dtype)
    return nn.functional.linear(x, maps.flatten(0, 1).to(x.dtype), bias).unflatten(-1, maps.shape[:2]).transpose(1, 2)
