"""The function `lab.train` and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.models.kinds import AnyModel
from headwater.plugins import outside
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, quiet
from headwater_lab.recipe.schema import Recipe, read_recipe
from headwater_lab.training.checkpoints import load_model, newest_checkpoint
from headwater_lab.training.records import RunRecord
from headwater_lab.training.run_folder import OnEvent
from headwater_lab.training.stages import train_stages


@dataclass(frozen=True)
class Run(Result):
    """A run: its folder, and its record (docs/records.md)."""

    folder: Path
    record: RunRecord = field(repr=False)

    def table(self) -> list[dict[str, Any]]:
        """A row per evaluation: the step, and every measure."""
        return [{"step": point.step, **point.metrics} for point in self.record.held_out]

    @quiet()
    def model(self) -> AnyModel:
        """The trained model."""
        return load_model(newest_checkpoint(self.folder))


@quiet()
def train(
    recipe: Recipe | Mapping[str, Any] | PathLike,
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    on_event: OnEvent | None = None,
    trust: Sequence[str] = (),
) -> Run:
    """Train the model of a recipe, stage by stage if it has stages, like `headwater train`.

    out: the run's folder; default: runs/NAME. resume: continue an interrupted run. on_event: called with (step, None)
    after each step, and with (step, point) for each new point of the record. trust: code from outside that checkpoints
    may name, "package.module" or "package.module:Class". Raises `HeadwaterError`.
    """
    outside.trust(trust)
    loaded = read_recipe(recipe, overrides)
    folder = local(out, "out") if out is not None else Path("runs") / loaded.name
    return Run(folder, train_stages(loaded, folder, resume=resume, on_event=on_event))
