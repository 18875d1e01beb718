"""Capabilities of mechanisms, beyond the contract, that a config uses: see `headwater.mechanisms.capabilities`.

`config` is always a `HeadwaterConfig`, which imports this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from headwater.plugins.mechanisms import resolve

if TYPE_CHECKING:
    from torch import nn

    from headwater.config.plan import Cost

# The linear layers of a block that a mechanism may replace; "feed_forward" is the whole feed-forward.
Map = Literal["query", "key", "value", "output", "feed_forward"]


@runtime_checkable
class CompletesOptions(Protocol):
    """Defaults derived from the config once, before `validate_options`."""

    @classmethod
    def complete_options(cls, options: dict[str, Any], config: Any) -> dict[str, Any]:
        """Return the options with defaults from the config filled in."""


@runtime_checkable
class LimitsKernels(Protocol):
    """A choice of attention kernels. Used by models and servers; a mechanism without it works with every kernel."""

    @classmethod
    def list_kernels(cls, options: dict[str, Any]) -> tuple[str, ...] | None:
        """Return the supported values of `attn_implementation`; None: all."""


@runtime_checkable
class KeepsState(Protocol):
    """State in the tail beyond a call's raw tokens, such as a running sum.

    Servers with paged attention store only raw tokens, and refuse such a mechanism.
    """

    keeps_state: ClassVar[Literal[True]]


@runtime_checkable
class StopsRedirection(Protocol):
    """A rule for heads that `redirect_heads` sends to a layer that is redirected itself.

    Used by the planner. Without it such a head attends to what that layer attends to.
    """

    @classmethod
    def stops_redirection(cls, options: dict[str, Any]) -> bool:
        """Return whether the head attends to what that layer would attend to if this mechanism were absent."""


@runtime_checkable
class ReplacesLinear(Protocol):
    """A module that replaces a linear layer of a block. Used by attention, the feed-forward, cost and growth."""

    @classmethod
    def build_linear(
        cls, options: dict[str, Any], config: Any, layer: int, name: Map, d_in: int, d_out: int
    ) -> nn.Module | None:
        """The module that replaces a linear layer, [..., d_in] -> [..., d_out]; None: keep the linear layer."""

    @classmethod
    def count_linear_cost(
        cls, options: dict[str, Any], config: Any, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost | None:
        """Return the cost of that module; None where `build_linear` returns None."""


def build_replacement(config: Any, layer: int, name: Map, d_in: int, d_out: int) -> nn.Module | None:
    """Build what the first mechanism that replaces a linear layer puts in its place; None if none does."""
    for mechanism, options in _list_replacing(config):
        if (module := mechanism.build_linear(options, config, layer, name, d_in, d_out)) is not None:
            return module
    return None


def count_replacement_cost(config: Any, layer: int, name: Map, d_in: int, d_out: int) -> Cost | None:
    """Count the cost of what `build_replacement` builds; None if no mechanism replaces the linear layer."""
    for mechanism, options in _list_replacing(config):
        if (cost := mechanism.count_linear_cost(options, config, layer, name, d_in, d_out)) is not None:
            return cost
    return None


def _list_replacing(config: Any) -> Iterator[tuple[ReplacesLinear, dict[str, Any]]]:
    """Yield the mechanisms of a config that can replace linear layers, with their options."""
    for name, options in config.mechanisms.items():
        if isinstance(mechanism := resolve(name), ReplacesLinear):
            yield mechanism, options


def replaces_linear(mechanism: type, options: dict[str, Any], config: Any, layer: int, name: Map, width: int) -> bool:
    """Whether a mechanism replaces a linear layer, or the feed-forward, width -> width."""
    return (
        isinstance(mechanism, ReplacesLinear)
        and mechanism.count_linear_cost(options, config, layer, name, width, width) is not None
    )
