"""Seeds in rounds until every arm is decided: decided arms stop, and the baseline stops with the last of them."""

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.pool import OnChange, Outcome, count_workers, run_trials
from headwater_lab.comparison.statistics import find_standings
from headwater_lab.comparison.trials import Trial
from headwater_lab.training.records import RunRecord, SeedPlan, changed_data


def run_sequentially(
    trials: list[Trial],
    plan: SeedPlan,
    baseline: str,
    workers: int | None = None,
    on_change: OnChange | None = None,
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
