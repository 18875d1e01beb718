"""The function `lab.reproduce` and its result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headwater.plugins import outside
from headwater.util import extras
from headwater.util.errors import HeadwaterError, either, nearest, shown
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, quiet
from headwater_lab.api.comparing import tell_failures, watched_trials
from headwater_lab.api.observer import SILENT, Observer
from headwater_lab.comparison.pool import Outcome
from headwater_lab.comparison.trials import make_slug
from headwater_lab.papers.kept import judge_recorded, keep_runs, read_runs, restore_runs
from headwater_lab.papers.price import DEVICES, estimate_price
from headwater_lab.papers.result import (
    Reproduction,
    compute_table,
    lay_out_cells,
    reproduce_table,
    to_json,
    write_result,
)
from headwater_lab.papers.table import SCALES, VERDICTS, PaperTable, find_table, read_tables, reads_models
from headwater_lab.papers.training_runs import train_table
from headwater_lab.papers.work import Work, prepare_work
from headwater_lab.util.terminal import Table, counted, lined


@dataclass(frozen=True)
class Reproduced(Result):
    """A paper's table: its figures and ours, and its claims.

    failed: the trials that failed and are not included. unfinished: runs on several devices or of single
    stages, and their commands.
    """

    result: Reproduction = field(repr=False)
    folder: Path
    failed: list[Outcome] = field(default_factory=list)
    unfinished: str = ""

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each of the paper's: its label, and for each column the paper's figure and ours, as text."""
        names, rows = lay_out_cells(self.result)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def claims(self) -> list[tuple[str, str]]:
        """Return the paper's claims and the verdicts."""
        return [(claim.says, claim.verdict) for claim in self.result.claims]

    def save(self) -> Path:
        """Write result.json, and figure.png if the table has a figure; returns the path of the first."""
        return write_result(self.result, self.folder)


@quiet()
def reproduce(
    table: str,
    scale: Literal["cpu", "gpu", "paper"] = "cpu",
    out: PathLike = "runs/reproduce",
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    task_files: PathLike | None = None,
    device: str = "cpu",
    records: PathLike | None = None,
    keep: PathLike | None = None,
    watch: Observer = SILENT,
    trust: Sequence[str] = (),
) -> Reproduced:
    """Train the models behind a paper's table or figure and judge its claims, like `headwater reproduce`.

    Call it again to resume. task_files: task files to use first; device: where to measure what the records lack.
    records: take finished runs from this file instead of training them. keep: add the table's finished runs to this
    file, which may be the same. trust: as in `train`. Raises `HeadwaterError`, also if no run is finished.
    """
    outside.trust_names(trust)
    folder, files = local(out, "out"), None if task_files is None else local(task_files, "task_files")
    paper_table = find_table(table)
    if scale not in SCALES:
        raise HeadwaterError(f"scale must be {either(SCALES)}, not {shown(scale)}.")
    if paper_table.computed:
        if overrides:
            raise HeadwaterError(
                f"{table} is computed without training, so {overrides[0]!r} has no effect; leave it out."
            )
        return Reproduced(compute_table(table), folder / make_slug(table))
    extras.check_extra("compare")
    work = prepare_work(table, scale, folder, overrides)
    work.check_tasks(files)
    keep_file = None if keep is None else local(keep, "keep")
    if keep_file is not None and keep_file.exists():
        read_runs(keep_file)  # damage is found before there is work to lose
    if records is not None:
        restore_runs(local(records, "records"), work, watch.tell)
    if watch.listens:
        watch.tell(_describe_cost(work))
    if work.cannot_show:
        watch.tell("Models of this size cannot show what the table claims, so there will be no verdict.")
    try:
        trials = partial(watched_trials, watch=watch)
        failed = tell_failures(train_table(work, workers, trials), watch)
    finally:  # also of what was interrupted
        if keep_file is not None:
            keep_runs(keep_file, work, watch.tell)
    unfinished = _describe_unfinished(work, failed, watch)
    return Reproduced(reproduce_table(work, files, device), work.folder, failed, unfinished)


def _describe_unfinished(work: Work, failed: Sequence[Outcome], watch: Observer) -> str:
    """Name the runs on several devices and of single stages, whose commands are printed; "" if none.

    Raises `HeadwaterError` if no run is finished.
    """
    unfinished = ""
    if commands := work.list_commands():
        for command in commands:
            watch.say(command)
        which = "the commands above" if watch.listens else "; ".join(commands)
        unfinished = (
            f"{counted(len(commands), 'run')} of this table, on several devices or in stages, cannot be trained by "
            f"this command: run {which}, then this one again."
        )
    if len(work.list_missing()) == work.runs:
        why = f": {failed[0].label} failed: {failed[0].error}" if failed else ""
        raise HeadwaterError(unfinished or f"No run of {work.name} is finished{why.rstrip('.')}.")
    return unfinished


