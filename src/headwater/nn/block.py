"""One Transformer block: attention and feed-forward around the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.nn.attention import Attention
from headwater.nn.feed_forward import FeedForward
from headwater.nn.norm import make_norm
from headwater.plan import LayerPlan

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class Block(GradientCheckpointingLayer):
    """x [B, T, D] and the tensors of earlier layers it reads -> (x, then the tensors later layers read).

    Tensors that carry gradients come and go positionally: re-entrant checkpointing sees no others.
    """

    def __init__(self, config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.parallel = config.parallel_residual
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, plan)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, *sources: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        attended, _, *exports = self.self_attn(self.input_layernorm(x), *sources, **kwargs)
        if self.parallel:
            x = x + self.dropout(attended) + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        else:
            x = x + self.dropout(attended)
            x = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x, *exports
