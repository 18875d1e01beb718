"""The function `lab.reproduce` and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headwater.plugins import outside
from headwater.util.errors import HeadwaterError, either, shown
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, quiet
from headwater_lab.comparison.pool import Outcome
from headwater_lab.comparison.prices import slug
from headwater_lab.papers.result import Reproduction, computed, reproduction, texts, write
from headwater_lab.papers.table import SCALES
from headwater_lab.papers.table import table as table_of
from headwater_lab.papers.training import train
from headwater_lab.papers.work import prepare


@dataclass(frozen=True)
class Reproduced(Result):
    """A paper's table: its figures and ours, and its claims; `failed`: the trials that failed and are not in it."""

    result: Reproduction = field(repr=False)
    folder: Path
    failed: list[Outcome] = field(default_factory=list)

    def table(self) -> list[dict[str, Any]]:
        """A row for each of the paper's rows: its label, and for each column the paper's figure and ours, as text."""
        names, rows = texts(self.result)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def claims(self) -> list[tuple[str, str]]:
        """The paper's claims, and the verdicts."""
        return [(one.says if isinstance(one.says, str) else str(one.says), one.verdict) for one in self.result.claims]

    def report(self) -> Path:
        """Write the table's page, and return its path."""
        return write(self.result, self.folder)


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
    trust: Sequence[str] = (),
) -> Reproduced:
    """Train the models behind a paper's table or figure and judge its claims, like `headwater reproduce`.

    Call it again to resume. task_files: task files to use first; device: where to measure what the records lack.
    trust: as in `train`.
    Raises `HeadwaterError`, after training the rest, if runs need several devices: it names their commands.
    """
    outside.trust(trust)
    folder, files = local(out, "out"), None if task_files is None else local(task_files, "task_files")
    known = table_of(table)
    if scale not in SCALES:
        raise HeadwaterError(f"scale must be {either(SCALES)}, not {shown(scale)}.")
    if known.computed:
        if overrides:
            raise HeadwaterError(
                f"{table} is computed without training, so {overrides[0]!r} has no effect; leave it out."
            )
        return Reproduced(computed(table), folder / slug(table))
    work = prepare(table, scale, folder, overrides)
    work.check_tasks(files)
    failed = [outcome for outcome in train(work, workers, _silent, _silent) if outcome.record is None]
    if commands := work.commands():
        raise HeadwaterError(f"{work.left()} function: run {'; '.join(commands)}, then call it again.")
    if len(work.missing()) == sum(len(place.seeds) for place in work.trained):
        why = f": {failed[0].label} failed: {failed[0].error}" if failed else ""
        raise HeadwaterError(f"No run of {table} is finished{why.rstrip('.')}.")
    return Reproduced(reproduction(work, files, device), work.folder, failed)


def _silent(name: str, steps: int) -> Callable[..., None]:
    return lambda *_: None
