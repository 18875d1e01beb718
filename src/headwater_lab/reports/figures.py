"""Figures of the page: what plotly draws, and what templates/report.js needs to switch axes, lines and colors.

A trace's `meta` says the number of its arm and the views that show it; `customdata` has the steps,
tokens and FLOPs of each point.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from headwater_lab.comparison.scaling import Law, Scaling, evaluate_law
from headwater_lab.comparison.statistics import finished_runs
from headwater_lab.reports.comparison import Comparison, differ_in_cost, name_unit
from headwater_lab.reports.curves import Curve, Curves, choose_y_limits, make_arm_curves
from headwater_lab.reports.styles import Style, choose_styles
from headwater_lab.reports.words import write_interval, write_verdict

# Maximum points to draw per curve, to keep the page small.
POINTS = 400


HOVER = (
    "%{fullData.name}<br><b>%{y:.4f}</b> at step %{customdata[0]:,}<br>"
    "%{customdata[1]:,} %{meta.unit}, %{customdata[2]:.3g} FLOPs<extra></extra>"
)


@dataclass(frozen=True)
class Switch:
    """A group of buttons, one of which is pressed: the setting, and value -> label."""

    sets: str
    label: str
    values: dict[str, str]


@dataclass(frozen=True)
class Drawing:
    """A figure with its buttons and its legend."""

    name: str
    label: str
    caption: str
    figure: go.Figure
    height: int
    switches: list[Switch] = field(default_factory=list)
    legend: dict[str, Style] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    titles: dict[str, dict[str, str]] = field(default_factory=dict)
    limits: dict[str, tuple[float, float] | None] = field(default_factory=dict)

    @property
    def json(self) -> str:
        """Escaped for a script element: no `<` in it can end the element."""
        figure = json.loads(self.figure.to_json())
        content = figure | {"state": self.state, "titles": self.titles, "limits": self.limits}
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def escape_markup(text: str) -> str:
    """Text escaped from plotly's markup and %{template}s."""
    return html.escape(text).replace("{", "&#123;")


AXES = [Switch(f"{axis}type", f"{axis} axis", {"linear": "linear", "log": "log"}) for axis in "xy"]


def curves_drawing(comparison: Comparison, name: str) -> Drawing:
    """Held-out metric and training loss over training."""
    curves = make_arm_curves(comparison)
    look = choose_styles(comparison.arms, comparison.baseline)
    kinds = [kind for kind in ("held_out", "training") if _has_curve(curves, kind)] or ["held_out"]
    figure = _make_figure()
    for kind in kinds:
        for trace in _curve_traces(comparison, curves, kind, look):
            figure.add_trace(trace)
    selected = "training" if "training" in kinds and not (curves.dense and "held_out" in kinds) else "held_out"
    switches = [
        Switch("what", "curve", {"held_out": "held-out", "training": "training loss"}),
        Switch("view", "lines", {"mean": "mean", "seed": "seeds", "both": "both"}),
        Switch("x", "x", {"tokens": comparison.trained_on, "flops": "FLOPs"}),
        *AXES,
    ]
    needed = {"what": len(kinds) > 1, "x": differ_in_cost(comparison.records)}
    return Drawing(
        name,
        f"Curves of {comparison.heading}: {curves.label(selected)} over training {comparison.trained_on}, one line for "
        f"each arm: {'; '.join(_describe_course(arm, mean) for arm, (_, mean) in curves.of(selected).items())}.",
        "Mean: over the points that all seeds of an arm have; the band, shown for up to four arms, is the range of "
        f"its seeds. {comparison.trained_on.capitalize()} and FLOPs include those of the model that a run started "
        f"from. Long curves are drawn with {POINTS} points.",
        figure,
        430,
        [switch for switch in switches if needed.get(switch.sets, True)],
        look,
        {"what": selected, "view": "mean", "x": "tokens", "xtype": "linear", "ytype": "linear"},
        {
            "x": {"tokens": f"training {comparison.trained_on}", "flops": "training FLOPs"},
            "what": {kind: curves.label(kind) for kind in kinds},
        },
        {kind: choose_y_limits(comparison, curves, kind) for kind in kinds},
    )


def _has_curve(curves: Curves, kind: str) -> bool:
    return any(len(mean.steps) > 1 for _, mean in curves.of(kind).values())


