"""The picture of curves for papers and READMEs: the same records always give the same picture."""

from __future__ import annotations

from matplotlib.figure import Figure

from headwater_lab.reports.comparison import Comparison, differ_in_cost
from headwater_lab.reports.curves import choose_y_limits, make_arm_curves
from headwater_lab.reports.styles import choose_styles
from headwater_lab.util.outputs import default_style
from headwater_lab.util.terminal import literal


@default_style()
def curves_picture(comparison: Comparison) -> Figure:
    """Every run as a thin line, every arm's mean as a thick one: against tokens, and FLOPs if their cost differs.

    Both include what was spent on a model that a run started from. The mean covers points that all seeds have.
    """
    axis = ["tokens", "flops"] if differ_in_cost(comparison.records) else ["tokens"]
    figure = Figure(figsize=(8.2, 3.9 * len(axis)), layout="constrained")
    curves = make_arm_curves(comparison)
    kind = "held_out" if curves.dense else "training"
    look = choose_styles(comparison.arms, comparison.baseline)
    for axes, name in zip(figure.subplots(len(axis), 1, squeeze=False)[:, 0], axis, strict=True):
        lines = []
        for arm, (runs, mean) in curves.of(kind).items():
            style = look[arm]
            for run in runs:
                axes.plot(getattr(run, name), run.values, color=style.color, lw=0.7, alpha=0.35, ls=style.line)
            marker = dict(marker=style.marker, markevery=max(1, len(mean.values) // 8), ms=4.5)
            lines += axes.plot(getattr(mean, name), mean.values, color=style.color, lw=2.0, ls=style.line, **marker)
        axes.set_xlabel(f"training {comparison.trained_on}" if name == "tokens" else "training FLOPs")
        axes.set_ylabel(curves.label(kind))
        axes.set_ylim(choose_y_limits(comparison, curves, kind) or (None, None))
        if name == "tokens":
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x >= 1e6 else f"{x / 1e3:g} k")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(lines, map(literal, curves.of(kind)), frameon=False, ncols=1 + len(look) // 8)
    return figure
