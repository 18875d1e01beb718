"""What a table trains at a scale: its runs, their folders, which are missing; and training them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from headwater.models.load import reading
from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater.util.terminal import counted
from headwater_lab.comparison import OnChange, Outcome, compare, jobs_of, match_arms
from headwater_lab.comparison.prices import slug
from headwater_lab.papers.places import ASIDE, RESTORED, SizedArm, finished, named, of_law, places, short, trials_folder
from headwater_lab.papers.table import (
    Gains,
    PaperTable,
    ReferenceText,
    Scale,
    ScaleName,
    counts_steps,
    reads_models,
    table,
)
from headwater_lab.recipe.schema import Recipe, load_recipe
from headwater_lab.recipe.shipped import recipes_folder
from headwater_lab.training.loop import OnEvent
from headwater_lab.training.records import RECORD
from headwater_lab.training.stages import chain, train_stages
from headwater_lab.training.stages import finished as is_finished

# Called before training with a name and the total steps; returns the function that receives progress.
Comparing = Callable[[str, int], OnChange]
TrainingCallback = Callable[[str, int], OnEvent]
# How a table's seeds are added, written before they are.
PLAN = "sequential.json"


@dataclass(frozen=True)
class Work:
    """A table at a scale. overrides: the table's and the user's; trials: the folder of its runs; folder: its page's."""

    name: str
    table: PaperTable
    scale: ScaleName
    out: Path
    overrides: tuple[str, ...]
    recipes: list[tuple[Path, Recipe]]
    places: dict[ReferenceText, SizedArm | None]

    @property
    def at(self) -> Scale:
        return self.table.scales[self.scale]

    @property
    def trials(self) -> Path:
        tuned = any(recipe.compare is not None and recipe.compare.learning_rates for _, recipe in self.recipes)
        return trials_folder(self.out, self.scale, self.overrides, tuned)

    @property
    def folder(self) -> Path:
        name = slug(self.name)
        return self.out / self.scale / (f"{name}-{short(' '.join(self.own))}" if self.own else name)

    @property
    def own(self) -> tuple[str, ...]:
        """The overrides that are not the table's."""
        return self.overrides[len(self.at.overrides) :]

    @property
    def cannot_show(self) -> str:
        """Why its runs cannot show what the paper claims; "" if they may, or if overrides change the runs."""
        return "" if any(not one.startswith(ASIDE) for one in self.own) else self.at.cannot_show

    @property
    def trained(self) -> list[SizedArm]:
        """Every place once, and those of the baselines and sizes that a law needs."""
        there = [place for place in self.places.values() if place is not None]
        laws = [self.places[f"{claim.arm} @ {claim.size}"] for claim in self.table.claims if isinstance(claim, Gains)]
        there += [one for place in laws if place is not None for one in of_law(place)]
        found: dict[tuple[str, str, str | None], SizedArm] = {}
        for one in there:
            found.setdefault((one.recipe.name, one.arm, one.size), one)
        return list(found.values())

    def missing(self) -> list[tuple[SizedArm, int]]:
        """The missing runs; also those of which only the record is there, if the table looks into its models."""
        inside, found = reads_models(self.table), []
        for one in self.trained:
            there = {seed for seed, run in finished(one, self.trials).items() if not (inside and run.restored)}
            found += [(one, seed) for seed in sorted(set(one.seeds) - there)]
        return found

    def commands(self) -> list[str]:
        """Commands for the missing runs of recipes for several devices, which are not trained from here."""
        return [place.command(seed, self.trials, self.overrides) for place, seed in self.missing() if place.devices > 1]

    def left(self) -> str:
        """How many runs `commands` are for, as the beginning of a sentence; "" if none."""
        runs = len(self.commands())
        if not runs:
            return ""
        devices = max(place.devices for place, _ in self.missing())
        return f"{counted(runs, 'run')} of this table for {devices} devices cannot be trained by this"

    def check_tasks(self, task_files: Path | None) -> None:
        """Raise `HeadwaterError` if benchmarks are not available, before anything is trained."""
        from headwater_lab.papers.measures import tasks_of

        names = tasks_of(self.table)
        if names:
            from headwater_lab.evaluation.tasks import Tasks

            Tasks(names, task_files)

    def comparisons(self) -> list[tuple[Recipe, set[tuple[str, str | None]]]]:
        """Recipes with a comparison, and the arms to train."""
        found: dict[str, tuple[Recipe, set[tuple[str, str | None]]]] = {}
        for one in self.trained:
            if one.recipe.compare is not None and one.devices == 1:
                found.setdefault(one.recipe.name, (one.recipe, set()))[1].add((one.arm, one.size))
        return list(found.values())

    def chains(self) -> list[tuple[Recipe, int]]:
        """Recipes with only stages, and how many of these to train."""
        found: dict[str, tuple[Recipe, int]] = {}
        for one in self.trained:
            if one.recipe.compare is None and one.devices == 1:
                count = one.recipe.stage_names.index(one.arm) + 1
                found[one.recipe.name] = one.recipe, max(count, found.get(one.recipe.name, (None, 0))[1])
        return list(found.values())


