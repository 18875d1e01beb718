"""Pictures of inspections: models side by side, with shared axes and color scales."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from headwater_lab.inspection.inspection import Inspection
from headwater_lab.inspection.tables import read_measure
from headwater_lab.util.figures import ShownFigure
from headwater_lab.util.outputs import default_style, save_figure

# Cell size of a heatmap in inches, and the longest side for which numbers are written into the cells.
CELL_WIDTH, CELL_HEIGHT, NUMBERED = 0.42, 0.26, 24
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
    start: int = 0  # number of the first column

    @property
    def columns(self) -> int:
        return max(value.shape[1] for value in self.values if value is not None)


@default_style()
def draw_pictures(inspections: Sequence[Inspection], folder: Path) -> list[Path]:
    """Write inspect-*.png into a folder, for the pictures with data."""
    figures = {"scalars": scalars_picture(inspections), "heads": heads_picture(inspections)}
    return [save_figure(figure, folder / f"inspect-{name}.png", 130) for name, figure in figures.items() if figure]


def scalars_picture(inspections: Sequence[Inspection]) -> Figure | None:
    """Heatmaps of scalars by head or by source layer, with layers downwards."""
    axes = {scalars.key: scalars.by for inspection in inspections for scalars in inspection.scalars if scalars.by}
    order = list(dict.fromkeys(mechanism for mechanism, *_ in axes))
    keys = sorted(axes, key=lambda key: (order.index(key[0]), key[1:]))
    return draw_heatmaps(inspections, [_scalars_grid(inspections, key, axes[key]) for key in keys])


def _scalars_grid(inspections: Sequence[Inspection], key: tuple[str, str, str], axis: str) -> Grid:
    by_model = [[scalars for scalars in inspection.scalars if scalars.key == key] for inspection in inspections]
    columns = [column for layers in by_model for scalars in layers for column in scalars.at]
    start, end = min(columns), max(columns) + 1
    values = []
    for inspection, layers in zip(inspections, by_model, strict=True):
        table = np.full((inspection.layers, end - start), nan)
        for scalars in layers:
            table[scalars.layer, np.array(scalars.at) - start] = scalars.values
        values.append(table if layers else None)
    names = {"kv head": "key/value head", "layer": "of layer (-1: embedding)" if start < 0 else "of layer"}
    return Grid(key[1], values, names.get(axis, axis), start)


def heads_picture(inspections: Sequence[Inspection]) -> Figure | None:
    """Heatmaps by layer and query head: entropy, sinks, previous token, induction, share of the output."""
    grids = []
    for measure, title in DRAWN.items():
        values = [read_measure(inspection, measure) for inspection in inspections]
        if any(value is not None for value in values):
            # Fill with NaN where a layer has fewer heads than another.
            arrays = [None if rows is None else np.array([*zip_longest(*rows, fillvalue=nan)]).T for rows in values]
            grids.append(Grid(title, arrays, "query head"))
    return draw_heatmaps(inspections, grids)


def draw_heatmaps(inspections: Sequence[Inspection], grids: Sequence[Grid]) -> Figure | None:
    """Draw one column per model. All heatmaps share one color scale and the axes of the largest model."""
    models = [m for m in range(len(inspections)) if any(grid.values[m] is not None for grid in grids)]
    if not models:
        return None
    depth = max(inspections[m].layers for m in models)
    numbered = depth <= NUMBERED and max(grid.columns for grid in grids) <= NUMBERED
    cell_width, cell_height = (CELL_WIDTH, CELL_HEIGHT) if numbered else (0.14, 0.14)
    width = max(1.3, cell_width * max(grid.columns for grid in grids)) + 0.35
    height = max(0.9, cell_height * depth) + 0.75
    size = len(models) * width + 0.3 + 0.6 * (not numbered), height * len(grids) + 0.15
    figure = ShownFigure(figsize=(max(3.0, size[0]), size[1]), layout="constrained")
    panels = figure.subplots(len(grids), len(models), squeeze=False)
    scale, image = _find_scale(grids), ScalarMappable()
    for row, grid in zip(panels, grids, strict=True):
        for axes, m in zip(row, models, strict=True):
            above = f"{inspections[m].name}\n" if len(inspections) > 1 else ""
            axes.set_title(above + grid.title, fontsize=9, loc="left")
            image = _draw_heatmap(axes, grid, grid.values[m], depth, scale, numbered) or image
    if not numbered:
        figure.colorbar(image, ax=panels, shrink=min(1.0, 2.5 / size[1]), pad=0.02).ax.tick_params(labelsize=7)
    return figure


def _draw_heatmap(
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
    axes.set_xlabel(grid.across, fontsize=8, loc="left")
    axes.set_ylabel("layer", fontsize=8)
    axes.tick_params(length=0, labelsize=7)
    if numbered:
        _write_numbers(axes, values, scale)
    step = 1 if numbered else 8
    columns = range(0, 1 + int(np.flatnonzero(~np.isnan(values).all(0)).max(initial=0)), step)
    axes.set_xticks(columns, [str(grid.start + column) for column in columns])
    axes.set_yticks(range(0, len(values), step))
    return image


def _find_scale(grids: Sequence[Grid]) -> tuple[float, float]:
    """Find the color scale: from zero (symmetric if any value is negative) to the largest value, at least one."""
    values = np.concatenate([value.ravel() for grid in grids for value in grid.values if value is not None])
    high = max(1.0, float(np.nanmax(np.abs(values))))
    return (-high if np.nanmin(values) < 0 else 0.0), high


def _write_numbers(axes: Axes, values: np.ndarray, scale: tuple[float, float]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            text = f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
            color = "white" if abs(value) > 0.6 * scale[1] else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
