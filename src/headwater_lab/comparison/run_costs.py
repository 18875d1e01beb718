"""What the runs of a comparison cost in training, counted before any of them: as they branch, and each run alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.cost.counts import training_flops
from headwater.cost.estimate import ModelEstimate
from headwater_lab.comparison.trials import Trial, find_trunks, list_trials, list_tuning_trials
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.model_estimates import find_config, find_teacher
from headwater_lab.util.terminal import Table, lined, si

TUNING, ALL = "tuning", "all"


@dataclass(frozen=True)
class RunCost:
    """The training cost of some runs, of which those with a trunk begin where it does.

    units: tokens or images. alone: FLOPs if every run began at step 0. hours: of one device, at the assumed share of
    its peak; None without hardware.
    """

    name: str
    runs: int
    units: int
    flops: float
    alone: float
    hours: float | None = None

    @property
    def saving(self) -> float:
        """The share of the FLOPs that branches save."""
        return 1 - self.flops / self.alone


def count_run_costs(recipe: Recipe, vocab_size: int | None, estimate: ModelEstimate) -> list[RunCost]:
    """Count the cost of the runs of a comparison: of tuning, of each size, and all.

    None if `compare` could not train the recipe, or it has stages.

    Runs are counted as written, before `compare.match`, and those of `compare.sequential` with all seeds.
    estimate: of a model, for the hardware, its precision and the assumed share of its peak. Raises `HeadwaterError`.
    """
    section = recipe.compare
    if section is None or recipe.training.world_size > 1:
        return []
    if any(arm.stages for arm in recipe.trials().values()):
        return []
    recipe = recipe.model_copy(update={"compare": section.model_copy(update={"match": None})})
    rates: dict[str, float] = {}

    def count_flops(arm: Recipe) -> float:
        """Count the FLOPs per token or image of an arm's model, each model once."""
        training = recipe.training.model_copy(update={"distillation": arm.training.distillation})
        model = arm.model_copy(update={"training": training, "seed": 0}).identity
        if model not in rates:
            config = find_config(repr(recipe.name), arm, vocab_size)
            rates[model] = training_flops(config, arm.row_length, find_teacher(arm))
        return rates[model]

    groups: dict[str, list[RunCost]] = {}
    if tries := list_tuning_trials(recipe, Path()):
        groups[TUNING] = [cost for _, cost in _count_trial_costs(tries, count_flops)]
    for trial, cost in _count_trial_costs(list_trials(recipe, Path()), count_flops):
        groups.setdefault(trial.experiment.size or recipe.name, []).append(cost)
    costs = [_sum_costs(name, group) for name, group in groups.items()]
    costs += [_sum_costs(ALL, costs)] if len(costs) > 1 else []
    if estimate.hardware is None:
        return costs
    speed = estimate.hardware.peak(estimate.precision) * estimate.mfu
    return [replace(cost, hours=cost.flops / speed / 3600) for cost in costs]


def _count_trial_costs(trials: Sequence[Trial], count: Callable[[Recipe], float]) -> Iterator[tuple[Trial, RunCost]]:
    """Count the cost of each trial, which may branch off another. count: the FLOPs per token or image of its model."""
    trunks, recipes = find_trunks(trials), {trial.folder: trial.recipe for trial in trials}
    for trial in trials:
        recipe, trunk = trial.recipe, trunks.get(trial.folder)
        first = 0 if trunk is None else recipes[trunk].decay_start or 0
        units, rate = recipe.tokens, count(recipe)
        trained = units * (recipe.training.steps - first) // recipe.training.steps
        yield trial, RunCost("", 1, trained, trained * rate, units * rate)


def _sum_costs(name: str, costs: Sequence[RunCost]) -> RunCost:
    fields = ("runs", "units", "flops", "alone")
    return RunCost(name, **{field: sum(getattr(cost, field) for cost in costs) for field in fields})


def tabulate_costs(title: str, costs: list[RunCost], unit: str, estimate: ModelEstimate) -> Table:
    """Lay out the costs of runs. estimate: what their hours were counted with."""
    names = ["", "runs", unit, "FLOPs", "each run alone", "saved"]
    rows = [
        [cost.name, f"{cost.runs:,}", si(cost.units), f"{cost.flops:.3g}", f"{cost.alone:.3g}", f"{cost.saving:.0%}"]
        for cost in costs
    ]
    if estimate.hardware is not None:
        names.append(f"hours, {estimate.hardware.name}, MFU {estimate.mfu:g}")
        rows = [[*row, f"{cost.hours:.3g}"] for row, cost in zip(rows, costs, strict=True)]
    return lined(*names, rows=rows, title=f"All runs of {title}")
