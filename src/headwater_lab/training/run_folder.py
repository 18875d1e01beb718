"""A run's folder: who may write to it, its log of points, and the journal through which a run reports.

runs/NAME/
  record.json      the result, and the only thing reports read
  metrics.jsonl    curve, held-out metrics, speed and warnings, written as they occur
  checkpoints/     see training/checkpoints.py, also for config.json, model.safetensors, …: the newest one's model
  start/           the model the run began with, if it was changed for it; see training/start.py
  stages/          of a run that has several; see training/stages.py
  tensorboard/     event files
  .headwater       marks the folder as a run's
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from lightning_fabric import Fabric

from headwater.cost.counts import cache_bytes_per_token, embedding_parameters, training_flops
from headwater.cost.hardware import peak_of
from headwater.models.compiling import is_compiled
from headwater.util.errors import HeadwaterError
from headwater.util.files import disk_problem, explain_disk_errors, read_bytes, replace_text, settle_path
from headwater_lab.data.base import Evaluation
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import STAGES, Progress, checkpoints, newest_whole, tidy, withdraw_model
from headwater_lab.training.processes import first
from headwater_lab.training.records import (
    CurvePoint,
    DocumentLoss,
    Event,
    Experiment,
    HeldOutPoint,
    Notice,
    RunRecord,
    SpeedPoint,
    environment,
    read_record,
    record_files,
    write_record,
)
from headwater_lab.training.start import KEPT, MADE, Setup, trained_event
from headwater_lab.util.model_kinds import unit_of
from headwater_lab.util.output_folder import LOCK, keep, occupied

METRICS, MARK = "metrics.jsonl", ".headwater"


@contextmanager
def locked(run: Path, nested: bool = False) -> Iterator[None]:
    """Lock a run's folder; nested: as `occupied`. Raises `HeadwaterError` as `check_ours`."""
    check_ours(run)
    with occupied(run, nested=nested):
        check_ours(run)  # another process may have been faster
        yield


@contextmanager
def claimed(run: Path, resume: bool, fabric: Fabric, notice: Callable[[str], None]) -> Iterator[Path | None]:
    """Lock the folder and yield the checkpoint to resume from (None to start fresh), in all processes.

    Nothing of an existing run is removed here: see `begun`. A run that is refused leaves nothing in the folder. Raises
    `HeadwaterError` if the folder holds anything but a run, if another process has locked it, if it holds a run and
    `resume` is false, or if nothing can be resumed.
    """
    lock = ExitStack()

    def claim() -> Path | None:
        lock.enter_context(locked(run))
        lock.callback(shutil.rmtree, run / MADE, ignore_errors=True)  # left by a run that never began
        mark(run)
        if (run / STAGES).is_dir():
            raise HeadwaterError(f"{str(run)!r} already holds a run with stages; choose another --out (out=).")
        saved = checkpoints(run)
        if saved and not resume:
            raise HeadwaterError(
                f"{str(run)!r} already holds a run (its newest checkpoint is {saved[-1].name}); add --resume "
                "(resume=True) to continue it, or choose another --out (out=)."
            )
        newest = newest_whole(run, notice)
        tidy(run)
        return newest

    with lock:
        yield first(fabric, claim)


def mark(run: Path) -> None:
    """Mark a folder as a run's. Raises `HeadwaterError` if it cannot be written."""
    try:
        (run / MARK).touch()
    except OSError as error:
        raise HeadwaterError(f"The folder {str(run)!r} cannot be written: {error.strerror}.") from error


