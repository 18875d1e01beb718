"""One Transformer block: attention and feed-forward around the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.mechanisms.base import Context, Mechanism
from headwater.nn.attention import Attention
from headwater.nn.feed_forward import make_feed_forward
from headwater.nn.norm import make_norm
from headwater.plan import LayerPlan
from headwater.registry import resolve

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
        self.residual = config.first_residual or plan.index > 0
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, plan)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = make_feed_forward(config, plan.index)
        self.residual_dropout = config.residual_dropout
        self.mechanisms = nn.ModuleDict(
            {name: resolve(name).build(config.mechanisms[name], config, plan) for name in plan.at("enter", "leave")}
        )
        self.enter, self.leave = plan.at("enter"), plan.at("leave")

    def forward(self, x: Tensor, *sources: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        context = Context(dict(zip(self.plan.reads, sources, strict=True)))
        entered = x
        for name in self.enter:
            entered = cast(Mechanism, self.mechanisms[name]).enter(entered, context)
        attended, _, *made = self.self_attn(self.input_layernorm(entered), *sources, **kwargs)
        residual = x if self.residual else 0
        if self.parallel:
            x = residual + self.dropped(attended) + self.dropped(self.mlp(self.post_attention_layernorm(x)))
        else:
            x = residual + self.dropped(attended)
            x = x + self.dropped(self.mlp(self.post_attention_layernorm(x)))
        exports = iter(made)
        handed_on = [x if source.kind == "stream" else next(exports) for source in self.plan.exports]
        for name in self.leave:
            x = cast(Mechanism, self.mechanisms[name]).leave(x, context)
        return x, *handed_on

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.residual_dropout) if self.training and self.residual_dropout else x
