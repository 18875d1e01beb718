"""Train a recipe's comparison: tuning, trials and costs of arms."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headwater_lab.comparison.arm_costs import ArmCost, Tell, check_timeable, choose_device, measure_arm_costs
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.earlier import (
    adopt_experiment,
    check_data,
    check_settings,
    find_earlier_runs,
)
from headwater_lab.comparison.pool import OnChange, Outcome, run_trials
from headwater_lab.comparison.rounds import run_sequentially
from headwater_lab.comparison.trials import (
    ArmKey,
    Job,
    Trial,
    choose_rate,
    find_folder,
    list_trials,
    list_tuning_trials,
    make_plan,
    order_jobs,
)
from headwater_lab.comparison.tuning import choose_rates, describe_edge
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.recipe import Recipe, naming_arm
from headwater_lab.training.records import ENDED, find_record
from headwater_lab.training.stages import list_configs
from headwater_lab.training.start import make_model
from headwater_lab.util.output_folder import occupy_folder


def run_comparison(
    recipe: Recipe,
    out: Path,
    workers: int | None = None,
    on_change: OnChange | None = None,
    only: Collection[ArmKey] | None = None,
    tell: Tell = lambda line: None,
    shared: bool = False,
) -> list[Outcome]:
    """Train a recipe's comparison: tuning runs, then trials. Measure costs if `compare.costs` is set.

    Call it again to resume. workers: trials at a time; default `compare.workers`, else as `run_trials`. only: leave out
    the trials of other arms and sizes. tell: called with a line for each arm whose cost is measured, or whose best
    rate is the outermost. shared: `out` may hold runs of the same name with other settings or arms, since no table is
    made of all of them, and other comparisons may be written to it at the same time. Raises `HeadwaterError` as the
    recipe's parts do, if another process compares into `out`, and for runs below `out` that are not of this comparison;
    `Interrupted` after Ctrl-C.
    """
    with occupy_folder(out / recipe.name if shared else out, nested=True):
        recipe = match_arms(recipe)
        trials = _choose_trials(list_trials(recipe, out), only)
        section = recipe.compare
        assert section is not None
        workers = workers or section.workers
        timed = _list_timed(section, trials)
        plan = make_plan(section)
        runs = find_earlier_runs(recipe, trials, out, shared)
        _check_models(trials)
        tuning = _choose_tuning_trials(recipe, out, only)
        check_data(tuning, [*tuning, *trials])
        rates: dict[str, float] = {}
        if section.tried_rates:
            rates = _tune_rates(section, tuning, workers, on_change, tell)
            trials = [replace(t, recipe=choose_rate(t.recipe, section, rates[t.experiment.arm])) for t in trials]
        check_settings(recipe, rates, runs, out)
        adopt_experiment(runs)
        if plan is not None:
            outcomes = run_sequentially(trials, plan, section.baseline, workers, on_change)
        else:
            check_data(trials, trials)
            outcomes = run_trials(trials, workers, on_change)
        measured: dict[tuple[str, str], ArmCost] = {}
        for size, arms in timed:
            if section.baseline in arms:
                measure_arm_costs(arms, section.baseline, find_folder(recipe, size, out), tell, measured)
        return outcomes


def _list_timed(section: Compare, trials: Sequence[Trial]) -> list[tuple[str | None, dict[str, Recipe]]]:
    """List the arms whose costs are measured, by size. Raises `HeadwaterError` as `check_timeable`."""
    timed: list[tuple[str | None, dict[str, Recipe]]] = [
        (size, {trial.experiment.arm: trial.recipe for trial in trials if trial.experiment.size == size})
        for size in (section.sizes or [None] if section.costs else [])
    ]
    for _, arms in timed:
        check_timeable(arms)
    return timed


def _tune_rates(
    section: Compare, tries: list[Trial], workers: int | None, on_change: OnChange | None, tell: Tell
) -> dict[str, float]:
    """Find each arm's learning rate by its tuning runs, of which a single rate needs none."""
    if not tries:
        return dict.fromkeys(section.arms, section.tried_rates[0])
    rates = choose_rates(tries, run_trials(tries, workers, on_change))
    for edge in filter(None, (describe_edge(arm, rate, section.tried_rates) for arm, rate in rates.items())):
        tell(edge)
    return rates


def _check_models(trials: Sequence[Trial]) -> None:
    """Make the models of each arm and size without storage, before any is trained.

    Raises `HeadwaterError`, which names the arm, if that is impossible.
    """
    for trial in {trial.arm_key: trial for trial in trials}.values():
        record = find_record(trial.jobs[0].folder)
        if record is not None and record.status in ENDED:  # the checkpoint that it began with may have changed
            continue
        for job in trial.jobs:
            job.recipe.data.check_extras()
        with naming_arm(*trial.arm_key), torch.device("meta"):
            for config, job in zip(list_configs(trial.recipe), trial.jobs, strict=True):
                make_model(job.recipe.training, config, choose_device(job.recipe), job.recipe.row_length)


def list_jobs(recipe: Recipe, out: Path, only: Collection[ArmKey] | None = None) -> list[Job]:
    """List all jobs that `run_comparison` may train, each once; with seeds until decided, it trains fewer."""
    recipe = match_arms(recipe)
    trials = _choose_trials(list_trials(recipe, out), only)
    if recipe.compare is not None and recipe.compare.tried_rates:
        trials += _choose_tuning_trials(recipe, out, only)
    return [job for level in order_jobs(trials) for job in level]


def _choose_trials(trials: list[Trial], only: Collection[ArmKey] | None) -> list[Trial]:
    return [trial for trial in trials if only is None or trial.arm_key in only]


def _choose_tuning_trials(recipe: Recipe, out: Path, only: Collection[ArmKey] | None) -> list[Trial]:
    """List the tuning trials of arms that are trained at any size: a learning rate is chosen at one size for all."""
    arms = None if only is None else {arm for arm, _ in only}
    return [trial for trial in list_tuning_trials(recipe, out) if arms is None or trial.experiment.arm in arms]
