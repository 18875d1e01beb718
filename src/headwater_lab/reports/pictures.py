"""Pictures for the page, papers and READMEs: the same records always give the same picture."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from headwater_lab.comparison.scaling import Estimate, Scaling, evaluate_law
from headwater_lab.comparison.speedup import MEASURES, Speedup
from headwater_lab.reports.comparison import Comparison, differ_in_cost, name_unit
from headwater_lab.reports.curves import Curve, Curves, choose_y_limits, make_arm_curves, make_run_curve
from headwater_lab.reports.words import split_difference, write_verdict
from headwater_lab.training.records import RunRecord
from headwater_lab.util.figures import Figure, ShownFigure, draw_png
from headwater_lab.util.outputs import COLORS, default_style
from headwater_lab.util.terminal import literal

WIDTH = 8.2  # inches
GREY = "#6b7683"  # the baseline's color
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES = ("-", "--", ":", "-.", (0, (10, 3)))


@dataclass(frozen=True)
class Style:
    """The style of one arm, in matplotlib's terms."""

    color: str
    marker: str = "o"
    line: str | tuple[int, tuple[int, ...]] = "-"


def choose_styles(arms: Sequence[str], baseline: str) -> dict[str, Style]:
    """Choose a style for each arm, no two alike among 210."""
    compared = [arm for arm in arms if arm != baseline]
    # 6 colors and 7 markers have no common divisor, so each of the first 42 arms gets a pair of its own.
    by_arm = {
        arm: Style(
            COLORS[index % len(COLORS)],
            MARKERS[(index + 1) % len(MARKERS)],
            LINES[index // len(COLORS) % len(LINES)],
        )
        for index, arm in enumerate(compared)
    }
    return {arm: by_arm.get(arm, Style(GREY)) for arm in arms}


@dataclass(frozen=True)
class Picture:
    """A figure, with a description for readers who do not see it, and a caption."""

    figure: Figure = field(repr=False)
    description: str
    caption: str

    @property
    def png(self) -> str:
        """The figure as PNG, in base64."""
        return base64.b64encode(self._repr_png_()).decode()

    def _repr_png_(self) -> bytes:
        return draw_png(self.figure)


def _make_panels(height: float, rows: int = 1, columns: int = 1, grid: str = "both") -> tuple[ShownFigure, list[Any]]:
    """Make a figure of panels with a faint grid, without a frame above and at the right."""
    figure = ShownFigure(figsize=(WIDTH, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(axis=grid, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


@default_style()
def curves_picture(comparison: Comparison) -> Picture:
    """Draw runs as thin lines and arms' means as thick ones: against tokens, and FLOPs if their cost differs."""
    axis = ["tokens", "flops"] if differ_in_cost(comparison.records) else ["tokens"]
    figure, panels = _make_panels(3.9 * len(axis), rows=len(axis))
    curves = make_arm_curves(comparison)
    look = choose_styles(comparison.arms, comparison.baseline)
    for axes, name in zip(panels, axis, strict=True):
        lines = []
        for arm, (runs, mean) in curves.by_arm.items():
            style = look[arm]
            for run in runs:
                axes.plot(getattr(run, name), run.values, color=style.color, lw=0.7, alpha=0.35, ls=style.line)
            marker = dict(marker=style.marker, markevery=max(1, len(mean.values) // 8), ms=4.5)
            lines += axes.plot(getattr(mean, name), mean.values, color=style.color, lw=2.0, ls=style.line, **marker)
        axes.set_xlabel(f"training {comparison.trained_on}" if name == "tokens" else "training FLOPs")
        axes.set_ylabel(curves.label)
        axes.set_ylim(choose_y_limits(curves, comparison.lower_is_better) or (None, None))
        if name == "tokens":
            axes.xaxis.set_major_formatter(_write_count)
        axes.legend(lines, map(literal, curves.by_arm), frameon=False, ncols=1 + len(look) // 8)
    return Picture(
        figure,
        f"Curves of {comparison.heading}: {curves.label} over training {comparison.trained_on}, one line for "
        f"each arm: {'; '.join(_describe_course(arm, mean) for arm, (_, mean) in curves.by_arm.items())}.",
        "Thin lines: runs. Thick lines: means over the points that all seeds of an arm have. "
        f"{_describe_hidden(curves, comparison)}"
        f"{comparison.trained_on.capitalize()} and FLOPs include the training of the model that a run started from.",
    )


def _write_count(number: float, _: float = 0.0) -> str:
    """Write a number on an axis."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {letter}"
    return f"{number:g}"


def _describe_hidden(curves: Curves, comparison: Comparison) -> str:
    """Say what curves do not show: held-out values if there are none, and points outside the axis."""
    limits = choose_y_limits(curves, comparison.lower_is_better)
    values = [value for runs, _ in curves.by_arm.values() for run in runs for value in run.values]
    hidden = limits is not None and any(value > limits[1] for value in values)
    training = "Only the end was evaluated; reporting.evaluate_every in the recipe gives held-out curves. "
    outside = "Points above the axis are left out. "
    return (training if curves.kind == "training" else "") + (outside if hidden else "")


def _describe_course(arm: str, mean: Curve) -> str:
    if not mean.steps:
        return f"{arm} has no step at which all its seeds have a value"
    return (
        f"{arm} from {mean.values[0]:.3f} at {mean.tokens[0]:,.0f} to {mean.values[-1]:.3f} at {mean.tokens[-1]:,.0f}"
    )


@default_style()
def run_picture(record: RunRecord) -> Picture:
    """Draw the training loss of a run, and next to it the deciding metric, against steps."""
    curves = {f"training loss (nats per {record.unit.removesuffix('s')})": make_run_curve(record, "training")}
    curves[f"held-out {name_unit(record.metric, record.unit)}"] = make_run_curve(record, "held_out")
    figure, panels = _make_panels(3.2, columns=2)
    for axes, (label, curve) in zip(panels, curves.items(), strict=True):
        axes.plot(curve.steps, curve.values, marker="o" if len(curve.steps) < 20 else "", ms=4)
        axes.set(xlabel="step", ylabel=label)
    description = "; ".join(f"{label}: {_describe_course('', curve).strip()}" for label, curve in curves.items())
    return Picture(figure, f"Curves of {record.name}: {description}.", "")


@default_style()
def differences_picture(comparison: Comparison) -> Picture | None:
    """Draw paired differences from the baseline with their intervals; None if there are none."""
    tests = [(s.arm, s.paired, s.interval, write_verdict(s, comparison)) for s in comparison.summaries if s.paired]
    if not tests:
        return None
    look = choose_styles(comparison.arms, comparison.baseline)
    figure, (axes,) = _make_panels(0.8 + 0.55 * len(tests), grid="x")
    descriptions = []
    for row, (arm, paired, interval, verdict) in enumerate(tests):
        style, (low, high) = look[arm], interval or (paired.mean, paired.mean)
        axes.plot([low, high], [row, row], color=style.color, lw=2.5, solid_capstyle="butt")
        axes.plot([paired.mean], [row], color=style.color, marker=style.marker, ms=9)
        seeds = paired.differences
        axes.plot(seeds, [row + 0.22] * len(seeds), "o", ms=4, mfc="none", color=style.color)
        mean, written = split_difference(paired)
        text = literal(f"{arm}: {mean} {verdict}")
        axes.annotate(
            text, (0, row - 0.33), xycoords=("axes fraction", "data"), va="center", fontsize=9,
            bbox={"fc": "white", "ec": "none", "pad": 1},
        )  # fmt: skip
        descriptions.append(f"{arm} {mean}, {written or 'no interval'}, {verdict}")
    axes.axvline(0, color=GREY, lw=1, zorder=0)
    axes.set(ylim=(len(tests) - 0.5, -0.65), yticks=[])
    axes.set_xlabel(literal(f"{comparison.unit}, minus {comparison.baseline}"))
    axes.spines["left"].set_visible(False)
    better = "left" if comparison.lower_is_better else "right"
    return Picture(
        figure,
        f"Differences of {comparison.heading} from {comparison.baseline} in {comparison.unit}, with intervals: "
        f"{'; '.join(descriptions)}.",
        f"Better is to the {better}. Rings are seeds, the mark is their mean, and the bar is its interval.",
    )


@default_style()
def scaling_picture(scaling: Scaling, title: str, arms: Sequence[str]) -> Picture:
    """Draw loss against size, and the fitted laws."""
    look = choose_styles(arms, scaling.baseline)
    figure, (axes,) = _make_panels(3.9)
    for law in scaling.laws:
        constants = np.array([law.e, np.log(max(law.a, 1e-300)), law.exponent])
        style, (sizes, losses) = look[law.arm], zip(*scaling.points[law.arm], strict=True)
        grid = np.geomspace(0.8 * min(sizes), 1.25 * max(sizes), 60)
        axes.plot(grid, evaluate_law(constants, grid), color=style.color, lw=1.5, ls=style.line)
        axes.plot(sizes, losses, style.marker, color=style.color, ms=7, label=literal(law.arm))
    axes.set(xscale="log", yscale="log", ylabel=name_unit(scaling.metric, scaling.unit))
    axes.set_xlabel(scaling.size_unit)
    axes.minorticks_off()
    axes.set_xticks([n for n, _ in scaling.points[scaling.baseline]])
    axes.xaxis.set_major_formatter("{x:.2g}" if scaling.axis == "flops" else _write_count)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return Picture(
        figure,
        f"Loss of {title} against size, with fitted laws: {' '.join(scaling.sentences())}",
        "Points: means over seeds. Lines: the fitted laws.",
    )


@default_style()
def speedup_picture(speedups: Sequence[Speedup], sizes: Sequence[str], comparison: Comparison) -> Picture:
    """Draw effective speedups against size, with a panel for each kind of constants that has any."""
    look = choose_styles(comparison.arms, comparison.baseline)
    drawn = [speedup for speedup in speedups if speedup.values]
    kinds = list(dict.fromkeys(speedup.constants for speedup in drawn))
    figure, panels = _make_panels(3.4 * len(kinds), rows=len(kinds), grid="y")
    for axes, constants in zip(panels, kinds, strict=True):
        of_kind = [speedup for speedup in drawn if speedup.constants == constants]
        arms = list(dict.fromkeys(speedup.arm for speedup in of_kind))
        for arm, shift in zip(arms, 0.6 * ((np.arange(len(arms)) + 0.5) / len(arms) - 0.5), strict=True):
            points = {sizes.index(s.size) + shift: _choose_estimate(s) for s in of_kind if s.arm == arm}
            _draw_speedups(axes, points, arm, look[arm])
        _set_speedup_axes(axes, [_choose_estimate(speedup).value for speedup in of_kind], sizes)
        axes.set_ylabel(f"effective speedup, {constants}")
    described = "; ".join(f"{s.arm}, {s.size}, {s.constants}: ×{_choose_estimate(s).value:.2f}" for s in drawn)
    return Picture(
        figure,
        f"Effective speedups of {comparison.title} over {comparison.baseline} against size: {described}.",
        "Bars: intervals, 95 % each, which may end outside the picture. Without comparable times: at equal FLOPs.",
    )


def _draw_speedups(axes: Any, points: Mapping[float, Estimate], arm: str, style: Style) -> None:
    """Draw an arm's estimates, by their positions."""
    ends = np.array([estimate.interval or [estimate.value] * 2 for estimate in points.values()])
    low, high = ends.clip(1e-6, 1e6).T  # unbounded intervals end outside the picture
    axes.vlines([*points], low, high, color=style.color, lw=1.8, alpha=0.8)
    values = [estimate.value for estimate in points.values()]
    axes.plot([*points], values, style.marker, color=style.color, ms=6, label=literal(arm))


def _set_speedup_axes(axes: Any, values: Sequence[float], sizes: Sequence[str]) -> None:
    axes.axhline(1, color=GREY, lw=1, zorder=0)
    axes.set(yscale="log", xlim=(-0.5, len(sizes) - 0.5), ylim=(min(*values, 1) / 1.3, max(*values, 1) * 1.4))
    axes.set_xticks(range(len(sizes)), map(literal, sizes))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5, 7, 8.5)))
    axes.yaxis.set_major_formatter("×{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, ncols=3, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1))  # above all bars


def _choose_estimate(speedup: Speedup) -> Estimate:
    return speedup.values.get(MEASURES[-1], speedup.values[MEASURES[1]])