def check_ours(run: Path) -> None:
    """Raise `HeadwaterError` unless a folder can be a run's: missing, empty, or already a run's."""
    run = settle_path(run)
    try:
        if not os.path.lexists(run) or (run.is_dir() and (is_run(run) or not any(run.iterdir()))):
            return
        what = "holds files that are not a run's" if run.is_dir() else "is no folder"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise HeadwaterError(f"{str(run)!r} {what}; choose a new or empty folder with --out.")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it, or one of its stages, is marked, or it holds the lock of a run that begins."""
    marked = [folder / MARK, *(folder / STAGES).glob(f"*/{MARK}")]
    return any(mark.is_file() for mark in marked) or [path.name for path in folder.iterdir()] == [LOCK]


def begun(run: Path) -> None:
    """Remove the log of an earlier run in the folder; called once the new run has everything it needs.

    The earlier one has no checkpoints.
    """
    withdraw_model(run)
    (run / METRICS).unlink(missing_ok=True)
    for leftover in (run / "tensorboard", run / KEPT):
        if leftover.is_symlink():
            leftover.unlink()
        elif leftover.is_dir():
            shutil.rmtree(leftover)
    if (run / MADE).exists():
        (run / MADE).rename(run / KEPT)


def is_running(run: Path) -> bool:
    """Whether a process is writing to the folder now."""
    if not (run / LOCK).exists():
        return False
    lock = FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # another user's, or a file system without locks
        return False
    lock.release()
    return False


Point = CurvePoint | HeldOutPoint | SpeedPoint | Notice


class Metrics:
    """The points of a run, in memory and in metrics.jsonl: one JSON object a line, {"kind": …, …}.

    damage: a description of damaged lines, whose points are missing; None if there are none.
    """

    def __init__(self, run: Path, step: int, metric: str, writes: bool = True) -> None:
        """Read the points up to `step`, and drop what a killed run wrote after its last checkpoint.

        metric: the deciding one, which every evaluation must have.
        writes: whether this process writes the file.
        Raises `HeadwaterError` if the file cannot be read at all.
        """
        self.file, self.writes = run / METRICS, writes
        self.points: list[Point] = []
        self.damage: str | None = None
        try:
            *lines, last = read_bytes(self.file).split(b"\n") if self.file.exists() else [b""]
        except OSError as error:
            raise HeadwaterError(f"{str(self.file)!r} cannot be read: {error.strerror}.") from error
        damaged = []
        # A killed process may leave an incomplete last line; its step is repeated.
        for number, line in enumerate(lines if _point(last) is None else [*lines, last], 1):
            point = _point(line)
            if point is None or (isinstance(point, HeldOutPoint) and metric not in point.metrics):
                damaged.append(number)
            elif point.step <= step:
                self.points.append(point)
        if damaged:
            self.damage = f"{METRICS} is damaged: line {damaged[0]} of {len(lines)}"
            self.damage += f" and {len(damaged) - 1} more are left out" if damaged[1:] else " is left out"
        if writes:
            replace_text(self.file, "".join(map(_line, self.points)))

    def add(self, point: Point) -> None:
        if point in self.points[-8:]:  # a finished run is evaluated again, with the same result
            return
        self.points.append(point)
        if not self.writes:
            return
        # The next checkpoint reports a full disk; a missing line of the log is no reason to end a run.
        with suppress(OSError), self.file.open("a") as file:
            file.write(_line(point))

    def fill(self, record: RunRecord) -> None:
        """Give the record all points, in order."""
        record.curve = [point for point in self.points if isinstance(point, CurvePoint)]
        record.held_out = [point for point in self.points if isinstance(point, HeldOutPoint)]
        record.speed = [point for point in self.points if isinstance(point, SpeedPoint)]
        record.notices = [point for point in self.points if isinstance(point, Notice)]


KINDS: dict[str, type[Point]] = {"curve": CurvePoint, "held_out": HeldOutPoint, "speed": SpeedPoint, "notice": Notice}


def _line(point: Point) -> str:
    kind = next(name for name, known in KINDS.items() if isinstance(point, known))
    return json.dumps({"kind": kind} | point.model_dump()) + "\n"


def _point(line: bytes) -> Point | None:
    """The point of a line; None if it is damaged."""
    try:
        values = json.loads(line.decode("utf-8"))
        return KINDS[values.pop("kind")](**values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class RunSummary:
    """A run, as read from its folder. status: "running" only while a process writes to it, else "interrupted"."""

    folder: Path
    record: RunRecord
    status: str
    step: int
    updated: float

    def to_json(self) -> dict[str, Any]:
        record, best, environment = self.record, self.record.best, self.record.environment
        return {
            "folder": str(self.folder),
            "name": record.name,
            "status": self.status,
            "step": self.step,
            "steps": record.recipe["training"]["steps"],
            "unit": record.unit,
            "tokens": record.tokens,
            "tokens_per_second": _number(record.tokens_per_second),
            "metric": record.metric,
            "last": _number(record.result),
            "best": None if best is None else _number(best.metrics[record.metric]),
            "best_step": None if best is None else best.step,
            "skipped_steps": record.skipped_steps,
            "device": environment.device_name or environment.device,
            "compiled": environment.compiled,
            "attention": environment.attention,
            "error": record.error,
            "updated": self.updated,
        }


def _number(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def runs_in(folder: Path, tell: Callable[[str], None]) -> list[RunSummary]:
    """All runs below `folder`, the most recently changed first.

    tell: called with a sentence for each damaged or unreadable file. A run with such a record is left out.
    """
    summaries = []
    for file in record_files(folder, tell):
        try:
            record = read_record(file)
        except HeadwaterError as error:
            tell(str(error))
            continue
        summaries.append(_summarize(file, record, tell))
    return sorted(summaries, key=lambda summary: -summary.updated)


def _summarize(file: Path, record: RunRecord, tell: Callable[[str], None]) -> RunSummary:
    """Summarize the run of a record, which is written at its start and at its end; in between, points show how far it
    is."""
    run = file.parent
    status = "running" if is_running(run) else "interrupted" if record.status == "running" else record.status
    try:
        points = Metrics(run, step=2**62, metric=record.metric, writes=False)
        if points.damage is not None:
            tell(f"{str(run)!r}: {points.damage}.")
        if "running" in (status, record.status):
            points.fill(record)
            record.tokens = record.curve[-1].tokens if record.curve else record.tokens
            if record.speed and record.speed[-1].tokens_per_second > 0:
                record.seconds = record.tokens / record.speed[-1].tokens_per_second
    except HeadwaterError as error:
        tell(str(error))
    steps = [point.step for point in record.curve] + [point.step for point in record.held_out]
    updated = max(path.stat().st_mtime for path in (file, run / METRICS) if path.exists())
    return RunSummary(run, record, status, max(steps, default=0), updated)


@contextmanager
def full_disk_told_once() -> Iterator[None]:
    """Stop TensorBoard's thread from printing a traceback when the disk is full: its caller gets the error too."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or disk_problem(args.exc_value) is None:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


