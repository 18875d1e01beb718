"""The linear layers of a block, any of which a mechanism may replace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from headwater.config.capabilities import Map, ReplacesLinear
from headwater.plugins.registry import resolve

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


def make_map(
    config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False
) -> nn.Module | None:
    """A linear layer d_in -> d_out, or a mechanism's module in its place; None if d_out is 0."""
    if d_out == 0:
        return None
    return own_map(config, layer, name, d_in, d_out) or nn.Linear(d_in, d_out, bias=bias)


def own_map(config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int) -> nn.Module | None:
    """The module with which one of the config's mechanisms replaces a linear layer; None if none does."""
    for mechanism, options in config.mechanisms.items():
        kind = resolve(mechanism)
        if isinstance(kind, ReplacesLinear):
            made = kind.build_linear(options, config, layer, name, d_in, d_out)
            if made is not None:
                return made
    return None
