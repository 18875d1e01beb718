"""Capabilities: optional methods of a mechanism beyond the contract, which some tools need.

A class, or its module, has a capability if it has all members of a Protocol below, or of one that the config asks for,
in `headwater.config.capabilities`. Each docstring names the tool that checks for it, by `isinstance`, and what the tool
does without it. `parameter` is always the name within the module, of a child module's as "conv.weight".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from headwater.config import capabilities as of_config
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.plan import Cost, LayerPlan, Source
    from headwater.config.text import HeadwaterConfig
    from headwater.mechanisms.growth_map import Dim, GrowthMap

# A mechanism's parsed options, by name.
OptionValues = dict[str, Any]
# The optimizer's parameter groups (headwater_lab.training.optimizers).
Group = Literal["matrices", "tensors", "embeddings", "vectors", "scalars"]


# Modules


@runtime_checkable
class HasSharedModule(Protocol):
    """A module that exists once per model. Layers read what it returns as `Source("shared", name, -1)`."""

    @classmethod
    def build_shared_module(cls, options: OptionValues, config: HeadwaterConfig) -> nn.Module | None:
        """Build the module, which is called once per forward pass, with the new tokens' ids [B, T] if the mechanism
        `needs_input_ids`; None: there is none with these options."""

    @classmethod
    def count_shared_cost(cls, options: OptionValues, config: HeadwaterConfig) -> Cost:
        """Count its cost, once per model."""


@runtime_checkable
class HoldsTokenTables(Protocol):
    """Parameters with a row for each token id. Used by `resize_token_embeddings`, which refuses tables without it."""

    def count_token_tables(self, parameter: str) -> int:
        """Count the tables in a parameter, one after the other along its first axis; 0 if it is no table."""


# Growth, retrofit, conversion


@runtime_checkable
class GrowsOptions(Protocol):
    """Options in a larger model. Used by `headwater grow`, which cannot grow a model with a mechanism that lacks it."""

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        """Return the options under which a larger model does the same. config: the smaller model's.

        Raises `HeadwaterError` for growth that is impossible, or that changes the function against
        `growth.preserves_function`.
        """


@runtime_checkable
class DescribesAxes(Protocol):
    """Axes of parameters. Used by `headwater grow`, which needs it, and to split heads over processes."""

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        """Name what the entries along each dimension belong to; the last covers all that remain, flattened."""


@runtime_checkable
class PassesThrough(Protocol):
    """A mechanism that changes the residual stream itself. Used by `headwater grow`, for layers that add nothing."""

    def find_neutral_value(self, parameter: str) -> Tensor | None:
        """Return the value of a parameter that leaves the stream unchanged; None: any value does."""


@runtime_checkable
class AddsToTrainedModel(Protocol):
    """An identity for trained models. Used by `headwater retrofit`, which without it needs --allow-change."""

    @classmethod
    def find_identity_options(cls, options: OptionValues) -> OptionValues | None:
        """Return the user's `options` completed so that it changes nothing in a trained model; None: impossible."""


@runtime_checkable
class ChoosesSources(Protocol):
    """For a mechanism by which layers share keys and values. Used by `convert: {choose: true}`."""

    @classmethod
    def choose_sources(
        cls, options: OptionValues, config: HeadwaterConfig, similarity: Mapping[str, Tensor]
    ) -> OptionValues:
        """Return `options`, the user's, with who shares with whom chosen by similarity, unless they name it.

        similarity: of "keys" and "values", [layers, layers] each (`headwater.conversion.alignment.measure_similarity`).
        """


# Training


class Step(NamedTuple):
    """A training step, numbered from 0, in a run of `steps` steps with `warmup` steps of learning-rate warm-up.

    start: the recipe's `start:` section, with `tau` resolved; empty for a run from scratch.
    """

    number: int
    steps: int
    warmup: int
    start: Mapping[str, Any]


