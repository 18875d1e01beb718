"""`start:` and `stages:` of a recipe: the model that a run starts from, and how it is changed."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from headwater.config.text import HeadwaterConfig
from headwater.conversion.alignment import choose_sources
from headwater.conversion.convert import blend_config, check_conversion, finish_config
from headwater.conversion.latent import latent_config
from headwater.growth.grown_model import grown_config
from headwater.growth.methods import GrowthOptions, KeyInit, TauPolicy
from headwater.plugins.mechanisms import as_mapping
from headwater.util.errors import HeadwaterError
from headwater_lab.util.settings import Count, Settings


class Growth(Settings):
    """`grow:` how to make a model larger; the fields are the arguments of `lab.grow`."""

    num_hidden_layers: Count | None = None
    """Layers after growth."""
    hidden_size: Count | None = None
    """Width of the residual stream after growth."""
    intermediate_size: Count | None = None
    """Width of the feed-forward after growth."""
    num_attention_heads: Count | None = None
    """Query heads after growth."""
    num_key_value_heads: Count | None = None
    """Key/value heads after growth; default: in proportion."""
    method: str = "exact"
    """How new layers and widths are made: exact, lemon, identity, stack, interleave, hypercloning, net2net, or one way
    for each direction, as in stack+hypercloning (docs/growth.md)."""
    attention_pairs: Count | None = None
    """Pairs of each attention projection after growth, of a model with parameter tokens."""
    ffn_pairs: Count | None = None
    """Pairs of each feed-forward after growth."""
    key_init: KeyInit = "zero"
    """random changes the function."""
    tau: TauPolicy = "keep"
    """recompute changes the function."""
    freeze: bool = False
    """Train only the new pairs."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        GrowthOptions(**self.model_dump())
        return self


def _map_mechanisms(mechanisms: Any) -> Any:
    """Map the names of mechanisms to their options, from a list of names too."""
    by_name = as_mapping(mechanisms)
    return {name: options or {} for name, options in by_name.items()} if isinstance(by_name, dict) else by_name


class CacheConversion(Settings):
    """`convert:` how to make the model's cache smaller."""

    mechanisms: Annotated[dict[str, dict[str, Any]] | None, BeforeValidator(_map_mechanisms)] = None
    """Mechanisms by which layers share keys and values: names with their options, or a list of names."""
    num_key_value_heads: Count | None = None
    """Fewer key/value heads: each is the mean of a group of the model's."""
    latent_width: Count | None = None
    """Keys and values are made from one latent of this many channels, a multiple of head_dim (docs/convert.md).
    Alone."""
    choose: bool = False
    """Choose the layers that share, by how similar their keys and values are on the data, if the options of a mechanism
    leave that open (docs/convert.md)."""
    align: bool = True
    """First bring keys and values that are to be shared or pooled as close together as possible, which keeps the
    function. Without `anneal`, then fit the output projections to the original's attention (docs/convert.md)."""
    anneal: bool = False
    """The model's own keys and values are gradually replaced by the shared ones during this run; a stage with
    `finish_conversion: true` then removes what no head attends to. false: the model is the smaller one from the
    first step."""

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        shares = bool(self.mechanisms) or self.num_key_value_heads is not None
        if self.latent_width is None and not shares:
            raise ValueError(
                "convert needs mechanisms that share keys and values, num_key_value_heads, or latent_width"
            )
        if self.latent_width is not None and (shares or self.choose or self.anneal or not self.align):
            raise ValueError(
                "convert.latent_width goes alone; leave out mechanisms, num_key_value_heads, choose, align and anneal"
            )
        return self


