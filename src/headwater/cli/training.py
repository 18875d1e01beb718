"""`headwater train`, `compare`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from headwater.cli.common import Overrides, err, out, progress_bars, quiet
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.compare import Trial


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shakespeare.yaml.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train one model as a recipe says."""
    from headwater.recipe import load_recipe
    from headwater.training.loop import train as run_training

    quiet()
    loaded = load_recipe(recipe, overrides or [])
    folder = run or Path("runs") / loaded.name
    progress = progress_bars()
    task = progress.add_task(loaded.name, total=loaded.training.steps, info="")

    def show(step: int, point) -> None:
        progress.start()  # at the first step: what is refused before leaves no bar behind
        progress.update(task, completed=step)
        if point is not None:
            progress.update(task, info=f"loss {point.loss:.4f}")

    try:
        record = run_training(loaded, folder, resume=resume, on_point=show)
    finally:
        if progress.live.is_started:
            progress.stop()
    result = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in record.held_out[-1].measures.items())
    out.print(f"{loaded.name}: held-out {result}")
    out.print(
        f"{record.parameters:,} parameters, {record.tokens:,} tokens at {record.tokens_per_second:,.0f} tokens/s, "
        f"{record.flops:.3g} FLOPs"
    )
    out.print(f"written to {folder}", soft_wrap=True)


def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes with a compare section, and dotted.key=value overrides.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write; default runs/<name of the first>.")
    ] = None,
) -> None:
    """Train the arms of recipes side by side, and report."""
    from headwater import compare as comparing
    from headwater import report as reporting
    from headwater.recipe import load_recipe

    quiet()
    overrides = [argument for argument in recipes if "=" in argument]
    loaded = [load_recipe(argument, overrides) for argument in recipes if "=" not in argument]
    if not loaded:
        raise HeadwaterError("Name at least one recipe.")
    folder = folder or Path("runs") / loaded[0].name
    failed = []
    for recipe in loaded:
        trials = comparing.trials_of(recipe, folder)
        with progress_bars() as progress:
            display = _TrialBars(progress, recipe.name, len(trials) * recipe.training.steps)
            outcomes = comparing.run_trials(trials, recipe.compare.workers if recipe.compare else None, display)
        failed += [outcome for outcome in outcomes if outcome.record is None]
    for outcome in failed:
        err.print(f"{outcome.trial.label} failed: {outcome.error}", soft_wrap=True, highlight=False)
    for comparison in reporting.comparisons(folder):
        out.print(reporting.table(comparison))
    page = reporting.write_report(folder)
    out.print(f"report: {page}", soft_wrap=True)
    if failed:
        raise HeadwaterError(f"{len(failed)} of the trials failed and are not in the tables.")


def report(folder: Annotated[Path, typer.Argument(help="A folder with run records.")]) -> None:
    """Write the report of a folder again, from its records."""
    from headwater import report as reporting

    for comparison in reporting.comparisons(folder):
        out.print(reporting.table(comparison))
    out.print(f"report: {reporting.write_report(folder)}", soft_wrap=True)


class _TrialBars:
    """One bar for a whole comparison and one for each trial that is running."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self.progress = progress
        self.whole = progress.add_task(name, total=steps, info="")
        self.done: dict[str, int] = {}
        self.bars: dict[str, TaskID] = {}

    def __call__(self, trial: Trial, step: int, status: str) -> None:
        label = trial.label
        self.done[label] = step
        self.progress.update(self.whole, completed=sum(self.done.values()))
        if status == "running" and label not in self.bars:
            self.bars[label] = self.progress.add_task(f"  {label}", total=trial.recipe.training.steps, info="")
        if label in self.bars:
            self.progress.update(self.bars[label], completed=step, visible=status == "running")
