"""What a comparison decides besides verdicts: each arm's learning rate, and which arms continue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headwater.compare.pool import OnChange, Outcome, run_trials
from headwater.compare.statistics import steps_to
from headwater.compare.trials import Trial, tuning_trial
from headwater.errors import HeadwaterError
from headwater.recipe import Halving, Recipe
from headwater.records import ENDED, RunRecord, read_record

# The score of a diverged run.
WORST = -1e30


def tuning_trials(recipe: Recipe, out: Path) -> list[Trial]:
    """Every arm at every learning rate with every tuning seed: the same budget for each arm."""
    section = recipe.compare
    assert section is not None
    return [
        tuning_trial(recipe, arm, rate, seed, out)
        for seed in section.tuning_seeds
        for arm in section.arms
        for rate in section.learning_rates
    ]


def found_rate(recipe: Recipe, arm: str, out: Path) -> float | None:
    """The best learning rate of an arm by the runs in `out`; None until they are finished, with these settings."""
    outcomes = []
    trials = [one for one in tuning_trials(recipe, out) if one.experiment.arm == arm]
    for trial in trials:
        try:
            record = read_record(trial.folder)
        except HeadwaterError:
            return None
        if record.status not in ENDED or record.config_hash != trial.recipe.digest():
            return None
        outcomes.append(Outcome(trial.label, record))
    return best_rates(trials, outcomes)[arm]


def best_rates(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The learning rate of each arm: the best mean of the deciding measure over the tuning seeds.

    With a number as `compare.threshold` it is the one with the fewest steps to get there, on average; a run that never
    does counts with all of its steps, and the measure decides among equals. A rate at which a run diverged ranks last;
    on a tie, the smaller one wins. Raises `HeadwaterError` if an arm diverged at all of them, or a trial failed.
    """
    scores: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome.record is None:
            raise HeadwaterError(
                f"Tuning the learning rates needs every trial, but {outcome.label} failed: {outcome.error}"
            )
        rates = scores.setdefault(trial.experiment.arm, {})
        pair = -_steps_needed(outcome.record, trial.experiment.threshold), score(outcome.record)
        rates.setdefault(trial.recipe.training.learning_rate, []).append(pair)
    found = {}
    for arm, rates in scores.items():
        ends = {rate: float(np.mean([end for _, end in values])) for rate, values in rates.items()}
        if not (usable := [rate for rate in sorted(rates) if ends[rate] > WORST / len(trials)]):
            raise HeadwaterError(
                f"The arm {arm!r} diverged at every learning rate tried; add smaller ones to compare.learning_rates."
            )
        found[arm] = max(usable, key=lambda rate: (float(np.mean([steps for steps, _ in rates[rate]])), ends[rate]))
    return found


def _steps_needed(record: RunRecord, threshold: float | str | None) -> int:
    """Steps to the threshold, at most those of the run; 0 if the threshold is no number."""
    if not isinstance(threshold, int | float):
        return 0
    steps = steps_to(record, threshold)
    return record.held_out[-1].step if steps is None and record.held_out else steps or 0


def score(record: RunRecord, step: int | None = None) -> float:
    """The deciding measure with its sign so that more is better, at a step or at the end; `WORST` if diverged.

    Raises `HeadwaterError` if the run was not evaluated at that step.
    """
    points = [point for point in record.held_out if step is None or point.step == step]
    if not points and record.status != "diverged":
        raise HeadwaterError(
            f"The run {record.name!r} already exists and was not evaluated at step {step}, where compare.halving "
            f"needs it; choose another --out, or remove it."
        )
    if record.status == "diverged":
        return WORST
    value = points[-1].measures[record.measure]
    return (-value if record.lower_is_better else value) if math.isfinite(value) else WORST


def run_halving(
    trials: list[Trial], halving: Halving, baseline: str, workers: int | None, on_change: OnChange | None
) -> list[Outcome]:
    """Train the trials as far as successive halving lets them go; the baseline's to the end.

    All arms are trained to the first rung, and the best of them, by their mean over the seeds, to the next; those that
    reach the last rung are trained to the end. On a tie the later arm continues. Raises `HeadwaterError` if trials
    have stages or different steps, if there is no room for a rung before the end, or if a trial failed.
    """
    by_arm: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        by_arm.setdefault(trial.experiment.arm, {})[trial.recipe.seed] = trial
    seeds = sorted({trial.recipe.seed for trial in trials})
    steps = halving_steps(trials, halving, baseline)
    left = [arm for arm in by_arm if arm != baseline]
    outcomes: dict[tuple[str, int], Outcome] = {}
    # The baseline is not a candidate; it runs alongside the first rung, so that no worker waits for it.
    whole = [(baseline, seed) for seed in seeds]
    scores: dict[str, float] = {}
    for rung, count in rungs(len(left), halving.factor, halving.steps, steps):
        left = sorted(left, key=lambda arm: scores.get(arm, 0.0))[-count:]
        now = [(arm, seed) for arm in sorted(left) for seed in seeds]
        todo = [
            *(by_arm[arm][seed] for arm, seed in whole),
            *(replace(by_arm[arm][seed], until=rung) for arm, seed in now),
        ]
        outcomes |= dict(zip([*whole, *now], run_trials(todo, workers, on_change), strict=True))
        whole = []
        scores = {arm: float(np.mean([_score_at(outcomes[arm, seed], rung) for seed in seeds])) for arm in left}
    # The last rung may end before the run.
    last = [(arm, seed) for arm in sorted(left) for seed in seeds]
    outcomes |= dict(zip(last, run_trials([by_arm[arm][seed] for arm, seed in last], workers, on_change), strict=True))
    return [outcomes[trial.experiment.arm, trial.recipe.seed] for trial in trials]


def _score_at(outcome: Outcome, rung: int) -> float:
    if outcome.record is None:
        raise HeadwaterError(f"Successive halving needs every trial, but {outcome.label} failed: {outcome.error}")
    return score(outcome.record, rung)


def rungs(arms: int, factor: int, first: int | None, steps: int) -> list[tuple[int, int]]:
    """Steps of each rung of successive halving (arXiv 1502.07943), and how many of the arms get there.

    One arm in `factor` passes each rung, with `factor` times the steps, until fewer than `factor` are left or the
    steps are used up. first: steps of the first rung; None makes the last rung the whole run.
    """
    count = 1
    while factor**count <= arms and (first or 1) * factor**count <= steps:
        count += 1
    first = first or steps // factor ** (count - 1)
    return [(first * factor**rung, -(-arms // factor**rung)) for rung in range(count)]


def halving_steps(trials: list[Trial], halving: Halving, baseline: str) -> int:
    """The steps of trials that `run_halving` can run. Raises `HeadwaterError` for others."""
    candidates = {trial.experiment.arm for trial in trials} - {baseline}
    if len(candidates) < halving.factor:
        raise HeadwaterError(
            f"compare.halving.factor={halving.factor} gives up none of {len(candidates)} arms; lower it, or add arms."
        )
    if any(trial.recipe.stages for trial in trials):
        raise HeadwaterError("compare.halving cannot stop runs with stages halfway; leave out one of the two.")
    steps = {trial.recipe.training.steps for trial in trials}
    if len(steps) > 1:
        raise HeadwaterError(
            f"compare.halving compares arms at equal steps, but these have {sorted(steps)}; give them the same steps."
        )
    if (first := halving.steps) is not None and first * halving.factor > max(steps):
        raise HeadwaterError(
            f"compare.halving.steps={first} leaves no second rung in {max(steps)} steps; give "
            f"{max(steps) // halving.factor} or fewer."
        )
    return max(steps)
