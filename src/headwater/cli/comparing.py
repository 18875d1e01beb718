"""`headwater compare`, `search`, `report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import Progress, TaskID

from headwater.cli.common import (
    GoesOn,
    MechanismOptions,
    TrainingDevice,
    check_writable,
    err,
    mechanisms_of,
    out,
    progress_bars,
    quiet,
    recipe_of,
    tell,
)
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.compare import Job, Outcome
    from headwater.recipe import Recipe

Workers = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Trials at a time; default one per GPU or core.", show_default=False)
]


def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes with a compare section, and dotted.key=value overrides.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="Where to write; default runs/<name of the first>.")
    ] = None,
    workers: Workers = None,
    device: TrainingDevice = None,
    resume: GoesOn = False,
) -> None:
    """Train the arms of recipes side by side, and report. Run it again to continue."""
    quiet()
    overrides = [argument for argument in recipes if "=" in argument] + _on(device)
    loaded = [recipe_of(argument, overrides) for argument in recipes if "=" not in argument]
    if not loaded:
        raise HeadwaterError("Name at least one recipe.")
    folder = folder or Path("runs") / loaded[0].name
    check_writable(folder, folder=True)
    failed = train_all(loaded, folder, workers)
    show(folder)
    complain(failed)


def _on(device: str | None) -> list[str]:
    """--device as an override."""
    return [] if device is None else [f"training.device={json.dumps(device)}"]


def train_all(recipes: Sequence[Recipe], folder: Path, workers: int | None = None) -> list[Outcome]:
    """Train all that the recipes compare, with bars; returns the trials that failed, and tells of those diverged."""
    from headwater import extras

    extras.check("compare")
    import headwater.compare as comparing

    failed = []
    for recipe in recipes:
        steps = sum(job.steps for job in comparing.jobs_of(recipe, folder))
        with progress_bars() as progress:
            outcomes = comparing.compare(recipe, folder, workers, TrialBars(progress, recipe.name, steps))
        failed += failures(outcomes)
    return failed


def failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Say which trials diverged or failed, and why, once for each reason; returns those that failed."""
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


def search(
    recipe: Annotated[list[str], typer.Argument(help="A recipe: model, data, budget; and dotted.key=value overrides.")],
    mechanism: MechanismOptions = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", file_okay=False, help="Where to write; default runs/<name>-search.", show_default=False),
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=1, help="Most mechanisms in one combination.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for choosing.")] = 2,
    final: Annotated[int, typer.Option(min=1, help="Combinations to test at the end.")] = 2,
    final_seeds: Annotated[int, typer.Option(min=2, help="Seeds of that test, new ones.")] = 6,
    equal: Annotated[
        Literal["parameters", "tokens", "flops"],
        typer.Option(help="What all combinations have in common; flops only without halving."),
    ] = "parameters",
    rate: Annotated[
        list[float] | None,
        typer.Option("--learning-rate", help="Tune each combination's among these.", show_default=False),
    ] = None,
    halving: Annotated[bool, typer.Option(help="Give up trailing combinations early (successive halving).")] = True,
    factor: Annotated[int, typer.Option(min=2, help="One arm in this many continues.")] = 3,
    workers: Workers = None,
    device: TrainingDevice = None,
    resume: GoesOn = False,
) -> None:
    """Which combination of mechanisms is best at a recipe's budget: choose, then test the best on new seeds."""
    from headwater.compare.search import VANILLA, best_arms, candidates, final_recipe, search_recipe
    from headwater.papers.price import budget
    from headwater.recipe import Halving
    from headwater.report.words import counted

    quiet()
    paths = [argument for argument in recipe if "=" not in argument]
    if len(paths) != 1:
        raise HeadwaterError("Name one recipe; whatever else is given is dotted.key=value.")
    loaded = recipe_of(paths[0], [argument for argument in recipe if "=" in argument] + _on(device))
    arms, refused = candidates(loaded, mechanisms_of(mechanism) if mechanism else None, most)
    for why in dict.fromkeys(refused.values()):
        labels = [label for label, reason in refused.items() if reason == why]
        more = f", and {len(labels) - 1} more" if len(labels) > 1 else ""
        tell(f"left out: {labels[0]}{more}: {why}")
    chosen = search_recipe(loaded, arms, seeds, final, Halving(factor=factor) if halving else None, rate or [], equal)
    if loaded.compare is not None:
        tell("The recipe's compare section is not read: the arms are the combinations.")
    folder = folder or Path("runs") / chosen.name
    given_up = chosen.compare is not None and chosen.compare.halving is not None
    goes_on = f"one in {factor} continues at each rung" if given_up else "all are trained to the end"
    tell(f"{len(arms) - 1} combinations and {VANILLA}; {goes_on}")
    check_writable(folder, folder=True)
    cost = budget(chosen, workers, (final, final_seeds))
    tell(
        f"{counted(cost.runs, 'run')}, the test of the best included; at most {cost.tokens:,} tokens and "
        f"{cost.flops:.2g} FLOPs, about {duration(cost.hours)} of {cost.device}"
    )
    complain(train_all([chosen], folder, workers))
    best = best_arms(chosen, folder, final)
    tell(f"chosen: {', '.join(best)}")
    complain(train_all([final_recipe(chosen, folder, best, final_seeds)], folder, workers))
    show(folder)


def duration(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(60 * hours))} min"
    return f"{hours:,.1f} h" if hours < 10 else f"{hours:,.0f} h"


def show(folder: Path) -> None:
    """The tables of a folder's comparisons, what each says in a sentence, and the page."""
    from headwater import report as reporting

    page = reporting.write_report(folder)  # before anything is printed, perhaps for nobody
    for comparison in reporting.comparisons(folder):
        out.print(reporting.table(comparison))
        if (domains := reporting.domains_table(comparison)) is not None:
            out.print(domains)
        out.print(reporting.answer(comparison), highlight=False, markup=False)
        out.print()
    out.print(f"report: {page}", soft_wrap=True)


def report(folder: Annotated[Path, typer.Argument(help="A folder with run records.")]) -> None:
    """Write the report of a folder again, from its records."""
    show(folder)


class TrialBars:
    """One bar for a whole comparison and one for each trial that is running."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self.progress = progress
        self.whole = progress.add_task(name, total=steps, info="")
        self.done: dict[str, int] = {}
        self.bars: dict[str, TaskID] = {}

    def __call__(self, job: Job, step: int, status: str) -> None:
        label = f"{job.folder}"
        self.done[label] = step
        self.progress.update(self.whole, completed=sum(self.done.values()))
        if status == "running" and label not in self.bars:
            self.bars[label] = self.progress.add_task(f"  {job.label}", total=job.recipe.training.steps, info="")
        if label in self.bars:
            self.progress.update(self.bars[label], completed=step, visible=status == "running")
