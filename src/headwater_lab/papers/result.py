"""A reproduced table: the paper's figures and ours, and the verdicts on its claims."""

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

from headwater import __version__
from headwater_lab.comparison.statistics import INCONCLUSIVE, is_too_wide
from headwater_lab.papers.claims import ClaimVerdict, Judged, judge_claims
from headwater_lab.papers.computing import COMPUTED
from headwater_lab.papers.measures import Runs
from headwater_lab.papers.table import Column, PaperTable, TableCell, find_table, list_measures
from headwater_lab.papers.work import Work
from headwater_lab.training.records import RunRecord
from headwater_lab.util.outputs import save_figure, write_json
from headwater_lab.util.terminal import Prose, Table, counted, lined

RESULT = "result.json"
# Verb forms after "one claim" and after several.
WORDS: dict[ClaimVerdict, tuple[str, str]] = {
    "replicates": ("replicates", "replicate"),
    "fails": ("fails", "fail"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
}
HUGE = 1e6
# Do not print estimates of more additional seeds than this.
MANY = 200


@dataclass(frozen=True)
class Ours:
    """Our result in a cell. value, spread: mean and standard deviation over the seeds."""

    text: str = ""
    value: float | None = None
    spread: float | None = None
    seeds: int = 0


@dataclass(frozen=True)
class Reproduction:
    """A table with the paper's figures and ours, and the verdicts on its claims.

    columns, rows: names as in the paper. cells: (the paper's figure, ours). work: None for a computed table, which has
    exact claims and may have a figure. records: of its runs.
    """

    name: str
    table: PaperTable
    columns: list[str]
    rows: list[str]
    cells: list[list[tuple[str, Ours]]]
    claims: Sequence[Judged]
    work: Work | None = None
    figure: Figure | None = None
    records: Sequence[RunRecord] = ()

    @property
    def machines(self) -> list[str]:
        """The machines that trained its runs, each with its version of PyTorch."""
        return sorted(set(map(describe_machine, self.records)))

    @property
    def answer(self) -> str:
        """A sentence on how many claims replicate, or the reason why none can be judged."""
        if self.work is not None and self.work.cannot_show:
            return f"Models of this size cannot show it, so no claim is judged: {self.work.cannot_show}"
        scale = "" if self.work is None else f" at {self.work.scale} scale"
        return count_verdicts([claim.verdict for claim in self.claims], scale)


def compute_table(name: str) -> Reproduction:
    """Compute a table that needs no training."""
    table = find_table(name)
    result = COMPUTED[table.computed]()
    cells = [[("", Ours(text)) for text in row[1:]] for row in result.rows]
    rows = [row[0] for row in result.rows]
    claims = [Judged(says, "replicates" if holds else "fails", why, counted=True) for says, why, holds in result.claims]
    return Reproduction(name, table, result.columns[1:], rows, cells, claims, None, result.figure)


def reproduce_table(work: Work, task_files: Path | None = None, device: str = "cpu") -> Reproduction:
    """Judge a table by its finished runs. Raises `HeadwaterError` if they lack a measure."""
    runs = Runs(work.table, work.arms, work.trials, task_files, device)
    table = work.table
    cells = [
        [
            (cell.paper or "", measure_cell(cell, column, runs))
            for column, cell in zip(table.columns, row.cells, strict=True)
        ]
        for row in table.rows
    ]
    words = work.settings.words
    columns = [add_names(column.name, words) for column in table.columns]
    rows = [add_names(row.label, words) if any(cell.arm for cell in row.cells) else row.label for row in table.rows]
    claims = [claim.model_copy(update={"says": use_names(claim.says, words)}) for claim in table.claims]
    judged = judge_claims([] if work.cannot_show else claims, runs)
    judged = [replace(claim, what=use_names(claim.what, words)) for claim in judged]
    records = [run.record for by_seed in runs.by_arm.values() for run in by_seed.values()]
    return Reproduction(work.name, table, columns, rows, cells, judged, work, records=records)


def describe_machine(record: RunRecord) -> str:
    """Name the processor or GPU of a run, and its version of PyTorch."""
    return f"{record.environment.device_name or 'a CPU'}, torch {record.environment.torch}"


def use_names(says: str, words: Mapping[str, str]) -> str:
    """Rewrite a claim with the names of the scale."""
    return _match_names(words).sub(lambda match: words[match[0]], says) if words else says


def add_names(label: str, words: Mapping[str, str]) -> str:
    """Add the scale's names to a row's or column's label, whose paper's names are of other sizes than our figures."""
    names = [words[name] for name in _match_names(words).findall(label)] if words else []
    return f"{label} (ours: {', '.join(names)})" if names else label


def _match_names(words: Mapping[str, str]) -> re.Pattern[str]:
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{pattern})(?!\w)")


