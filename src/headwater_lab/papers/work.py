"""What a table trains at a scale: its runs, their folders, and which are missing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.trials import make_slug
from headwater_lab.evaluation.tasks import Tasks
from headwater_lab.papers.measures import tasks_of
from headwater_lab.papers.places import ASIDE, SizedArm, find_arms, finished_runs, law_arms, short_digest, trials_folder
from headwater_lab.papers.table import (
    Gains,
    PaperTable,
    ReferenceText,
    Scale,
    ScaleName,
    counts_steps,
    find_table,
    reads_models,
)
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import load_recipe, recipes_folder
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
        name = make_slug(self.name)
        return self.out / self.scale / (f"{name}-{short_digest(' '.join(self.own))}" if self.own else name)

    @property
    def own(self) -> tuple[str, ...]:
        """The overrides that are not the table's."""
        return self.overrides[len(self.at.overrides) :]

    @property
    def cannot_show(self) -> str:
        """Why its runs cannot show what the paper claims; "" if they may, or if overrides change the runs."""
        return "" if any(not override.startswith(ASIDE) for override in self.own) else self.at.cannot_show

    @property
    def trained(self) -> list[SizedArm]:
        """Every place once, and those of the baselines and sizes that a law needs."""
        arms = [arm for arm in self.places.values() if arm is not None]
        laws = [self.places[f"{claim.arm} @ {claim.size}"] for claim in self.table.claims if isinstance(claim, Gains)]
        arms += [member for arm in laws if arm is not None for member in law_arms(arm)]
        by_key: dict[tuple[str, str, str | None], SizedArm] = {}
        for arm in arms:
            by_key.setdefault((arm.recipe.name, arm.arm, arm.size), arm)
        return list(by_key.values())

    def missing(self) -> list[tuple[SizedArm, int]]:
        """The missing runs; also those of which only the record is there, if the table looks into its models."""
        inside, missing = reads_models(self.table), []
        for arm in self.trained:
            seeds = {seed for seed, run in finished_runs(arm, self.trials).items() if not (inside and run.restored)}
            missing += [(arm, seed) for seed in sorted(set(arm.seeds) - seeds)]
        return missing

    def commands(self) -> list[str]:
        """Commands for the missing runs of recipes for several devices, which are not trained from here."""
        return [arm.command(seed, self.trials, self.overrides) for arm, seed in self.missing() if arm.devices > 1]

    def left(self) -> str:
        """How many runs `commands` are for, as the beginning of a sentence; "" if none."""
        runs = len(self.commands())
        if not runs:
            return ""
        devices = max(arm.devices for arm, _ in self.missing())
        return f"{counted(runs, 'run')} of this table for {devices} devices cannot be trained by this"

    def check_tasks(self, task_files: Path | None) -> None:
        """Raise `HeadwaterError` if benchmarks are not available, before anything is trained."""
        if names := tasks_of(self.table):
            Tasks(names, task_files)

    def comparisons(self) -> list[tuple[Recipe, set[tuple[str, str | None]]]]:
        """Recipes with a comparison, and the arms to train."""
        by_name: dict[str, tuple[Recipe, set[tuple[str, str | None]]]] = {}
        for arm in self.trained:
            if arm.recipe.compare is not None and arm.devices == 1:
                by_name.setdefault(arm.recipe.name, (arm.recipe, set()))[1].add((arm.arm, arm.size))
        return list(by_name.values())

    def chains(self) -> list[tuple[Recipe, int]]:
        """Recipes with only stages, and how many of these to train."""
        by_name: dict[str, tuple[Recipe, int]] = {}
        for arm in self.trained:
            if arm.recipe.compare is None and arm.devices == 1:
                count = arm.recipe.stage_names.index(arm.arm) + 1
                by_name[arm.recipe.name] = arm.recipe, max(count, by_name.get(arm.recipe.name, (None, 0))[1])
        return list(by_name.values())


def prepare_work(name: str, scale: ScaleName, out: Path, overrides: Sequence[str] = ()) -> Work:
    """A table's work at a scale with training. Raises `HeadwaterError` for unknown names and bad overrides."""
    table = find_table(name)
    settings = table.scales[scale]
    if settings.nothing:
        raise HeadwaterError(settings.nothing)
    changes = (*settings.overrides, *overrides)
    files = [recipes_folder() / path for path in settings.recipes]
    recipes = [(file, _read_recipe(file, file.stat().st_mtime_ns, changes)) for file in files]
    for _, recipe in recipes:
        if recipe.compare is not None and recipe.compare.sequential:
            raise HeadwaterError(f"{name} is judged by all seeds of its arms; leave out compare.sequential.")
    work = Work(name, table, scale, out, changes, recipes, find_arms(table, scale, recipes))
    if counts_steps(table) and any(arm.threshold is None for arm in work.places.values() if arm is not None):
        raise HeadwaterError(f"{name} counts the steps to compare.threshold, which has to be a number; pass one.")
    return work


@functools.lru_cache(maxsize=256)
def _read_recipe(file: Path, changed: int, overrides: tuple[str, ...]) -> Recipe:
    """Many tables share a recipe; `changed` identifies a rewritten file."""
    return match_arms(load_recipe(file, overrides))
