"""Trials of a comparison: an arm with a seed is a trial, which is one job, or one job per stage."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.comparison.budget import match_arms
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import STAGES
from headwater_lab.training.records import Experiment, RunRecord, SeedPlan
from headwater_lab.util.names import file_name

# (arm, size).
ArmKey = tuple[str, str | None]


@dataclass(frozen=True)
class Job:
    """One run of a trial: all of it, or one of its stages."""

    recipe: Recipe
    folder: Path
    label: str
    experiment: Experiment | None = None
    trunk: Path | None = None
    """The folder of the job that it branches off."""

    @property
    def steps(self) -> int:
        """The step it ends at."""
        return self.recipe.training.steps


@dataclass(frozen=True)
class Trial:
    """One arm with one seed (at one size, if there are several; at one learning rate during tuning)."""

    experiment: Experiment
    recipe: Recipe
    folder: Path
    rate: float | None = None
    """The entry of `compare.tried_rates` that it tries."""

    @property
    def arm_key(self) -> ArmKey:
        return self.experiment.arm, self.experiment.size

    @property
    def jobs(self) -> list[Job]:
        """The jobs to run, in order. Arms with identical first stages share them."""
        if not self.recipe.stages:
            return [Job(self.recipe, self.folder, self.label, self.experiment)]
        parent = self.folder.parent / STAGES
        runs = self.recipe.chain(
            lambda name, recipe: parent / f"{name}-{recipe.seed}-{recipe.identity.partition(':')[2][:8]}"
        )
        return [
            Job(recipe, folder, f"stage {name} · seed {recipe.seed}")
            for name, (recipe, folder) in zip(self.recipe.stage_names, runs, strict=True)
        ]

    @property
    def label(self) -> str:
        return " · ".join(filter(None, (self.experiment.arm, self.experiment.size, f"seed {self.recipe.seed}")))


def make_slug(name: str) -> str:
    """Make a name for a folder: letters and digits of any script, or a checksum if there are none."""
    return file_name(re.sub(r"[\W_]+", "-", name.lower()).strip("-") or f"{zlib.crc32(name.encode()):08x}")


def find_folder(recipe: Recipe, size: str | None, out: Path) -> Path:
    """Name the folder of a comparison's runs at one size."""
    return out.joinpath(recipe.name, *([make_slug(size)] if size is not None else []))


def list_trials(recipe: Recipe, out: Path) -> list[Trial]:
    """List all trials of a recipe, seeds outermost, so that early results already compare the arms.

    Raises `HeadwaterError` for a recipe that has nothing to compare, or that cannot be trained side by side.
    """
    if recipe.compare is None:
        raise HeadwaterError(f"The recipe {recipe.name!r} has no compare section; add one, or use `headwater train`.")
    if (world_size := recipe.training.world_size) > 1:
        raise HeadwaterError(
            f"{recipe.name!r} trains each model on {world_size} devices, and "
            "compare gives each trial one process; train its arms with `headwater train --arm NAME seed=N` and then "
            "`headwater report`, or set training.devices=1 and training.nodes=1."
        )
    section = recipe.compare
    recipe = match_arms(recipe)
    trials = [
        make_trial(recipe, arm, seed, out, size)
        for seed in section.all_seeds
        for size in (section.sizes or [None])
        for arm in section.arms
    ]
    for kind, names in (("arms", section.arms), ("sizes", section.sizes)):
        for name, other_name in combinations(names, 2):
            if make_slug(name) == make_slug(other_name):
                raise HeadwaterError(
                    f"The {kind} {name!r} and {other_name!r} of {recipe.name!r} differ only in case or punctuation, "
                    "and their runs would share a folder; rename one."
                )
    return trials


def make_trial(recipe: Recipe, arm: str, seed: int, out: Path, size: str | None = None) -> Trial:
    """Make the trial of one arm with one seed, in its folder below `out`. Raises `HeadwaterError`."""
    recipe = match_arms(recipe)
    assert recipe.compare is not None
    if size is not None and not recipe.compare.sizes:
        raise HeadwaterError(f"{recipe.name!r} compares at one size; leave out size {size!r}.")
    if recipe.compare.sizes and size is None:
        raise HeadwaterError(
            f"{recipe.name!r} compares sizes; choose one with --size: {', '.join(recipe.compare.sizes)}."
        )
    if recipe.compare.sizes and size not in recipe.compare.sizes:
        raise HeadwaterError(f"{recipe.name!r} has no size {size!r}; {nearest(str(size), recipe.compare.sizes)}")
    experiment = Experiment(
        name=recipe.name,
        title=recipe.title,
        arm=arm,
        baseline=recipe.compare.baseline,
        threshold=recipe.compare.threshold,
        budget_arms=recipe.compare.budget_arms,
        projections=recipe.compare.ladder.projections if recipe.compare.ladder is not None else [],
        size=size,
        seed_plan=make_plan(recipe.compare),
    )
    return Trial(experiment, recipe.arm(arm, seed, size), find_folder(recipe, size, out) / f"{make_slug(arm)}-{seed}")


