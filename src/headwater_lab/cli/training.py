"""`headwater train`, `runs`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.util.errors import HeadwaterError, nearest
from headwater.util.terminal import lined
from headwater_lab.cli.common import check_outside, print_json, recipe_of, stdout, tell, tell_model
from headwater_lab.cli.options import AsJson, FolderPath, need
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.comparison.trials import Trial
    from headwater_lab.recipe.schema import Recipe
    from headwater_lab.training.records import RunRecord
    from headwater_lab.training.run_folder import Activity, Point


def train(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    out: FolderPath | None = None,
    resume: bool = False,
    arm: str | None = None,
    size: str | None = None,
    stage: str | None = None,
) -> None:
    """Train the model of a recipe, stage by stage if it has stages, or one arm of its comparison.

    recipe: A recipe's file, or the name of one of `headwater list recipes`, e.g. shakespeare.
    overrides: Override a field of the recipe: dotted.key=value.
    out: The run's folder; default: runs/<name>.
    resume: Continue from the newest intact checkpoint.
    arm: Train this arm of the recipe's comparison.
    size: Use this size of the recipe's comparison.
    stage: Train only this stage of the recipe.
    """
    from headwater_lab.training.processes import is_first
    from headwater_lab.training.stages import chain

    need("--arm", "--size")
    loaded = recipe_of(recipe, overrides)
    folder, experiment = out or Path("runs") / loaded.name, None
    if arm is not None:
        trial = _trial_of(loaded, arm, size, overrides)
        loaded, folder, experiment = trial.recipe, out or trial.folder, trial.experiment
    if loaded.start is not None and not resume:
        check_outside(folder, loaded.start.checkpoint, around=True)
    record = trained_with_bar(loaded, folder, resume=resume, experiment=experiment, only=stage)
    if not is_first():
        return
    _print_record(loaded.name, record)
    stages = dict(zip(loaded.stage_names, (place for _, place in chain(loaded, folder)), strict=True))
    tell_model(folder, None if stage is None else stages[stage])


def _trial_of(recipe: Recipe, arm: str, size: str | None, overrides: Sequence[str]) -> Trial:
    """An arm of a recipe's comparison as a trial; tell which overrides it replaces."""
    from headwater_lab.comparison.trials import trial_of

    if recipe.compare is None or arm not in recipe.compare.arms:
        known = list(recipe.compare.arms) if recipe.compare else []
        raise HeadwaterError(f"{recipe.name!r} has no arm {arm!r}; {nearest(arm, known)}")
    trial = trial_of(recipe, arm, recipe.seed, Path("runs") / recipe.name, size)
    for key in (text.partition("=")[0] for text in overrides):
        asked = _at(recipe, key)
        if not isinstance(asked, dict) and asked != _at(trial.recipe, key):  # a section is merged, not replaced
            by = f"the arm {arm!r}" if size is None else f"the arm {arm!r} or the size {size!r}"
            tell(f"{key} has no effect, because {by} sets it; change it in the recipe's compare section.")
    return trial


def _print_record(name: str, record: RunRecord) -> None:
    """Print the result of a run, its domains and stages, and its cost."""
    last = record.held_out[-1].metrics
    metrics = [metric for metric in last if "/" not in metric] if record.domains else list(last)
    result = ", ".join(f"{metric.replace('_', ' ')} {last[metric]:.4f}" for metric in metrics)
    stdout.print(f"{name}: held-out {result}")
    for domain in record.domains:
        own = ", ".join(f"{metric.replace('_', ' ')} {last[f'{metric}/{domain}']:.4f}" for metric in metrics)
        stdout.print(f"  {domain}: {own}")
    for one in record.stages:
        stdout.print(
            f"  {one.name}: {one.parameters:,} parameters, {one.steps:,} steps, {one.tokens:,} {record.unit}, "
            f"{one.flops:.3g} FLOPs (total {one.total_flops:.3g}), {record.metric.replace('_', ' ')} {one.result:.4f}"
        )
    left_out = f", {record.skipped_steps} steps skipped" if record.skipped_steps else ""
    stdout.print(
        f"{record.parameters:,} parameters, {record.tokens:,} {record.unit} at {record.tokens_per_second:,.0f} "
        f"{record.unit}/s, {record.flops:.3g} FLOPs, "
        f"{record.data_wait_seconds / max(record.seconds, 1e-9):.1%} of the time waiting for data{left_out}"
    )


