"""FLOPs of the baseline for an arm's result, interpolated between runs of the baseline with other budgets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater_lab.comparison.statistics import (
    PairedTest,
    choose_decisive,
    finished_runs,
    judge_other_quantity,
    plan_of,
)
from headwater_lab.comparison.tuning import find_score
from headwater_lab.training.records import RunRecord


@dataclass(frozen=True)
class EquivalentFlops:
    """The baseline's FLOPs for an arm's results, over the arm's.

    flops: the arm's own, including all stages and the checkpoint that it began with; the mean over
    seeds. factor: the logarithms of the baseline's over these, seed by seed; None where no seed has a curve of the
    baseline. below, above: how many seeds end worse than the baseline's smallest budget, or better than its largest.
        They count as if at that budget, so the factor is then only a bound.
    """

    arm: str
    flops: float
    factor: PairedTest | None
    below: int
    above: int


def measure_equivalent_flops(
    records: Sequence[RunRecord], baseline: str, budgets: Sequence[str]
) -> list[EquivalentFlops]:
    """Measure the equivalent FLOPs of every other arm, all tested together.

    budgets: arms that are the baseline with other budgets. Between their points, and the baseline's own, the result is
    taken as linear in the logarithm of FLOPs, seed by seed; a larger budget that is no better is left out.
    """
    finished = finished_runs(choose_decisive(records, baseline))
    curves = _make_curves([finished.get(arm, {}) for arm in (baseline, *budgets)])
    rows, samples = [], {}
    for arm, runs in finished.items():
        if arm in (baseline, *budgets):
            continue
        scored = [(run, curves[seed]) for seed, run in sorted(runs.items()) if seed in curves]
        scores = [(find_score(run), curve[0]) for run, curve in scored]
        samples[arm] = [float(np.interp(find_score(run), *curve)) - math.log(run.total_flops) for run, curve in scored]
        flops = float(np.mean([run.total_flops for run in runs.values()])) if runs else math.nan
        below = sum(value < budget_scores[0] for value, budget_scores in scores)
        above = sum(value > budget_scores[-1] for value, budget_scores in scores)
        rows.append((arm, flops, below, above))
    tests = judge_other_quantity(samples, plan_of(records))
    return [EquivalentFlops(arm, flops, tests[arm], *ends) for arm, flops, *ends in rows]


def _make_curves(arms: Sequence[dict[int, RunRecord]]) -> dict[int, tuple[list[float], list[float]]]:
    """List by seed scores that rise and the logarithms of the FLOPs that they took, at two budgets or more."""
    curves = {}
    for seed in arms[0]:
        runs = [by_seed[seed] for by_seed in arms if seed in by_seed]
        points = sorted((math.log(run.total_flops), find_score(run)) for run in runs)
        rising = points[:1]
        for point in points[1:]:
            if point[1] > rising[-1][1]:
                rising.append(point)
        if len(rising) > 1:
            curves[seed] = [score for _, score in rising], [flops for flops, _ in rising]
    return curves
