"""The linear maps of a block: `nn.Linear`, unless a mechanism has a form of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from headwater.mechanisms.base import Map
from headwater.nn.linear import Linear
from headwater.registry import resolve

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


def make_map(
    config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False
) -> nn.Module | None:
    """The module of one linear map d_in -> d_out; None for a map to nothing."""
    if d_out == 0:
        return None
    return own_map(config, layer, name, d_in, d_out) or Linear(d_in, d_out, bias=bias)


def own_map(config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int) -> nn.Module | None:
    """A mechanism's form of a linear map, if one of the config's has any."""
    for mechanism, options in config.mechanisms.items():
        made = resolve(mechanism).map(options, config, layer, name, d_in, d_out)
        if made is not None:
            return made
    return None
