"""Finished runs in one file, from which a table's verdicts can be checked without training.

A line is a run as JSON: `run`, its folder below the output folder, `by`, who ran it ("" in this repository), and
`record`, its record.json (docs/reference/records.md) without the losses of single documents. It contains no weights.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from headwater.models.load import reading
from headwater.util.errors import HeadwaterError
from headwater.util.files import explain_absence, replace_text
from headwater_lab.comparison.arm_costs import Tell
from headwater_lab.comparison.running import list_jobs
from headwater_lab.comparison.trials import Trial, choose_rate, find_tried_rate, make_trial, make_tuning_trial
from headwater_lab.papers.arms import RESTORED, finished_runs
from headwater_lab.papers.result import Reproduction, describe_machine, reproduce_table
from headwater_lab.papers.table import ScaleName, find_table, reads_models
from headwater_lab.papers.work import Work, prepare_work
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.records import (
    ENDED,
    RECORD,
    RunRecord,
    list_records,
    read_record,
    usable_record,
    write_record,
)
from headwater_lab.training.run_folder import MARK
from headwater_lab.util.terminal import counted


class KeptRun(BaseModel):
    """A run as a line of the file."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    run: str
    by: str = ""
    record: RunRecord

    @field_validator("run")
    @classmethod
    def _below(cls, run: str) -> str:
        path = PurePosixPath(run)
        is_plain = path.as_posix() == run != "." and not path.is_absolute() and "\0" not in run
        if not is_plain or {"..", RECORD, MARK, RESTORED}.intersection(path.parts):
            raise ValueError("not a folder below the output folder")
        return run


def read_runs(file: Path) -> list[KeptRun]:
    """Read the runs in a file. Raises `HeadwaterError` for a damaged line, or two lines of one run, with numbers."""
    if not file.is_file():
        raise HeadwaterError(f"{explain_absence(file, 'file')}; name a file of finished runs.")
    with reading(repr(str(file))):
        text = file.read_text(encoding="utf-8").rstrip("\n")
    runs: list[KeptRun] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n") if text else [], 1):
        try:
            run = KeptRun.model_validate_json(line)
            usable_record(run.record)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            where = ".".join(map(str, detail["loc"])) or "the line"
            raise HeadwaterError(
                f"Line {number} of {str(file)!r} is not a finished run: {where}: {detail['msg']}; use an intact file."
            ) from error
        if (earlier := lines.setdefault(run.run, number)) != number:
            raise HeadwaterError(f"Lines {earlier} and {number} of {str(file)!r} are both of {run.run!r}; remove one.")
        runs.append(run)
    return runs


def write_runs(file: Path, runs: Iterable[KeptRun]) -> None:
    """Write runs, a line each, sorted by folder, without losses of single documents."""
    lines = sorted((run.run, run.model_dump_json(exclude={"record": {"documents"}})) for run in runs)
    replace_text(file, "\n".join(line for _, line in lines) + "\n")


def dump_record(record: RunRecord) -> str:
    """Dump what a run was, as JSON: not in which comparison it is read, where its tokenizer was, nor single losses."""
    return record.model_dump_json(exclude={"documents": True, "experiment": True, "data": {"tokenizer"}})


def write_run(run: KeptRun, out: Path) -> None:
    """Write the record of a run into its folder below `out`, which keeps who ran it and that there are no weights."""
    folder = out / run.run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    (folder / RESTORED).write_text(run.by, encoding="utf-8")
    write_record(run.record, folder)


