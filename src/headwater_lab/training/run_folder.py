"""A run's folder: its contents and its lock.

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

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from headwater.models.load import WEIGHTS
from headwater.util.errors import HeadwaterError
from headwater.util.files import settle_path
from headwater_lab.training.checkpoints import FACTS, FOLDER, STAGES, find_newest_intact, list_checkpoints
from headwater_lab.training.processes import run_in_first
from headwater_lab.training.saving import remove_leftovers, withdraw_model
from headwater_lab.util.output_folder import LOCK, occupy_folder

if TYPE_CHECKING:  # reading runs does not need the trainer's packages
    from lightning_fabric import Fabric

METRICS, MARK = "metrics.jsonl", ".headwater"
# Folder of a changed model before the run begins, and afterwards.
CHANGED, START = ".start", "start"


@contextmanager
def lock_run(run: Path, nested: bool = False) -> Iterator[None]:
    """Lock a run's folder; nested: as `occupy_folder`. Raises `HeadwaterError` as `check_ours`."""
    check_ours(run)
    with occupy_folder(run, nested=nested):
        check_ours(run)  # again, since another process may have created something meanwhile
        yield


@contextmanager
def claim_folder(
    run: Path, resume: bool, fabric: Fabric, notice: Callable[[str], None], begin: Callable[[], Path] | None = None
) -> Iterator[Path | None]:
    """Lock the folder and yield the checkpoint to resume from (None to start fresh), in all processes.

    begin: writes the checkpoint to resume from into a folder without any.
    This removes nothing of an existing run: see `clear_log`. A refused run leaves nothing in the folder.
    Raises `HeadwaterError` if the folder holds anything but a run, if another process has locked it, if it holds a run
    and `resume` is false, or a model without checkpoints, or if nothing can be resumed.
    """
    lock = ExitStack()

    def claim() -> Path | None:
        lock.enter_context(lock_run(run))
        lock.callback(shutil.rmtree, run / CHANGED, ignore_errors=True)  # left by a run that never began
        mark_folder(run)
        if (run / STAGES).is_dir():
            raise HeadwaterError(f"{str(run)!r} already holds a run with stages; choose another --out (out=).")
        saved = list_checkpoints(run)
        if saved and not resume:
            raise HeadwaterError(
                f"{str(run)!r} already holds a run (its newest checkpoint is {saved[-1].name}); add --resume "
                "(resume=True) to continue it, or choose another --out (out=)."
            )
        if not saved and (run / WEIGHTS).is_file():
            raise HeadwaterError(
                f"{str(run)!r} holds a model without {FOLDER}/, which a new run would overwrite; copy them back "
                "to continue it, or choose another --out (out=)."
            )
        newest = find_newest_intact(run, notice)
        remove_leftovers(run)
        return begin() if newest is None and begin is not None else newest

    with lock:
        yield run_in_first(fabric, claim)


def mark_folder(run: Path) -> None:
    """Mark a folder as a run's. Raises `HeadwaterError` if it cannot be written."""
    try:
        (run / MARK).touch()
    except OSError as error:
        raise HeadwaterError(f"The folder {str(run)!r} cannot be written: {error.strerror}.") from error


def check_ours(run: Path) -> None:
    """Raise `HeadwaterError` unless a folder can become a run's: missing, empty, or already a run's."""
    run = settle_path(run)
    try:
        if not os.path.lexists(run) or any(map(_is_ours, [run, *(run / STAGES).glob("*")])):
            return
        if run.is_dir() and {path.name for path in run.iterdir()} <= {LOCK}:  # empty, or a run that is just beginning
            return
        problem = "holds files that are not a run's" if run.is_dir() else "is not a folder"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise HeadwaterError(f"{str(run)!r} {problem}; choose a new or empty folder with --out.")


def _is_ours(folder: Path) -> bool:
    """Whether a folder has the mark of a run or stage, or a checkpoint: many tools that copy leave out hidden files."""
    return (folder / MARK).is_file() or any((path / FACTS).is_file() for path in list_checkpoints(folder))


def clear_log(run: Path) -> None:
    """Remove the log of an earlier run in the folder; called once the new run has everything it needs.

    The earlier one has no checkpoints.
    """
    withdraw_model(run)
    (run / METRICS).unlink(missing_ok=True)
    for leftover in (run / "tensorboard", run / START):
        if leftover.is_symlink():
            leftover.unlink()
        elif leftover.is_dir():
            shutil.rmtree(leftover)
    if (run / CHANGED).exists():
        (run / CHANGED).rename(run / START)


def is_running(run: Path) -> bool:
    """Whether a process is writing to the folder now."""
    if not (run / LOCK).exists():
        return False
    lock = FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # the lock is another user's, or the file system has none
        return False
    lock.release()
    return False
