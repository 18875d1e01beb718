"""A reproduced table: the paper's figures and ours, the verdicts on its claims, and its page."""

from __future__ import annotations

import base64
import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.text import Text

from headwater import __version__
from headwater_lab.comparison.statistics import has_diverged
from headwater_lab.papers.claims import ClaimVerdict, Judged, judge
from headwater_lab.papers.computing import COMPUTED, Fact
from headwater_lab.papers.measures import Runs, incomparable
from headwater_lab.papers.places import finished
from headwater_lab.papers.table import Column, Measure, PaperTable, TableCell, cell_measures, table
from headwater_lab.papers.work import Work
from headwater_lab.reports.page import Head, PageCell, PageTable, write_report
from headwater_lab.reports.words import MANY, counted
from headwater_lab.training.records import environment
from headwater_lab.util.outputs import default_style, write_json
from headwater_lab.util.terminal import Table, lined

RESULT = "result.json"
CLASSES: dict[ClaimVerdict, str] = {"replicates": "better", "fails": "worse", "inconclusive": "soft"}
# After "one claim" and after several.
WORDS: dict[ClaimVerdict, tuple[str, str]] = {
    "replicates": ("replicates", "replicate"),
    "fails": ("fails", "fail"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
}
HUGE = 1e6
INCOMPARABLE = "not comparable"


@dataclass(frozen=True)
class Ours:
    """Our result in a cell. value, spread: mean and standard deviation over the seeds."""

    text: str = ""
    value: float | None = None
    spread: float | None = None
    seeds: int = 0


@dataclass(frozen=True)
class Reproduction:
    """columns, rows: names as in the paper; cells: (the paper's, ours). A computed table has facts and no claims."""

    name: str
    table: PaperTable
    columns: list[str]
    rows: list[str]
    cells: list[list[tuple[str, Ours]]]
    claims: Sequence[Judged | Fact]
    work: Work | None = None
    figure: Figure | None = None

    @property
    def answer(self) -> str:
        """A sentence on how many claims replicate, or why none can be judged."""
        if self.work is not None and self.work.cannot_show:
            return f"Models of this size cannot show it, so no claim is judged: {self.work.cannot_show}"
        return tally([one.verdict for one in self.claims], "" if self.work is None else f" at {self.work.scale} scale")


def computed(name: str) -> Reproduction:
    """A table that needs no training."""
    of = table(name)
    found = COMPUTED[of.computed]()
    cells = [[("", Ours(text)) for text in row[1:]] for row in found.rows]
    rows = [row[0] for row in found.rows]
    return Reproduction(name, of, found.columns[1:], rows, cells, found.facts, None, found.figure)


def reproduction(work: Work, task_files: Path | None = None, device: str = "cpu") -> Reproduction:
    """A table from the existing runs. Raises `HeadwaterError` if they lack a measure."""
    runs = Runs(work.table, work.places, work.trials, task_files, device)
    of = work.table
    cells = [
        [(printed(cell, column), ours(cell, column, runs)) for column, cell in zip(of.columns, row.cells, strict=True)]
        for row in of.rows
    ]
    columns, rows = [column.name for column in of.columns], [row.label for row in of.rows]
    claims = [claim.model_copy(update={"says": here(claim.says, work.at.words)}) for claim in of.claims]
    judged = judge([] if work.cannot_show else claims, runs)
    judged = [replace(claim, what=here(claim.what, work.at.words)) for claim in judged]
    return Reproduction(work.name, of, columns, rows, cells, judged, work)


def here(says: str, words: Mapping[str, str]) -> str:
    """A claim with the names of the scale."""
    if not words:
        return says
    known = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"(?<!\w)({known})(?!\w)", lambda match: words[match[0]], says)


def printed(cell: TableCell, column: Column) -> str:
    """The paper's figure with the digits it was printed with, which YAML does not keep."""
    if cell.paper is None or isinstance(cell.paper, str):
        return cell.paper or ""
    digits = column.digits if column.paper_digits is None else column.paper_digits
    text = f"{cell.paper:.{digits}f}"
    return text if float(text) == cell.paper else f"{cell.paper:g}"


def ours(cell: TableCell, column: Column, runs: Runs) -> Ours:
    """The measure of the cell's arm, over its seeds; if it is not the paper's measure, only a remark."""
    if cell.arm is None or not runs.of(cell.arm):
        return Ours()
    measure = cell.measure or column.measure
    found = _ours(cell, cell.arm, measure, column, runs)
    return replace(found, text=INCOMPARABLE) if incomparable(runs.table, measure) else found


