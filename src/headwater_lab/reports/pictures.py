"""Pictures for papers and READMEs: the same records always give the same picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from headwater.util.drawing import default_style
from headwater.util.outputs import save_figure
from headwater.util.terminal import literal
from headwater_lab.reports.comparison import Comparison, differ_in_cost
from headwater_lab.reports.curves import arm_curves, y_limits
from headwater_lab.reports.styles import GREY, styles

DPI = 160


@default_style()
def save(figure: Figure, path: Path) -> None:
    save_figure(figure, path, DPI)


@default_style()
def curves_picture(comparison: Comparison) -> Figure:
    """Every run as a thin line, every arm's mean as a thick one: against tokens, and FLOPs if their cost differs.

    Both include what was spent on a model that a run started from. The mean covers points that all seeds have.
    """
    axis = ["tokens", "flops"] if differ_in_cost(comparison.records) else ["tokens"]
    figure = Figure(figsize=(8.2, 3.9 * len(axis)), layout="constrained")
    curves = arm_curves(comparison)
    what = "held_out" if curves.dense else "training"
    look = styles(comparison.arms, comparison.baseline)
    for axes, name in zip(figure.subplots(len(axis), 1, squeeze=False)[:, 0], axis, strict=True):
        lines = []
        for arm, (runs, mean) in curves.of(what).items():
            style = look[arm]
            for run in runs:
                axes.plot(getattr(run, name), run.values, color=style.color, lw=0.7, alpha=0.35, ls=style.line)
            marker = dict(marker=style.marker, markevery=max(1, len(mean.values) // 8), ms=4.5)
            lines += axes.plot(getattr(mean, name), mean.values, color=style.color, lw=2.0, ls=style.line, **marker)
        axes.set_xlabel(f"training {comparison.trained_on}" if name == "tokens" else "training FLOPs")
        axes.set_ylabel(curves.label(what))
        axes.set_ylim(y_limits(comparison, curves, what) or (None, None))
        if name == "tokens":
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x >= 1e6 else f"{x / 1e3:g} k")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(lines, map(literal, curves.of(what)), frameon=False, ncols=1 + len(look) // 8)
    return figure


@default_style()
def bars_picture(comparison: Comparison) -> Figure:
    """Left: the measure of each arm. Right: its paired difference from the baseline, with interval. Dots are seeds."""
    summaries = comparison.summaries
    figure = Figure(figsize=(8.2, 1.3 + 0.42 * len(summaries)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    look = styles(comparison.arms, comparison.baseline)
    for place, summary in enumerate(summaries):
        color = look[summary.arm].color
        if summary.mean is not None:
            results = [run.result for run in comparison.finished(summary.arm)]
            left.barh(place, summary.mean, color=color, alpha=0.85, height=0.6)
            left.plot(results, [place] * len(results), "o", color="black", ms=3, alpha=0.6)
            text, ink = f"{summary.mean:.3f}", "white"
        else:
            text, ink = "diverged", "black"
        left.annotate(text, (0, place), xytext=(5, 0), textcoords="offset points", va="center", color=ink)
        if summary.paired is not None:
            if summary.interval is not None:
                right.plot(summary.interval, [place, place], color=color, lw=2.5, solid_capstyle="butt")
            right.plot(summary.paired.mean, place, look[summary.arm].marker, color=color, ms=6)
            shared = summary.paired.differences
            right.plot(shared, [place + 0.22] * len(shared), "o", color="black", ms=2.5, alpha=0.6)
    left.set_yticks(range(len(summaries)), [literal(summary.arm) for summary in summaries])
    left.set_ylim(len(summaries) - 0.5, -0.5)  # the first at the top, including those without a bar
    left.set_xlabel(comparison.unit)
    right.axvline(0, color=GREY, lw=1)
    right.set_xlabel(f"{comparison.unit}, difference to\n{literal(comparison.baseline)}, 95 % interval")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