def is_cut_off(folder: Path) -> bool:
    """Whether a folder has only the marks of `write_run`, which was stopped before it wrote the record."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {MARK, RESTORED}


def read_runner(folder: Path) -> str:
    """Read who ran the run in a folder that `write_run` wrote; "" for a run that was trained there."""
    mark = folder / RESTORED
    return mark.read_text(encoding="utf-8") if mark.exists() and not list_checkpoints(folder) else ""


def judge_recorded(names: Iterable[str], scale: ScaleName, runs: Sequence[KeptRun]) -> Iterator[Reproduction]:
    """Judge each of these tables that has finished runs among `runs` and needs no models, without training."""
    with TemporaryDirectory() as folder:
        yield from judge_trained(names, scale, Path(folder), runs=runs)


def judge_trained(
    names: Iterable[str],
    scale: ScaleName,
    out: Path,
    overrides: Sequence[str] = (),
    runs: Sequence[KeptRun] | None = None,
) -> Iterator[Reproduction]:
    """Judge each of these tables that has finished runs below the output folder `out`, without training.

    runs: to write there first; tables that need the models themselves are then left out.
    """
    for name in names:
        scales = find_table(name).scales
        if not scales or scales[scale].nothing:
            continue
        work = prepare_work(name, scale, out, overrides)
        if runs is not None:
            if reads_models(work.table):
                continue
            _write_records(runs, work)
        if any(finished_runs(arm, work.trials) for arm in work.trained_arms):
            yield reproduce_table(work)


def restore_runs(file: Path, work: Work, tell: Tell) -> None:
    """Write the records of a table's comparisons in `file` into their runs' folders, if these have no run yet.

    Runs whose settings differ from the recipe's are left out. Raises `HeadwaterError` for a damaged file.
    """
    runs = read_runs(file)
    if reads_models(work.table):
        tell(f"{work.name} needs the models themselves, which are not in {str(file)!r}, so its runs are trained here.")
        return
    restored, outdated = _write_records(runs, work)
    if restored:
        machines = set(map(describe_machine, restored))
        tell(f"{counted(len(restored), 'run')} from {str(file)!r}, trained on {'; '.join(sorted(machines))}")
    if outdated:
        tell(f"left out {counted(outdated, 'run')} of {str(file)!r}: the recipe has other settings now")


def _write_records(runs: Sequence[KeptRun], work: Work) -> tuple[list[RunRecord], int]:
    """Write a table's records; return them, and the number of runs whose settings differ from the recipe's."""
    recipes = {work.trials / recipe.name: recipe for recipe in _list_comparisons(work)}
    restored, outdated = [], 0
    for line in runs:
        folder = work.out / line.run
        recipe = next((recipe for trials, recipe in recipes.items() if folder.is_relative_to(trials)), None)
        if recipe is None:
            continue
        if _find_trial(line.record, recipe, folder, work.trials) is None:
            outdated += 1
        elif not list_checkpoints(folder) and not (folder / RECORD).exists():
            write_run(line, work.out)
            restored.append(line.record)
    return restored, outdated


def keep_runs(file: Path, work: Work, tell: Tell) -> None:
    """Add the finished and diverged runs of a table's comparisons to `file`, sorted; the file may not exist yet.

    A line is replaced only if the recipe has other settings, or another tuned learning rate, now. Runs on other data
    than the file's are not added.
    """
    with FileLock(file.with_name(f".{file.name}.lock")):
        runs = {line.run: line for line in read_runs(file)} if file.exists() else {}
        hashes: dict[str, str] = {}
        for line in runs.values():
            hashes.setdefault(_dump_settings(line.record), line.record.data_hashes)
        added, differing = 0, 0
        for recipe in _list_comparisons(work):
            for path in list_records(work.trials / recipe.name):
                record, run = read_record(path), path.parent.relative_to(work.out).as_posix()
                if record.status not in ENDED or _find_trial(record, recipe, path.parent, work.trials) is None:
                    continue
                if run in runs and runs[run].record.identity == record.identity:
                    continue
                if hashes.setdefault(_dump_settings(record), record.data_hashes) != record.data_hashes:
                    differing += 1
                    continue
                runs[run] = KeptRun(run=run, by=read_runner(path.parent), record=record)
                added += 1
        if added:
            write_runs(file, runs.values())
            tell(f"{counted(added, 'run')} added to {str(file)!r}")
        if differing:
            tell(
                f"{counted(differing, 'run')} not added to {str(file)!r}, whose runs had other data; use another file "
                "with another --out"
            )


def _find_trial(record: RunRecord, recipe: Recipe, folder: Path, trials: Path) -> Trial | None:
    """Find the trial of a recipe's comparison that this run belongs to; None if its settings are not the recipe's."""
    experiment, section = record.experiment, recipe.compare
    if experiment is None or section is None or experiment.arm not in section.arms:
        return None
    if experiment.size not in (section.sizes or [None]):
        return None
    trial = make_trial(recipe, experiment.arm, record.seed, trials, experiment.size)
    rate = find_tried_rate(trial.recipe, section, record)
    if experiment.phase == "tuning":
        trial = make_tuning_trial(recipe, experiment.arm, rate, record.seed, trials)
    elif section.tried_rates:
        trial = replace(trial, recipe=choose_rate(trial.recipe, section, rate))
    return trial if trial.folder == folder and trial.recipe.identity == record.identity else None


def _dump_settings(record: RunRecord) -> str:
    return json.dumps(record.recipe.get("data"), sort_keys=True)


def _list_comparisons(work: Work) -> list[Recipe]:
    """List a table's comparisons, except those whose runs start from checkpoints, which records do not contain."""
    return [
        recipe
        for recipe, only in work.list_comparisons()
        if all(job.recipe.start is None for job in list_jobs(recipe, work.trials, only))
    ]
