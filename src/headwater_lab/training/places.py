"""Where a run's checkpoints are."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater.util.files import absence
from headwater_lab.training.records import RECORD, read_record

FOLDER, STAGES = "checkpoints", "stages"
_NAME = re.compile(r"step-(\d+)", re.ASCII)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run it names. Raises `HeadwaterError` if nothing is there."""
    if not path.is_dir():
        raise HeadwaterError(f"{absence(path, 'checkpoint folder')}; name a checkpoint's folder, or a run's.")
    if whole := checkpoints(path):
        return whole[-1]
    has_model = (path / "config.json").exists()
    if has_model and not (path / STAGES).is_dir():
        return path
    if (path / RECORD).is_file():
        record = read_record(path)
        if record.stages:
            last = path / record.stages[-1].folder
            if path.resolve() not in last.resolve().parents:
                raise HeadwaterError(f"The {RECORD} of {str(path)!r} names a stage outside of it: {str(last)!r}.")
            return newest_checkpoint(last)
        if has_model:
            return path
        why = "it diverged" if record.status == "diverged" else f"its status is {record.status!r}"
        raise HeadwaterError(f"The run {str(path)!r} has no checkpoint: {why}.")
    return path


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
