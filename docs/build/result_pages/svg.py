"""Pictures of the generated pages, as SVG in the page: their text and axes take the page's colors, light or dark."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from headwater_lab.reports.comparison import Comparison

INK = "#010203"  # stands for the page's text color
COLORS = {
    "better": "#2e9e6b",
    "worse": "#d1495b",
    "inconclusive": "#8a8f98",
    "replicates": "#2e9e6b",
    "fails": "#d1495b",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headwater",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def render_figure(figure: Figure, caption: str, details: str = "") -> str:
    """Render a figure as SVG. details: what to add to the caption for readers who do not see the figure."""
    with mpl.rc_context(STYLE):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    text = html.escape(" ".join(filter(None, [caption, details])), quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f'\n<figure class="results-picture">\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>\n'


def _make_figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def draw_counts(claims: Sequence[Any], group_of: Callable[[Any], str]) -> str:
    """Draw the measured claims of each paper, by verdict."""
    verdicts = ("replicates", "inconclusive", "fails")
    groups: dict[str, dict[str, int]] = {}
    for claim in claims:
        if claim.kind == "measured":
            counts = groups.setdefault(group_of(claim), dict.fromkeys(verdicts, 0))
            counts[claim.verdict] += 1
    names = list(reversed(groups))
    with mpl.rc_context(STYLE):
        figure, axes = _make_figure(7, 0.4 * len(names) + 1)
        left = [0] * len(names)
        for verdict in verdicts:
            widths = [groups[name][verdict] for name in names]
            axes.barh(names, widths, left=left, color=COLORS[verdict], label=verdict)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_xlabel("measured claims")
        axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
        summary = "; ".join(f"{name}: {', '.join(f'{n} {v}' for v, n in groups[name].items() if n)}" for name in groups)
        return render_figure(figure, "Measured claims by verdict.", summary)


def draw_differences(comparison: Comparison, title: str) -> str:
    """Draw every arm's difference from the baseline with its interval, the best at the top."""
    summaries = [summary for summary in comparison.summaries if summary.difference is not None and summary.interval]
    summaries.sort(key=lambda summary: summary.difference or 0, reverse=comparison.lower_is_better)
    with mpl.rc_context(STYLE):
        figure, axes = _make_figure(7, 0.24 * len(summaries) + 1)
        axes.axvline(0, color=INK, linewidth=0.8)
        for row, summary in enumerate(summaries):
            color = COLORS.get(summary.verdict(comparison.lower_is_better), COLORS["inconclusive"])
            axes.plot(summary.interval, [row, row], color=color, linewidth=2)
            axes.plot([summary.difference], [row], "o", color=color, markersize=5)
        axes.set_yticks(range(len(summaries)), [summary.arm for summary in summaries])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"{comparison.unit} minus {comparison.baseline}")
        return render_figure(figure, f"{title}. Green: better; red: worse; grey: inconclusive.")


def draw_curves(comparison: Comparison, title: str) -> str:
    """Draw the training loss of every arm over tokens, mean over the seeds."""
    with mpl.rc_context(STYLE):
        figure, axes = _make_figure(7, 3.6)
        for arm in comparison.arms:
            runs = [record for record in comparison.records if record.arm == arm]
            points = list(zip(*(run.curve for run in runs), strict=False))
            tokens = [point[0].tokens / 1e6 for point in points]
            losses = [sum(entry.loss for entry in point) / len(point) for point in points]
            axes.plot(tokens, losses, label=arm)
        axes.set_xlabel("tokens, millions")
        axes.set_ylabel("training loss, nats")
        axes.legend()
        return render_figure(figure, title)


def draw_caches(rows: Sequence[Mapping[str, str]], caption: str) -> str:
    """Draw quality over bytes, a curve a way. rows: with "way", "cache, bytes a token" and "bits per byte"."""
    with mpl.rc_context(STYLE):
        figure, axes = _make_figure(7, 3.6)
        for way in dict.fromkeys(row["way"] for row in rows):
            points = sorted(
                (float(row["cache, bytes a token"].replace(",", "")), float(row["bits per byte"]))
                for row in rows
                if row["way"] == way
            )
            axes.plot(*zip(*points, strict=True), "o-", label=way)
        axes.set_xscale("log", base=2)
        shown: list[int] = []
        for size in sorted({int(row["cache, bytes a token"].replace(",", "")) for row in rows}):
            if not shown or size > 1.15 * shown[-1]:  # labels would overlap
                shown.append(size)
        axes.set_xticks(shown, [f"{size:,}" for size in shown])
        axes.tick_params(axis="x", rotation=45)
        axes.set_xlabel("cache, bytes a token")
        axes.set_ylabel("held-out bits per byte")
        axes.legend()
        return render_figure(figure, caption)