class Activity(NamedTuple):
    """What a run does between steps, such as "evaluating, batch 7". The caller hears it; it is not recorded."""

    text: str


# Called with the step and an event: None after every step, a point of the curve, a warning, or what the run does now.
OnEvent = Callable[[int, Point | Activity | None], None]


class Journal:
    """Everything that a run reports goes through here. Only the first process writes."""

    def __init__(
        self,
        run: Setup,
        resumed: bool,
        experiment: Experiment | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.run, self.folder, self.progress, fabric = run, run.folder, run.progress, run.fabric
        recipe, is_first = run.recipe, fabric.global_rank == 0
        self.on_event = on_event if is_first else None
        self.to_tensorboard = True
        self.record = first(fabric, new_record, run, experiment)
        self.flops_per_unit = training_flops(run.config, run.data.context)
        if run.teacher is not None:
            self.flops_per_unit += run.teacher.flops
        on_gpu = fabric.device.type == "cuda"
        self.peak = peak_of(fabric.device, recipe.training.precision) if on_gpu else None
        self.last = replace(run.progress)  # at the last point of the curve
        if recipe.reporting.wandb is not None:
            first(fabric, start_wandb, recipe, self.folder, run.progress.run_id)
        with explain_disk_errors(self.unwritten):
            if not resumed:
                first(fabric, begun, self.folder)
            self.metrics = Metrics(self.folder, run.progress.step, run.data.metric, writes=is_first)
        if self.metrics.damage is not None:
            self.warn(f"{self.metrics.damage}.")
        for message in run.warnings:
            self.warn(message)
        self.write("running")
        first(fabric, keep, self.folder)

    @property
    def history(self) -> list[Event]:
        """What was done to the model, including this run."""
        run, progress = self.run, self.progress
        flops = self.flops_per_unit * progress.tokens
        own = trained_event(run.recipe, run.data, progress.step, progress.rows, progress.tokens, flops)
        return [*(run.beginning.origin.history if run.beginning else ()), own]

    def tell(self, point: Point) -> None:
        """Record a point, and pass it to the caller."""
        self.metrics.add(point)
        self.report(point.step, point)

    def report(self, step: int, event: Point | Activity | None) -> None:
        """Call the caller's `on_event`."""
        if self.on_event is not None:
            self.on_event(step, event)

    def warn(self, message: str, step: int | None = None) -> None:
        """Record a warning; step: the step it is about, by default the current one."""
        self.tell(Notice(step=self.progress.step if step is None else step, message=message))

    def announce(self, activity: str) -> None:
        """Tell the caller what the run does now; see `Activity`."""
        self.report(self.progress.step, Activity(activity))

    def curve(self, progress: Progress, learning_rate: float, norm: float) -> None:
        """A point of the curve: the mean loss, of steps up to this progress, and the speed since the previous one.

        progress: a copy from after its step, which may since have been followed by others.
        """
        running, step = self.run.running, progress.step
        steps = float(running["steps"])
        if steps:  # 0 if every step since then was skipped
            shown = {"loss": float(running["loss"]) / steps, "learning_rate": learning_rate, "gradient_norm": norm}
            flops = self.flops_per_unit * progress.tokens
            for total in running.values():
                total.zero_()
            self.tell(CurvePoint(step=step, tokens=progress.tokens, flops=flops, **shown))
            self.show(shown | {"skipped_steps": self.progress.skipped}, step)
        last, self.last = self.last, progress
        passed = max(progress.seconds - last.seconds, 1e-9)
        rate = (progress.tokens - last.tokens) / passed
        mfu = None if self.peak is None else rate * self.flops_per_unit / self.peak / self.run.fabric.world_size
        waited = (progress.waited - last.waited) / passed
        self.tell(SpeedPoint(step=step, tokens_per_second=rate, data_wait_fraction=waited, mfu=mfu))
        speeds = {f"{self.record.unit}_per_second": rate, "data_wait_fraction": waited, "mfu": mfu}
        if self.run.fabric.device.type == "cuda":
            speeds["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.run.fabric.device) / 1e9
        self.show({name: value for name, value in speeds.items() if value is not None}, step)

    def held_out(self, evaluation: Evaluation) -> None:
        """Record the held-out metrics at this step."""
        progress, metrics = self.progress, evaluation.metrics
        flops = self.flops_per_unit * progress.tokens
        self.tell(HeldOutPoint(step=progress.step, tokens=progress.tokens, flops=flops, metrics=metrics))
        self.show({f"held_out/{name}": value for name, value in metrics.items()}, progress.step)
        self.record.documents = [DocumentLoss(**document) for document in evaluation.documents]

    def show(self, values: dict[str, Any], step: int) -> None:
        """Pass the numbers of a step to TensorBoard until it fails to write them; metrics.jsonl has them too."""
        try:
            if self.to_tensorboard:
                self.run.fabric.log_dict(values, step=step)
        except Exception as error:
            # The logger wraps the disk's error in its own.
            if (problem := disk_problem(error) or disk_problem(error.__cause__ or error)) is None:
                raise
            self.to_tensorboard = False
            self.warn(f"TensorBoard's files cannot be written ({problem}); the run continues without them.")

    def write(self, status: str, error: Exception | None = None) -> None:
        """Update record.json. Raises `HeadwaterError` if it cannot be written."""
        record, progress = self.record, self.progress
        record.status = status  # type: ignore[assignment]
        record.error = record.error if error is None else str(error)
        record.tokens, record.flops = progress.tokens, self.flops_per_unit * progress.tokens
        record.seconds, record.data_wait_seconds = progress.seconds, progress.waited
        record.skipped_steps, record.data_order = progress.skipped, progress.order
        self.metrics.fill(record)
        if self.run.fabric.global_rank == 0:
            with explain_disk_errors(self.unwritten):
                write_record(record, self.folder)

    def unwritten(self, problem: str) -> str:
        return f"The run's files in {str(self.folder)!r} cannot be written: {problem}; then continue with --resume."


def new_record(run: Setup, experiment: Experiment | None) -> RunRecord:
    """The record of a run before its first step."""
    recipe, data, config, fabric = run.recipe, run.data, run.config, run.fabric
    return RunRecord(
        name=recipe.name,
        experiment=experiment,
        origin=None if run.beginning is None else run.beginning.origin,
        seed=recipe.seed,
        status="running",
        recipe=recipe.model_dump(mode="json"),
        identity=recipe.identity,
        data=data.description,
        metric=data.metric,
        lower_is_better=data.lower_is_better,
        parameters=run.model.num_parameters(),
        embedding_parameters=embedding_parameters(config),
        cache_bytes_per_token=cache_bytes_per_token(config),
        unit=unit_of(config),
        tokens=0,
        flops=0.0,
        seconds=0.0,
        environment=environment(
            str(fabric.device), fabric.world_size, is_compiled(run.model), config._attn_implementation
        ),
    )


def start_wandb(recipe: Recipe, folder: Path, run_id: str) -> None:
    """Weights & Biases syncs the TensorBoard files, so there is one way of logging. Raises `HeadwaterError`."""
    import wandb

    try:
        wandb.init(
            project=recipe.reporting.wandb,
            name=recipe.name,
            id=run_id,  # a resumed run continues its curve
            resume="allow",
            dir=folder,
            config=recipe.model_dump(mode="json"),
            sync_tensorboard=True,
        )
    except wandb.Error as error:
        raise HeadwaterError(f"Weights & Biases refused reporting.wandb={recipe.reporting.wandb!r}: {error}") from error