def make_plan(section: Compare) -> SeedPlan | None:
    """Make the plan of how seeds are added until the comparison is decided; None for fixed seeds."""
    if not section.sequential or section.margin is None:
        return None
    return SeedPlan(
        seeds=section.all_seeds,
        min_seeds=section.min_seeds,
        margin=section.margin,
        arms=[arm for arm in section.arms if arm not in (section.baseline, *section.budget_arms)],
        baseline=section.baseline,
    )


def describe_runs(recipe: Recipe, arms: int | None = None) -> str:
    """Describe how many runs a comparison until decided takes, without tuning; "" for one with fixed seeds.

    arms: how many arms at a size; default: all.
    """
    section = recipe.compare
    if section is None or not section.sequential:
        return ""
    runs = arms or len(section.arms) * max(1, len(section.sizes))
    return (
        f"{recipe.name}: {runs * section.min_seeds} to {runs * section.max_seeds} runs, with {section.min_seeds} to "
        f"{section.max_seeds} seeds per arm, until decided"
    )


def make_tuning_trial(recipe: Recipe, arm: str, rate: float, seed: int, out: Path) -> Trial:
    """Make the trial of a learning rate, in a separate folder next to the comparison's."""
    trial = make_trial(recipe, arm, seed, out, next(iter(recipe.compare.sizes), None) if recipe.compare else None)
    return Trial(
        experiment=trial.experiment.model_copy(update={"phase": "tuning", "seed_plan": None}),
        recipe=choose_rate(trial.recipe, recipe.compare, rate),
        folder=out / recipe.name / "tuning" / f"{make_slug(arm)}-{rate:g}-{seed}",
        rate=rate,
    )


def list_tuning_trials(recipe: Recipe, out: Path) -> list[Trial]:
    """List every arm at every learning rate with every tuning seed, the same for each arm; none for a single rate."""
    section = recipe.compare
    assert section is not None
    if len(section.tried_rates) == 1:
        return []
    return [
        make_tuning_trial(recipe, arm, rate, seed, out)
        for seed in section.tuning_seeds
        for arm in section.arms
        for rate in section.tried_rates
    ]


def choose_rate(recipe: Recipe, section: Compare | None, rate: float) -> Recipe:
    """Copy a trial's recipe with one of `compare.tried_rates`: a rate, or a multiple of the ladder's for this size."""
    if section is not None and section.ladder is not None:
        rate = rate * recipe.training.learning_rate
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"learning_rate": rate})})


def find_tried_rate(recipe: Recipe, section: Compare, record: RunRecord) -> float:
    """Find the entry of `compare.tried_rates` that a record ran at. recipe: its trial's, not yet tuned."""
    rate = float(record.recipe["training"]["learning_rate"])
    if section.ladder is None:
        return rate
    rates = {tried: choose_rate(recipe, section, tried).training.learning_rate for tried in section.tried_rates}
    return next((tried for tried, value in rates.items() if value == rate), 1.0)


def order_jobs(trials: list[Trial]) -> list[list[Job]]:
    """Order all jobs, each once, by dependency: a stage follows from the one before, a branch from its trunk."""
    trunks = find_trunks(trials)
    by_depth: dict[int, dict[Path, Job]] = {}
    for trial in trials:
        depth, folder = 0, trial.folder
        while (trunk := trunks.get(folder)) is not None:
            depth, folder = depth + 1, trunk
        for level, job in enumerate(trial.jobs, depth):
            by_depth.setdefault(level, {}).setdefault(job.folder, replace(job, trunk=trunks.get(job.folder)))
    return [list(by_depth[depth].values()) for depth in sorted(by_depth)]


def find_trunks(trials: Sequence[Trial]) -> dict[Path, Path]:
    """Find the trials that branch off another one, by folder: those equal to it up to the start of its decay.

    Each branches off the next shorter one, so that runs of all lengths cost no more than the longest and their decays.
    """
    groups: dict[object, list[Trial]] = {}
    for trial in trials:
        if (settings := trial.recipe.trunk_settings) is not None:
            groups.setdefault(settings, []).append(trial)
    chains = (sorted(group, key=lambda trial: trial.recipe.decay_start or 0) for group in groups.values())
    return {trial.folder: trunk.folder for group in chains for trunk, trial in pairwise(group)}
