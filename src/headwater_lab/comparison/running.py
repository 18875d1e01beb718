"""Train a recipe's comparison: tuning, trials and prices."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.earlier import adopt, check_arms, check_plans, check_settings, earlier_runs
from headwater_lab.comparison.pool import OnChange, Outcome, run_trials
from headwater_lab.comparison.prices import Told, check_priced, measure
from headwater_lab.comparison.rounds import run_sequentially
from headwater_lab.comparison.trials import Job, Trial, at_rates, folder_of, levels, plan_for, trials_of
from headwater_lab.comparison.tuning import best_rates, tuning_trials
from headwater_lab.recipe.schema import Recipe
from headwater_lab.util.output_folder import occupied

# An arm at a size.
ArmKey = tuple[str, str | None]


def compare(
    recipe: Recipe,
    out: Path,
    workers: int | None = None,
    on_change: OnChange | None = None,
    only: Collection[ArmKey] | None = None,
    tell: Told = lambda line: None,
    shared: bool = False,
) -> list[Outcome]:
    """Everything a recipe's comparison trains: learning rates first if they are to be tuned, then its trials; then its
    prices, with `compare.costs`.

    Call it again to resume. workers: trials at a time; default `compare.workers`, else as `run_trials`. only: leave
    out the trials of other arms and sizes. tell: called with a line for each arm whose price is measured. shared: `out`
    may hold runs of the same name with other settings or arms, since no table is made of all of them, and other
    comparisons may be written to it at the same time. Raises `HeadwaterError` as the recipe's parts do, if another
    process compares into `out`, and for runs below `out` that are not of this comparison; `Interrupted` after Ctrl-C.
    """
    with occupied(out / recipe.name if shared else out, nested=True):
        recipe = match_arms(recipe)
        trials = _among(trials_of(recipe, out), only)
        section = recipe.compare
        assert section is not None
        workers = workers or section.workers
        priced = [
            (size, {trial.experiment.arm: trial.recipe for trial in trials if trial.experiment.size == size})
            for size in (section.sizes or [None] if section.costs else [])
        ]
        for _, arms in priced:
            check_priced(arms)
        plan = plan_for(section)
        runs = earlier_runs(recipe, trials, out, shared)
        check_arms(recipe, runs, out)
        check_plans(plan, runs)
        rates: dict[str, float] = {}
        if section.learning_rates:
            tries = _tries(recipe, out, only)
            rates = best_rates(tries, run_trials(tries, workers, on_change))
            trials = at_rates(trials, rates)
        check_settings(recipe, rates, runs, out)
        adopt(recipe, runs, out)
        if plan is not None:
            outcomes = run_sequentially(trials, plan, section.baseline, workers, on_change)
        else:
            outcomes = run_trials(trials, workers, on_change)
        for size, arms in priced:
            if section.baseline in arms:
                measure(arms, section.baseline, folder_of(recipe, size, out), tell)
        return outcomes


def jobs_of(recipe: Recipe, out: Path, only: Collection[ArmKey] | None = None) -> list[Job]:
    """All jobs that `compare` may train, each once; until decided, it will be fewer."""
    recipe = match_arms(recipe)
    trials = _among(trials_of(recipe, out), only)
    if recipe.compare is not None and recipe.compare.learning_rates:
        trials += _tries(recipe, out, only)
    return [job for level in levels(trials) for job in level]


def _among(trials: list[Trial], only: Collection[ArmKey] | None) -> list[Trial]:
    return [trial for trial in trials if only is None or (trial.experiment.arm, trial.experiment.size) in only]


def _tries(recipe: Recipe, out: Path, only: Collection[ArmKey] | None) -> list[Trial]:
    """To tune arms that are trained at any size: a learning rate is chosen at one size for all."""
    arms = None if only is None else {arm for arm, _ in only}
    return [trial for trial in tuning_trials(recipe, out) if arms is None or trial.experiment.arm in arms]
