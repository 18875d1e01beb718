"""`headwater train`, `runs`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import say, tell, tell_model
from headwater_lab.cli.options import LOOK, TRAIN, FolderPath, command, need
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import lined

if TYPE_CHECKING:
    from headwater_lab.training.records import RunRecord


@command(TRAIN, "train shakespeare training.steps=200 --out runs/mine")
def train_recipe(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    out: FolderPath | None = None,
    resume: bool = False,
    arm: str | None = None,
    size: str | None = None,
    stage: str | None = None,
    trunk: FolderPath | None = None,
) -> None:
    """Train the model of a recipe, stage by stage if it has stages, or one arm of its comparison.

    recipe: A recipe's file, or the name of one of `headwater list recipes`, e.g. shakespeare.
    overrides: Override a field of the recipe: dotted.key=value.
    out: The run's folder; default: runs/<name>.
    resume: Continue from the newest intact checkpoint.
    arm: Train this arm of the recipe's comparison.
    size: Use this size of the recipe's comparison.
    stage: Train only this stage of the recipe.
    trunk: Branch off this shorter run (training.schedule=wsd), where its decay begins.
    """
    from headwater_lab.api.training import train
    from headwater_lab.training.processes import is_first

    need("--arm", "--size")
    with ProgressReport() as report:
        run = train(
            recipe,
            out,
            overrides=overrides,
            resume=resume,
            arm=arm,
            size=size,
            stage=stage,
            trunk=trunk,
            watch=report,
        )
    if is_first():
        _print_record(run.record)
        tell_model(run.folder, run.model_folder)


def _print_record(record: RunRecord) -> None:
    """Print the result of a run, its domains and stages, and its cost."""
    measured = record.held_out[-1].metrics
    metrics = [metric for metric in measured if "/" not in metric] if record.domains else list(measured)
    result = ", ".join(f"{metric.replace('_', ' ')} {measured[metric]:.4f}" for metric in metrics)
    say(f"{record.name}: held-out {result}")
    for domain in record.domains:
        values = ", ".join(f"{metric.replace('_', ' ')} {measured[f'{metric}/{domain}']:.4f}" for metric in metrics)
        say(f"  {domain}: {values}")
    for stage in record.stages:
        say(
            f"  {stage.name}: {stage.parameters:,} parameters, {stage.steps:,} steps, {stage.tokens:,} {record.unit}, "
            f"{stage.flops:.3g} FLOPs (total {stage.total_flops:.3g}), "
            f"{record.metric.replace('_', ' ')} {stage.result:.4f}"
        )
    left_out = f", {record.skipped_steps} steps skipped" if record.skipped_steps else ""
    say(
        f"{record.parameters:,} parameters, {record.tokens:,} {record.unit} at {record.tokens_per_second:,.0f} "
        f"{record.unit}/s, {record.flops:.3g} FLOPs, "
        f"{record.data_wait_seconds / max(record.seconds, 1e-9):.1%} of the time waiting for data{left_out}"
    )


@command(LOOK, "runs")
def list_runs(folder: Path = Path("runs")) -> None:
    """List runs with their progress, status and best result.

    folder: Folder to search, at any depth.
    """
    from headwater_lab.training.journal import list_runs

    listed = list_runs(folder, tell)
    if not listed:
        raise HeadwaterError(f"There are no runs in {str(folder)!r}.")
    unit = " or ".join(sorted({run.record.unit for run in listed}, reverse=True))
    columns = ("run", "status", "step", unit, f"{unit}/s", "last", "best", "at step", "updated")
    table = lined(*columns, left=columns[:2])
    for run in listed:
        record, best = run.record, run.record.best
        metric = record.metric.replace("_", " ")
        table.add_row(
            str(run.folder.relative_to(folder)) if run.folder != folder else folder.name,
            run.status,
            f"{run.step:,} / {record.recipe['training']['steps']:,}",
            f"{record.tokens:,}",
            f"{record.tokens_per_second:,.0f}",
            "" if record.result is None else f"{record.result:.4f}",
            "" if best is None else f"{best.metrics[record.metric]:.4f} {metric}",
            "" if best is None else f"{best.step:,}",
            f"{datetime.fromtimestamp(run.updated):%Y-%m-%d %H:%M}",
        )
    say(table)
