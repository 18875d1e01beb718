"""The function `lab.reproduce` and its result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from rich.text import Text

from headwater.plugins.trust import trust_names
from headwater.util import extras
from headwater.util.errors import HeadwaterError, either, nearest, shown
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, quiet, write_html
from headwater_lab.api.comparing import tell_failures, watched_trials
from headwater_lab.api.observer import Observer, choose_observer
from headwater_lab.comparison.pool import Outcome
from headwater_lab.comparison.trials import make_slug
from headwater_lab.papers.arms import FIRST_NODE
from headwater_lab.papers.estimate import DEVICES, estimate_cost
from headwater_lab.papers.kept import keep_runs, read_runs, restore_runs
from headwater_lab.papers.result import (
    Reproduction,
    claims_caption,
    compute_table,
    lay_out_cells,
    reproduce_table,
    table_caption,
    write_result,
)
from headwater_lab.papers.table import SCALES, VERDICTS, PaperTable, find_table, read_tables
from headwater_lab.papers.work import Work, prepare_work, train_table
from headwater_lab.util.terminal import Table, counted, lined


@dataclass(frozen=True, repr=False)
class Reproduced(Result):
    """A paper's table: its figures and ours, and its claims.

    failed: the trials that failed and are not included. unfinished: runs on several devices or of single
    stages, and their commands.
    """

    result: Reproduction
    folder: Path
    failed: list[Outcome] = field(default_factory=list)
    unfinished: str = ""

    def table(self) -> list[dict[str, Any]]:
        """Return a row per cell of the table: the paper's figure, and our mean and standard deviation over seeds."""
        return [
            {
                "row": label,
                "column": column,
                "paper": _read_number(paper),
                "ours": _read_number(figure.text) if figure.value is None else figure.value,
                "sd": figure.spread,
                "seeds": figure.seeds,
            }
            for label, cells in zip(self.result.rows, self.result.cells, strict=True)
            for column, (paper, figure) in zip(self.result.columns, cells, strict=True)
        ]

    def text_table(self) -> list[dict[str, str]]:
        """Return a row for each of the paper's: its label, and for each column the paper's figure and ours, as text."""
        names, rows = lay_out_cells(self.result)
        unique = [f"{name}, {names[index - 1]}" if name == "ours" else name for index, name in enumerate(names)]
        return [dict(zip(unique, row, strict=True)) for row in rows]

    def picture(self) -> Figure:
        """Return the figure of a computed table. Raises `HeadwaterError` if it has none."""
        if self.result.figure is None:
            raise HeadwaterError(f"{self.result.name} has no figure; its table and claims are all there is.")
        return self.result.figure

    def __repr__(self) -> str:
        lines = [f"{self.result.name}: {self.result.table.title}", self.result.answer, self.unfinished]
        failures = f"{counted(len(self.failed), 'trial')} failed (.failed)." if self.failed else ""
        return "\n".join(filter(None, [*lines, failures]))

    def _repr_html_(self) -> str:
        claims = [{"claim": says, "verdict": verdict} for says, verdict in self.claims()]
        table = write_html(repr(self), self.text_table(), table_caption(self.result))
        return table + (write_html("", claims, claims_caption(self.result)) if claims else "")

    def claims(self) -> list[tuple[str, str]]:
        """Return the paper's claims and the verdicts."""
        return [(claim.says, claim.verdict) for claim in self.result.claims]

    def save(self) -> Path:
        """Write result.json, and figure.png if the table has a figure; returns the path of the first."""
        return write_result(self.result, self.folder)


def _read_number(text: str) -> float | None:
    """Read a number such as 1,024 or 30%; None for other text."""
    try:
        number = float(text.replace(",", "").removesuffix("%"))
        return number / 100 if text.endswith("%") else number
    except ValueError:
        return None


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
    watch: Observer | None = None,
    trust: Sequence[str] = (),
) -> Reproduced:
    """Train the models behind a paper's table or figure and judge its claims, like `headwater reproduce`.

    Call it again to resume. task_files: task files to use first; device: where to measure what the records lack;
    models are trained on `training.device`, each on one of the GPUs that the process sees.
    records: take finished runs from this file instead of training them. keep: add the table's finished runs to this
    file, which may be the same. trust: as in `train`. Raises `HeadwaterError`, also if no run is finished.
    """
    trust_names(trust)
    watch = choose_observer(watch)
    folder, files = local(out, "out"), None if task_files is None else local(task_files, "task_files")
    if index := device.partition(":")[2]:
        raise HeadwaterError(
            f"Training uses every GPU that it sees, not {device} alone; set CUDA_VISIBLE_DEVICES={index} instead."
        )
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
        read_runs(keep_file)  # find damage before training begins
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
            watch.say(Text(command))
        which = "the commands above" if watch.listens else "; ".join(commands)
        if any(FIRST_NODE in command for command in commands):
            which += f", on every node, with the first one's name for {FIRST_NODE}"
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
    flops, hours = estimate_cost(work.trained_arms, work.scale)
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
    for name, table in choose_tables(papers).items():
        cells = ["computed", "", ""] if table.computed else []
        for scale, settings in table.scales.items():
            if settings.nothing:
                cells.append("nothing")
                continue
            work = prepare_work(name, scale, folder)
            time = write_duration(estimate_cost(work.trained_arms, scale)[1])
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