def _ours(cell: TableCell, arm: str, measure: Measure, column: Column, runs: Runs) -> Ours:
    found = runs.of(arm)
    if measure == "steps":
        return _steps(list(runs.steps(arm).values()))
    if measure == "diverged":
        lost = sum(runs.lost(arm, runs.unlearned).values())
        return Ours(f"{lost} of {len(found)}", float(lost), None, len(found))
    if measure == "saved":
        return _saved(arm, column, runs)
    values = runs.values(measure, arm)
    for other, change in ((cell.minus, float.__sub__), (cell.over, lambda a, b: (a - b) / b)):
        if other is not None:
            base = runs.values(measure, other)
            values = {seed: change(values[seed], base[seed]) for seed in sorted(values.keys() & base.keys())}
    lost = sum(has_diverged(run.record) for run in found.values())
    note = f"diverged {lost} of {len(found)}" if lost else ""
    if not values:
        return Ours(note)
    mean = _mean([column.times * value for value in values.values()], column.digits)
    return replace(mean, text="; ".join(filter(None, (mean.text, note))))


def _mean(values: Sequence[float], digits: int) -> Ours:
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
    text = number(mean, digits) + ("" if spread is None else f" ± {number(spread, digits)}")
    return Ours(text, mean, spread, len(values))


def _steps(steps: Sequence[int | None]) -> Ours:
    reached = [n for n in steps if n is not None]
    if not reached:
        return Ours("never", None, None, len(steps))
    mean = _mean([float(n) for n in reached], 0)
    some = f" in {len(reached)} of {len(steps)}" if len(reached) < len(steps) else ""
    return replace(mean, text=f"{mean.text}{some}", seeds=len(steps))


def _saved(name: str, column: Column, runs: Runs) -> Ours:
    """1 - N/N': of an arm with more = N'/N - 1."""
    found = runs.equal(name)
    if isinstance(found, str) or not math.isfinite(found[0].more.value):
        return Ours()
    equal, _ = found
    value = column.times * _less(equal.more.value)
    text = number(value, column.digits)
    if equal.more.interval is not None:
        low, high = (number(column.times * _less(end), column.digits) for end in equal.more.interval)
        text += f" [{low}, {high}]"
    return Ours(text if equal.inside else f"{text}; beyond the sizes", value, None, equal.more.freedom + 1)


def _less(more: float) -> float:
    return 1 - 1 / (1 + more) if more > -1 else -math.inf


def number(value: float, digits: int) -> str:
    return f"{value:.3g}" if abs(value) >= HUGE else f"{value:,.{digits}f}"


def evidence(one: Judged | Fact) -> str:
    """The number that a claim was judged by, in words."""
    if isinstance(one, Fact):
        return one.evidence
    if one.estimate is None and one.interval is None:
        return one.why
    why = one.why
    if one.more is not None:
        seeds = f"about {counted(one.more, 'more seed')}" if one.more <= MANY else f"more than {MANY} more seeds"
        why += f"; {seeds} would settle it"
    estimate = "" if one.estimate is None else f" {_amount(one.estimate, one)}"
    interval = "" if one.interval is None else f" [{_amount(one.interval[0], one)}, {_amount(one.interval[1], one)}]"
    if one.kind == "more" and interval:  # by a fitted law, and often beyond what it was fitted to
        interval, estimate = "", f"{interval}{estimate and f', estimate{estimate}'}"
    return f"{one.what}:{estimate}{interval}" + (f"; {why}" if why else "")


def _amount(value: float, one: Judged) -> str:
    if one.kind == "share":
        return f"{value:.0%}"
    if one.kind == "more":
        return f"{value:+.1%}" if value < 10 else "∞" if math.isinf(value) else f"×{1 + value:.3g}"
    if abs(value) >= HUGE:
        return f"{value:+.3g}"
    low, high = one.interval or (0.0, value)
    scale = abs(high - low) or abs(value) or 1.0
    return f"{value:+,.{max(0, 2 - math.floor(math.log10(scale)))}f}"


def tally(verdicts: Sequence[ClaimVerdict], where: str = "") -> str:
    """A sentence on how many claims replicate."""
    total, counts = len(verdicts), Counter(verdicts)
    if not total:
        return "No claim is judged."
    if total == 1:
        return f"The claim {WORDS[verdicts[0]][0]}{where}."
    if len(counts) == 1:
        return f"All {total} claims {WORDS[verdicts[0]][1]}{where}."
    parts = [f"{counts[name]} {words[counts[name] > 1]}" for name, words in WORDS.items() if counts[name]]
    return f"Of {total} claims{where}, {', '.join(parts)}."


def texts(found: Reproduction) -> tuple[list[str], list[list[str]]]:
    """Column names and rows: the paper's columns only where it has any figures."""
    names, rows = [""], [[label] for label in found.rows]
    for index, name in enumerate(found.columns):
        column = [cells[index] for cells in found.cells]
        papers = any(paper for paper, _ in column)
        names += [f"{name}, paper", "ours"] if papers else [name]
        for row, (paper, our) in zip(rows, column, strict=True):
            row += [paper, our.text] if papers else [our.text]
    return names, rows


def terminal(found: Reproduction) -> list[Table | Text]:
    """The table and its claims."""
    lines = [f"{found.table.title}: {found.table.source}"]
    lines += about(found)[1:] if found.work is not None else []
    names, rows = texts(found)
    layout = lined(*names, rows=rows)
    layout.columns[0].no_wrap = len(found.columns) < 4
    columns = ("verdict", "claim", "by")
    claims = lined(*columns, rows=[(one.verdict, one.says, evidence(one)) for one in found.claims], left=columns)
    claims.columns[0].no_wrap = True
    return [
        Text("\n".join(lines)),
        layout,
        Text(caption(found)),
        Text(f"\n{found.answer}"),
        *([claims] if found.claims else []),
        *map(Text, found.table.notes),
    ]


