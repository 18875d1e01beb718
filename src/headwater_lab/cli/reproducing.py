"""`headwater reproduce`: train the models behind a paper's table or figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.cli.common import check_writable, device_of, say, split_overrides, stdout, tell
from headwater_lab.cli.comparing import TrialBars, complain, failures
from headwater_lab.cli.options import DeviceName, FilePath, FolderPath, WorkerCount, refuse
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.papers.result import Reproduction
    from headwater_lab.papers.table import PaperTable
    from headwater_lab.papers.work import Work
    from headwater_lab.training.loop import OnEvent

ScaleOption = Literal["cpu", "gpu", "paper"]
# What only training reads.
OF_TRAINING = ("--keep", "--task-files", "--workers", "--device")


def reproduce(
    arguments: Sequence[str] = (),
    *,
    scale: ScaleOption = "cpu",
    list: bool = False,
    out: FolderPath = Path("runs/reproduce"),
    workers: WorkerCount | None = None,
    task_files: Path | None = None,
    device: DeviceName = "auto",
    records: FilePath | None = None,
    keep: FilePath | None = None,
) -> None:
    """Train the models behind a paper's table or figure, and judge its claims. Run it again to resume.

    arguments: A table, PAPER/TABLE, and dotted.key=value overrides of its recipes.
    scale: cpu: minutes to an hour and a half on two cores; gpu: up to a day on one; paper: its own.
    list: List all tables, or those of one paper, with the time that they take.
    out: Output folder for runs and pages.
    task_files: Task files to use first, as in evaluate.
    records: Judge the named tables, or all, by the finished runs in this file; train nothing.
    keep: Take finished runs from this file instead of training them, and add those that are trained.
    """
    names, overrides = split_overrides(arguments)

    def refuse_training(where: str, *options: str) -> None:
        refuse(where, *OF_TRAINING, *options, overrides=overrides)

    if list:
        refuse_training("with --list", "--records", "--scale")
        _list(names, out)
        return
    if records is not None:
        refuse_training("with --records")
        _judge(records, names, scale)
        return
    from headwater_lab.comparison.prices import slug
    from headwater_lab.papers.table import SCALES
    from headwater_lab.papers.table import table as paper_table

    if len(names) != 1:
        raise HeadwaterError("Name one table, such as kv-shifting/figure-1a; `headwater reproduce --list` lists all.")
    (name,) = names
    table = paper_table(name)
    check_writable(out, folder=True)
    if table.computed:
        refuse_training(f"for {name}, which is computed without training", "--scale")
        from headwater_lab.papers.result import computed

        _show(computed(name), out / slug(name))
    elif why := table.scales[scale].nothing:
        refuse_training(f"for {name}, which is not run at {scale} scale")
        others = " or ".join(other for other in SCALES if not table.scales[other].nothing)
        say(f"{name} is meaningless at {scale} scale and was not run: {why} Use --scale {others}.")
    else:
        extras.check("compare")
        from headwater_lab.papers.work import prepare

        _train_table(prepare(name, scale, out, overrides), workers, task_files, device, keep)


def _train_table(work: Work, workers: int | None, task_files: Path | None, device: str, keep: Path | None) -> None:
    """Train a table's runs and print it."""
    from headwater_lab.papers.kept import keep as keep_runs
    from headwater_lab.papers.kept import restore
    from headwater_lab.papers.measures import tasks_of
    from headwater_lab.papers.result import reproduction
    from headwater_lab.papers.training import train

    if not tasks_of(work.table):
        refuse(f"for {work.name}, which has no benchmarks", "--task-files")
    work.check_tasks(task_files)
    device = device_of(device)
    if keep is not None:
        check_writable(keep)
        restore(keep, work, tell)
    tell(_cost(work))
    if work.cannot_show:
        tell("Models of this size cannot show what the table claims, so there will be no verdict.")
    try:
        with ProgressReport() as progress:

            def training(name: str, steps: int) -> OnEvent:
                return lambda step, point: progress.show(name, step, steps, unit="step")

            failed = failures(train(work, workers, partial(TrialBars, progress), training))
    finally:  # also of what was interrupted
        if keep is not None:
            keep_runs(keep, work, tell)
    left = work.commands()
    if len(work.missing()) < sum(len(arm.seeds) for arm in work.trained):
        _show(reproduction(work, task_files, device), work.folder)
    for line in left:
        say(line)
    if left:
        commands = "command" if len(left) == 1 else "commands"
        raise HeadwaterError(f"{work.left()} command: run the {commands} above, then this one again.")
    complain(failed)


