"""What a config costs, from its plan alone: parameters, FLOPs, cache bytes. No torch.

Matmul FLOPs count 2 per multiply-add. Attention is counted causally: token t of S attends to t + 1 tokens, on average
(S + 1) / 2. Elementwise work (norms, RoPE, activations, the mechanisms' mixes) is left out, as is usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.plan import LayerPlan

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


def _layer_matmul_weights(config: HeadwaterConfig, plan: LayerPlan) -> int:
    heads = 2 * config.num_attention_heads + plan.kv_heads * (1 + plan.owns_v)  # query and output, key, value
    maps = 3 if config.feed_forward == "gated" else 2
    return config.hidden_size * (heads * config.head_dim + maps * config.intermediate_size)


def forward_flops_per_token(config: HeadwaterConfig, context: int) -> float:
    """FLOPs of one forward pass, per token of rows of `context` tokens, the output head included."""
    matmul = sum(_layer_matmul_weights(config, plan) for plan in config.layer_plans)
    matmul += config.hidden_size * config.vocab_size
    window = min(config.sliding_window or context, context)
    seen = (window * (window + 1) / 2 + (context - window) * window) / context
    attention = 2 * config.num_attention_heads * config.head_dim * seen * config.num_hidden_layers
    return 2.0 * (matmul + attention)


def training_flops_per_token(config: HeadwaterConfig, context: int) -> float:
    """Forward and backward: three times the forward pass."""
    return 3 * forward_flops_per_token(config, context)


def cache_bytes_per_token(config: HeadwaterConfig, element_size: int = 4) -> int:
    """Bytes that each further token adds to the cache of one sequence; `element_size` in bytes, fp32 by default."""
    entries = sum(plan.kv_heads * config.head_dim * (1 + plan.owns_v) for plan in config.layer_plans)
    return entries * element_size


def cache_bytes(config: HeadwaterConfig, tokens: int, batch_size: int = 1, element_size: int = 4) -> int:
    """Bytes of the cache after `tokens` tokens: the history (the window's, if it slides) and the raw tails."""
    stored = tokens if config.sliding_window is None else min(tokens, config.sliding_window - 1)
    per_layer = (
        plan.kv_heads * config.head_dim * (1 + plan.owns_v) * (stored + plan.tail) for plan in config.layer_plans
    )
    return batch_size * element_size * sum(per_layer)
