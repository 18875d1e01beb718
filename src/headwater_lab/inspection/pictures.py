"""Inspections as pictures: models side by side, with the same axes and the same colors for the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from headwater_lab.inspection.inspection import Inspection
from headwater_lab.inspection.tables import measured, named
from headwater_lab.inspection.watch import SHOWN
from headwater_lab.util.outputs import default_style, save_figure

# Cell size of a heatmap in inches, and the largest side with a number in each cell.
CELL_WIDTH, CELL_HEIGHT, NUMBERED = 0.42, 0.26, 24
WIDEST = 15.0  # inches of a picture
BRIGHTEST = 99.5  # percentile of attention at the end of the color scale
DRAWN = {
    "entropy, share of maximum": "entropy / maximum",
    "attention to the first token": "first token",
    "previous token's value": "previous token",
    "induction: value": "induction",
    "share of heads' output": "share of output",
}


@dataclass(frozen=True)
class Grid:
    """A heatmap for each model: values[model] [rows, columns], or None."""

    title: str
    values: list[np.ndarray | None]
    across: str
    first: int = 0  # what the first column is called

    @property
    def columns(self) -> int:
        return max(value.shape[1] for value in self.values if value is not None)


@default_style()
def draw(found: Sequence[Inspection], folder: Path) -> list[Path]:
    """Write inspect-*.png into a folder, for those with data."""
    draw = {"scalars": scalars_picture, "heads": heads_picture, "attention": attention_picture}
    figures = {name: picture(found) for name, picture in draw.items()}
    return [save_figure(figure, folder / f"inspect-{name}.png", 130) for name, figure in figures.items() if figure]


def scalars_picture(found: Sequence[Inspection]) -> Figure | None:
    """Heatmaps of scalars by head or by source layer, with layers downwards."""
    known = [{(s.mechanism, s.symbol, s.place): s.by for s in one.scalars if s.by} for one in found]
    grids = []
    every = {key: by for one in known for key, by in one.items()}
    order = list(dict.fromkeys(mechanism for mechanism, *_ in every))
    for key, by in sorted(every.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])):
        chosen = [[s for s in one.scalars if (s.mechanism, s.symbol, s.place) == key] for one in found]
        first = min(at for several in chosen for s in several for at in s.at)
        width = max(at for several in chosen for s in several for at in s.at) - first + 1
        values = []
        for one, several in zip(found, chosen, strict=True):
            table = np.full((one.layers, width), nan)
            for s in several:
                table[s.layer, [at - first for at in s.at]] = s.values
            values.append(table if several else None)
        across = {"kv head": "key/value head", "layer": "of layer (-1: embedding)" if first < 0 else "of layer"}
        grids.append(Grid(key[1], values, across.get(by, by), first))
    return heatmaps(found, grids)


def heads_picture(found: Sequence[Inspection]) -> Figure | None:
    """Heatmaps by layer and query head: entropy, sinks, previous token, induction, share of the output."""
    grids = []
    for measure, title in DRAWN.items():
        values = [measured(one, measure) for one in found]
        if any(value is not None for value in values):
            # NaN where a layer has fewer heads than another
            arrays = [None if rows is None else np.array([*zip_longest(*rows, fillvalue=nan)]).T for rows in values]
            grids.append(Grid(named(title, found), arrays, "query head"))
    return heatmaps(found, grids)


def heatmaps(found: Sequence[Inspection], grids: Sequence[Grid]) -> Figure | None:
    """One column per model. All heatmaps share one color scale and the axes of the largest model."""
    shown = [m for m in range(len(found)) if any(grid.values[m] is not None for grid in grids)]
    if not shown:
        return None
    depth = max(found[m].layers for m in shown)
    numbered = depth <= NUMBERED and max(grid.columns for grid in grids) <= NUMBERED
    cell_width, cell_height = (CELL_WIDTH, CELL_HEIGHT) if numbered else (0.14, 0.14)
    width = max(1.3, cell_width * max(grid.columns for grid in grids)) + 0.35
    height = max(0.9, cell_height * depth) + 0.75
    size = len(shown) * width + 0.3 + 0.6 * (not numbered), height * len(grids) + 0.15
    figure = Figure(figsize=(max(3.0, size[0]), size[1]), layout="constrained")
    panels = figure.subplots(len(grids), len(shown), squeeze=False)
    scale, image = _scale(grids), ScalarMappable()
    for row, grid in zip(panels, grids, strict=True):
        for axes, m in zip(row, shown, strict=True):
            above = f"{found[m].name}\n" if len(found) > 1 else ""
            axes.set_title(above + grid.title, fontsize=9, loc="left")
            image = _heatmap(axes, grid, grid.values[m], depth, scale, numbered) or image
    if not numbered:
        figure.colorbar(image, ax=panels, shrink=min(1.0, 2.5 / size[1]), pad=0.02).ax.tick_params(labelsize=7)
    return figure


def _heatmap(
    axes: Axes, grid: Grid, values: np.ndarray | None, depth: int, scale: tuple[float, float], numbered: bool
) -> Any:
    axes.spines[:].set_visible(False)
    axes.set(xlim=(-0.5, grid.columns - 0.5), ylim=(depth - 0.5, -0.5), xticks=[], yticks=[])
    if values is None:
        axes.text(0, 0, "none", fontsize=8, ha="center", va="center")
        return None
    low, high = scale
    colors = "RdBu_r" if low < 0 else "Blues"
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colors, aspect="auto", interpolation="nearest")
    axes.set(xlim=(-0.5, grid.columns - 0.5), ylim=(depth - 0.5, -0.5))
    axes.set_xlabel(grid.across, fontsize=8, loc="left")
    axes.set_ylabel("layer", fontsize=8)
    axes.tick_params(length=0, labelsize=7)
    if numbered:
        _write_numbers(axes, values, scale)
    step = 1 if numbered else 8
    columns = range(0, 1 + int(np.flatnonzero(~np.isnan(values).all(0)).max(initial=0)), step)
    axes.set_xticks(columns, [str(grid.first + column) for column in columns])
    axes.set_yticks(range(0, len(values), step))
    return image


def _scale(grids: Sequence[Grid]) -> tuple[float, float]:
    """From zero (symmetric if any value is negative) to the largest value, at least one."""
    values = np.concatenate([value.ravel() for grid in grids for value in grid.values if value is not None])
    high = max(1.0, float(np.nanmax(np.abs(values))))
    return (-high if np.nanmin(values) < 0 else 0.0), high


def _write_numbers(axes: Axes, values: np.ndarray, scale: tuple[float, float]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            text = f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
            color = "white" if abs(value) > 0.6 * scale[1] else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)


def attention_picture(found: Sequence[Inspection]) -> Figure | None:
    """A row for each image and model: the image, and the mean attention of each layer's heads to its patches.

    All have one color scale. 1 is an equal share.
    """
    rows = [
        (one, number, np.array(one.read.looks[number]) * one.images.tokens)
        for number in range(SHOWN)
        for one in found
        if one.read and one.images and number < len(one.read.looks)
    ][: max(SHOWN, 2 * len(found))]
    if not rows:
        return None
    widest = max(len(values) for *_, values in rows)
    cell = min(1.0, WIDEST / (widest + 1))
    several = len(found) > 1
    size = (widest + 1) * cell + 1.0 + 1.2 * several, len(rows) * cell * 1.16 + 0.5
    figure = Figure(figsize=(max(3.0, size[0]), size[1]), layout="constrained")
    panels = figure.subplots(len(rows), widest + 1, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    highest = float(np.percentile(np.concatenate([values.ravel() for *_, values in rows]), BRIGHTEST))
    for place, (one, number, values) in enumerate(rows):
        assert one.images is not None
        first = panels[place, 0]
        first.imshow(one.images.pictures[number], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        if several:
            first.set_ylabel(one.name, fontsize=7, rotation=0, ha="right", va="center")
        first.set_title(one.images.names[number], fontsize=7, pad=2)
        for column, map in enumerate(values):
            axes = panels[place, column + 1]
            axes.imshow(map, vmin=0, vmax=highest, cmap="magma", interpolation="nearest", aspect=_aspect(one, map))
            if place == 0 or several:
                axes.set_title(f"layer {column}", fontsize=7, pad=2)
    scale = ScalarMappable(Normalize(0, highest), "magma")
    bar = figure.colorbar(scale, ax=panels, shrink=min(1.0, 2.5 / size[1]), pad=0.02)
    bar.set_label("attention, 1: equal share", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return figure


def _aspect(one: Inspection, map: np.ndarray) -> float:
    """Height over width of a patch, so that the map has its image's shape."""
    assert one.images is not None
    high, wide = one.images.pictures[0].shape[:2]
    return (high / map.shape[0]) / (wide / map.shape[1])
