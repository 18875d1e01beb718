"""Train a recipe's comparison: tuning, trials, with seeds in rounds until it is decided, and prices."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.earlier import (
    adopt_experiment,
    check_earlier_runs,
    check_settings,
    find_earlier_runs,
)
from headwater_lab.comparison.pool import OnChange, Outcome, count_workers, run_trials
from headwater_lab.comparison.prices import Told, check_priced, measure_prices
from headwater_lab.comparison.statistics import find_standings
from headwater_lab.comparison.trials import (
    Job,
    Trial,
    find_folder,
    list_trials,
    make_plan,
    order_jobs,
    set_rate,
)
from headwater_lab.comparison.tuning import choose_rates, list_tuning_trials
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.records import RunRecord, SeedPlan, changed_data
from headwater_lab.util.output_folder import occupy_folder

# An arm at a size.
ArmKey = tuple[str, str | None]


def run_comparison(
    recipe: Recipe,
    out: Path,
    workers: int | None = None,
    on_change: OnChange | None = None,
    only: Collection[ArmKey] | None = None,
    tell: Told = lambda line: None,
    shared: bool = False,
) -> list[Outcome]:
    """Train a recipe's comparison: tuning runs, then trials. Measure costs if `compare.costs` is set.

    Call it again to resume. workers: trials at a time; default `compare.workers`, else as `run_trials`. only: leave
    out the trials of other arms and sizes. tell: called with a line for each arm whose price is measured. shared: `out`
    may hold runs of the same name with other settings or arms, since no table is made of all of them, and other
    comparisons may be written to it at the same time. Raises `HeadwaterError` as the recipe's parts do, if another
    process compares into `out`, and for runs below `out` that are not of this comparison; `Interrupted` after Ctrl-C.
    """
    with occupy_folder(out / recipe.name if shared else out, nested=True):
        recipe = match_arms(recipe)
        trials = _choose_trials(list_trials(recipe, out), only)
        section = recipe.compare
        assert section is not None
        workers = workers or section.workers
        priced = [
            (size, {trial.experiment.arm: trial.recipe for trial in trials if trial.experiment.size == size})
            for size in (section.sizes or [None] if section.costs else [])
        ]
        for _, arms in priced:
            check_priced(arms)
        plan = make_plan(section)
        runs = find_earlier_runs(recipe, trials, out, shared)
        check_earlier_runs(recipe, runs, out)
        rates: dict[str, float] = {}
        if section.learning_rates:
            tries = _choose_tuning_trials(recipe, out, only)
            rates = choose_rates(tries, run_trials(tries, workers, on_change))
            trials = [replace(t, recipe=set_rate(t.recipe, rates[t.experiment.arm])) for t in trials]
        check_settings(recipe, rates, runs, out)
        adopt_experiment(recipe, runs, out)
        if plan is not None:
            outcomes = run_sequentially(trials, plan, section.baseline, workers, on_change)
        else:
            outcomes = run_trials(trials, workers, on_change)
        for size, arms in priced:
            if section.baseline in arms:
                measure_prices(arms, section.baseline, find_folder(recipe, size, out), tell)
        return outcomes


def run_sequentially(
    trials: list[Trial], plan: SeedPlan, baseline: str, workers: int | None, on_change: OnChange | None
) -> list[Outcome]:
    """Train the first seeds of all arms, then further seeds of the undecided ones, one at a time, at every size.

    trials: of all seeds of the plan. With many workers, several seeds are trained at a time; those beyond an arm's
    decision do not count, so the decisions depend only on the results in the plan's order. Arms that are not tested
    (the baseline with other budgets) use the baseline's seeds. A failed trial ends the comparison after its
    round, since its seed cannot be left out. Raises `HeadwaterError` if runs with the same settings had different data.
    """
    by_key = {(trial.experiment.arm, trial.experiment.size, trial.recipe.seed): trial for trial in trials}
    arms = list(dict.fromkeys((arm, size) for arm, size, _ in by_key))
    undecided = [(arm, size) for arm, size in arms if arm in plan.arms]
    outcomes: list[Outcome] = []
    records: list[RunRecord] = []
    seeds, count = list(plan.seeds), plan.min_seeds
    while undecided and seeds:
        sizes = {size for _, size in undecided}
        running = [key for key in arms if key in undecided or (key[0] not in plan.arms and key[1] in sizes)]
        round_trials = [by_key[*key, seed] for seed in seeds[:count] for key in running]
        seeds = seeds[count:]
        round_outcomes = run_trials(round_trials, workers, on_change)
        outcomes += round_outcomes
        records += [outcome.record for outcome in round_outcomes if outcome.record is not None]
        if len(records) < len(outcomes):
            break
        if changed := changed_data(records):
            raise HeadwaterError(changed)
        undecided = [key for key in undecided if not _is_decided(key, records, plan, baseline)]
        jobs = [job for trial in round_trials for job in trial.jobs]
        # as many seeds as keep all workers busy, if only the baseline is not tested
        trials_per_seed = len(undecided) + len({size for _, size in undecided})
        count = max(1, (workers or count_workers(jobs)) // max(1, trials_per_seed))
    return outcomes


def _is_decided(key: tuple[str, str | None], records: list[RunRecord], plan: SeedPlan, baseline: str) -> bool:
    """Whether an arm at a size needs no further seed."""
    arm, size = key
    of_size = [record for record in records if record.experiment and record.experiment.size == size]
    return find_standings(of_size, baseline, plan)[arm].decided


def list_jobs(recipe: Recipe, out: Path, only: Collection[ArmKey] | None = None) -> list[Job]:
    """List all jobs that `run_comparison` may train, each once; with seeds until decided, it trains fewer."""
    recipe = match_arms(recipe)
    trials = _choose_trials(list_trials(recipe, out), only)
    if recipe.compare is not None and recipe.compare.learning_rates:
        trials += _choose_tuning_trials(recipe, out, only)
    return [job for level in order_jobs(trials) for job in level]


def _choose_trials(trials: list[Trial], only: Collection[ArmKey] | None) -> list[Trial]:
    return [trial for trial in trials if only is None or (trial.experiment.arm, trial.experiment.size) in only]


def _choose_tuning_trials(recipe: Recipe, out: Path, only: Collection[ArmKey] | None) -> list[Trial]:
    """List the tuning trials of arms that are trained at any size: a learning rate is chosen at one size for all."""
    arms = None if only is None else {arm for arm, _ in only}
    return [trial for trial in list_tuning_trials(recipe, out) if arms is None or trial.experiment.arm in arms]
