"""`headwater reproduce`: train the models behind a paper's table or figure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater.util.terminal import duration
from headwater_lab.cli.common import Device, check_writable, device_of, err, out, quiet, tell
from headwater_lab.cli.comparing import TrialBars, Workers, complain, failures
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.papers.result import Reproduction
    from headwater_lab.papers.table import PaperTable
    from headwater_lab.papers.work import Work

ScaleOption = Literal["cpu", "gpu", "paper"]


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PAPER/TABLE] [dotted.key=value]…",
            help="A table, and dotted.key=value overrides of its recipes.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        ScaleOption,
        typer.Option(help="cpu: minutes to an hour and a half on two cores; gpu: up to a day on one; paper: its own."),
    ] = "cpu",
    listing: Annotated[
        bool, typer.Option("--list", help="List all tables, or those of one paper, with the time that they take.")
    ] = False,
    folder: Annotated[Path, typer.Option("--out", file_okay=False, help="Output folder for runs and pages.")] = Path(
        "runs/reproduce"
    ),
    workers: Workers = None,
    task_files: Annotated[
        Path | None,
        typer.Option(help="Task files to use first, as in evaluate.", show_default=False),
    ] = None,
    device: Device = "auto",
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Add seeds until claims about mean differences are decided.")
    ] = False,
    max_seeds: Annotated[
        int | None,
        typer.Option(min=2, help="With --sequential: the maximum of seeds; default: 30.", show_default=False),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Judge the named tables, or all, by the finished runs in this file; train nothing.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Take finished runs from this file instead of training them, and add those that are trained.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train the models behind a paper's table or figure, and judge its claims. Run it again to resume."""
    names = [one for one in arguments or [] if "=" not in one]
    overrides = [one for one in arguments or [] if "=" in one]
    counting = {"--sequential": sequential, "--max-seeds": max_seeds}
    training = {
        **dict.fromkeys(overrides, True),
        "--keep": keep,
        "--task-files": task_files,
        "--workers": workers,
        "--device": device != "auto",
    }
    if listing:
        _refuse("with --list", training | counting | {"--records": records, "--scale": scale != "cpu"})
        _list(names, folder)
        return
    if not sequential:
        _refuse("without --sequential", {"--max-seeds": max_seeds})
    limit = (max_seeds or 30) if sequential else None
    if records is not None:
        _refuse("with --records", training)
        _judge(records, names, scale, limit)
        return
    training |= counting
    from headwater_lab.papers.table import SCALES
    from headwater_lab.papers.table import table as paper_table

    quiet()
    if len(names) != 1:
        raise HeadwaterError("Name one table, such as kv-shifting/figure-1a; `headwater reproduce --list` lists all.")
    table = paper_table(names[0])
    check_writable(folder, folder=True)
    if table.computed:
        _refuse(f"for {names[0]}, which is computed without training", training | {"--scale": scale != "cpu"})
        from headwater_lab.comparison.prices import slug
        from headwater_lab.papers.result import computed

        _show(computed(names[0]), folder / slug(names[0]))
        return
    if table.scales[scale].nothing:
        _refuse(f"for {names[0]}, which is not run at {scale} scale", training)
        others = [other for other in SCALES if not table.scales[other].nothing]
        why = f"{names[0]} is meaningless at {scale} scale and was not run: {table.scales[scale].nothing}"
        out.print(f"{why} Use --scale {' or '.join(others)}.", soft_wrap=True, markup=False, highlight=False)
        return
    extras.check("compare")
    from headwater_lab.papers.kept import keep as keep_runs
    from headwater_lab.papers.kept import restore
    from headwater_lab.papers.measures import tasks_of
    from headwater_lab.papers.result import reproduction
    from headwater_lab.papers.training import check_not_begun_otherwise
    from headwater_lab.papers.work import prepare

    if not tasks_of(table):
        _refuse(f"for {names[0]}, which has no benchmarks", {"--task-files": task_files})
    work = prepare(names[0], scale, folder, overrides)
    work.check_tasks(task_files)
    if not sequential:
        check_not_begun_otherwise(work)
    device = device_of(device)
    if keep is not None:
        check_writable(keep)
        restore(keep, work, tell)
    err.print(_cost(work), soft_wrap=True, highlight=False)
    if work.cannot_show:
        err.print("Models of this size cannot show what the table claims, so there will be no verdict.", soft_wrap=True)
    try:
        failed, trained = _train(work, workers, limit, task_files, device)
    finally:  # also of what was interrupted
        if keep is not None:
            keep_runs(keep, work, tell)
    left = work.commands()
    if len(work.missing()) < sum(len(place.seeds) for place in work.trained):
        until = None if limit is None else (work, limit)
        _show(reproduction(trained, task_files, device, until), work.folder)
    for line in left:
        out.print(line, soft_wrap=True, markup=False, highlight=False)
    if left:
        commands = "command" if len(left) == 1 else "commands"
        raise HeadwaterError(f"{work.left()} command: run the {commands} above, then this one again.")
    complain(failed)


def _refuse(where: str, options: Mapping[str, object]) -> None:
    """Raise `HeadwaterError` for the first option or override that is given and would not be read."""
    if unread := next((name for name, value in options.items() if value is not None and value is not False), None):
        raise HeadwaterError(f"{unread!r} has no effect {where}; leave it out.")


def _train(
    work: Work, workers: int | None, max_seeds: int | None, task_files: Path | None, device: str
) -> tuple[list, Work]:
    """The failed trials, and the work with all seeds."""
    from headwater_lab.papers.training import train as train_work
    from headwater_lab.papers.training import train_sequentially

    with ProgressReport() as progress:

        def training(name: str, steps: int):
            bar = progress.add_task(name, total=steps, unit="step")
            return lambda step, point: progress.update(bar, completed=step)

        comparing = partial(TrialBars, progress)
        if max_seeds is None:
            outcomes, trained = train_work(work, workers, comparing, training), work
        else:
            outcomes, trained = train_sequentially(work, workers, comparing, training, max_seeds, task_files, device)
    return failures(outcomes), trained


def _show(found: Reproduction, folder: Path) -> None:
    from headwater_lab.papers.result import terminal, write

    for part in terminal(found):
        out.print(part, highlight=False)
    out.print(f"report: {write(found, folder)}", soft_wrap=True)


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


def _chosen(papers: list[str]) -> dict[str, PaperTable]:
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


def _judge(records: Path, names: list[str], scale: ScaleOption, max_seeds: int | None) -> None:
    """Print the tables whose runs are in a file, with their claims."""
    from tempfile import TemporaryDirectory

    from headwater_lab.papers.kept import recorded
    from headwater_lab.papers.result import terminal

    extras.check("compare")
    reproduction = None
    with TemporaryDirectory() as folder:
        for number, reproduction in enumerate(recorded(_chosen(names), scale, records, Path(folder), max_seeds)):
            if number:
                out.print()
            for part in terminal(reproduction):
                out.print(part, highlight=False)
    if reproduction is None:
        raise HeadwaterError(f"{str(records)!r} has no run of these tables at {scale} scale with their settings.")


def _list(papers: list[str], folder: Path) -> None:
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
    out.print(listing, highlight=False)
