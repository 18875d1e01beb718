"""Seeds in rounds until every arm is decided: decided arms stop, and the baseline stops with the last of them."""

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.earlier import check_data
from headwater_lab.comparison.pool import OnChange, Outcome, count_workers, run_trials
from headwater_lab.comparison.statistics import find_standings
from headwater_lab.comparison.trials import ArmKey, Trial
from headwater_lab.training.records import RunRecord, SeedPlan, changed_data


def run_sequentially(
    trials: list[Trial],
    plan: SeedPlan,
    baseline: str,
    workers: int | None,
    on_change: OnChange | None,
) -> list[Outcome]:
    """Train the first seeds of all arms, then further seeds of the undecided ones, one at a time, at every size.

    trials: of all seeds of the plan. With many workers, several seeds are trained at a time; those beyond an arm's
    decision do not count, so the decisions depend only on the results in the plan's order. Arms that are not tested
    (the baseline with other budgets) use the baseline's seeds. A failed trial ends the comparison after its
    round, since its seed cannot be left out. Raises `HeadwaterError` if runs with the same settings had different data.
    """
    undecided = list(dict.fromkeys(trial.arm_key for trial in trials if trial.experiment.arm in plan.arms))
    outcomes: list[Outcome] = []
    seeds, count = list(plan.seeds), plan.min_seeds
    while undecided and seeds:
        round_seeds, seeds = seeds[:count], seeds[count:]
        round_trials = [t for t in trials if t.recipe.seed in round_seeds and _is_needed(t, undecided, plan)]
        check_data(round_trials, trials)
        outcomes += run_trials(round_trials, workers, on_change)
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        if len(records) < len(outcomes):
            break
        undecided = _find_undecided(undecided, records, plan, baseline)
        jobs = [job for trial in round_trials for job in trial.jobs]
        # as many seeds as keep all workers busy, if only the baseline is not tested
        trials_per_seed = len(undecided) + len({size for _, size in undecided})
        count = max(1, (workers or count_workers(jobs)) // max(1, trials_per_seed))
    return outcomes


def _is_needed(trial: Trial, undecided: list[ArmKey], plan: SeedPlan) -> bool:
    """Whether a trial is of an undecided arm, or of an untested one at the size of an undecided one."""
    arm, size = trial.arm_key
    return (arm, size) in undecided or (arm not in plan.arms and any(size == needed for _, needed in undecided))


def _find_undecided(arms: list[ArmKey], records: list[RunRecord], plan: SeedPlan, baseline: str) -> list[ArmKey]:
    """Find the arms that need another seed. Raises `HeadwaterError` if the runs' data differ."""
    if changed := changed_data(records):
        raise HeadwaterError(changed)
    standings = {
        size: find_standings(
            [record for record in records if record.experiment and record.experiment.size == size], baseline, plan
        )
        for size in {size for _, size in arms}
    }
    return [(arm, size) for arm, size in arms if not standings[size][arm].decided]
