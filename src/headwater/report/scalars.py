"""The scalars that finished runs have learned, from their checkpoints, as means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.inspect.scalars import Scalars, scalars
from headwater.records import RunRecord
from headwater.report.comparison import Comparison
from headwater.report.newest import MOST, model_of

# Show up to this many one by one, otherwise mean and range.
FEW = 4


@dataclass(frozen=True)
class Shade:
    """A cell: its text, and where it is between the lowest (0) and the highest (1) of its symbol; None if empty."""

    text: str
    heat: float | None


@dataclass(frozen=True)
class Learned:
    """One arm: a row for each layer, a column for each symbol. seeds: models that were read."""

    arm: str
    seeds: int
    columns: list[str]
    rows: list[tuple[int, list[Shade]]]


def learned(comparison: Comparison) -> list[Learned]:
    """The arms that have scalars and still have checkpoints."""
    found = []
    for arm in comparison.arms:
        runs = comparison.finished(arm)
        if sum(run.parameters for run in runs) <= MOST:
            models = _models(comparison, runs)
            if models:
                found.append(tabled(arm, models))
    return found


def _models(comparison: Comparison, runs: Sequence[RunRecord]) -> list[list[Scalars]]:
    """The scalars of each readable model; none if the first has none."""
    found = []
    for run in runs:
        model = model_of(comparison, run)
        if model is not None:
            found.append(scalars(model))
            if not found[-1]:
                return []
    return found


def tabled(arm: str, models: list[list[Scalars]]) -> Learned:
    """The mean over models, number by number."""
    means: dict[tuple[int, str], np.ndarray] = {}
    for one in models[0]:
        column = _column(one)
        values = [
            other.values for model in models for other in model if (other.layer, _column(other)) == (one.layer, column)
        ]
        means[one.layer, column] = np.mean([v for v in values if len(v) == len(one.values)], axis=0)
    columns = list(dict.fromkeys(column for _, column in means))
    layers = sorted({layer for layer, _ in means})
    rows = [(layer, [_shade(means, layer, column) for column in columns]) for layer in layers]
    return Learned(arm, len(models), columns, rows)


def _column(one: Scalars) -> str:
    """The symbol with its place and the unit it is counted by."""
    place = f" {one.place}" if one.place else ""
    by = f", by {one.by}" if one.by else ""
    return f"{one.symbol}{place} ({one.mechanism}{by})"


def _shade(means: dict[tuple[int, str], np.ndarray], layer: int, column: str) -> Shade:
    values = means.get((layer, column))
    if values is None or not len(values):
        return Shade("", None)
    averages = [float(v.mean()) for (_, name), v in means.items() if name == column and len(v)]
    low, high = min(averages), max(averages)
    heat = (float(values.mean()) - low) / (high - low) if high > low else 0.0
    if len(values) > FEW:
        return Shade(f"{values.mean():.3f} ({values.min():.3f} … {values.max():.3f})", heat)
    return Shade(" · ".join(f"{value:.3f}" for value in values), heat)
