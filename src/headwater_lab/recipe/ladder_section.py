"""`compare.ladder:` of a recipe: sizes and budgets by rule."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater_lab.optimization.laws import OF_TOKENS
from headwater_lab.util.settings import Count, Settings

Positive = Annotated[float, Field(gt=0, le=1e9)]
# The least ratio of neighboring budgets: runs of one are told from those of another by their whole steps.
LEAST_RATIO = 1.2


class Ladder(Settings):
    """`ladder:` sizes × budgets, as `compare.sizes` named by layers and tokens per parameter, e.g. d4 ×20."""

    law: Literal["olmo", "marin", "nanochat"]
    """What sets batch, peak rate, warm-up and decay (schedule wsd) of each size and budget, the same for all arms
    (docs/reference/optimizers.md): olmo, from the size; marin and nanochat, also from the tokens."""
    depths: list[Count] = Field(min_length=1)
    """Layers of each size."""
    width_per_layer: Count = 64
    """Width of the model, per layer; the feed-forward's width is the config's default for it."""
    head_dim: Count = 64
    """Width of a head."""
    tokens_per_parameter: list[Positive] = Field(default=[20.0], min_length=1)
    """Budgets: training tokens per parameter of the baseline, embeddings aside."""
    branches: bool = True
    """All budgets of a size come from one run, so the law may not depend on tokens; false allows any law, with a run
    for each budget where its rate differs."""
    multipliers: list[Positive] = []
    """Try each arm at these multiples of the law's rate, at the smallest size and budget, on `tuning_seeds`; the arm
    gets the best at all sizes. A single one is taken as it is."""
    projections: list[Annotated[float, Field(gt=0)]] = []
    """FLOPs for which the report predicts each arm's loss, by laws that need three `depths`."""

    @model_validator(mode="after")
    def _check_rungs(self) -> Self:
        for name in ("depths", "tokens_per_parameter", "multipliers", "projections"):
            if len({f"{value:g}" for value in getattr(self, name)}) < len(getattr(self, name)):
                raise ValueError(f"compare.ladder.{name} has an entry twice; list each once")
        budgets = sorted(self.tokens_per_parameter)
        if close := [pair for pair in pairwise(budgets) if pair[1] <= LEAST_RATIO * pair[0]]:
            raise ValueError(
                f"compare.ladder.tokens_per_parameter: {close[0][0]:g} and {close[0][1]:g} are too near for laws of "
                f"their own; let budgets differ by more than {LEAST_RATIO - 1:.0%}"
            )
        if odd := [depth for depth in self.depths if depth * self.width_per_layer % self.head_dim]:
            raise ValueError(
                f"compare.ladder: {odd[0]} layers are {odd[0] * self.width_per_layer} wide, which is not a multiple of "
                f"head_dim={self.head_dim}; change depths, width_per_layer or head_dim"
            )
        if self.branches and self.law in OF_TOKENS and len(self.tokens_per_parameter) > 1:
            raise ValueError(
                f"compare.ladder.law={self.law} sets the rate from a run's tokens, so its budgets cannot come from one "
                "run; use law=olmo, one of tokens_per_parameter, or branches=false for a run a budget"
            )
        return self

    def shape(self, depth: int) -> dict[str, int | None]:
        """The fields of the model with this many layers."""
        width = depth * self.width_per_layer
        return {
            "num_hidden_layers": depth,
            "hidden_size": width,
            "num_attention_heads": width // self.head_dim,
            "num_key_value_heads": None,
            "intermediate_size": None,
        }
