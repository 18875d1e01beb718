"""The feed-forward part of a block. Gated form (SwiGLU with act = silu): arXiv 2002.05202."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from headwater.config.capabilities import build_replacement
from headwater.config.text import HeadwaterConfig
from headwater.kernels.activation import apply_activation
from headwater.mechanisms.contract import Hidden
from headwater.nn.linear import JoinsLinears, apply_linear


class FeedForward(JoinsLinears):
    """down(act(gate(x)) · up(x)) if gated, else down(act(up(x))): x [B, T, D] -> [B, T, D].

    For SiLU and GELU the backward pass keeps gate(x) and up(x), or only up(x) (`headwater.kernels.activation`).
    """

    def __init__(self, config: HeadwaterConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.feed_forward == "gated" else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor, change: Callable[[Hidden], Hidden] | None = None) -> Tensor:
        """Run the feed-forward. change: what mechanisms do before the activation."""
        joined = self.apply_joined(x)
        if joined is None and change is None and not torch.is_grad_enabled():  # frees gate(x) before up(x) is computed
            inner = self.act(apply_linear(self.gate_proj or self.up_proj, x))
            inner = inner if self.gate_proj is None else inner * apply_linear(self.up_proj, x)
            return apply_linear(self.down_proj, inner)
        if joined is None:
            joined = [None if layer is None else apply_linear(layer, x) for layer in self.list_joinable()]
        hidden = Hidden(*joined)
        gate, up = hidden if change is None else change(hidden)
        factors = (up, None) if gate is None else (gate, up)
        return apply_activation(self.act, *factors, partial(apply_linear, self.down_proj))

    def list_joinable(self) -> tuple[nn.Module | None, ...]:
        """The maps before the activation."""
        return self.gate_proj, self.up_proj


def make_feed_forward(config: HeadwaterConfig, layer: int) -> nn.Module:
    """Make the feed-forward of one layer: a mechanism's module if one replaces it, otherwise the config's."""
    width = config.hidden_size
    replacement = build_replacement(config, layer, "feed_forward", width, width)
    return replacement or FeedForward(config)
