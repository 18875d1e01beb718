"""A run's folder: who may write to it, and its log of points.

runs/NAME/
  record.json      the result, and the only thing reports read
  metrics.jsonl    curve, held-out metrics, speed and warnings, written as they occur
  checkpoints/     see training/checkpoint.py
  config.json, model.safetensors, …    the newest checkpoint's model; see training/model_folder.py
  start/           the model the run began with, if it was changed for it; see training/start.py
  tensorboard/     event files
  .headwater       marks the folder as a run's
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from lightning_fabric import Fabric

from headwater.util.errors import HeadwaterError
from headwater.util.files import read_bytes, replace_text, settled
from headwater.util.output_folder import LOCK, occupied
from headwater_lab.training.checkpoint import newest_whole, tidy
from headwater_lab.training.model_folder import withdraw_model
from headwater_lab.training.parallel import first
from headwater_lab.training.places import STAGES, checkpoints
from headwater_lab.training.records import (
    CurvePoint,
    HeldOutPoint,
    Notice,
    RunRecord,
    SpeedPoint,
    read_record,
    record_files,
)
from headwater_lab.training.start import KEPT, MADE

METRICS, MARK = "metrics.jsonl", ".headwater"
T = TypeVar("T")


@contextmanager
def claimed(run: Path, resume: bool, fabric: Fabric, notice: Callable[[str], None]) -> Iterator[Path | None]:
    """Lock the folder and yield the checkpoint to resume from (None to start fresh), in all processes.

    Nothing of an existing run is removed here: see `begun`. A run that is refused leaves nothing in the folder. Raises
    `HeadwaterError` if the folder holds anything but a run, if another process has locked it, if it holds a run and
    `resume` is false, or if nothing can be resumed.
    """
    lock = ExitStack()

    def claim() -> Path | None:
        check_ours(run)
        lock.enter_context(occupied(run, busy="run is writing to"))
        check_ours(run)  # another process may have been faster
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
    run = settled(run)
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
        self.torn = False
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
            which = ", ".join(map(str, damaged[:8])) + (f" and {len(damaged) - 8} more" if len(damaged) > 8 else "")
            what = "line" if len(damaged) == 1 else "lines"
            self.damage = f"{METRICS} is damaged: {what} {which} of {len(lines)} left out, all others are intact"
        if writes:
            self.rewrite()

    def rewrite(self) -> None:
        replace_text(self.file, "".join(map(_line, self.points)))

    def add(self, point: Point) -> None:
        if point in self.points[-8:]:  # a finished run is evaluated again, with the same result
            return
        self.points.append(point)
        if not self.writes:
            return
        # The next checkpoint reports a full disk; a missing line of the log is no reason to end a run.
        was_torn, self.torn = self.torn, True
        with suppress(OSError):
            if was_torn:  # an incomplete line may be there, which would run into this one
                self.rewrite()
            else:
                with self.file.open("a") as file:
                    file.write(_line(point))
            self.torn = False

    def of(self, kind: type[T]) -> list[T]:
        """All points of one kind, in order."""
        return [point for point in self.points if isinstance(point, kind)]


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
        best = self.record.best
        return {
            "folder": str(self.folder),
            "name": self.record.name,
            "status": self.status,
            "step": self.step,
            "steps": self.record.recipe["training"]["steps"],
            "unit": self.record.unit,
            "tokens": self.record.tokens,
            "tokens_per_second": _number(self.record.tokens_per_second),
            "metric": self.record.metric,
            "last": _number(self.record.result),
            "best": None if best is None else _number(best.metrics[self.record.metric]),
            "best_step": None if best is None else best.step,
            "skipped_steps": self.record.skipped_steps,
            "device": self.record.environment.device_name or self.record.environment.device,
            "compiled": self.record.environment.compiled,
            "attention": self.record.environment.attention,
            "error": self.record.error,
            "updated": self.updated,
        }


def _number(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def runs_in(folder: Path, tell: Callable[[str], None]) -> list[RunSummary]:
    """All runs below `folder`, the most recently changed first.

    tell: called with a sentence for each damaged or unreadable file. A run with such a record is left out.
    """
    found = []
    for file in record_files(folder, tell):
        run, metrics = file.parent, file.with_name(METRICS)
        try:
            record = read_record(file)
        except HeadwaterError as error:
            tell(str(error))
            continue
        try:
            points = Metrics(run, step=2**62, metric=record.metric, writes=False)
        except HeadwaterError as error:
            tell(str(error))
            points = None
        if points is not None and points.damage is not None:
            tell(f"{str(run)!r}: {points.damage}.")
        status = record.status
        alive = is_running(run)
        if points is not None and (alive or status == "running"):
            # The record is written at the start and at the end; in between, the points show the progress.
            record.held_out = points.of(HeldOutPoint)
            curve = points.of(CurvePoint)
            record.tokens = curve[-1].tokens if curve else record.tokens
            speed = points.of(SpeedPoint)
            if speed and speed[-1].tokens_per_second > 0:
                record.seconds = record.tokens / speed[-1].tokens_per_second
            record.curve = curve
        steps = [point.step for point in record.curve] + [point.step for point in record.held_out]
        updated = max(path.stat().st_mtime for path in (file, metrics) if path.exists())
        shown = "running" if alive else "interrupted" if status == "running" else status
        found.append(RunSummary(run, record, shown, max(steps, default=0), updated))
    return sorted(found, key=lambda one: -one.updated)
