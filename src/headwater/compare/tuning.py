"""What a comparison decides before its trials, each arm's learning rate, and while they run, which arms continue."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  (it makes HalvingGridSearchCV importable)
from sklearn.model_selection import HalvingGridSearchCV

from headwater.compare.pool import OnChange, Outcome, run_trials
from headwater.compare.trials import Trial, tuning_trial
from headwater.errors import HeadwaterError
from headwater.recipe import Halving, Recipe
from headwater.records import RunRecord

# The score of what diverged, and of what is not known yet.
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


def best_rates(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The learning rate of each arm: the best mean of the deciding measure over the tuning seeds.

    A rate at which a run diverged is the worst there is; of equal ones the smaller is taken. Raises `HeadwaterError`
    where an arm diverged at all of them, or a trial failed.
    """
    scores: dict[str, dict[float, list[float]]] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome.record is None:
            raise HeadwaterError(
                f"Tuning the learning rates needs every trial, and {outcome.label} failed: {outcome.error}"
            )
        rates = scores.setdefault(trial.experiment.arm, {})
        rates.setdefault(trial.recipe.training.learning_rate, []).append(score(outcome.record))
    found = {}
    for arm, rates in scores.items():
        means = {rate: float(np.mean(values)) for rate, values in sorted(rates.items())}
        found[arm] = max(means, key=lambda rate: means[rate])
        if means[found[arm]] <= WORST / len(trials):
            raise HeadwaterError(
                f"The arm {arm!r} diverged at every learning rate tried; add smaller ones to compare.learning_rates."
            )
    return found


def score(record: RunRecord, step: int | None = None) -> float:
    """The deciding measure with its sign so that more is better, at a step or at the end; `WORST` if diverged.

    Raises `HeadwaterError` where the run was not measured at that step.
    """
    points = [point for point in record.held_out if step is None or point.step == step]
    if not points and record.status != "diverged":
        raise HeadwaterError(
            f"The run {record.name!r} is there already and was not measured at step {step}, where compare.halving "
            "wants to know; choose another --out, or remove it."
        )
    if record.status == "diverged":
        return WORST
    value = points[-1].measures[record.measure]
    return (-value if record.lower_is_better else value) if math.isfinite(value) else WORST


def run_halving(
    trials: list[Trial], halving: Halving, baseline: str, workers: int | None, on_change: OnChange | None
) -> list[Outcome]:
    """Train the trials as far as successive halving lets them go; the baseline's to the end.

    scikit-learn decides which arms continue (`HalvingGridSearchCV`: a candidate is an arm, a fold a seed, the resource
    steps). It is asked with what is known so far, and what it would like to know of the lowest open rung is trained
    next, side by side. An arm's score is its mean over the seeds. Raises `HeadwaterError` where trials have stages or
    different steps, where there is no room for a rung before the end, and where a trial failed.
    """
    by_arm: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        by_arm.setdefault(trial.experiment.arm, {})[trial.recipe.seed] = trial
    seeds = sorted({trial.recipe.seed for trial in trials})
    steps = halving_steps(trials, halving, baseline)
    candidates = [arm for arm in by_arm if arm != baseline]
    outcomes: dict[tuple[str, int], Outcome] = {}
    known: dict[tuple[str, int, int], float] = {}
    while missing := _ask(candidates, seeds, steps, halving, known):
        rung = min(step for *_, step in missing)
        now = sorted((arm, seed) for arm, seed, step in missing if step == rung)
        # The baseline is no candidate; beside the first rung, so that no worker waits for it.
        whole = [] if known else [(baseline, seed) for seed in seeds]
        todo = [
            *(by_arm[arm][seed] for arm, seed in whole),
            *(replace(by_arm[arm][seed], until=rung) for arm, seed in now),
        ]
        outcomes |= dict(zip([*whole, *now], run_trials(todo, workers, on_change), strict=True))
        for arm, seed in now:
            outcome = outcomes[arm, seed]
            if outcome.record is None:
                raise HeadwaterError(
                    f"Successive halving needs every trial, and {outcome.label} failed: {outcome.error}"
                )
            known[arm, seed, rung] = score(outcome.record, rung)
    # The last rung may end before the run: rungs are the first one times powers of the factor.
    highest = max(rung for *_, rung in known)
    last = [(arm, seed) for arm, seed, rung in known if rung == highest]
    left = [by_arm[arm][seed] for arm, seed in last]
    outcomes |= dict(zip(last, run_trials(left, workers, on_change), strict=True))
    return [outcomes[trial.experiment.arm, trial.recipe.seed] for trial in trials]


def halving_steps(trials: list[Trial], halving: Halving, baseline: str) -> int:
    """The steps of trials that `run_halving` can run. Raises `HeadwaterError` for others."""
    candidates = {trial.experiment.arm for trial in trials} - {baseline}
    if len(candidates) < halving.factor:
        raise HeadwaterError(
            f"compare.halving.factor={halving.factor} gives up none of {len(candidates)} arms; lower it, or add arms."
        )
    if any(trial.recipe.stages for trial in trials):
        raise HeadwaterError("compare.halving stops runs half-way, and these have stages; leave out one of the two.")
    steps = {trial.recipe.training.steps for trial in trials}
    if len(steps) > 1:
        raise HeadwaterError(
            f"compare.halving compares arms at equal steps, and these have {sorted(steps)}; give them the same steps."
        )
    if (first := halving.steps) is not None and first * halving.factor > max(steps):
        raise HeadwaterError(
            f"compare.halving.steps={first} leaves no second rung in {max(steps)} steps; give "
            f"{max(steps) // halving.factor} or fewer."
        )
    return max(steps)


def _ask(
    arms: list[str], seeds: list[int], steps: int, halving: Halving, known: dict[tuple[str, int, int], float]
) -> set[tuple[str, int, int]]:
    """What successive halving wants to know and does not: (arm, seed, steps)."""
    missing: set[tuple[str, int, int]] = set()

    def look_up(arm: str, seed: int, rung: int) -> float:
        if (arm, seed, rung) not in known:
            missing.add((arm, seed, rung))
        return known.get((arm, seed, rung), WORST)

    search = HalvingGridSearchCV(
        _Known(look_up),
        {"arm": arms},
        resource="steps",
        factor=halving.factor,
        min_resources="exhaust" if halving.steps is None else halving.steps,
        max_resources=steps,
        cv=[([place], [place]) for place in range(len(seeds))],
        refit=False,
        error_score="raise",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        try:
            search.fit(np.array(seeds)[:, None], np.zeros(len(seeds)))
        except ValueError as error:
            raise HeadwaterError(f"compare.halving does not fit {steps} steps and {len(arms)} arms: {error}") from error
    return missing


class _Known(BaseEstimator):
    """An "estimator" that knows what has been trained: fit on the row of a seed, its score is the arm's."""

    def __init__(self, look_up: Callable[[str, int, int], float] | None = None, arm: str = "", steps: int = 0) -> None:
        self.look_up, self.arm, self.steps = look_up, arm, steps

    def fit(self, X: np.ndarray, y: np.ndarray | None = None) -> _Known:
        assert self.look_up is not None
        self.score_ = self.look_up(self.arm, int(X[0, 0]), int(self.steps))
        return self

    def score(self, X: np.ndarray, y: np.ndarray | None = None) -> float:
        return self.score_
