"""Tables, pictures and the HTML page of a comparison, from saved records alone."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from headwater.compare import Summary, summarise
from headwater.errors import HeadwaterError
from headwater.files import replace_text
from headwater.records import RECORD, RunRecord, read_record

# Okabe-Ito, which stays apart for the colour-blind; the baseline is grey.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
GREY = "#6b7683"
UNITS = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}


@dataclass(frozen=True)
class Comparison:
    """The records of one experiment."""

    name: str
    title: str
    baseline: str
    threshold: float | None
    records: list[RunRecord]
    failed: list[RunRecord]

    @property
    def summaries(self) -> list[Summary]:
        return summarise(self.records, self.baseline, self.threshold)

    @property
    def measure(self) -> str:
        return self.records[0].measure

    @property
    def lower_is_better(self) -> bool:
        return self.records[0].lower_is_better

    def colours(self) -> dict[str, str]:
        others = [s.arm for s in self.summaries if s.arm != self.baseline]
        return {self.baseline: GREY} | {arm: COLOURS[i % len(COLOURS)] for i, arm in enumerate(others)}

    def runs(self, arm: str) -> list[RunRecord]:
        return [r for r in self.records if r.experiment is not None and r.experiment.arm == arm]


def comparisons(folder: Path) -> list[Comparison]:
    """The comparisons whose finished records lie under `folder`. Raises `HeadwaterError` if there are none."""
    found: dict[str, list[RunRecord]] = {}
    failed: dict[str, list[RunRecord]] = {}
    for path in sorted(folder.rglob(RECORD)):
        record = read_record(path)
        if record.experiment is None:
            continue
        if record.status == "finished" and record.result is not None:
            found.setdefault(record.experiment.name, []).append(record)
        elif record.status == "failed":
            failed.setdefault(record.experiment.name, []).append(record)
    if not found:
        raise HeadwaterError(
            f"There are no finished runs of a comparison under {str(folder)!r}; make some with `headwater compare`."
        )
    result = []
    for name, records in found.items():
        first = records[0].experiment
        assert first is not None
        # The baseline first, then the arms by result.
        order = {s.arm: s.mean for s in summarise(records, first.baseline)}
        sign = 1 if records[0].lower_is_better else -1
        records.sort(key=lambda r: _place(r, first.baseline, order, sign))
        result.append(
            Comparison(name, first.title or name, first.baseline, first.threshold, records, failed.get(name, []))
        )
    return result


def _place(record: RunRecord, baseline: str, order: dict[str, float], sign: int) -> tuple[bool, float, int]:
    assert record.experiment is not None
    return record.experiment.arm != baseline, -sign * order[record.experiment.arm], record.seed


def columns(comparison: Comparison) -> list[str]:
    unit = UNITS.get(comparison.measure, comparison.measure)
    names = ["", f"{unit} ± sd", f"minus {comparison.baseline} [95 %]", "verdict"]
    if comparison.threshold is not None:
        names.append(f"steps to {comparison.threshold:g}")
    return [*names, "parameters", "tokens/s", "cache B/token"]


def cells(summary: Summary, comparison: Comparison) -> list[str]:
    """One row of the table, as text."""
    row = [
        summary.arm,
        f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}"),
        ("" if summary.difference is None else f"{summary.difference:+.3f}")
        + ("" if summary.interval is None else f" [{summary.interval[0]:+.3f}, {summary.interval[1]:+.3f}]"),
        summary.verdict(comparison.lower_is_better),
    ]
    if comparison.threshold is not None:
        steps = summary.steps_to_threshold or []
        row.append(", ".join("never" if n is None else str(n) for n in steps) if any(steps) else "never")
    return [
        *row,
        f"{summary.parameters:,}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.cache_bytes_per_token:,}",
    ]


def table(comparison: Comparison) -> Table:
    """The comparison for a terminal."""
    result = Table(
        title=comparison.title,
        caption=note(comparison),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, name in enumerate(columns(comparison)):
        result.add_column(name, justify="left" if index == 0 else "right", no_wrap=index < 3)
    for summary in comparison.summaries:
        result.add_row(*cells(summary, comparison))
    return result


def note(comparison: Comparison) -> str:
    seeds = len({record.seed for record in comparison.records})
    direction = "lower" if comparison.lower_is_better else "higher"
    return (
        f"{seeds} seed{'s' if seeds > 1 else ''}, paired by seed; {direction} is better; interval: Student's t on the "
        "paired differences, each arm by itself; cache in fp32."
    )


def reading(comparison: Comparison) -> list[str]:
    """What the numbers say, and no more than their intervals carry."""
    unit = UNITS.get(comparison.measure, comparison.measure)
    lines = []
    for s in comparison.summaries:
        verdict = s.verdict(comparison.lower_is_better)
        if s.difference is None:
            continue
        if verdict == "open":
            because = "one seed says nothing of chance" if s.interval is None else "the interval includes zero"
            lines.append(f"{s.arm}: {s.difference:+.3f} {unit} against {comparison.baseline}; open, {because}.")
        else:
            assert s.interval is not None
            lines.append(
                f"{s.arm}: {s.difference:+.3f} {unit} against {comparison.baseline}; {verdict}, "
                f"95 % interval {s.interval[0]:+.3f} to {s.interval[1]:+.3f}."
            )
    for record in comparison.failed:
        lines.append(f"{record.name} failed and is not in the table: {record.error}")
    return lines


def curves_picture(comparison: Comparison) -> Figure:
    """Every run as a thin line, every arm's mean as a thick one: against tokens, and FLOPs if their cost differs.

    Both count what was spent on a model that a run began with.
    """
    # A dense held-out curve says more than the training loss; a sparse one is left to the bars.
    held_out = min(len(record.held_out) for record in comparison.records) >= 8
    axis = ["tokens", "flops"] if differ_in_cost(comparison.records) else ["tokens"]
    figure = Figure(figsize=(8.2, 3.9 * len(axis)), layout="constrained")
    unit = UNITS.get(comparison.measure, comparison.measure)
    for axes, name in zip(figure.subplots(len(axis), 1, squeeze=False)[:, 0], axis, strict=True):
        for arm, colour in comparison.colours().items():
            xs, ys = [], []
            for record in comparison.runs(arm):
                points: Sequence[Any] = record.held_out if held_out else record.curve
                before = getattr(record.origin, name) if record.origin else 0
                xs = [getattr(point, name) + before for point in points]
                ys.append([p.measures[record.measure] if held_out else p.loss for p in points])
                axes.plot(xs, ys[-1], color=colour, lw=0.7, alpha=0.35)
            shortest = min(len(y) for y in ys)
            axes.plot(xs[:shortest], np.mean([y[:shortest] for y in ys], axis=0), color=colour, lw=2.0, label=arm)
        axes.set_xlabel("training tokens" if name == "tokens" else "training FLOPs")
        axes.set_ylabel(f"held-out {unit}" if held_out else "training loss (nats per token)")
        low, high = _y_limits(comparison, held_out)
        axes.set_ylim(low, high)
        if name == "tokens":
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x >= 1e6 else f"{x / 1e3:g} k")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def differ_in_cost(records: Sequence[RunRecord]) -> bool:
    """Whether runs differ in FLOPs per token, or began with models that had cost something."""
    rates = [record.flops / record.tokens for record in records if record.tokens]
    return max(rates) > 1.02 * min(rates) or any(record.origin for record in records)


def _y_limits(comparison: Comparison, held_out: bool) -> tuple[float | None, float | None]:
    """The first points of a training curve would press the rest flat, and so would those of a held-out loss."""
    if held_out and not comparison.lower_is_better:
        return None, None
    curves = [
        [p.measures[r.measure] for p in r.held_out] if held_out else [p.loss for p in r.curve]
        for r in comparison.records
    ]
    low = min(value for curve in curves for value in curve)
    later = [curve[max(1, len(curve) // 8)] for curve in curves if len(curve) > 1]
    return low * 0.97, max(later, default=low) * 1.05


def bars_picture(comparison: Comparison) -> Figure:
    """Left: the measure of each arm. Right: its paired difference to the baseline with the interval. Dots are seeds."""
    summaries = comparison.summaries
    unit = UNITS.get(comparison.measure, comparison.measure)
    figure = Figure(figsize=(8.2, 1.3 + 0.42 * len(summaries)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = comparison.colours()
    base = {record.seed: record.result for record in comparison.runs(comparison.baseline)}
    for place, summary in enumerate(summaries):
        colour = colours[summary.arm]
        results = {record.seed: record.result for record in comparison.runs(summary.arm)}
        left.barh(place, summary.mean, color=colour, alpha=0.85, height=0.6)
        left.plot(list(results.values()), [place] * len(results), "o", color="black", ms=3, alpha=0.6)
        left.annotate(
            f"{summary.mean:.3f}", (0, place), xytext=(5, 0), textcoords="offset points", va="center", color="white"
        )
        if summary.difference is not None:
            if summary.interval is not None:
                right.plot(summary.interval, [place, place], color=colour, lw=2.5, solid_capstyle="butt")
            right.plot(summary.difference, place, "D", color=colour, ms=6)
            shared = [results[seed] - base[seed] for seed in results if seed in base]  # type: ignore[operator]
            right.plot(shared, [place + 0.22] * len(shared), "o", color="black", ms=2.5, alpha=0.6)
    left.set_yticks(range(len(summaries)), [summary.arm for summary in summaries])
    left.invert_yaxis()
    left.set_xlabel(unit)
    right.axvline(0, color=GREY, lw=1)
    right.set_xlabel(f"{unit}, difference to\n{comparison.baseline}, 95 % interval")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_report(folder: Path) -> Path:
    """Pictures and report.html for the comparisons under `folder`; returns the page's path. Raises `HeadwaterError`."""
    found = comparisons(folder)
    experiments = []
    for comparison in found:
        pictures = []
        for kind, figure in (("curves", curves_picture(comparison)), ("bars", bars_picture(comparison))):
            path = folder / f"{comparison.name}-{kind}.png"
            figure.savefig(path, dpi=160)
            data = path.read_bytes()
            width = struct.unpack(">I", data[16:20])[0]  # from the PNG header
            pictures.append(
                {
                    "base64": base64.b64encode(data).decode(),
                    "alt": f"{comparison.title}: {kind}",
                    "width": width * 100 // 160,
                }
            )
        first = next(r for r in comparison.records if r.experiment and r.experiment.arm == comparison.baseline)
        experiments.append(
            {
                "title": comparison.title,
                "reading": reading(comparison),
                "columns": columns(comparison),
                "verdict_column": columns(comparison).index("verdict"),
                "rows": [
                    {"cells": cells(s, comparison), "verdict": s.verdict(comparison.lower_is_better)}
                    for s in comparison.summaries
                ],
                "note": note(comparison),
                "pictures": pictures,
                "facts": first.data
                | {"training tokens per run": f"{first.tokens:,}", "training FLOPs per run": f"{first.flops:.3g}"},
                "recipe": yaml.safe_dump(first.recipe, sort_keys=False, allow_unicode=True),
            }
        )
    e = found[0].records[0].environment
    page = Environment(loader=PackageLoader("headwater"), autoescape=True).get_template("report.html.j2")
    html = page.render(
        title="headwater: " + " · ".join(c.name for c in found),
        environment=(
            f"headwater {e.headwater}, Python {e.python}, PyTorch {e.torch}, transformers {e.transformers}, "
            f"{e.platform}, {e.device}, {e.threads} thread{'s' if e.threads > 1 else ''} a run"
        ),
        experiments=experiments,
    )
    target = folder / "report.html"
    replace_text(target, html)
    return target