def _curve_traces(comparison: Comparison, curves: Curves, kind: str, look: Mapping[str, Style]) -> Iterator[go.Scatter]:
    """By arm: the band of its seeds, the seeds, their mean."""
    for index, (arm, (runs, mean)) in enumerate(curves.of(kind).items()):
        meta = {"arm": index, "what": kind, "ink": look[arm].baseline, "unit": comparison.trained_on}
        yield _draw_band(thin_curve(mean), look[arm], meta | {"view": "mean"})
        for run in runs:
            yield _draw_line(thin_curve(run), arm, look[arm], meta | {"view": "seed"})
        yield _draw_line(thin_curve(mean), arm, look[arm], meta | {"view": "mean"})


def _describe_course(arm: str, mean: Curve) -> str:
    if not mean.steps:
        return f"{arm} has no step at which all its seeds have a value"
    return (
        f"{arm} from {mean.values[0]:.3f} at {mean.tokens[0]:,.0f} to {mean.values[-1]:.3f} at {mean.tokens[-1]:,.0f}"
    )


def thin_curve(curve: Curve) -> Curve:
    """At most `POINTS` points of it, including the first and the last."""
    if len(curve.steps) <= POINTS:
        return curve
    indices = np.unique(np.linspace(0, len(curve.steps) - 1, POINTS).round().astype(int))
    lists = (curve.steps, curve.tokens, curve.flops, curve.values, curve.low, curve.high)
    return Curve(curve.seed, *([values[i] for i in indices] for values in lists))


def _list_points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in zip(curve.steps, curve.tokens, curve.flops, strict=True)]


def _draw_line(curve: Curve, arm: str, style: Style, meta: dict[str, Any]) -> go.Scatter:
    mean = curve.seed is None
    return go.Scatter(
        x=curve.tokens,
        y=_drop_infinities(curve.values),
        customdata=_list_points(curve),
        meta=meta,
        name=escape_markup(arm) + (", mean" if mean else f", seed {curve.seed}"),
        mode="lines+markers" if mean or len(curve.steps) < 2 else "lines",
        line={"color": style.color, "dash": style.dash, "width": 2.2 if mean else 1},
        marker={"symbol": style.symbol, "size": 8, "color": style.color, "maxdisplayed": 9},
        opacity=1 if mean else 0.55,
        hovertemplate=HOVER,
    )


def _draw_band(mean: Curve, style: Style, meta: dict[str, Any]) -> go.Scatter:
    points = _list_points(mean)
    return go.Scatter(
        x=mean.tokens + mean.tokens[::-1],
        y=mean.high + mean.low[::-1],
        customdata=points + points[::-1],
        meta=meta | {"band": True},
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=_make_transparent(style.color, 0.15),
        hoverinfo="skip",
    )


