"""The work for a table at a scale: its runs, their folders, and the training of the missing ones."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.running import list_jobs, run_comparison
from headwater_lab.comparison.trials import ArmKey, make_slug
from headwater_lab.evaluation.tasks import Tasks
from headwater_lab.papers.arms import (
    RESTORED,
    SizedArm,
    digest_text,
    find_arm,
    finished_runs,
    list_law_arms,
    list_references,
    list_run_settings,
    trials_folder,
)
from headwater_lab.papers.measures import tasks_of
from headwater_lab.papers.table import Gains, PaperTable, Scale, ScaleName, counts_steps, find_table, reads_models
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import load_recipe, recipes_folder
from headwater_lab.training.records import RECORD
from headwater_lab.training.start import MAY_CHANGE

# Overrides of these leave what runs can show: the hardware, and when they are evaluated.
SAME_TRAINING = (*(f"{field}=" for field in sorted(MAY_CHANGE - {"training.steps"})), "reporting.")


@dataclass(frozen=True)
class Work:
    """A table at a scale. overrides: the table's, then the user's; decisive: those of the user's that change the runs.
    arms: recipes and sizes of each arm it names."""

    name: str
    table: PaperTable
    scale: ScaleName
    out: Path
    overrides: tuple[str, ...]
    decisive: tuple[str, ...]
    recipes: list[tuple[Path, Recipe]]
    arms: dict[str, SizedArm | None]

    @property
    def settings(self) -> Scale:
        """The table's settings at this scale."""
        return self.table.scales[self.scale]

    @property
    def user_overrides(self) -> tuple[str, ...]:
        """The overrides that are not the table's."""
        return self.overrides[len(self.settings.overrides) :]

    @property
    def trials(self) -> Path:
        """The folder of its runs."""
        of_table = (override for override in self.settings.overrides if not override.startswith("compare.seeds="))
        return trials_folder(self.out, self.scale, (*of_table, *self.decisive))

    @property
    def folder(self) -> Path:
        """The folder of its page."""
        digest = [digest_text(" ".join(self.user_overrides))] if self.user_overrides else []
        return self.out / self.scale / "-".join([make_slug(self.name), *digest])

    @property
    def cannot_show(self) -> str:
        """The reason why its runs cannot show the paper's claims; "" if they may, or if overrides train otherwise."""
        changed = any(not override.startswith(SAME_TRAINING) for override in self.decisive)
        return "" if changed else self.settings.cannot_show

    @property
    def trained_arms(self) -> list[SizedArm]:
        """List every arm once, with the baselines and sizes that a law needs."""
        arms = [arm for arm in self.arms.values() if arm is not None]
        laws = [self.arms[f"{claim.arm} @ {claim.size}"] for claim in self.table.claims if isinstance(claim, Gains)]
        arms += [member for arm in laws if arm is not None for member in list_law_arms(arm)]
        by_key: dict[tuple[str, str, str | None], SizedArm] = {}
        for arm in arms:
            by_key.setdefault((arm.recipe.name, arm.arm, arm.size), arm)
        return list(by_key.values())

    @property
    def runs(self) -> int:
        """The number of runs for the table."""
        return sum(len(arm.seeds) for arm in self.trained_arms)

    def list_missing(self) -> list[tuple[SizedArm, int]]:
        """List the missing runs, and runs without a model if the table needs the models."""
        inside, missing = reads_models(self.table), []
        for arm in self.trained_arms:
            seeds = {seed for seed, run in finished_runs(arm, self.trials).items() if not (inside and run.is_restored)}
            missing += [(arm, seed) for seed in sorted(set(arm.seeds) - seeds)]
        return missing

    def list_commands(self) -> list[str]:
        """List commands for the missing runs that `train_table` leaves out: on several devices, or single stages."""
        return [
            arm.command(seed, self.trials, self.overrides)
            for arm, seed in self.list_missing()
            if arm.recipe.training.world_size > 1 or arm.recipe.compare is None
        ]

    def check_tasks(self, task_files: Path | None) -> None:
        """Raise `HeadwaterError` if benchmarks are not available, before anything is trained."""
        if names := tasks_of(self.table):
            Tasks(names, task_files)

    def list_comparisons(self) -> list[tuple[Recipe, set[ArmKey]]]:
        """List the recipes with a comparison, and the arms to train."""
        by_name: dict[str, tuple[Recipe, set[ArmKey]]] = {}
        for arm in self.trained_arms:
            if arm.recipe.compare is not None and arm.recipe.training.world_size == 1:
                by_name.setdefault(arm.recipe.name, (arm.recipe, set()))[1].add((arm.arm, arm.size))
        return list(by_name.values())