def measure_cell(cell: TableCell, column: Column, runs: Runs) -> Ours:
    """Measure the cell's arm over its seeds."""
    arm, measure = cell.arm, cell.measure or column.measure
    if arm is None or not (runs_by_seed := runs.find_seeds(arm)):
        return Ours()
    if measure == "steps":
        return _write_steps(list(runs.count_steps(arm).values()))
    if measure == "diverged":
        lost = sum(runs.find_lost(arm, runs.unlearned).values())
        return Ours(f"{lost} of {len(runs_by_seed)}", float(lost), None, len(runs_by_seed))
    if measure == "saved":
        return _write_saved(arm, column, runs)
    values = runs.measure_seeds(measure, arm)
    for against, change in ((cell.minus, float.__sub__), (cell.over, lambda a, b: (a - b) / b)):
        if against is not None:
            base = runs.measure_seeds(measure, against)
            values = {seed: change(values[seed], base[seed]) for seed in sorted(values.keys() & base.keys())}
    lost = sum(run.record.has_diverged for run in runs_by_seed.values())
    note = f"diverged {lost} of {len(runs_by_seed)}" if lost else ""
    if not values:
        return Ours(note)
    mean = _write_mean([column.times * value for value in values.values()], column.digits)
    return replace(mean, text="; ".join(filter(None, (mean.text, note))))


def _write_mean(values: Sequence[float], digits: int) -> Ours:
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
    text = write_number(mean, digits) + ("" if spread is None else f" ± {write_number(spread, digits)}")
    return Ours(text, mean, spread, len(values))


def _write_steps(steps: Sequence[int | None]) -> Ours:
    reached = [n for n in steps if n is not None]
    if not reached:
        return Ours("never", None, None, len(steps))
    mean = _write_mean([float(n) for n in reached], 0)
    some = f" in {len(reached)} of {len(steps)}" if len(reached) < len(steps) else ""
    return replace(mean, text=f"{mean.text}{some}", seeds=len(steps))


def _write_saved(name: str, column: Column, runs: Runs) -> Ours:
    """Write 1 - N/N' of an arm with more = N'/N - 1."""
    equal_and_axis = runs.find_equivalent_size(name)
    if isinstance(equal_and_axis, str) or not math.isfinite(equal_and_axis[0].extra.value):
        return Ours()
    equal, _ = equal_and_axis
    saved = equal.extra.map_values(lambda more: column.times * (1 - 1 / (1 + more) if more > -1 else -math.inf))
    text = write_number(saved.value, column.digits)
    if saved.interval is not None:
        low, high = (write_number(end, column.digits) for end in saved.interval)
        text = INCONCLUSIVE if is_too_wide(equal.extra.interval, shift=1) else f"{text} [{low}, {high}]"
    return Ours(text if equal.inside else f"{text}; beyond the sizes", saved.value, None, equal.extra.freedom + 1)


def write_number(value: float, digits: int) -> str:
    return f"{value:.3g}" if abs(value) >= HUGE else f"{value:,.{digits}f}"


def describe_evidence(claim: Judged) -> str:
    """Describe the number that a claim was judged by."""
    if claim.estimate is None and claim.interval is None:
        return claim.why
    why = claim.why
    if claim.more is not None:
        seeds = f"about {counted(claim.more, 'more seed')}" if claim.more <= MANY else f"more than {MANY} more seeds"
        why += f"; {seeds} would settle it"
    return f"{claim.what}:{_write_estimate(claim)}" + (f"; {why}" if why else "")


def _write_estimate(claim: Judged) -> str:
    if claim.kind == "more" and claim.verdict == "inconclusive" and is_too_wide(claim.interval, shift=1):
        return f" {INCONCLUSIVE}"
    estimate = "" if claim.estimate is None else f" {_write_amount(claim.estimate, claim)}"
    ends = [_write_amount(end, claim) for end in claim.interval or ()]
    interval = f" [{', '.join(ends)}]" if ends else ""
    if claim.kind == "more" and interval:  # by a fitted law, and often beyond what it was fitted to
        interval, estimate = "", f"{interval}{estimate and f', estimate{estimate}'}"
    return f"{estimate}{interval}"


def _write_amount(value: float, claim: Judged) -> str:
    if claim.kind == "share":
        return f"{value:.0%}"
    if claim.kind == "more":
        return f"{value:+.1%}" if value < 10 else "∞" if math.isinf(value) else f"×{1 + value:.3g}"
    if abs(value) >= HUGE:
        return f"{value:+.3g}"
    low, high = claim.interval or (0.0, value)
    scale = abs(high - low) or abs(value) or 1.0
    return f"{value:+,.{max(0, 2 - math.floor(math.log10(scale)))}f}"


def count_verdicts(verdicts: Sequence[ClaimVerdict], where: str) -> str:
    """Write a sentence on how many claims replicate."""
    total, counts = len(verdicts), Counter(verdicts)
    if not total:
        return "No claim is judged."
    if total == 1:
        return f"The claim {WORDS[verdicts[0]][0]}{where}."
    if len(counts) == 1:
        return f"All {total} claims {WORDS[verdicts[0]][1]}{where}."
    clauses = [f"{counts[name]} {words[counts[name] > 1]}" for name, words in WORDS.items() if counts[name]]
    return f"Of {total} claims{where}, {', '.join(clauses)}."


