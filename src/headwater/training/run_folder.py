"""A run's folder: who may write to it, and its log of points.

runs/NAME/
  record.json      the result, and the only thing reports read
  metrics.jsonl    curve and held-out points as they are made
  checkpoints/     see training/checkpoint.py
  tensorboard/     event files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from headwater.errors import HeadwaterError
from headwater.records import CurvePoint, HeldOutPoint
from headwater.training.checkpoint import FOLDER, checkpoints

METRICS = "metrics.jsonl"


@contextmanager
def claimed(run: Path, resume: bool) -> Iterator[Path | None]:
    """Lock the folder and give the newest checkpoint to go on from (None to start fresh).

    Raises `HeadwaterError` if another process has the folder, if it holds a run and `resume` is not asked for.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwaterError(f"The folder {str(run)!r} cannot be made: {error.strerror}.") from error
    lock = FileLock(run / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise HeadwaterError(f"Another run is writing to {str(run)!r}; wait for it, or choose another --out.") from None
    try:
        whole = checkpoints(run)
        if whole and not resume:
            raise HeadwaterError(
                f"{str(run)!r} already holds a run (its newest checkpoint is {whole[-1].name}); add --resume to go on "
                "with it, or choose another --out."
            )
        for leftover in (run / FOLDER).glob(".writing-*"):
            shutil.rmtree(leftover)
        if not whole:
            (run / METRICS).unlink(missing_ok=True)
            shutil.rmtree(run / "tensorboard", ignore_errors=True)
        yield whole[-1] if whole else None
    finally:
        lock.release()


class Metrics:
    """The points of a run, in memory and in metrics.jsonl."""

    def __init__(self, run: Path, step: int) -> None:
        """Read what is there up to `step`, and forget what a killed run wrote after its last checkpoint."""
        self.file = run / METRICS
        self.curve: list[CurvePoint] = []
        self.held_out: list[HeldOutPoint] = []
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                try:
                    self._keep(json.loads(line), step)
                except ValueError:  # the last line of a killed run may be cut short
                    break
        beside = self.file.with_name(f".{METRICS}")
        points: list[CurvePoint | HeldOutPoint] = [*self.curve, *self.held_out]
        points.sort(key=lambda point: point.step)
        beside.write_text("".join(point.model_dump_json() + "\n" for point in points))
        beside.replace(self.file)

    def _keep(self, values: dict, step: int) -> None:
        if values["step"] > step:
            return
        if "measures" in values:
            self.held_out.append(HeldOutPoint(**values))
        else:
            self.curve.append(CurvePoint(**values))

    def add(self, point: CurvePoint | HeldOutPoint) -> None:
        kept: list = self.curve if isinstance(point, CurvePoint) else self.held_out
        if kept and kept[-1].step == point.step:
            return  # looked at again, with the same result
        kept.append(point)
        with self.file.open("a") as file:
            file.write(point.model_dump_json() + "\n")
