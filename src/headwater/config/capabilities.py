"""Capabilities of mechanisms that a config asks for beyond the contract: see `headwater.mechanisms.capabilities`.

`config` is always a `HeadwaterConfig`, which imports this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from headwater.config.plan import Cost

# The linear layers of a block that a mechanism may replace; "feed_forward" is the whole feed-forward.
Map = Literal["query", "key", "value", "output", "feed_forward"]


@runtime_checkable
class CompletesOptions(Protocol):
    """For defaults that follow from the config, but not from its later changes. Asked before `validate_options`."""

    @classmethod
    def complete_options(cls, options: dict[str, Any], config: Any) -> dict[str, Any]:
        """The options with what they take from the config filled in."""


@runtime_checkable
class LimitsKernels(Protocol):
    """Asked when a model chooses its attention kernel, and by servers. Without it a mechanism works with all."""

    @classmethod
    def list_kernels(cls, options: dict[str, Any]) -> tuple[str, ...] | None:
        """The values of `attn_implementation` that it works with; None: all."""


@runtime_checkable
class KeepsState(Protocol):
    """For a mechanism that writes more than a call's raw tokens into its tail, such as a running sum.

    Asked by servers with paged attention, which know raw tokens alone and refuse it.
    """

    keeps_state: ClassVar[Literal[True]]


@runtime_checkable
class StopsRedirection(Protocol):
    """For `redirect_heads`, where a head takes keys and values from a layer that is redirected itself.

    Asked by the planner. Without it such a head attends to what that layer attends to.
    """

    @classmethod
    def stops_redirection(cls, options: dict[str, Any]) -> bool:
        """Whether it attends to what that layer would attend to without this mechanism."""


@runtime_checkable
class ReplacesLinear(Protocol):
    """For a module in place of a linear layer of a block. Asked by attention, the feed-forward, cost and growth."""

    @classmethod
    def build_linear(
        cls, options: dict[str, Any], config: Any, layer: int, name: Map, d_in: int, d_out: int
    ) -> nn.Module | None:
        """The module that replaces a linear layer, [..., d_in] -> [..., d_out]; None: keep the linear layer."""

    @classmethod
    def count_linear_cost(
        cls, options: dict[str, Any], config: Any, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost | None:
        """Cost of that module; None where `build_linear` returns None."""


def replaces_linear(mechanism: type, options: dict[str, Any], config: Any, layer: int, name: Map, width: int) -> bool:
    """Whether a mechanism replaces a linear layer, or the feed-forward, width -> width."""
    return (
        isinstance(mechanism, ReplacesLinear)
        and mechanism.count_linear_cost(options, config, layer, name, width, width) is not None
    )