def about(found: Reproduction) -> list[str]:
    """The paper's conclusion, the setting, and the remarks on it, which are left out if overrides change it."""
    of, work = found.table, found.work
    says = f"{of.source}. The paper: {of.says}"
    if work is None:
        return [says]
    if not work.own:
        return [says, f"Scale {work.scale}; how the setting differs: {work.at.setting}", *work.at.remarks]
    but = f"Scale {work.scale}, and with {shlex.join(work.own)}, which may contradict the following"
    return [says, f"{but}: {work.at.setting}"]


def head(found: Reproduction) -> Head:
    """The top of the page."""
    of, work = found.table, found.work
    first, *rest = about(found)
    paragraphs = [first, found.answer, *rest, *of.notes, f"Made by: {command(found)}"]
    if work is not None and compared(work):
        paragraphs.append(
            "Below: the complete comparisons that these runs belong to, as `headwater compare` reports them. They "
            "include all arms and seeds trained so far, use the recipe's deciding metric, and test each arm against "
            "one baseline, with their own corrections."
        )
    layout = PageTable(caption(found), *texts(found))
    rows: list[list[PageCell]] = [
        [one.says, (one.verdict, CLASSES[one.verdict]), evidence(one)] for one in found.claims
    ]
    claims = [PageTable(claims_caption(found), ["claim", "verdict", "by"], rows, text=True)] if rows else []
    pictures = [] if found.figure is None else [(of.title, _png(found.figure))]
    return Head(of.title, paragraphs, [layout, *claims], pictures)


def caption(found: Reproduction) -> str:
    if found.work is None:
        return "Computed, not measured, so exact."
    seeds = sorted({ours.seeds for row in found.cells for _, ours in row if ours.seeds})
    over = f"{seeds[0]} to {counted(seeds[-1])}" if seeds else "no run that finished"
    over = counted(seeds[0]) if len(seeds) == 1 else over
    differs = any(ours.text == INCOMPARABLE for row in found.cells for _, ours in row)
    otherwise = " Not comparable: measured differently than in the paper." if differs else ""
    laws = "; by a fitted law with its 95 % interval" if "saved" in cell_measures(found.table) else ""
    printed = any(paper for row in found.cells for paper, _ in row)  # a table of the ledger is of no paper
    figures, or_ = ("The paper's figures, and ours", ", or not given") if printed else ("Our figures", "")
    return f"{figures}: mean ± standard deviation over {over}{laws}. Empty: not trained at this scale{or_}.{otherwise}"


def claims_caption(found: Reproduction) -> str:
    if found.work is None:
        return "Claims and results."
    return (
        "Claims, and the interval each is judged by: a claim replicates if the whole interval agrees with it, fails "
        "if none of it does, and is inconclusive otherwise. Differences are paired by seed (Student's t), shares of "
        "seeds have binomial intervals, and counts, such as FLOPs, are exact; the probability that any verdict of "
        "the table is wrong is at most 5 % (Holm). Other tables that share these runs are not taken into account."
    )


def command(found: Reproduction) -> str:
    parts = ["headwater", "reproduce", found.name]
    if found.work is not None:
        parts += [*found.work.own, *(["--scale", found.work.scale] if found.work.scale != "cpu" else [])]
    return shlex.join(parts)


@default_style()
def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def write(found: Reproduction, folder: Path) -> Path:
    """The page report.html and result.json in `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, to_json(found))
    trials, names = (folder, []) if found.work is None else (found.work.trials, compared(found.work))
    return write_report(trials, head=head(found), only=names, target=folder / "report.html")


def compared(work: Work) -> list[str]:
    """The comparisons with a finished run."""
    there = {
        place.recipe.name
        for place in work.trained
        if place.recipe.compare and any(not has_diverged(run.record) for run in finished(place, work.trials).values())
    }
    return sorted(there)


def to_json(found: Reproduction) -> dict[str, Any]:
    """The results, with the command that makes them; not what the table's file says of the paper and the setting."""
    work = found.work
    result: dict[str, Any] = {
        "headwater": __version__,
        "table": found.name,
        "answer": found.answer,
        "cannot_show": "" if work is None else work.cannot_show,
        "command": command(found),
        "columns": found.columns,
        "rows": [
            {"label": label, "cells": [{"paper": paper or None, "ours": asdict(one)} for paper, one in row]}
            for label, row in zip(found.rows, found.cells, strict=True)
        ],
        "claims": [asdict(one) | {"evidence": evidence(one)} for one in found.claims],
        "environment": environment("cpu").model_dump(),
    }
    if work is not None:
        result |= {
            "scale": work.scale,
            "overrides": list(work.overrides),
            "trials": str(work.trials),
            "runs": {name: sorted(place.seeds) for name, place in work.places.items() if place is not None},
        }
    return result
