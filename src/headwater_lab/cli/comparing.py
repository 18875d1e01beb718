"""`headwater compare`, `report`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID

from headwater.util import extras
from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.cli.common import (
    MechanismOptions,
    check_writable,
    err,
    mechanisms_of,
    out,
    quiet,
    recipe_of,
    tell,
    tell_runs,
)
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.comparison.pool import Outcome
    from headwater_lab.comparison.running import ArmKey
    from headwater_lab.comparison.trials import Job
    from headwater_lab.recipe.schema import Recipe

Workers = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Trials at a time; default: one per GPU or core.", show_default=False),
]


def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes with a compare section, and dotted.key=value overrides.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="Output folder; default: runs/<name of the first>.")
    ] = None,
    workers: Workers = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Train only this arm and what it is compared with; repeatable. Default: all."),
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="Train only this size; repeatable. Default: all.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Compare all combinations of mechanisms, and test the best on fresh seeds.")
    ] = False,
    mechanism: MechanismOptions = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Add seeds until each arm is decided, within compare.margin.")
    ] = False,
) -> None:
    """Train the arms of recipes side by side and write a report. Run it again to resume."""
    extras.check("compare")
    from headwater.util.output_folder import occupied

    quiet()
    overrides = [argument for argument in recipes if "=" in argument]
    overrides += ["compare.sequential=true"] if sequential else []
    loaded = [recipe_of(argument, overrides) for argument in recipes if "=" not in argument]
    if not loaded:
        raise HeadwaterError("Name at least one recipe.")
    names = [one.name for one in loaded]
    if len(set(names)) < len(names):
        raise HeadwaterError(
            f"Two of the recipes are named {next(name for name in names if names.count(name) > 1)!r}, and their runs "
            "would share a folder; give each its own `name`, or compare them one by one with --out."
        )
    if mechanism and not search:
        raise HeadwaterError("--mechanism names what --search combines; add --search, or leave it out.")
    if search and (len(loaded) > 1 or arm or size or sequential):
        raise HeadwaterError("--search takes one recipe, without --arm, --size and --sequential.")
    only = [_part(recipe, arm or [], size or []) for recipe in loaded] if arm or size else None
    folder = folder or Path("runs") / loaded[0].name
    check_writable(folder, folder=True)
    with occupied(folder):
        if search:
            failed = _search(loaded[0], mechanism, folder, workers)
        else:
            failed = train_all(loaded, folder, workers, only)
        show(folder)
        complain(failed)


def _part(recipe: Recipe, arms: list[str], sizes: list[str]) -> set[ArmKey] | None:
    """These arms of a recipe with its baseline and budgets, at these sizes; None without a compare section."""
    section = recipe.compare
    if section is None:
        return None
    for what, names, known in (("arm", arms, section.arms), ("size", sizes, section.sizes)):
        for name in names:
            if what == "size" and not known:
                raise HeadwaterError(f"{recipe.name!r} compares at one size; leave out --size.")
            if name not in known:
                raise HeadwaterError(f"{recipe.name!r} has no {what} {name!r}; {nearest(name, known)}")
    untested = {section.baseline, *section.budget_arms}
    if section.sequential and arms and untested.issuperset(arms):
        raise HeadwaterError(f"{arms[0]!r} is what other arms are compared with; name an arm to decide with --arm.")
    chosen = {*untested, *arms} if arms else set(section.arms)
    return {(arm, size) for arm in chosen for size in sizes or section.sizes or [None]}


def train_all(
    recipes: Sequence[Recipe],
    folder: Path,
    workers: int | None = None,
    only: Sequence[Collection[ArmKey] | None] | None = None,
) -> list[Outcome]:
    """Train what the recipes compare, with progress bars; report diverged trials and return failed ones.

    only: for each recipe the arms and sizes to train; default: all.
    """
    extras.check("compare")
    from headwater_lab.comparison import running

    failed = []
    for recipe, part in zip(recipes, only or [None] * len(recipes), strict=True):
        tell_runs(recipe, None if part is None else len(part))
        steps = sum(job.steps for job in running.jobs_of(recipe, folder, part))
        with ProgressReport() as progress:
            bars = TrialBars(progress, recipe.name, steps)
            outcomes = running.compare(recipe, folder, workers, bars, part, tell)
        failed += failures(outcomes)
    return failed


def failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Print which trials diverged or failed, and why, once for each reason; return those that failed."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            what = "diverged" if outcome.record is not None else "failed"
            reasons.setdefault((what, outcome.error), []).append(outcome.label)
    for (what, why), labels in reasons.items():
        others = f", and {len(labels) - 1} more," if len(labels) > 1 else ""
        err.print(f"{labels[0]}{others} {what}: {why}", soft_wrap=True, highlight=False)
    return [outcome for outcome in outcomes if outcome.record is None]


def complain(failed: list[Outcome]) -> None:
    if failed:
        raise HeadwaterError(f"{len(failed)} of the trials failed and are not in the tables.")


def _search(recipe: Recipe, mechanism: list[str] | None, folder: Path, workers: int | None) -> list[Outcome]:
    """Train all combinations of the mechanisms, then the best again on fresh seeds; return the failed trials."""
    from headwater_lab.comparison.search import (
        FINAL_SEEDS,
        FINALISTS,
        VANILLA,
        best_arms,
        candidates,
        final_recipe,
        search_recipe,
    )
    from headwater_lab.reports.words import counted

    arms, refused = candidates(recipe, mechanisms_of(mechanism) if mechanism else None)
    for reason in dict.fromkeys(refused.values()):
        labels = [label for label, why in refused.items() if why == reason]
        more = f", and {len(labels) - 1} more" if len(labels) > 1 else ""
        tell(f"left out: {labels[0]}{more}: {reason}")
    selection = search_recipe(recipe, arms)
    tell(
        f"{len(arms) - 1} combinations and {VANILLA}; then a test of the best {FINALISTS} in "
        f"{counted((FINALISTS + 1) * len(FINAL_SEEDS), 'run')}"
    )
    complain(train_all([selection], folder, workers))
    best = best_arms(selection, folder)
    tell(f"chosen: {', '.join(best)}")
    return train_all([final_recipe(selection, folder, best)], folder, workers)


def show(folder: Path) -> None:
    """Print the tables of a folder's comparisons with a sentence each, and write the page.

    Raises `HeadwaterError` at the end if runs had different data, so that no verdict holds.
    """
    from headwater_lab.reports import comparisons, words, write_report
    from headwater_lab.reports.prices import prices_of, terminal_prices

    page = write_report(folder)  # before anything is printed, since the pipe may be closed
    found = comparisons(folder)
    for comparison in found:
        for table in words.tables(comparison):
            out.print(table)
        if (prices := prices_of(comparison)) is not None:
            out.print(terminal_prices(prices))
        out.print(words.answer(comparison), highlight=False, markup=False)
        for line in words.left_out(comparison):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        out.print()
    out.print(f"report: {page}", soft_wrap=True)
    if wrong := next((one.changed_data for one in found if one.changed_data), ""):
        raise HeadwaterError(wrong)


def report(folder: Annotated[Path, typer.Argument(help="A folder with run records.")]) -> None:
    """Write a folder's report again from its records."""
    extras.check("compare")
    show(folder)


class TrialBars:
    """A progress bar for the whole comparison and one for each running trial."""

    def __init__(self, progress: ProgressReport, name: str, steps: int) -> None:
        self.progress = progress
        self.whole = progress.add_task(name, total=steps, unit="step")
        self.done: dict[str, int] = {}
        self.bars: dict[str, TaskID] = {}

    def __call__(self, job: Job, step: int, status: str) -> None:
        label = f"{job.folder}"
        self.done[label] = step
        self.progress.update(self.whole, completed=sum(self.done.values()))
        if status == "running" and label not in self.bars:
            self.bars[label] = self.progress.add_task(f"  {job.label}", total=job.recipe.training.steps, unit="step")
        if label in self.bars:
            self.progress.update(self.bars[label], completed=step, visible=status == "running")
