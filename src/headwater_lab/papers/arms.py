"""The arms of a table: the recipe, size and folder in which each is trained."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater.util.layout import LABORATORY, LIBRARY
from headwater_lab.comparison.trials import choose_rate, find_folder, find_tried_rate, make_slug, make_trial
from headwater_lab.comparison.tuning import find_tuned_rate
from headwater_lab.papers.table import Claim, Gains, Pair, PaperTable, ReferenceText, ScaleName
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.records import ENDED, RunRecord, find_record
from headwater_lab.training.stages import list_stages

REFERENCE = re.compile(r"(?:(?P<recipe>[\w.-]+): )?(?P<arm>.+?)(?: @ (?P<size>.+))?")
# Stands for the name of the first of several nodes in the command of a run.
FIRST_NODE = "FIRST_NODE"
# Marks a run's folder in which only the record is present; see kept.py.
RESTORED = ".restored"


@dataclass(frozen=True)
class SizedArm:
    """An arm of a recipe's comparison at one of its sizes; or a stage, for a recipe with stages and no comparison."""

    recipe: Recipe
    path: Path
    arm: str
    size: str | None = None

    @property
    def seeds(self) -> list[int]:
        return self.recipe.compare.seeds if self.recipe.compare else [self.recipe.seed]

    @property
    def threshold(self) -> float | None:
        threshold = self.recipe.compare.threshold if self.recipe.compare else None
        return None if isinstance(threshold, str) else threshold

    @property
    def name(self) -> ReferenceText:
        """The arm's name in a table with several recipes."""
        return f"{self.recipe.name}: {self.arm}" + (f" @ {self.size}" if self.size is not None else "")

    def folder(self, seed: int, out: Path) -> Path:
        """Return the folder of one seed's run of a comparison, as `make_trial` names it."""
        return find_folder(self.recipe, self.size, out) / f"{make_slug(self.arm)}-{seed}"

    def run(self, seed: int, out: Path) -> tuple[Recipe, Path]:
        """Return the settings of one seed's run, and its folder below `out`."""
        if self.recipe.compare:
            trial = make_trial(self.recipe, self.arm, seed, out, self.size)
            return trial.recipe, trial.folder
        return list_stages(self.recipe, out / self.recipe.name)[self.recipe.stage_names.index(self.arm)]

    def command(self, seed: int, out: Path, overrides: Sequence[str]) -> str:
        """Return the command that trains one seed's run in its folder, on the recipe's number of devices.

        On several nodes it is to be run on each, with the first one's name for `FIRST_NODE`.
        """
        nodes, devices = self.recipe.training.nodes, self.recipe.training.devices
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={FIRST_NODE}:29500"] if nodes > 1 else []
        torchrun = ["torchrun", f"--nnodes={nodes}", *meeting, f"--nproc-per-node={devices}", "-m", LABORATORY]
        words = [*(torchrun if self.recipe.training.world_size > 1 else [LIBRARY]), "train", str(self.path), *overrides]
        if self.recipe.compare is None:
            return shlex.join([*words, "--stage", self.arm, "--out", str(out / self.recipe.name)])
        size = [] if self.size is None else ["--size", self.size]
        return shlex.join([*words, "--arm", self.arm, *size, f"seed={seed}", "--out", str(self.folder(seed, out))])


@dataclass(frozen=True)
class FinishedRun:
    """A finished or diverged run. checkpoint_folder: the folder with its last stage's checkpoints."""

    record: RunRecord
    folder: Path

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / self.record.stages[-1].folder if self.record.stages else self.folder

    @property
    def is_restored(self) -> bool:
        """Whether only the record exists, from a file of `headwater reproduce --records`."""
        return (self.folder / RESTORED).exists() and not list_checkpoints(self.checkpoint_folder)


def list_law_arms(arm: SizedArm) -> list[SizedArm]:
    """List the arms to which a law over sizes is fitted: an arm of a comparison and its baseline, at every size."""
    section = arm.recipe.compare
    assert section is not None
    return [replace(arm, arm=name, size=size) for name in (arm.arm, section.baseline) for size in section.sizes]