def _show(result: Reproduction, folder: Path) -> None:
    from headwater_lab.papers.result import terminal, write

    for part in terminal(result):
        stdout.print(part)
    say(f"report: {write(result, folder)}")


def _cost(work: Work) -> str:
    """Print what will be trained, and its cost."""
    from headwater_lab.papers.price import price
    from headwater_lab.reports.words import counted

    missing = work.missing()
    whole = sum(len(place.seeds) for place in work.trained)
    if not missing:
        return f"all {whole} runs are finished"
    cost = price(work.trained, work.scale)
    there = f", {whole - len(missing)} of them finished" if len(missing) < whole else ""
    hours = f"about {duration(cost.hours)} of {cost.device}"
    return f"{counted(whole, 'run')}{there}; {cost.flops:.2g} FLOPs in total, {hours}"


def _chosen(papers: Sequence[str]) -> dict[str, PaperTable]:
    """All tables, or those of `papers`, each a paper or a table."""
    from headwater.util.errors import nearest
    from headwater_lab.papers.table import tables as paper_tables

    known = paper_tables()
    of = sorted({name.partition("/")[0] for name in known})
    for paper in papers:
        if paper not in of and paper not in known:
            raise HeadwaterError(f"There is no paper {paper!r}; {nearest(paper, of)}")
    chosen = {name for name in known if not papers or {name, name.partition("/")[0]} & {*papers}}
    return {name: table for name, table in known.items() if name in chosen}


def _judge(records: Path, names: Sequence[str], scale: ScaleOption) -> None:
    """Print the tables whose runs are in a file, with their claims."""
    from tempfile import TemporaryDirectory

    from headwater_lab.papers.kept import recorded
    from headwater_lab.papers.result import terminal

    extras.check("compare")
    reproduction = None
    with TemporaryDirectory() as folder:
        for number, reproduction in enumerate(recorded(_chosen(names), scale, records, Path(folder))):
            if number:
                stdout.print()
            for part in terminal(reproduction):
                stdout.print(part)
    if reproduction is None:
        raise HeadwaterError(f"{str(records)!r} has no run of these tables at {scale} scale with their settings.")


def _list(papers: Sequence[str], folder: Path) -> None:
    """Print the tables of `papers`; default: all."""
    from headwater.util.terminal import lined
    from headwater_lab.papers.price import price
    from headwater_lab.papers.table import SCALES
    from headwater_lab.papers.work import prepare

    caption = (
        "Time for all runs of one table, from the FLOPs that `headwater plan` counts: on two idle cores at 4·10¹⁰ "
        "FLOP/s each and 40 ms a step (cpu), else on one H100 at an MFU of 0.4. Tables share runs. k/n: how many of "
        "its runs exist."
    )
    names = ("table", "title", *SCALES)
    listing = lined(*names, left=names, caption=caption)
    listing.columns[0].no_wrap = True
    for name, table in _chosen(papers).items():
        cells = ["computed", "", ""] if table.computed else []
        for scale, at in table.scales.items():
            if at.nothing:
                cells.append("nothing")
                continue
            work = prepare(name, scale, folder)
            runs = sum(len(place.seeds) for place in work.trained)
            time = duration(price(work.trained, scale).hours)
            note = "; cannot show it" if at.cannot_show else ""
            cells.append(f"{time}, {runs - len(work.missing())}/{runs}{note}")
        listing.add_row(name, table.title, *cells)
    stdout.print(listing)


def duration(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(60 * hours))} min"
    return f"{hours:,.1f} h" if hours < 10 else f"{hours:,.0f} h"
