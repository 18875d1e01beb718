"""The feed-forward part of a block. Gated form (SwiGLU with act = silu): arXiv 2002.05202."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from headwater.kernels.activation import activated
from headwater.kernels.cast import shared_cast
from headwater.nn.linear import Linear
from headwater.nn.projection import own_map

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class FeedForward(nn.Module):
    """down(act(gate(x)) · up(x)) if gated, else down(act(up(x))): x [B, T, D] -> [B, T, D].

    For SiLU and GELU the backward pass keeps gate(x) and up(x), or up(x) alone (`headwater.kernels.activation`).
    """

    def __init__(self, config: HeadwaterConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias=bias) if config.feed_forward == "gated" else None
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # frees gate(x) before up(x) is computed
            inner = self.act((self.gate_proj or self.up_proj)(x))
            return self.down_proj(inner if self.gate_proj is None else inner * self.up_proj(x))
        if self.gate_proj is None:
            return activated(self.act, self.up_proj(x), None, self.down_proj)
        # A quantizer or an adapter may have replaced them with layers that want x uncast.
        ours = type(self.gate_proj) is Linear and type(self.up_proj) is Linear
        for_gate, for_up = shared_cast(x, 2) if ours else (x, x)
        return activated(self.act, self.gate_proj(for_gate), self.up_proj(for_up), self.down_proj)


def make_feed_forward(config: HeadwaterConfig, layer: int) -> nn.Module:
    """The feed-forward of one layer: a mechanism's module if one replaces it, else the config's."""
    width = config.hidden_size
    return own_map(config, layer, "feed_forward", width, width) or FeedForward(config)