@runtime_checkable
class ActsInTraining(Protocol):
    """Work between training steps. Called by the training loop."""

    def prepare_training(self, step: Step) -> Any:
        """Return what `prepare_step` needs, as JSON values for checkpoints, when a run begins; None: do not call it."""

    def prepare_step(self, state: Any, step: Step) -> None:
        """Prepare a step, with the result of `prepare_training`. Of changes, only buffers and parameters are saved."""

    @classmethod
    def describe_training(cls, modules: int, step: Step) -> str | None:
        """Describe the work for the run's record; None: nothing. modules: how many do it."""


@runtime_checkable
class GroupsParameters(Protocol):
    """Groups of parameters in the optimizer; by default they are grouped by kind and shape."""

    def choose_group(self, parameter: str) -> str | None:
        """Return one of `Group`, or another name for a separate group without weight decay; None: by kind and shape.

        Only parameters of two dimensions can be in "matrices", which Muon trains under `optimizer: muon`.
        """


# Several processes


class Processes(Protocol):
    """The server's processes that a model is split over, from the point of view of one of them."""

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of the processes' x."""
        ...

    def concatenate(self, x: Tensor) -> Tensor:
        """The processes' x, one after another in the last dimension."""
        ...


@runtime_checkable
class SplitsOverProcesses(Protocol):
    """Splitting over processes. Used by the model classes for vLLM and torchtitan, which refuse to split a mechanism
    without it.

    per_head: within attention each head is computed from that head and the layer's input alone; `describe_axes` says
        which entries of a parameter belong to which.
    per_token: outside attention each token is computed alone, and within it no input of the layer is read.
    """

    per_head: ClassVar[bool]
    per_token: ClassVar[bool]


@runtime_checkable
class LimitsSplitting(Protocol):
    """`per_head` for some options only. Used together with `SplitsOverProcesses`."""

    @classmethod
    def splits_heads(cls, options: OptionValues) -> bool:
        """Whether heads can be split over processes with these options."""


# Inspection


class Shown(NamedTuple):
    """Scalars of a mechanism in one layer, as used in its forward pass: values [n].

    owner: what they belong to; "layer" is the one that a summand comes from (-1: the embedding), "" a single number's.
    indices: of these heads or layers, [n].
    """

    values: Tensor
    owner: Literal["", "kv head", "query head", "layer"] = ""
    indices: tuple[int, ...] = ()


@runtime_checkable
class ShowsScalars(Protocol):
    """Scalars to display. Used by `headwater inspect` and reports."""

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        """The scalars of this layer, learned or fixed, by symbol. shared: what the models' shared modules return."""


# All protocols, those of the config first, except `Processes`, which tools implement.
CAPABILITIES: tuple[type, ...] = tuple(
    kind
    for kind in (*vars(of_config).values(), *vars().values())
    if Protocol in getattr(kind, "__bases__", ()) and kind is not Processes
)


def members_of(capability: type) -> set[str]:
    """The names of a capability's members."""
    return {name for name in (*vars(capability), *capability.__annotations__) if not name.startswith("_")}


def check_capabilities(mechanism: type) -> None:
    """Raise `HeadwaterError` if a class has some members of a capability and lacks others."""
    for capability in CAPABILITIES:
        lacking = sorted(name for name in members_of(capability) if not hasattr(mechanism, name))
        if lacking and len(lacking) < len(members_of(capability)):
            raise HeadwaterError(
                f"The class {mechanism.__name__} defines only part of {capability.__name__} "
                f"(headwater.mechanisms.capabilities) and lacks {' and '.join(lacking)}; define all of it or none."
            )


def can_split_heads(mechanism: type, options: OptionValues) -> bool:
    """Whether the heads of a mechanism with these options can be split over processes."""
    if not (isinstance(mechanism, SplitsOverProcesses) and mechanism.per_head):
        return False
    return not isinstance(mechanism, LimitsSplitting) or mechanism.splits_heads(options)


def can_split_tokens(mechanism: type) -> bool:
    """Whether the tokens of a row can be split over processes with a mechanism."""
    return isinstance(mechanism, SplitsOverProcesses) and mechanism.per_token


def axes_of(mechanism: nn.Module, parameter: str) -> tuple[Dim, ...]:
    """Describe the axes of a parameter, as `DescribesAxes` does; () if they are not known."""
    return mechanism.describe_axes(parameter) if isinstance(mechanism, DescribesAxes) else ()