def _make_transparent(color: str, alpha: float) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _drop_infinities(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _make_figure() -> go.Figure:
    """Without a template: colors of text and grid follow the page."""
    axis = {"automargin": True, "ticks": "outside", "zeroline": False}
    return go.Figure(
        layout={
            "template": "none",
            "showlegend": False,
            "hovermode": "closest",
            "margin": {"l": 8, "r": 14, "t": 12, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis | {"exponentformat": "SI", "title": {"standoff": 8}},
            "yaxis": axis | {"title": {"standoff": 8}},
        }
    )


def differences_drawing(comparison: Comparison, name: str) -> Drawing | None:
    """Paired differences from the baseline with their intervals; None if there are none."""
    summaries = [s for s in comparison.summaries if s.paired is not None]
    if not summaries:
        return None
    look = choose_styles(comparison.arms, comparison.baseline)
    figure = _make_figure()
    descriptions, reach = [], [0.0]
    finished = finished_runs(comparison.records)
    for index, s in enumerate(summaries):
        assert s.paired is not None
        mean, style = s.paired.mean, look[s.arm]
        low, high = s.interval or (mean, mean)
        text_of_verdict = write_verdict(s, comparison)
        interval = write_interval(s.interval) if s.interval else "no interval"
        # In the order of the differences: the plan's, if seeds are added until a question is decided.
        order = comparison.plan.seeds if comparison.plan else sorted(finished[s.arm])
        shared = [seed for seed in order if seed in finished[s.arm] and seed in finished[comparison.baseline]]
        seeds = shared[: len(s.paired.differences)]
        figure.add_scatter(
            x=list(s.paired.differences),
            y=[index + 0.2] * len(seeds),
            customdata=seeds,
            meta={"ink": True},
            mode="markers",
            name=escape_markup(s.arm),
            marker={"size": 5, "symbol": "circle-open", "color": style.color},
            hovertemplate="%{fullData.name}, seed %{customdata}<br><b>%{x:+.4f}</b><extra></extra>",
        )
        figure.add_scatter(
            x=[mean],
            y=[index],
            mode="markers",
            name=escape_markup(s.arm),
            marker={"size": 11, "symbol": style.symbol, "color": style.color},
            error_x={
                "type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low],
                "color": style.color, "thickness": 2.5, "width": 5,
            },
            hovertemplate=f"%{{fullData.name}}<br><b>%{{x:+.4f}}</b> {interval}<br>{text_of_verdict}<extra></extra>",
        )  # fmt: skip
        descriptions.append(f"{s.arm} {mean:+.3f}, {interval}, {text_of_verdict}")
        reach += [low, high, *s.paired.differences]
        figure.add_annotation(
            text=f"<b>{escape_markup(s.arm)}</b> {mean:+.3f} {escape_markup(text_of_verdict)}",
            x=0, xref="paper", xanchor="left", y=index - 0.36, yanchor="middle", showarrow=False,
        )  # fmt: skip
    better = "left" if comparison.lower_is_better else "right"
    title = escape_markup(f"{comparison.unit}, minus {comparison.baseline}")
    # Every whole interval, and a little room for the marks at the ends.
    room = 0.05 * (max(reach) - min(reach)) or 0.001
    figure.update_xaxes(zeroline=True, zerolinewidth=2, range=[min(reach) - room, max(reach) + room], title_text=title)
    figure.update_yaxes(
        range=[len(summaries) - 0.5, -0.62], showticklabels=False, ticks="", showgrid=False, fixedrange=True
    )
    return Drawing(
        name,
        f"Differences of {comparison.heading} from {comparison.baseline} in {comparison.unit}, with intervals: "
        f"{'; '.join(descriptions)}.",
        f"Better is to the {better}. Rings are seeds, the mark is their mean, and the bar is its interval.",
        figure,
        84 + 54 * len(summaries),
    )


def scaling_drawing(scaling: Scaling, name: str, title: str, arms: Sequence[str]) -> Drawing:
    """Loss against size, and the fitted laws."""
    look = choose_styles(arms, scaling.baseline)
    laws = {law.arm: law for law in scaling.laws}
    figure = _make_figure()
    quantity = "parameters without embeddings" if scaling.axis == "parameters" else f"training {scaling.unit}"
    hover = "%{fullData.name}<br><b>%{y:.4f}</b> at %{x:.4s}<extra></extra>"
    for index, arm in enumerate(look):
        if arm not in laws:
            continue
        style, points = look[arm], scaling.points[arm]
        grid = np.geomspace(0.8 * min(n for n, _ in points), 1.25 * max(n for n, _ in points), 60)
        meta = {"arm": index, "ink": style.baseline}
        figure.add_scatter(
            x=grid.tolist(),
            y=_drop_infinities(evaluate_law(law_constants(laws[arm]), grid).tolist()),
            meta=meta,
            mode="lines",
            name=f"{escape_markup(arm)}, law",
            line={"color": style.color, "width": 2},
            hovertemplate=hover,
        )
        figure.add_scatter(
            x=[n for n, _ in points],
            y=[loss for _, loss in points],
            meta=meta,
            mode="markers",
            name=escape_markup(arm),
            marker={"symbol": style.symbol, "size": 10, "color": style.color},
            hovertemplate=hover,
        )
    figure.update_layout(xaxis={"type": "log", "title": {"text": quantity}}, yaxis={"type": "log"})
    return Drawing(
        name,
        f"Loss of {title} against size, with fitted laws: {' '.join(scaling.sentences())}",
        "Points: means over seeds. Lines: the fitted laws.",
        figure,
        430,
        AXES,
        {arm: style for arm, style in look.items() if arm in laws},
        {"xtype": "log", "ytype": "log"},
        {"y": {"": name_unit(scaling.metric, scaling.unit)}},
        {},
    )


def law_constants(law: Law) -> np.ndarray:
    """E, log A, a."""
    return np.array([law.e, math.log(max(law.a, 1e-300)), law.exponent])
