"""Seeds in rounds until every arm is decided: decided arms stop, and the baseline stops with the last of them."""

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.earlier import check_data
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
    rounds = _Rounds(trials, plan, baseline)
    outcomes: list[Outcome] = []
    count = plan.min_seeds
    while round_trials := rounds.take_trials(count):
        check_data(round_trials, trials)
        round_outcomes = run_trials(round_trials, workers, on_change)
        outcomes += round_outcomes
        records = [outcome.record for outcome in round_outcomes if outcome.record is not None]
        if len(records) < len(round_outcomes):
            break
        rounds.decide_arms(records)
        jobs = [job for trial in round_trials for job in trial.jobs]
        # as many seeds as keep all workers busy
        count = max(1, (workers or count_workers(jobs)) // max(1, rounds.trials_per_seed))
    return outcomes


class _Rounds:
    """The trials of each round: seeds of the undecided arms and, at their sizes, of the untested arms."""

    def __init__(self, trials: list[Trial], plan: SeedPlan, baseline: str) -> None:
        self.plan, self.baseline = plan, baseline
        self.trials = {(trial.experiment.arm, trial.experiment.size, trial.recipe.seed): trial for trial in trials}
        self.arms = list(dict.fromkeys((arm, size) for arm, size, _ in self.trials))
        self.undecided = [(arm, size) for arm, size in self.arms if arm in plan.arms]
        self.seeds = 0  # taken so far
        self.records: list[RunRecord] = []

    @property
    def trials_per_seed(self) -> int:
        """Runs per further seed, if only the baseline is not tested."""
        return len(self.undecided) + len({size for _, size in self.undecided})

    def take_trials(self, count: int) -> list[Trial]:
        """Take the trials of the next `count` seeds; none once everything is decided or all seeds are taken."""
        sizes = {size for _, size in self.undecided}
        arms = [
            (arm, size)
            for arm, size in self.arms
            if (arm, size) in self.undecided or (arm not in self.plan.arms and size in sizes)
        ]
        seeds = self.plan.seeds[self.seeds : self.seeds + count]
        self.seeds += count
        return [self.trials[arm, size, seed] for seed in seeds for arm, size in arms]

    def decide_arms(self, records: list[RunRecord]) -> None:
        """Add these records, and keep only the arms that need another seed."""
        self.records += records
        if changed := changed_data(self.records):
            raise HeadwaterError(changed)
        by_size = {
            size: find_standings(
                [record for record in self.records if record.experiment and record.experiment.size == size],
                self.baseline,
                self.plan,
            )
            for size in {size for _, size in self.undecided}
        }
        self.undecided = [(arm, size) for arm, size in self.undecided if not by_size[size][arm].decided]
