"""`compare:` of a recipe."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headwater.util.errors import nearest
from headwater_lab.recipe.ladder_section import Ladder
from headwater_lab.util.settings import Count, ReadIf, Seed, Settings

IF_TUNED = ReadIf(lambda recipe, name: len(recipe.compare.tried_rates) > 1, "without learning rates to choose from")
IF_SEQUENTIAL = ReadIf(lambda recipe, name: recipe.compare.sequential, "without compare.sequential=true")


class Compare(Settings):
    """`compare:` variants of the recipe, trained side by side."""

    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name of each arm -> its changes to the recipe, e.g. {model: {mechanisms: {kv_shift: {}}}}."""
    baseline: str
    """The arm that the others are compared with, seed by seed."""
    seeds: list[Seed] = Field(default=[0, 1, 2], min_length=1)
    """Each arm is trained once per seed; a seed sets the initial value of every parameter and the order of the data."""
    workers: Count | None = None
    """Trials at a time; default: one per GPU, or one per CPU core."""
    threshold: float | Literal["baseline"] | None = None
    """Report the first step at which the deciding measure reaches this value, and the cost up to that step; baseline:
    the baseline's final value, seed by seed."""
    budget_arms: list[str] = []
    """Arms that are the baseline with other budgets. Report what every other arm's result is worth: the FLOPs that the
    baseline would need for it (docs/statistics.md)."""
    match: Literal["tokens", "parameters", "flops"] | None = None
    """Make every arm cost the same as the baseline by adjusting its steps (tokens, flops), or the width of its
    feed-forward or the pairs that replace it (parameters, within 1 %); null leaves arms as written."""
    costs: bool = False
    """Measure after the runs what each arm costs: times of training and of generation (docs/statistics.md)."""
    learning_rates: list[Annotated[float, Field(gt=0)]] = []
    """Try each arm at each of these first; the arm gets the best by mean over `tuning_seeds`. With several `sizes`, all
    use the rate found for the first. A single one is taken as it is."""
    tuning_seeds: Annotated[list[Seed], IF_TUNED] = Field(default=[1000], min_length=1)
    """Seeds for tuning, which are not part of the comparison."""
    sizes: dict[str, dict[str, Any]] = {}
    """Name of each size -> its changes to every arm (and under `arms:` to single arms); with three or more, a scaling
    law is fitted."""
    ladder: Ladder | None = None
    """Sizes and budgets by rule, in place of `sizes`."""
    sequential: bool = False
    """Add seeds until each arm is better, worse or equivalent within the margin; false trains `seeds`."""
    margin: Annotated[Annotated[float, Field(gt=0)] | None, IF_SEQUENTIAL] = None
    """The smallest difference of the deciding measure that matters; needed for `sequential`."""
    min_seeds: Annotated[int, Field(ge=2, le=1000), IF_SEQUENTIAL] = 6
    """Seeds before the first look, for `sequential`."""
    max_seeds: Annotated[int, Field(ge=2, le=1000), IF_SEQUENTIAL] = 30
    """Seeds at which an undecided arm is inconclusive, for `sequential`. Seeds after the listed ones continue from the
    largest."""

    @field_validator("sizes", mode="before")
    @classmethod
    def _allow_null(cls, sizes: Any) -> Any:
        return {} if sizes is None else sizes

    @property
    def tried_rates(self) -> list[float]:
        """Rates that are tried for each arm: `learning_rates`, or multiples of the ladder's."""
        return self.learning_rates or (self.ladder.multipliers if self.ladder is not None else [])

    @property
    def all_seeds(self) -> list[int]:
        """The seeds that may be trained, in their order."""
        if not self.sequential:
            return self.seeds
        further = itertools.count(max(self.seeds) + 1)
        return [*self.seeds, *itertools.islice(further, self.max_seeds - len(self.seeds))]

    @model_validator(mode="after")
    def _check_names(self) -> Compare:
        if self.baseline not in self.arms:
            raise ValueError(f"baseline {self.baseline!r} is not an arm; {nearest(self.baseline, self.arms)}")
        for size, change in self.sizes.items():
            for arm in change.get("arms", {}):
                if arm not in self.arms:
                    raise ValueError(f"compare.sizes.{size}.arms: {arm!r} is not an arm; {nearest(arm, self.arms)}")
        for field, changes in (("arms", self.arms), ("sizes", self.sizes)):
            for name, change in changes.items():
                if unread := change.keys() & {"seed", "name", "compare"}:
                    raise ValueError(
                        f"compare.{field}.{name}.{min(unread)} has no effect: the comparison sets it; leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _check_lists(self) -> Compare:
        if self.sequential:
            self._check_sequential()
        self._check_budget_arms()
        if self.budget_arms and self.match is not None:
            raise ValueError(f"compare.match={self.match} would make all compare.budget_arms the same; leave one out")
        if self.learning_rates and self.ladder is not None:
            raise ValueError("compare.learning_rates and compare.ladder both set the rate; use ladder.multipliers")
        if len(self.tried_rates) > 1 and (shared := set(self.all_seeds) & set(self.tuning_seeds)):
            raise ValueError(
                f"compare.tuning_seeds and compare.seeds share {sorted(shared)}; seeds that choose a rate flatter it, "
                f"so use other tuning_seeds"
            )
        if len({f"{rate:g}" for rate in self.learning_rates}) < len(self.learning_rates):
            raise ValueError("compare.learning_rates names a rate twice, up to its sixth digit; list each once")
        for field in ("seeds", "tuning_seeds", "budget_arms"):
            if len(set(entries := getattr(self, field))) < len(entries):
                raise ValueError(f"compare.{field} has an entry twice: {entries}; list each once")
        return self

    def _check_budget_arms(self) -> None:
        for arm in self.budget_arms:
            if arm not in self.arms.keys() - {self.baseline}:
                hint = nearest(arm, self.arms.keys() - {self.baseline})
                raise ValueError(f"compare.budget_arms: {arm!r} is not an arm other than the baseline; {hint}")
            for arms in (self.arms, *(size.get("arms", {}) for size in self.sizes.values())):
                change, base = arms.get(arm, {}), arms.get(self.baseline, {})
                names = (change.keys() | base.keys()) - {"training"}
                if differing := [name for name in names if change.get(name) != base.get(name)]:
                    raise ValueError(
                        f"compare.budget_arms: {arm!r} differs from {self.baseline!r} in {min(differing)}, but a "
                        "budget is the same model with other fields of training"
                    )

    def _check_sequential(self) -> None:
        if self.margin is None:
            raise ValueError("compare.sequential=true needs compare.margin, the smallest difference that matters")
        if self.min_seeds > self.max_seeds:
            raise ValueError(f"compare.min_seeds={self.min_seeds} is more than compare.max_seeds={self.max_seeds}")
        if len(self.seeds) > self.max_seeds:
            raise ValueError(
                f"compare.seeds lists {len(self.seeds)} seeds, more than compare.max_seeds={self.max_seeds}; list only "
                "the first"
            )
        if not self.arms.keys() - {self.baseline, *self.budget_arms}:
            raise ValueError("compare.sequential=true needs an arm other than the baseline and its budgets")
