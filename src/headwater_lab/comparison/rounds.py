"""Seeds in rounds, until every arm is decided: arms that are decided stop, and the baseline with the last of them."""

from __future__ import annotations

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.pool import OnChange, Outcome, default_workers, run_trials
from headwater_lab.comparison.statistics import standings
from headwater_lab.comparison.trials import Trial
from headwater_lab.training.records import RunRecord, SeedPlan, changed_data


def run_sequentially(
    trials: list[Trial],
    plan: SeedPlan,
    baseline: str,
    workers: int | None = None,
    on_change: OnChange | None = None,
) -> list[Outcome]:
    """Train the first seeds of all arms, then one seed after the other of those that are undecided, at every size.

    trials: of all seeds of the plan. With many workers, several seeds are trained at a time; those beyond an arm's
    decision do not count, so the decisions depend only on the results in the plan's order. Arms that are not tested,
    the baseline with other budgets, have its seeds. A failed trial ends the comparison after its
    round, since its seed cannot be left out. Raises `HeadwaterError` once runs with the same settings had other data.
    """
    by_key = {(one.experiment.arm, one.experiment.size, one.recipe.seed): one for one in trials}
    keys = list(dict.fromkeys((one.experiment.arm, one.experiment.size) for one in trials))
    still = [key for key in keys if key[0] in plan.arms]
    outcomes: list[Outcome] = []
    records: list[RunRecord] = []
    done, count = 0, plan.min_seeds
    while still and done < len(plan.seeds):
        sizes = {size for _, size in still}
        now = [key for key in keys if key in still or (key[0] not in plan.arms and key[1] in sizes)]
        todo = [by_key[*key, seed] for seed in plan.seeds[done : done + count] for key in now]
        found = run_trials(todo, workers, on_change)
        outcomes += found
        if any(one.record is None for one in found):
            break
        records += [one.record for one in found if one.record is not None]
        if wrong := changed_data(records):
            raise HeadwaterError(wrong)
        still = _undecided(records, still, baseline, plan)
        done += count
        count = _ahead(todo, len(still) + len({size for _, size in still}), workers)
    return outcomes


def _undecided(
    records: list[RunRecord], arms: list[tuple[str, str | None]], baseline: str, plan: SeedPlan
) -> list[tuple[str, str | None]]:
    """The arms that need another seed."""
    stands = {
        size: standings([r for r in records if r.experiment and r.experiment.size == size], baseline, plan)
        for size in {size for _, size in arms}
    }
    return [(arm, size) for arm, size in arms if not stands[size][arm].decided]


def _ahead(todo: list[Trial], runs: int, workers: int | None) -> int:
    """Seeds of the next round: as many as keep all workers busy. runs: for one seed."""
    if not runs:
        return 1
    return max(1, (workers or default_workers([job for one in todo for job in one.jobs])) // runs)