class Change(Settings):
    """A change to a trained model before training continues: one of these, or none."""

    grow: Growth | None = None
    """Make it larger."""
    convert: CacheConversion | None = None
    """Make its cache smaller."""
    finish_conversion: bool = False
    """Finish a conversion that was annealed: the same function with the smaller cache."""
    new_classifier: bool = False
    """Draw a new classifier for the data's classes; of an image model."""
    optimizer_state: Literal["fresh", "keep"] = "fresh"
    """keep: carry the optimizer's state along, by the rules of docs/growth.md."""
    tau: Literal["keep", "anneal"] | None = None
    """anneal: each τ moves to the default for its number of pairs, during the warm-up, or half of all steps if there is
    none; null: anneal for a model that was grown with τ kept and nothing frozen, otherwise keep."""

    @model_validator(mode="after")
    def _one_change(self) -> Self:
        if sum(map(bool, (self.grow, self.convert, self.finish_conversion))) > 1:
            raise ValueError("a model is grown, converted or finished, one at a time; make stages of it")
        if self.grow is not None and self.grow.freeze and self.optimizer_state == "keep":
            raise ValueError("grow.freeze trains only new parameters, which have no state to keep; leave one out")
        if self.latent_width is not None and self.optimizer_state == "keep":
            raise ValueError("a latent has new weights, which have no state to keep; leave out optimizer_state")
        return self

    @property
    def latent_width(self) -> int | None:
        """Channels of the latent that a conversion makes; None if it makes none."""
        return None if self.convert is None else self.convert.latent_width


class Start(Change):
    """`start:` the trained model that a run starts from, under the recipe's own schedule. The model is then the
    checkpoint's: of `model:` only the dropout fields apply. If it was last trained on the same data with the same seed,
    training continues after the rows it has seen. A tokenizer may add tokens to the checkpoint's."""

    checkpoint: str
    """A checkpoint's folder, or a run's (its newest). A comparison identifies it by its path."""
    previous: str | None = None
    """In a stage: the identity of the previous stage, which identifies the checkpoint."""


class TrainingStage(Change):
    """One of `stages:`, a run in runs/<name>/stages/ that starts from the previous stage's model."""

    name: str = Field(pattern=r"^\w[\w.-]*$", max_length=50)
    """Name in records and folders: letters, digits, dots and dashes."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Changes to `training:`; steps and schedule are the stage's own."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Changes to `data:`."""

    def check_state(self, previous: str, current: str, frozen: bool) -> None:
        """Raise `HeadwaterError` if the optimizer's state cannot be kept.

        previous, current: the optimizers of the stage before and of this one. frozen: the stage before trained only
        new pairs.
        """
        if self.optimizer_state != "keep":
            return
        if self.grow is not None and frozen:
            raise HeadwaterError(
                f"Stage {self.name!r} trains what the stage before had frozen, for which there is no optimizer state; "
                "leave out optimizer_state: keep."
            )
        if previous != current:
            raise HeadwaterError(
                f"Stage {self.name!r} keeps the state of {previous} but trains with {current}; use the same optimizer "
                "for both, or leave out optimizer_state: keep."
            )
        if self.convert is not None and self.convert.align:
            raise HeadwaterError(
                f"Stage {self.name!r} aligns keys and values, which rotates their weights, so that the optimizer's "
                "state no longer fits; set convert.align to false, or leave out optimizer_state: keep."
            )


def changed_config(config: HeadwaterConfig, change: Change) -> HeadwaterConfig:
    """Plan the config of a changed model. Raises the same `HeadwaterError` as the change."""
    if change.grow is not None:
        return grown_config(config, **change.grow.model_dump())
    if change.finish_conversion:
        return finish_config(config)
    if (width := change.latent_width) is not None:
        return latent_config(config, width)
    if (goal := change.convert) is not None:
        # The layers to share are chosen once there are weights; until then any choice has the same size.
        mechanisms = choose_sources(config, goal.mechanisms) if goal.choose else goal.mechanisms
        blended = blend_config(config, mechanisms, goal.num_key_value_heads)
        check_conversion(blended)
        return blended if goal.anneal else finish_config(blended)
    return config
