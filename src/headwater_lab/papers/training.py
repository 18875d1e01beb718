"""Training what a table needs: once, or with seeds added until its claims are decided."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from headwater.models.load import reading
from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.prices import slug
from headwater_lab.comparison.running import ArmKey, compare, jobs_of
from headwater_lab.papers.claims import UntilDecided, still_undecided
from headwater_lab.papers.kept import check_restored
from headwater_lab.papers.measures import Runs
from headwater_lab.papers.places import RESTORED, finished, named
from headwater_lab.papers.table import reads_models
from headwater_lab.papers.work import Work, with_seeds
from headwater_lab.recipe.schema import Recipe
from headwater_lab.training.records import RECORD
from headwater_lab.training.run_folder import OnEvent
from headwater_lab.training.stages import chain, train_stages
from headwater_lab.training.stages import finished as is_finished
from headwater_lab.util.terminal import counted

# Called before training with a name and the total steps; returns the function that receives progress.
Comparing = Callable[[str, int], OnChange]
TrainingCallback = Callable[[str, int], OnEvent]
# How a table's seeds are added, written before they are.
PLAN = "sequential.json"


def _train_missing(work: Work, workers: int | None, comparing: Comparing, training: TrainingCallback) -> list[Outcome]:
    """Train what is missing, if one device is enough; returns the outcomes of all trials of comparisons."""
    extras.check("compare")
    outcomes = []
    for one in work.trained if reads_models(work.table) else []:
        for run in finished(one, work.trials).values():
            if run.restored:  # its model is asked for, and not there
                (run.folder / RECORD).unlink()
                (run.folder / RESTORED).unlink()
    missing = {place.recipe.name for place, _ in work.missing()}
    if missing:
        check_restored(work)
    for recipe, only in work.comparisons():
        if recipe.name in missing:
            outcomes += _compare(recipe, work, workers, comparing, only)
    for recipe, count in work.chains():
        folder = work.trials / recipe.name
        for stage, (plain, place) in list(zip(recipe.stage_names, chain(recipe, folder), strict=True))[:count]:
            if not is_finished(plain, place):
                told = training(f"{recipe.name}, {stage}", plain.training.steps)
                train_stages(recipe, folder, resume=True, only=stage, on_event=told)
    return outcomes


class ClaimsPlan(BaseModel, extra="forbid", strict=True):
    """How a table's seeds are added. claims: what is tested, but for the words; seeds: the first ones of each
    comparison; thresholds: of each, by which steps are counted."""

    max_seeds: int
    claims: list[dict[str, Any]]
    seeds: dict[str, list[int]]
    thresholds: dict[str, float | Literal["baseline"] | None]


def plan_of(work: Work) -> Path:
    """The file of a table's `ClaimsPlan`: beside the runs, which other overrides share."""
    return work.trials / f"{slug(work.name)}-{PLAN}"


def begun(work: Work) -> ClaimsPlan | None:
    """The plan that a table was begun with. Raises `HeadwaterError` for a damaged one."""
    file = plan_of(work)
    if not file.is_file():
        return None
    with reading(f"The plan {str(file)!r}", "restore it, or use another --out"):
        return ClaimsPlan.model_validate_json(file.read_bytes())


def check_not_begun_otherwise(work: Work) -> None:
    """Raise `HeadwaterError` if the table's seeds are added until its claims are decided, see `train`."""
    if (plan := begun(work)) is not None:
        raise HeadwaterError(
            f"{work.name} was begun with --sequential, whose verdicts these would replace; pass --sequential "
            f"--max-seeds {plan.max_seeds} to go on, or another --out."
        )


def _begin(work: Work, max_seeds: int) -> None:
    """Write how a table's seeds are added. Raises `HeadwaterError` for another maximum, or other first seeds, than it
    was begun with, since a change would break the error rate.
    """
    sections = {recipe.name: recipe.compare for _, recipe in work.recipes if recipe.compare is not None}
    listed = {name: section.seeds for name, section in sections.items()}
    plan = ClaimsPlan(
        max_seeds=max_seeds,
        claims=[claim.model_dump(mode="json", exclude={"says", "said"}) for claim in work.table.claims],
        seeds=listed,
        thresholds={name: section.threshold for name, section in sections.items()},
    )
    if (seeds := max(map(len, listed.values()), default=0)) > max_seeds:
        raise HeadwaterError(
            f"{work.name} begins with {counted(seeds)}, more than --max-seeds {max_seeds}; allow at least that many."
        )
    earlier = begun(work)
    if earlier is not None and earlier != plan:
        first = "; ".join(", ".join(map(str, seeds)) for seeds in earlier.seeds.values())
        raise HeadwaterError(
            f"{work.name} was begun with at most {earlier.max_seeds} seeds, the seeds {first} first, and "
            f"{counted(len(earlier.claims), 'claim')}, with their margins and thresholds. The error rate holds only "
            f"for a plan made before the results; pass --max-seeds {earlier.max_seeds} without other seeds or "
            "thresholds, or another --out."
        )
    check_restored(work)
    plan_of(work).parent.mkdir(parents=True, exist_ok=True)
    replace_text(plan_of(work), plan.model_dump_json(indent=1) + "\n")


def train(
    work: Work,
    workers: int | None,
    comparing: Comparing,
    training: TrainingCallback,
    max_seeds: int | None = None,
    task_files: Path | None = None,
    device: str = "cpu",
) -> tuple[list[Outcome], Work]:
    """Train the table; with `max_seeds`, then one seed after the other of the arms whose claims are undecided.

    Returns the outcomes of all trials, and the work with those seeds. `claims.still_undecided` says which claims those
    are. A failed trial ends it; call it again to resume. Raises `HeadwaterError` as training does or for a table begun
    with another maximum, and `Interrupted` after Ctrl-C.
    """
    if max_seeds is None:
        check_not_begun_otherwise(work)
        return _train_missing(work, workers, comparing, training), work
    _begin(work, max_seeds)
    outcomes = _train_missing(work, workers, comparing, training)
    own = Runs(work.table, work.places, work.trials, task_files, device)
    until, more, extended = UntilDecided(own, max_seeds), 0, work
    while not work.cannot_show and all(outcome.record is not None for outcome in outcomes):
        runs = Runs(work.table, extended.places, work.trials, task_files, device).without_gaps(own)
        names = {name for claim in still_undecided(work.table.claims, runs, until) for name in named(claim)}
        if not names:
            break
        more += 1
        extended = with_seeds(work, more, max_seeds)
        asked = [place for name in names if (place := extended.places[name]) is not None]
        for recipe in {place.recipe.name: place.recipe for place in asked if place.recipe.compare}.values():
            only = {(place.arm, place.size) for place in asked if place.recipe.name == recipe.name}
            outcomes += _compare(recipe, work, workers, comparing, only)
    return outcomes, extended


def _compare(
    recipe: Recipe, work: Work, workers: int | None, comparing: Comparing, only: Collection[ArmKey] | None
) -> list[Outcome]:
    steps = sum(job.steps for job in jobs_of(recipe, work.trials, only))
    return compare(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