def list_claimed_arms(claim: Claim | Pair) -> list[ReferenceText]:
    """List the arms that a claim names."""
    if isinstance(claim, Gains):
        return [f"{claim.arm} @ {claim.size}"]
    if isinstance(claim, Pair):
        return [name for arm, against, _ in claim.pairs for name in (arm, against)]
    return [claim.arm]


def list_references(table: PaperTable) -> list[ReferenceText]:
    """List every arm named by a cell or a claim, once each."""
    arms = [arm for row in table.rows for cell in row.cells for arm in (cell.arm, cell.minus, cell.over) if arm]
    for claim in table.claims:
        arms += list_claimed_arms(claim)
    return list(dict.fromkeys(arms))


def find_arm(
    table: PaperTable, scale: ScaleName, recipes: Sequence[tuple[Path, Recipe]], reference: ReferenceText
) -> SizedArm | None:
    """Find an arm of the table at a scale; None if it is not trained there.

    Raises `HeadwaterError` if no recipe of the scale, or more than one, has the arm.
    """
    name = table.scales[scale].arms.get(reference, reference)
    if name is None:
        return None
    match = REFERENCE.fullmatch(name)
    assert match is not None
    arm, size = match["arm"], match["size"]
    candidates = [
        SizedArm(recipe, path, arm, size)
        for path, recipe in recipes
        if match["recipe"] in (None, recipe.name)
        and arm in (recipe.compare.arms if recipe.compare else recipe.stage_names)
    ]
    if len(candidates) != 1:
        names = ", ".join(recipe.name for _, recipe in recipes)
        raise HeadwaterError(f"{name!r} names {len(candidates)} arms in {names}; it must name exactly one.")
    sizes = candidates[0].recipe.compare.sizes if candidates[0].recipe.compare else {}
    if (size not in sizes) if sizes else size is not None:
        raise HeadwaterError(f"{name!r} must name one of the sizes {list(sizes)} of {candidates[0].recipe.name!r}.")
    return candidates[0]


def finished_runs(arm: SizedArm, out: Path) -> dict[int, FinishedRun]:
    """Read the runs of an arm by seed: finished or diverged, with exactly these settings."""
    runs: dict[int, FinishedRun] = {}
    section = arm.recipe.compare
    tuned = section is not None and section.tried_rates and arm.recipe.training.world_size == 1
    rate = find_tuned_rate(arm.recipe, arm.arm, out) if tuned else None
    for seed in arm.seeds:
        if arm.recipe.compare and not arm.folder(seed, out).is_dir():  # because computing settings takes time
            continue
        recipe, folder = arm.run(seed, out)
        if (record := find_record(folder)) is None:
            continue
        if section is not None and section.tried_rates:
            # On several devices it was trained by hand, at a learning rate that somebody chose.
            chosen = find_tried_rate(recipe, section, record) if arm.recipe.training.world_size > 1 else rate
            if chosen is None:
                continue
            recipe = choose_rate(recipe, section, chosen)
        if record.status in ENDED and record.identity == recipe.identity:
            runs[seed] = FinishedRun(record, folder)
    return runs


def list_run_settings(recipe: Recipe) -> list[object]:
    """List what decides the runs of a recipe, whatever their seeds: recipes of equal settings share runs."""
    section = recipe.compare
    if section is None:
        return [run.identity for run in recipe.stage_recipes]
    tuning = (section.tuning_seeds, section.threshold) if len(section.tried_rates) > 1 else None
    settings: list[object] = [section.tried_rates, tuning]
    for key, trial in recipe.trials().items():
        # A run that is evaluated at other steps reaches a threshold at others.
        settings.append((key, trial.model_copy(update={"seed": 0}).identity, trial.reporting.evaluate_every))
    return settings


def trials_folder(out: Path, scale: ScaleName, overrides: Sequence[str]) -> Path:
    """Name the folder of a scale's runs, which tables share; with overrides, which change them, another."""
    return out / scale / (f"trials-{digest_text(' '.join(sorted(overrides)))}" if overrides else "trials")


def digest_text(text: str) -> str:
    """Make a short digest of a text, for the name of a folder."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
