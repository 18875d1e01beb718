"""Choose each arm's learning rate, the best of those tried."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.pool import Outcome
from headwater_lab.comparison.statistics import steps_to
from headwater_lab.comparison.trials import Trial, list_tuning_trials
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.records import ENDED, RunRecord, find_record

# The score of a diverged run.
WORST = -1e30


def find_tuned_rate(recipe: Recipe, arm: str, out: Path) -> float | None:
    """Find the best learning rate of an arm by the runs in `out`; None until they are finished, with these settings."""
    if recipe.compare is not None and len(recipe.compare.tried_rates) == 1:
        return recipe.compare.tried_rates[0]
    outcomes = []
    trials = [trial for trial in list_tuning_trials(recipe, out) if trial.experiment.arm == arm]
    for trial in trials:
        record = find_record(trial.folder)
        if record is None or record.status not in ENDED or record.describe_difference(trial.recipe):
            return None
        outcomes.append(Outcome(trial.label, record))
    return choose_rates(trials, outcomes)[arm]


def choose_rates(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Choose one of `compare.tried_rates` for each arm: the best mean of the deciding metric over the tuning seeds.

    With a number as `compare.threshold`, the rate with the fewest steps to the threshold on average is best; a run that
    never reaches it counts with all of its steps, and the metric breaks ties. A rate at which a run diverged ranks
    last; on a tie, the smaller one wins. Raises `HeadwaterError` if an arm diverged at all of them, or a trial failed.
    """
    records: dict[str, dict[float, list[RunRecord]]] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome.record is None:
            raise HeadwaterError(
                f"Tuning the learning rates needs every trial, but {outcome.label} failed: {outcome.error}"
            )
        records.setdefault(trial.experiment.arm, {}).setdefault(trial.rate or 0.0, []).append(outcome.record)
    best = {}
    for arm, by_rate in records.items():
        rate = find_best_rate(by_rate, trials[0].experiment.threshold)
        if rate is None:
            raise HeadwaterError(
                f"The arm {arm!r} diverged at every learning rate tried; add smaller ones to compare.learning_rates "
                "(compare.ladder.multipliers)."
            )
        best[arm] = rate
    return best


def find_best_rate(by_rate: Mapping[float, Sequence[RunRecord]], threshold: float | str | None) -> float | None:
    """Find an arm's best rate as `choose_rates` does; None if it diverged at all of them."""
    ends = {rate: float(np.mean([find_score(record) for record in runs])) for rate, runs in by_rate.items()}
    steps = {rate: float(np.mean([_steps_needed(record, threshold) for record in by_rate[rate]])) for rate in by_rate}
    usable = [rate for rate in sorted(by_rate) if ends[rate] > WORST / len(by_rate[rate]) / 2]
    return max(usable, key=lambda rate: (-steps[rate], ends[rate]), default=None)


def describe_edge(arm: str, rate: float | None, tried: Collection[float]) -> str:
    """Say that there may be a better learning rate if an arm's best is at an end of those tried; or ""."""
    if len(tried) < 2 or rate not in (min(tried), max(tried)):
        return ""
    edge, further = ("smallest", "smaller") if rate == min(tried) else ("largest", "larger")
    return (
        f"The best learning rate of {arm}, {rate:g}, is the {edge} one tried; add {further} ones to "
        "compare.learning_rates (compare.ladder.multipliers) for a fair comparison."
    )


def _steps_needed(record: RunRecord, threshold: float | str | None) -> int:
    """Count the steps to the threshold, at most the run's; 0 if the threshold is not a number."""
    if not isinstance(threshold, int | float):
        return 0
    steps = steps_to(record, threshold)
    return record.held_out[-1].step if steps is None and record.held_out else steps or 0


def find_score(record: RunRecord) -> float:
    """Find the deciding metric at the end, signed so that more is better; `WORST` if diverged."""
    result = record.result
    if record.status == "diverged" or result is None or not math.isfinite(result):
        return WORST
    return -result if record.lower_is_better else result