def prepare(name: str, scale: ScaleName, out: Path, overrides: Sequence[str] = ()) -> Work:
    """A table's work at a scale with training. Raises `HeadwaterError` for unknown names and bad overrides."""
    of = table(name)
    at = of.scales[scale]
    if at.nothing:
        raise HeadwaterError(at.nothing)
    changes = (*at.overrides, *overrides)
    files = [recipes_folder() / path for path in at.recipes]
    recipes = [(file, _read(file, file.stat().st_mtime_ns, changes)) for file in files]
    for _, recipe in recipes:
        if recipe.compare is not None and recipe.compare.sequential:
            raise HeadwaterError(
                f"{name} is judged by all seeds of its arms, or with --sequential; leave out compare.sequential."
            )
    made = Work(name, of, scale, out, changes, recipes, places(of, scale, recipes))
    if counts_steps(of) and any(one.threshold is None for one in made.places.values() if one is not None):
        raise HeadwaterError(f"{name} counts the steps to compare.threshold, which has to be a number; pass one.")
    return made


@functools.lru_cache(maxsize=256)
def _read(file: Path, changed: int, overrides: tuple[str, ...]) -> Recipe:
    """Many tables share a recipe; `changed` identifies a rewritten file."""
    return match_arms(load_recipe(file, overrides))


def train(work: Work, workers: int | None, comparing: Comparing, training: TrainingCallback) -> list[Outcome]:
    """Train what is missing, if one device is enough; returns the outcomes of all trials of comparisons.

    Raises `HeadwaterError` as training does, and `Interrupted` after Ctrl-C; call it again to resume.
    """
    from headwater_lab.papers.kept import check_restored

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
        if recipe.name not in missing:
            continue
        steps = sum(job.steps for job in jobs_of(recipe, work.trials, only))
        outcomes += compare(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
    for recipe, count in work.chains():
        folder = work.trials / recipe.name
        for stage, (plain, place) in list(zip(recipe.stage_names, chain(recipe, folder), strict=True))[:count]:
            if not is_finished(plain, place):
                told = training(f"{recipe.name}, {stage}", plain.training.steps)
                train_stages(recipe, folder, resume=True, only=stage, on_event=told)
    return outcomes


def with_seeds(work: Work, more: int, most: int) -> Work:
    """The same with more seeds in every comparison, but at most `most`; they count on from the largest."""
    recipes = []
    for path, recipe in work.recipes:
        section = recipe.compare
        if section is not None and len(section.seeds) < most:
            taken = {*section.tuning_seeds} if section.learning_rates else set()
            further = (seed for seed in itertools.count(max(section.seeds) + 1) if seed not in taken)
            seeds = [*section.seeds, *itertools.islice(further, min(more, most - len(section.seeds)))]
            recipe = recipe.model_copy(update={"compare": section.model_copy(update={"seeds": seeds})})
        recipes.append((path, recipe))
    return replace(work, recipes=recipes, places=places(work.table, work.scale, recipes))


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
    """Raise `HeadwaterError` if the table's seeds are added until its claims are decided, see `train_sequentially`."""
    if (plan := begun(work)) is not None:
        raise HeadwaterError(
            f"{work.name} was begun with --sequential, whose verdicts these would replace; pass --sequential "
            f"--max-seeds {plan.max_seeds} to go on, or another --out."
        )


def train_sequentially(
    work: Work,
    workers: int | None,
    comparing: Comparing,
    training: TrainingCallback,
    max_seeds: int,
    task_files: Path | None = None,
    device: str = "cpu",
) -> tuple[list[Outcome], Work]:
    """Train the table, then one seed after the other of the arms whose claims are undecided; the work with those seeds.

    `claims.still_undecided` says which claims those are. A failed trial
    ends it; call it again to resume. Raises `HeadwaterError` for another maximum, or other first seeds, than it was
    begun with, since a change would break the error rate.
    """
    from headwater_lab.papers.claims import UntilDecided, still_undecided
    from headwater_lab.papers.kept import check_restored
    from headwater_lab.papers.measures import Runs

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
    outcomes = train(work, workers, comparing, training)
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
            steps = sum(job.steps for job in jobs_of(recipe, work.trials, only))
            outcomes += compare(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
    return outcomes, extended
