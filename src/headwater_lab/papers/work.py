"""What a table trains at a scale: its runs, their folders, and which are missing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.trials import slug
from headwater_lab.evaluation.tasks import Tasks
from headwater_lab.papers.measures import tasks_of
from headwater_lab.papers.places import ASIDE, SizedArm, finished, of_law, places, short, trials_folder
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
from headwater_lab.recipe.loading import load_recipe
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.shipped import recipes_folder
from headwater_lab.util.terminal import counted


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
        if names := tasks_of(self.table):
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
            raise HeadwaterError(f"{name} is judged by all seeds of its arms; leave out compare.sequential.")
    made = Work(name, of, scale, out, changes, recipes, places(of, scale, recipes))
    if counts_steps(of) and any(one.threshold is None for one in made.places.values() if one is not None):
        raise HeadwaterError(f"{name} counts the steps to compare.threshold, which has to be a number; pass one.")
    return made


@functools.lru_cache(maxsize=256)
def _read(file: Path, changed: int, overrides: tuple[str, ...]) -> Recipe:
    """Many tables share a recipe; `changed` identifies a rewritten file."""
    return match_arms(load_recipe(file, overrides))
