"""Branches: runs of several lengths with the schedule wsd share their trunk, the part at the constant rate.

Up to the step at which its decay begins, such a run does not depend on its number of steps, so a longer one can begin
with a checkpoint of it and equals a run of its own to the last bit. It gets the checkpoint under its own recipe and
the log up to there, and then resumes as any run does. The step before the decay is always saved, and never removed.
"""

import json
import os
import secrets
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater.util.files import stage_folder
from headwater_lab.recipe.recipe import DECAY_FIELDS, Recipe, parse
from headwater_lab.training.checkpoints import (
    FACTS,
    FOLDER,
    SUMS,
    Progress,
    check_sums,
    list_checkpoints,
    read_progress,
    step_of,
)
from headwater_lab.training.records import find_record
from headwater_lab.training.run_folder import METRICS
from headwater_lab.training.saving import link_or_copy, sync_files, write_sums
from headwater_lab.training.start import list_changes


def can_branch(trunk: Path, recipe: Recipe) -> bool:
    """Whether a run of this recipe can branch off the run `trunk`."""
    try:
        _find_branch_point(trunk, recipe)
    except HeadwaterError:
        return False
    return True


def _describe_change(trunk: Recipe, recipe: Recipe) -> str:
    """Describe the first setting in which a recipe differs from its trunk's."""
    old, new = (settings.model_dump(mode="json") for settings in (trunk, recipe))
    free = {f"training.{name}" for name in (*DECAY_FIELDS, "timeout_minutes")} | {"data.workers"}
    reports = ("reporting.log_every", "reporting.evaluate_every")
    changes = [change for change in list_changes(old, new) if change[0] not in free]
    changes += [change for change in list_changes(old, new, ["reporting"]) if change[0] in reports]
    name, before, after = changes[0] if changes else ("mechanisms", "another order", "this one")
    return f"{name}={before!r}, and this recipe has {after!r}"


def _find_branch_point(trunk: Path, recipe: Recipe) -> tuple[Path, Progress, str]:
    """Find the newest checkpoint that `recipe` shares with the run `trunk`: from before both decays.

    Returns it with its progress, and the identity of the trunk. Raises `HeadwaterError` if the runs share none, or if
    it is damaged.
    """
    if recipe.decay_start is None:
        raise HeadwaterError(
            f"Only a run with training.schedule=wsd can branch off another, and this recipe has "
            f"{recipe.training.schedule}; change it, or leave out --trunk (trunk=)."
        )
    if not (checkpoints := list_checkpoints(trunk)):
        raise HeadwaterError(f"{str(trunk)!r} has no checkpoints to branch off; name the folder of a run.")
    trunk_recipe = parse(read_progress(checkpoints[-1]).recipe, repr(str(trunk)))
    if trunk_recipe.trunk_settings != recipe.trunk_settings:
        raise HeadwaterError(
            f"{str(trunk)!r} was trained with {_describe_change(trunk_recipe, recipe)}; a branch differs only in "
            f"training.{', training.'.join(DECAY_FIELDS)}."
        )
    record = find_record(trunk)
    if record is not None and (changed := record.changed_code):
        raise HeadwaterError(
            f"{changed[0]} has changed since {str(trunk)!r} was started; restore it, or leave out --trunk (trunk=)."
        )
    limit = min(trunk_recipe.decay_start or 0, recipe.decay_start)
    shared = [path for path in checkpoints if step_of(path) <= limit]
    if not shared:
        raise HeadwaterError(
            f"{str(trunk)!r} has no checkpoint from before its decay and this run's, which begins after step "
            f"{recipe.decay_start}; branch off a shorter run."
        )
    source = shared[-1]
    check_sums(source)
    progress = read_progress(source)
    if progress.kept:
        raise HeadwaterError(
            f"Mechanisms of {str(trunk)!r} change over the whole length of a run, so none can branch off; leave out "
            "--trunk (trunk=)."
        )
    return source, progress, trunk_recipe.identity


def start_branch(trunk: Path, recipe: Recipe, run: Path) -> Path:
    """Write the newest checkpoint that `recipe` shares with the run `trunk`, and its log, into the folder `run`.

    Returns the checkpoint, to resume from. Raises `HeadwaterError` if the runs share none, or if it is damaged.
    """
    source, progress, identity = _find_branch_point(trunk, recipe)
    facts = {"folder": os.path.relpath(trunk, run), "identity": identity, "step": progress.step}
    values = recipe.model_dump(mode="json")
    progress = replace(progress, recipe=values, run_id=secrets.token_hex(4), trunk=facts)
    if (trunk / METRICS).exists():
        shutil.copyfile(trunk / METRICS, run / METRICS)  # later points are dropped when the run resumes
    with stage_folder(run / FOLDER / source.name) as folder:
        for file in source.iterdir():
            if file.name not in (FACTS, SUMS):
                (link_or_copy if file.suffix == ".safetensors" else shutil.copyfile)(file, folder / file.name)
        (folder / FACTS).write_text(json.dumps(asdict(progress), indent=1))
        write_sums(folder, sync_files(folder, [file.name for file in folder.iterdir()]))
    return run / FOLDER / source.name
