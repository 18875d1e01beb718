"""`headwater reproduce`: train the models behind a paper's table or figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, device_of, say, split_overrides
from headwater_lab.cli.compare import check_failures
from headwater_lab.cli.options import TRAIN, DeviceName, FilePath, FolderPath, WorkerCount, command, refuse
from headwater_lab.cli.progress import ProgressReport

ScaleOption = Literal["cpu", "gpu", "paper"]
# Options that affect only training.
OF_TRAINING = ("--keep", "--task-files", "--workers", "--device")


@command(TRAIN, "reproduce kv-shifting/figure-1a")
def reproduce_table(
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
    no_train: bool = False,
) -> None:
    """Train the models behind a paper's table or figure, and judge its claims. Run it again to resume.

    arguments: A table, PAPER/TABLE, and dotted.key=value overrides of its recipes.
    scale: cpu: minutes to 1.6 hours on two cores; gpu: up to a day on one GPU; paper: the paper's own.
    list: List all tables, or one paper's, with the time that they take.
    out: Output folder for runs and results.
    task_files: Task files to use first, as in evaluate.
    device: Where to measure the models: auto, cpu or cuda. They are trained on training.device.
    records: Take finished runs from this file instead of training them.
    keep: Add the table's finished runs to this file, which may be the one of --records.
    no_train: Judge the named tables, or all, by the finished runs in --records, or else in --out; train nothing.
    """
    names, overrides = split_overrides(arguments)
    if list:
        refuse("with --list", *OF_TRAINING, "--records", "--no-train", "--scale", overrides=overrides)
        extras.check_extra("report")
        from headwater_lab.api.reproducing import list_tables

        say(list_tables(names, out))
        return
    if no_train:
        refuse("with --no-train", *OF_TRAINING)
        if records is not None:
            refuse("with --no-train and --records", "--out", overrides=overrides)
        _judge_runs(names, scale, out, overrides, records)
        return
    if len(names) != 1:
        raise HeadwaterError("Name one table, such as kv-shifting/figure-1a; `headwater reproduce --list` lists all.")
    (name,) = names
    if not _check_table(name, scale, overrides):
        return
    check_writable(out, folder=True)
    if keep is not None:
        check_writable(keep)
    from headwater_lab.api.reproducing import reproduce
    from headwater_lab.papers.result import terminal_tables

    with ProgressReport() as report:
        result = reproduce(
            name,
            scale,
            out,
            overrides=overrides,
            workers=workers,
            task_files=task_files,
            device=device_of(device),
            records=records,
            keep=keep,
            watch=report,
        )
    say(*terminal_tables(result.result))
    say(f"result: {result.save()}")
    if result.unfinished:
        raise HeadwaterError(result.unfinished)
    check_failures(result.failed)


def _check_table(name: str, scale: ScaleOption, overrides: Sequence[str]) -> bool:
    """Check whether a table is run at this scale, and print the reason if not. Refuses options that have no effect."""
    from headwater_lab.papers.table import SCALES, find_table

    table = find_table(name)
    if table.computed:
        where = f"for {name}, which is computed without training"
        refuse(where, *OF_TRAINING, "--scale", "--records", overrides=overrides)
        return True
    if why := table.scales[scale].nothing:
        refuse(f"for {name}, which is not run at {scale} scale", *OF_TRAINING, "--records", overrides=overrides)
        scales = " or ".join(option for option in SCALES if not table.scales[option].nothing)
        say(f"{name} is meaningless at {scale} scale and was not run: {why} Use --scale {scales}.")
        return False
    extras.check_extra("compare")
    from headwater_lab.papers.measures import tasks_of

    if not tasks_of(table):
        refuse(f"for {name}, which has no benchmarks", "--task-files")
    return True


def _judge_runs(
    names: Sequence[str], scale: ScaleOption, out: Path, overrides: Sequence[str], records: Path | None
) -> None:
    """Print the tables that have finished runs in a file, or else in the output folder, with their claims."""
    extras.check_extra("report")
    from headwater_lab.api.reproducing import choose_tables
    from headwater_lab.papers.kept import judge_recorded, judge_trained, read_runs
    from headwater_lab.papers.result import terminal_tables

    tables = choose_tables(names)
    if records is None:
        reproductions = judge_trained(tables, scale, out, overrides)
    else:
        reproductions = judge_recorded(tables, scale, read_runs(records))
    reproduction = None
    for reproduction in reproductions:
        say(*terminal_tables(reproduction), "")
    if reproduction is None:
        where = str(out if records is None else records)
        raise HeadwaterError(
            f"{where!r} has no run of these tables at {scale} scale with these settings; leave out --no-train to train "
            "them, or pass --records a file with their runs. A clone of headwater has ours in results/ledger.jsonl and "
            "results/papers.jsonl; results/verdicts-without-records.json has the verdicts whose runs were not stored."
        )