def _at(recipe: Recipe, key: str) -> Any:
    """A recipe's value at a dotted key; None if there is none."""
    value: Any = recipe.model_dump(mode="json", exclude={"compare"})
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def trained_with_bar(recipe: Recipe, folder: Path, **options: Any) -> RunRecord:
    """Train a recipe's stages with a progress bar. options: what `train_stages` takes."""
    from headwater_lab.training.stages import chain, train_stages

    bar = _TrainingBar(recipe.name, sum(run.training.steps for run, _ in chain(recipe, folder)), recipe.unit)
    try:
        return train_stages(recipe, folder, on_event=bar, **options)
    finally:
        bar.progress.stop()


class _TrainingBar:
    """Progress of a run: steps, loss, speed, MFU, time left, with warnings above."""

    def __init__(self, name: str, steps: int, unit: str) -> None:
        self.name, self.steps, self.unit = name, steps, unit
        self.progress = ProgressReport()
        self.loss = self.speed = self.held_out = ""

    def __call__(self, step: int, point: Point | Activity | None) -> None:
        from headwater_lab.training.records import CurvePoint, HeldOutPoint, Notice, SpeedPoint
        from headwater_lab.training.run_folder import Activity

        if isinstance(point, Notice):
            tell(f"step {point.step}: {point.message}")
            return
        if isinstance(point, CurvePoint):
            self.loss = f"loss {point.loss:.4f}"
        elif isinstance(point, SpeedPoint):
            mfu = "" if point.mfu is None else f", MFU {point.mfu:.0%}"
            self.speed = f"{point.tokens_per_second:,.0f} {self.unit}/s{mfu}"
        elif isinstance(point, HeldOutPoint):
            name, value = next(iter(point.metrics.items()))
            self.held_out = f"held-out {name.replace('_', ' ')} {value:.4f}"
        activity = point.text if isinstance(point, Activity) else self.speed
        info = "  ".join(filter(None, (self.loss, self.held_out, activity)))
        self.progress.show(self.name, step, self.steps, unit="step", info=info)


def runs(folder: Path = Path("runs"), *, json: AsJson = False) -> None:
    """List runs with their progress, status and best result.

    folder: Folder to search, at any depth.
    """
    from headwater_lab.training.run_folder import runs_in

    found = runs_in(folder, tell)
    if not found:
        raise HeadwaterError(f"There are no runs in {str(folder)!r}.")
    if json:
        print_json([one.to_json() for one in found])
        return
    table = lined()
    unit = " or ".join(sorted({one.record.unit for one in found}, reverse=True))
    for title in ("run", "status", "step", unit, f"{unit}/s", "last", "best", "at step", "updated"):
        table.add_column(title, justify="left" if title in ("run", "status") else "right", no_wrap=title != "run")
    for one in found:
        record, best = one.record, one.record.best
        metric = record.metric.replace("_", " ")
        table.add_row(
            str(one.folder.relative_to(folder)) if one.folder != folder else folder.name,
            one.status,
            f"{one.step:,} / {record.recipe['training']['steps']:,}",
            f"{record.tokens:,}",
            f"{record.tokens_per_second:,.0f}",
            "" if record.result is None else f"{record.result:.4f}",
            "" if best is None else f"{best.metrics[record.metric]:.4f} {metric}",
            "" if best is None else f"{best.step:,}",
            f"{datetime.fromtimestamp(one.updated):%Y-%m-%d %H:%M}",
        )
    stdout.print(table)