def lay_out_cells(result: Reproduction) -> tuple[list[str], list[list[str]]]:
    """Lay out column names and rows, with the paper's columns only where it has any figures."""
    names, rows = [""], [[label] for label in result.rows]
    for index, name in enumerate(result.columns):
        column = [cells[index] for cells in result.cells]
        papers = any(paper for paper, _ in column)
        names += [f"{name}, paper", "ours"] if papers else [name]
        for row, (paper, our) in zip(rows, column, strict=True):
            row += [paper, our.text] if papers else [our.text]
    return names, rows


def terminal_tables(result: Reproduction) -> list[Table | Prose]:
    """Make the tables of the terminal: the results, and the claims."""
    lines = [f"{result.table.title}: {result.table.source}"]
    lines += describe_setting(result)
    names, rows = lay_out_cells(result)
    columns = ("verdict", "claim", "by")
    verdicts = [(claim.verdict, claim.says, describe_evidence(claim)) for claim in result.claims]
    claims = lined(*columns, rows=verdicts, left=columns, caption=claims_caption(result))
    return [
        Prose("\n".join(lines)),
        lined(*names, rows=rows),
        Prose(table_caption(result)),
        Prose(f"\n{result.answer}"),
        *([claims] if result.claims else []),
        *map(Prose, result.table.notes),
    ]


def describe_setting(result: Reproduction) -> list[str]:
    """List the setting, and the remarks on it, which are left out if overrides change it."""
    work = result.work
    if work is None:
        return []
    if not work.user_overrides:
        return [f"Scale {work.scale}; how the setting differs: {work.settings.setting}", *work.settings.remarks]
    but = f"Scale {work.scale}, and with {shlex.join(work.user_overrides)}, which may contradict the following"
    return [f"{but}: {work.settings.setting}"]


def table_caption(result: Reproduction) -> str:
    if result.work is None:
        return "Computed, not measured, so exact."
    seeds = sorted({our.seeds for row in result.cells for _, our in row if our.seeds})
    over = f"{seeds[0]} to {counted(seeds[-1])}" if seeds else "no run that finished"
    over = counted(seeds[0]) if len(seeds) == 1 else over
    laws = "; by a fitted law with its 95 % interval" if "saved" in list_measures(result.table) else ""
    printed = any(paper for row in result.cells for paper, _ in row)  # tables from the ledger belong to no paper
    figures, or_ = ("The paper's figures, and ours", ", or not given") if printed else ("Our figures", "")
    return f"{figures}: mean ± standard deviation over {over}{laws}. Empty: not trained at this scale{or_}."


def claims_caption(result: Reproduction) -> str:
    if result.work is None:
        return "Claims and results."
    return (
        "Claims, and the interval each is judged by: a claim replicates if the whole interval agrees with it, fails "
        "if none of it does, and is inconclusive otherwise. Differences are paired by seed (Student's t), shares of "
        "seeds have binomial intervals, and counts, such as FLOPs, are exact; the probability that any verdict of "
        "the table is wrong is at most 5 % (Holm). Other tables that share these runs are not taken into account."
    )


def reproduce_command(result: Reproduction) -> str:
    words = ["headwater", "reproduce", result.name]
    if result.work is not None:
        words += [*result.work.user_overrides, *(["--scale", result.work.scale] if result.work.scale != "cpu" else [])]
    return shlex.join(words)


def write_result(result: Reproduction, folder: Path) -> Path:
    """Write result.json into `folder`, and figure.png if there is a figure; returns the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, to_json(result))
    if result.figure is not None:
        save_figure(result.figure, folder / "figure.png", dpi=160)
    return folder / RESULT


def to_json(reproduced: Reproduction) -> dict[str, Any]:
    """Return the table, its results and the verdicts as data for JSON, with the command that makes them."""
    work, table = reproduced.work, reproduced.table
    about = {"paper": reproduced.name.partition("/")[0], "table": reproduced.name, "scale": work and work.scale}
    result: dict[str, Any] = {
        "headwater": __version__,
        **about,
        **table.model_dump(include={"title", "source", "says", "notes"}),
        "answer": reproduced.answer,
        "cannot_show": "" if work is None else work.cannot_show,
        "command": reproduce_command(reproduced),
        "columns": reproduced.columns,
        "rows": [
            {"label": label, "cells": [{"paper": paper or None, "ours": asdict(our)} for paper, our in row]}
            for label, row in zip(reproduced.rows, reproduced.cells, strict=True)
        ],
        "claims": [
            about | {"number": number} | asdict(claim) | {"evidence": describe_evidence(claim)}
            for number, claim in enumerate(reproduced.claims, 1)
        ],
    }
    if work is not None:
        result |= {
            **work.settings.model_dump(include={"setting", "remarks"}),
            "overrides": list(work.overrides),
            "trials": str(work.trials),
            "runs": {name: sorted(arm.seeds) for name, arm in work.arms.items() if arm is not None},
            "machines": reproduced.machines,
        }
    return result
