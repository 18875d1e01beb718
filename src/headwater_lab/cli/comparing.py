"""`headwater compare`, `report`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import TaskID

from headwater.util import extras
from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.cli.common import (
    check_writable,
    mechanisms_of,
    recipe_of,
    say,
    split_overrides,
    stdout,
    tell,
    tell_runs,
)
from headwater_lab.cli.options import FolderPath, WorkerCount, exclude, need
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.comparison.pool import Outcome
    from headwater_lab.comparison.running import ArmKey
    from headwater_lab.comparison.trials import Job
    from headwater_lab.recipe.schema import Recipe


def compare(
    recipes: Sequence[str],
    *,
    out: FolderPath | None = None,
    workers: WorkerCount | None = None,
    arm: Sequence[str] = (),
    size: Sequence[str] = (),
    search: bool = False,
    mechanism: Sequence[str] = (),
    sequential: bool = False,
) -> None:
    """Train the arms of recipes side by side and write a report. Run it again to resume.

    recipes: Recipes with a compare section, and dotted.key=value overrides.
    out: Output folder; default: runs/<name of the first>.
    arm: Train only this arm and what it is compared with; repeatable. Default: all.
    size: Train only this size; repeatable. Default: all.
    search: Compare all combinations of mechanisms, and test the best on fresh seeds.
    mechanism: With --search: NAME, or "NAME={option: value}"; repeatable.
    sequential: Add seeds until each arm is decided, within compare.margin.
    """
    extras.check("compare")
    from headwater_lab.util.output_folder import occupied

    exclude("--search", "--arm", "--size", "--sequential")
    need("--search", "--mechanism")
    names, overrides = split_overrides(recipes)
    overrides += ["compare.sequential=true"] if sequential else []
    loaded = [recipe_of(name, overrides) for name in names]
    if not loaded:
        raise HeadwaterError("Name at least one recipe.")
    titles = [recipe.name for recipe in loaded]
    if repeated := next((title for title in titles if titles.count(title) > 1), None):
        raise HeadwaterError(
            f"Two of the recipes are named {repeated!r}, and their runs would share a folder; give each its own "
            "`name`, or compare them one by one with --out."
        )
    if search and len(loaded) > 1:
        raise HeadwaterError("--search takes one recipe; search them one by one.")
    parts = [_part(recipe, arm, size) if arm or size else None for recipe in loaded]
    folder = out or Path("runs") / titles[0]
    check_writable(folder, folder=True)
    with occupied(folder):
        failed = _search(loaded[0], mechanism, folder, workers) if search else _train(loaded, folder, workers, parts)
        show(folder)
        complain(failed)


def _part(recipe: Recipe, arms: Sequence[str], sizes: Sequence[str]) -> set[ArmKey] | None:
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


def _train(
    recipes: Sequence[Recipe], folder: Path, workers: int | None, parts: Sequence[Collection[ArmKey] | None] = (None,)
) -> list[Outcome]:
    """Train what the recipes compare, with progress bars; report diverged trials and return failed ones.

    parts: for each recipe the arms and sizes to train; None: all.
    """
    from headwater_lab.comparison import running

    failed = []
    for recipe, part in zip(recipes, parts, strict=True):
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
        tell(f"{labels[0]}{others} {what}: {why}")
    return [outcome for outcome in outcomes if outcome.record is None]


def complain(failed: list[Outcome]) -> None:
    if failed:
        raise HeadwaterError(f"{len(failed)} of the trials failed and are not in the tables.")


def _search(recipe: Recipe, mechanism: Sequence[str], folder: Path, workers: int | None) -> list[Outcome]:
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
    complain(_train([selection], folder, workers))
    best = best_arms(selection, folder)
    tell(f"chosen: {', '.join(best)}")
    return _train([final_recipe(selection, folder, best)], folder, workers)


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
            stdout.print(table)
        if (prices := prices_of(comparison)) is not None:
            stdout.print(terminal_prices(prices))
        stdout.print(words.answer(comparison))
        for line in words.left_out(comparison):
            say(line)
        stdout.print()
    say(f"report: {page}")
    if wrong := next((one.changed_data for one in found if one.changed_data), ""):
        raise HeadwaterError(wrong)


def report(folder: Path) -> None:
    """Write a folder's report again from its records.

    folder: A folder with run records.
    """
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
