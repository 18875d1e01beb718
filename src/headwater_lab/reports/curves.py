"""Curves of runs and their means: held-out metric and training loss, by steps, tokens and FLOPs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headwater_lab.reports.comparison import Comparison
from headwater_lab.training.records import RunRecord, same_tokens

What = Literal["held_out", "training"]


@dataclass(frozen=True)
class Curve:
    """One run, or the mean of several. NaN where a loss was not finite.

    tokens, flops: including the starting model's.
    """

    steps: list[int]
    tokens: list[float]
    flops: list[float]
    values: list[float]


ArmCurves = tuple[list[Curve], Curve]
"""The runs of an arm, and their mean."""


@dataclass(frozen=True)
class Curves:
    """The curves of one kind, by arm. label: the label of their axis."""

    kind: What
    label: str
    by_arm: dict[str, ArmCurves]


def make_arm_curves(comparison: Comparison) -> Curves:
    """Make the held-out curves, or if only the end was evaluated, those of training losses if comparable."""
    finished = [record for arm in comparison.arms for record in comparison.finished(arm)]
    # Losses per token are only comparable for the same tokens.
    trained = same_tokens(comparison.records) and all(record.curve for record in finished)
    kind: What = "training" if trained and min(len(record.held_out) for record in finished) < 2 else "held_out"
    runs = {arm: [make_run_curve(run, kind) for run in comparison.runs(arm)] for arm in comparison.arms}
    sample = comparison.trained_on.removesuffix("s")
    label = f"held-out {comparison.unit}" if kind == "held_out" else f"training loss (nats per {sample})"
    return Curves(kind, label, {arm: (curves, average_curves(curves)) for arm, curves in runs.items()})


def make_run_curve(record: RunRecord, kind: What) -> Curve:
    points: Sequence[Any] = record.held_out if kind == "held_out" else record.curve
    origin = record.origin
    values = [float(p.metrics[record.metric] if kind == "held_out" else p.loss) for p in points]
    values = [value if math.isfinite(value) else math.nan for value in values]
    return Curve(
        [p.step for p in points],
        [p.tokens + (origin.tokens if origin else 0) for p in points],
        [p.flops + (origin.flops if origin else 0) for p in points],
        values,
    )


def average_curves(runs: Sequence[Curve]) -> Curve:
    """Average over the steps at which every run has a number."""
    indices = [{step: i for i, step in enumerate(run.steps) if not math.isnan(run.values[i])} for run in runs]
    steps = sorted(set.intersection(*map(set, indices))) if indices else []

    def rows(name: str) -> np.ndarray:
        values = [[getattr(run, name)[index[step]] for step in steps] for run, index in zip(runs, indices, strict=True)]
        return np.array(values, dtype=float).reshape(len(runs), len(steps))

    tokens, flops, values = (rows(name).mean(0).tolist() for name in ("tokens", "flops", "values"))
    return Curve(steps, tokens, flops, values)


def choose_y_limits(curves: Curves, lower_is_better: bool) -> tuple[float, float] | None:
    """Choose limits without what would flatten the rest; None: all points.

    These are the first points of training losses, and rises above a curve's beginning, as before a run diverges.
    """
    curves_of_runs = [run.values for runs, _ in curves.by_arm.values() for run in runs]
    numbers = [[value for value in values if not math.isnan(value)] for values in curves_of_runs]
    numbers = [values for values in numbers if values]
    if not numbers or (curves.kind == "held_out" and not lower_is_better):
        return None
    low = min(map(min, numbers))
    is_training = curves.kind == "training"
    high = max(values[max(1, len(values) // 8) if is_training and len(values) > 1 else 0] for values in numbers)
    return low - 0.03 * abs(low), max(high * 1.05, low + 1e-6)
