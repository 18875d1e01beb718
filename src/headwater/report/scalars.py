"""The scalars that finished runs have learned, from their checkpoints, as means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers.utils import logging

from headwater.errors import HeadwaterError
from headwater.inspect.scalars import Scalars, scalars
from headwater.records import RunRecord
from headwater.report.comparison import Comparison
from headwater.training.checkpoint import load_model
from headwater.training.places import checkpoints

# Maximum total parameters of an arm's models to load; use `headwater inspect` for larger ones.
MOST = 300_000_000
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
        folders = [_folder(comparison.folders[arm, run.seed], run) for run in runs]
        if sum(run.parameters for run in runs) <= MOST:
            models = _models(folders)
            if models:
                found.append(tabled(arm, models))
    return found


def _models(folders: Sequence[Path]) -> list[list[Scalars]]:
    """The scalars of each readable model; none if the first has none."""
    found = []
    for folder in folders:
        one = _scalars(folder)
        if one is not None and not one:
            return []
        found += [one] if one else []
    return found


def _folder(folder: Path, run: RunRecord) -> Path:
    """The run's checkpoints: those of its last stage, if it has several."""
    return folder / run.stages[-1].folder if run.stages else folder


def _scalars(folder: Path) -> list[Scalars] | None:
    """None without a checkpoint that can be read."""
    saved = checkpoints(folder)
    if not saved:
        return None
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return scalars(load_model(saved[-1]))
    except HeadwaterError:
        return None
    finally:
        if bars:
            logging.enable_progress_bar()


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