def _describe_cost(work: Work) -> str:
    """Describe the planned training and its cost."""
    missing = len(work.list_missing())
    if not missing:
        return f"all {work.runs} runs are finished"
    flops, hours = estimate_price(work.trained_arms, work.scale)
    finished = f", {work.runs - missing} of them finished" if missing < work.runs else ""
    return (
        f"{counted(work.runs, 'run')}{finished}; {flops:.2g} FLOPs in total, about {write_duration(hours)} of "
        f"{DEVICES[work.scale]}"
    )


def choose_tables(papers: Sequence[str]) -> dict[str, PaperTable]:
    """Choose all tables, or only `papers`, each a paper or a table."""
    tables = read_tables()
    names = sorted({name.partition("/")[0] for name in tables})
    for paper in papers:
        if "/" in paper:
            find_table(paper)
        elif paper not in names:
            raise HeadwaterError(f"There is no paper {paper!r}; {nearest(paper, names)}")
    return {name: table for name, table in tables.items() if not papers or {name, name.partition("/")[0]} & {*papers}}


def read_results(files: Sequence[PathLike], papers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Judge the papers' tables by the finished runs in files, without training, and return them as data for JSON.

    files: as `headwater reproduce --keep` writes them, such as results/papers.jsonl. papers: papers or tables; default:
    all. Each table is in the list once for each scale, or once if it is computed, as in result.json
    (`papers.result.to_json`) and with its `state`:

    - "judged" by the runs in the files; "computed" without any; "cannot show": its models are too small for a verdict,
    - "no runs" if the files have none; "needs models", which are not in the files; "not run": meaningless at this
      scale. Then it has no results: `why` says so, and `unjudged` lists the claims.

    Each claim has its paper, table and scale, its sentence (`says`), its verdict, the figures behind it, its number of
    seeds, and whether it is `counted`, an arithmetical identity, and not measured. Raises `HeadwaterError` for damaged
    files.
    """
    tables, results = choose_tables(papers), []
    runs = [run for file in files for run in read_runs(local(file, "files"))]
    judged = {
        (result.name, scale): to_json(result) for scale in SCALES for result in judge_recorded(tables, scale, runs)
    }
    for name, table in tables.items():
        if table.computed:
            results.append({"state": "computed", **to_json(compute_table(name))})
        for scale, settings in table.scales.items():
            if (result := judged.get((name, scale))) is not None:
                results.append({"state": "cannot show" if result["cannot_show"] else "judged", **result})
                continue
            state, why = "no runs", f"The records contain no run of it at {scale} scale."
            if settings.nothing:
                state, why = "not run", settings.nothing
            elif reads_models(table):
                state, why = "needs models", "It needs the models themselves, which records do not contain."
            about = {"paper": name.partition("/")[0], "table": name, "scale": scale, "why": why}
            about |= table.model_dump(include={"title", "source", "says", "notes"})
            results.append({"state": state, **about, "unjudged": [claim.says for claim in table.claims]})
    return results


def list_tables(papers: Sequence[str], folder: Path) -> Table:
    """List the tables of `papers` with the verdicts that headwater has come to; default: all."""
    caption = (
        "cpu, gpu, paper: --scale, with the time for all runs of one table, from the FLOPs that `headwater plan` "
        "counts: on two idle cores at 4·10¹⁰ FLOP/s each and 40 ms a step (cpu), else on one H100 at an MFU of 0.4. "
        f"Tables share runs. k/n: how many of its runs exist in {str(folder)!r}. Computed: needs no training. Nothing: "
        "means nothing at this scale and is not run. Cannot show it: models of this size cannot show the effect, so "
        "there is no verdict.\nVerdicts: the claims of this version's own runs at cpu scale (gpu: at gpu scale): "
        "+ replicates, − fails, ? inconclusive."
    )
    shipped = json.loads(VERDICTS.read_text())
    names = ("table", "title", *SCALES, "verdicts")
    listing = lined(*names, left=names, caption=caption)
    listing.columns[0].no_wrap = True
    for name, table in choose_tables(papers).items():
        cells = ["computed", "", ""] if table.computed else []
        for scale, settings in table.scales.items():
            if settings.nothing:
                cells.append("nothing")
                continue
            work = prepare_work(name, scale, folder)
            time = write_duration(estimate_price(work.trained_arms, scale)[1])
            note = "; cannot show it" if settings.cannot_show else ""
            cells.append(f"{time}, {work.runs - len(work.list_missing())}/{work.runs}{note}")
        listing.add_row(name, table.title, *cells, write_verdicts(shipped.get(name, {})))
    return listing


def write_verdicts(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Write the counts of verdicts at each scale, such as +2 −1 ?3; gpu +6."""
    signs = {"replicates": "+", "fails": "−", "inconclusive": "?"}
    texts = []
    for scale, verdicts in counts.items():
        text = " ".join(f"{sign}{verdicts[verdict]}" for verdict, sign in signs.items() if verdict in verdicts)
        texts.append(text if scale == "cpu" else f"{scale} {text}")
    return "; ".join(texts)


def write_duration(hours: float) -> str:
    """Hours as text, in minutes below one."""
    if hours < 1:
        return f"{max(1, round(60 * hours))} min"
    return f"{hours:,.1f} h" if hours < 10 else f"{hours:,.0f} h"
