"""What the runs of a comparison cost in training, counted before any of them: as they branch, and each run alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.cost.counts import training_flops
from headwater.cost.estimate import Price
from headwater_lab.comparison.trials import Job, list_trials, order_jobs
from headwater_lab.comparison.tuning import list_tuning_trials
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.model_estimates import find_config
from headwater_lab.util.terminal import Table, lined, si

TUNING, ALL = "tuning", "all"


@dataclass(frozen=True)
class RunCost:
    """The training cost of some runs, of which those with a trunk begin where it does.

    units: tokens or images. alone: FLOPs if every run began at step 0. hours: of one device, at the assumed share of
    its peak; None without hardware.
    """

    name: str
    runs: int = 0
    units: int = 0
    flops: float = 0.0
    alone: float = 0.0
    hours: float | None = None

    @property
    def saving(self) -> float:
        """The share of the FLOPs that branches save."""
        return 1 - self.flops / self.alone


def price_runs(recipe: Recipe, vocab_size: int | None = None, price: Price | None = None) -> list[RunCost]:
    """Price the runs of a recipe's comparison: of tuning, of each size, and all; none if `compare` could not train it,
    or it has stages.

    Runs are priced as written, before `compare.match`, and those of `compare.sequential` with all seeds.
    price: of a model, for the hardware, its precision and the assumed share of its peak. Raises `HeadwaterError`.
    """
    section = recipe.compare
    if section is None or recipe.training.devices * recipe.training.nodes > 1:
        return []
    if any(arm.stages for arm in recipe.trials().values()):
        return []
    recipe = recipe.model_copy(update={"compare": section.model_copy(update={"match": None})})
    tuning = list_tuning_trials(recipe, Path()) if section.learning_rates else []
    costs = {name: RunCost(name) for name in ([TUNING] if tuning else [])}
    rates: dict[str, float] = {}
    for trials in (tuning, list_trials(recipe, Path())):
        jobs = {job.folder: job for level in order_jobs(trials) for job in level}
        for job in jobs.values():
            model = job.recipe.model_copy(update={"training": recipe.training, "seed": 0}).identity
            if model not in rates:
                config = find_config(repr(recipe.name), job.recipe, vocab_size)
                rates[model] = training_flops(config, job.recipe.row_length)
            name = TUNING if trials is tuning else (job.experiment and job.experiment.size) or recipe.name
            costs[name] = _add_run(costs.get(name, RunCost(name)), job, jobs, rates[model])
    total = replace(_sum_costs(costs.values()), name=ALL)
    priced = [*costs.values(), total] if len(costs) > 1 else [*costs.values()]
    if price is None or price.hardware is None:
        return priced
    speed = price.hardware.peak(price.precision) * price.mfu
    return [replace(cost, hours=cost.flops / speed / 3600) for cost in priced]


def _add_run(cost: RunCost, job: Job, jobs: dict[Path, Job], rate: float) -> RunCost:
    """Add a run. jobs: by folder. rate: FLOPs per token or image."""
    units = job.recipe.rows * job.recipe.row_length
    first = (jobs[job.trunk].recipe.decay_start or 0) if job.trunk is not None else 0
    trained = units * (job.steps - first) // job.steps
    return _sum_costs([cost, RunCost(cost.name, 1, trained, trained * rate, units * rate)])


def _sum_costs(costs: Iterable[RunCost]) -> RunCost:
    costs = list(costs)
    sums = {name: sum(getattr(cost, name) for cost in costs) for name in ("runs", "units", "flops", "alone")}
    return RunCost(costs[0].name, **sums)


def tabulate_costs(title: str, costs: list[RunCost], unit: str, price: Price) -> Table:
    """Lay out the costs of runs. price: the price they were made with."""
    names = ["", "runs", unit, "FLOPs", "each run alone", "saved"]
    rows = [
        [cost.name, f"{cost.runs:,}", si(cost.units), f"{cost.flops:.3g}", f"{cost.alone:.3g}", f"{cost.saving:.0%}"]
        for cost in costs
    ]
    if price.hardware is not None:
        names.append(f"hours, {price.hardware.name}, MFU {price.mfu:g}")
        rows = [[*row, f"{cost.hours:.3g}"] for row, cost in zip(rows, costs, strict=True)]
    return lined(*names, rows=rows, title=f"All runs of {title}")
