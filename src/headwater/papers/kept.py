"""Finished runs in one file, by which a table's verdicts can be checked, and seeds added, without training them again.

A line is a run as JSON: `run`, its folder below the output folder, and `record`, its record.json (docs/records.md)
without the losses of single documents. There are no weights in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from headwater.compare import jobs_of, trial_of
from headwater.compare.trials import at_rate, tuning_trial
from headwater.errors import HeadwaterError
from headwater.files import replace_text
from headwater.papers.measures import reads_models
from headwater.papers.work import Work
from headwater.reading import reading
from headwater.recipe import AnyData, Recipe
from headwater.records import RECORD, RunRecord, read_record, record_files, write_record
from headwater.terminal import counted
from headwater.training.run_folder import MARK

Tell = Callable[[str], None]


class KeptRun(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(extra="forbid")

    run: str
    record: RunRecord

    @field_validator("run")
    @classmethod
    def _below(cls, run: str) -> str:
        if PurePosixPath(run).is_absolute() or ".." in PurePosixPath(run).parts:
            raise ValueError("is not a folder below the output folder")
        return run


def read(file: Path) -> list[KeptRun]:
    """Raises `HeadwaterError` for a damaged file, and names the line."""
    with reading(repr(str(file))):
        lines = file.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(KeptRun.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise HeadwaterError(
                f"Line {number} of {str(file)!r} is not a finished run: {where}: {first['msg']}; use an intact file."
            ) from error
    return found


def restore(file: Path, work: Work, tell: Tell) -> None:
    """Write the records in `file` of a table's comparisons into their runs' folders, where there are none yet.

    Left out are runs with other settings than the recipe's, and those on other data than is here: "python-docs" of
    another version of Python. Raises `HeadwaterError` for a damaged file.
    """
    if not file.exists():
        tell(f"There is no {str(file)!r} yet; finished runs will be added to it.")
        return
    runs = read(file)
    if reads_models(work.table):
        tell(f"{work.name} looks into models, which are not in {str(file)!r}, so its runs are trained here.")
        return
    recipes = {work.trials / recipe.name: recipe for recipe in _comparisons(work)}
    builds: dict[str, str | None] = {}
    taken: list[RunRecord] = []
    left: Counter[str] = Counter()
    for one in runs:
        folder = work.out / one.run
        recipe = next((recipe for at, recipe in recipes.items() if folder.is_relative_to(at)), None)
        if recipe is None or (folder / RECORD).exists():
            continue
        if not _same(one.record, recipe, folder, work.trials):
            left["other settings than the recipe has now"] += 1
            continue
        data = TypeAdapter(AnyData).validate_python(one.record.recipe["data"])
        key = data.model_dump_json()
        if key not in builds:
            builds[key] = data.build().description.get("sha256")
        if builds[key] != one.record.data.get("sha256"):
            source, python = one.record.data.get("source"), one.record.environment.python
            left[f"other data than is here ({source!r}, with Python {python})"] += 1
            continue
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        write_record(one.record, folder)
        taken.append(one.record)
    if taken:
        machines = {f"{one.environment.device_name}, torch {one.environment.torch}" for one in taken}
        tell(f"{counted(len(taken), 'run')} from {str(file)!r}, trained on {'; '.join(sorted(machines))}")
    for why, count in left.items():
        tell(f"{counted(count, 'run')} in {str(file)!r} had {why}; left out")


def _same(record: RunRecord, recipe: Recipe, folder: Path, trials: Path) -> bool:
    """Whether a run is one of a recipe's comparison as it is now, at a rate that it may have, and in this folder."""
    experiment, section = record.experiment, recipe.compare
    if experiment is None or section is None or experiment.arm not in section.arms:
        return False
    rate = record.recipe["training"]["learning_rate"]
    if experiment.part == "tuning":
        trial = tuning_trial(recipe, experiment.arm, rate, record.seed, trials)
    elif experiment.size is None or experiment.size in section.sizes:
        trial = trial_of(recipe, experiment.arm, record.seed, trials, experiment.size)
    else:
        return False
    own = at_rate(trial.recipe, rate) if section.learning_rates else trial.recipe
    return trial.folder == folder and own.digest() == record.config_hash


def keep(file: Path, work: Work) -> None:
    """Add the finished and diverged runs of a table's comparisons to `file`, sorted; what has run again is replaced."""
    found = {one.run: one for one in read(file)} if file.exists() else {}
    for recipe in _comparisons(work):
        for place in record_files(work.trials / recipe.name):
            record = read_record(place)
            if record.status in ("finished", "diverged"):
                run = place.parent.relative_to(work.out).as_posix()
                found[run] = KeptRun(run=run, record=record.model_copy(update={"documents": []}))
    if found:
        lines = [one.model_dump_json(exclude_defaults=True) for _, one in sorted(found.items())]
        replace_text(file, "\n".join(lines) + "\n")


def _comparisons(work: Work) -> list[Recipe]:
    """A table's comparisons, except those whose runs start from checkpoints, which a record does not have."""
    return [
        recipe
        for recipe, only in work.comparisons()
        if all(job.recipe.start is None for job in jobs_of(recipe, work.trials, only))
    ]