def prepare_work(name: str, scale: ScaleName, out: Path, overrides: Sequence[str] = ()) -> Work:
    """Prepare a table's work at a scale with training. Raises `HeadwaterError` for unknown names and bad overrides."""
    table = find_table(name)
    settings = table.scales[scale]
    if settings.nothing:
        raise HeadwaterError(settings.nothing)
    changes = (*settings.overrides, *overrides)
    files = [recipes_folder() / path for path in settings.recipes]
    recipes = list(zip(files, _read_recipes(files, changes), strict=True))
    for _, recipe in recipes:
        if recipe.compare is not None and recipe.compare.sequential:
            raise HeadwaterError(f"{name} needs all seeds of its arms; leave out compare.sequential.")
    arms = {reference: find_arm(table, scale, recipes, reference) for reference in list_references(table)}
    decisive = _find_decisive(files, settings.overrides, overrides)
    work = Work(name, table, scale, out, changes, decisive, recipes, arms)
    if counts_steps(table) and any(arm.threshold is None for arm in work.arms.values() if arm is not None):
        raise HeadwaterError(f"{name} counts the steps to compare.threshold, which must be a number; pass one.")
    return work


def _find_decisive(files: Sequence[Path], of_table: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Find the overrides without which the runs would be others, or could not be read."""

    def list_settings(overrides: Sequence[str]) -> list[list[object]]:
        return [list_run_settings(recipe) for recipe in _read_recipes(files, (*of_table, *overrides))]

    decisive, settings = list(overrides), list_settings(overrides)
    for override in overrides:
        fewer = decisive.copy()
        fewer.remove(override)
        with suppress(HeadwaterError):
            decisive = fewer if list_settings(fewer) == settings else decisive
    return tuple(decisive)


def _read_recipes(files: Sequence[Path], overrides: Sequence[str]) -> list[Recipe]:
    return [_read_recipe(file, file.stat().st_mtime_ns, tuple(overrides)) for file in files]


@functools.lru_cache(maxsize=256)
def _read_recipe(file: Path, changed: int, overrides: tuple[str, ...]) -> Recipe:
    """Read a recipe, which many tables share. changed: identifies a rewritten file."""
    return match_arms(load_recipe(file, overrides))


# Called before training with a name and the total steps; returns the function that receives progress.
Comparing = Callable[[str, int], OnChange]


def train_table(work: Work, workers: int | None, comparing: Comparing) -> list[Outcome]:
    """Train what is missing of comparisons on one device, or resume; return the outcomes of all trials.

    Raises `HeadwaterError` as training does, and `Interrupted` after Ctrl-C.
    """
    extras.check_extra("compare")
    outcomes = []
    for arm in work.trained_arms if reads_models(work.table) else []:
        for run in finished_runs(arm, work.trials).values():
            if run.is_restored:  # the table needs the model, which is missing
                (run.folder / RECORD).unlink()
                (run.folder / RESTORED).unlink()
    missing = {arm.recipe.name for arm, _ in work.list_missing()}
    for recipe, only in work.list_comparisons():
        if recipe.name in missing:
            steps = sum(job.steps for job in list_jobs(recipe, work.trials, only))
            outcomes += run_comparison(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
    return outcomes
