"""Compare arms of a recipe: trials side by side in worker processes, and honest statistics over their records."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pebble import ProcessExpired, ProcessPool
from scipy import stats

from headwater.errors import HeadwaterError, Interrupted
from headwater.hardware import cores
from headwater.recipe import Recipe
from headwater.records import Experiment, RunRecord, read_record, write_record
from headwater.training.checkpoint import checkpoints
from headwater.training.run_folder import METRICS
from headwater.training.stages import STAGES, joined


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    experiment: Experiment
    recipe: Recipe
    folder: Path

    @property
    def jobs(self) -> list[Job]:
        """What it is to run, in order. Arms that begin alike share the stages in which they do."""
        if not self.recipe.stages:
            return [Job(self.recipe, self.folder, self.label, self.experiment)]
        parent = self.folder.parent / STAGES
        places = self.recipe.chain(lambda name, recipe: parent / f"{name}-{recipe.seed}-{recipe.digest()[:8]}")
        return [
            Job(recipe, folder, f"stage {name} · seed {recipe.seed}")
            for name, (recipe, folder) in zip(self.recipe.stage_names, places, strict=True)
        ]

    @property
    def label(self) -> str:
        return f"{self.experiment.arm} · seed {self.recipe.seed}"


@dataclass(frozen=True)
class Job:
    """One run of a trial: all of it, or one of its stages."""

    recipe: Recipe
    folder: Path
    label: str
    experiment: Experiment | None = None


OnChange = Callable[[Job, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial or one of its jobs: a record, or the reason there is none."""

    label: str
    record: RunRecord | None
    error: str | None = None


def trials_of(recipe: Recipe, out: Path) -> list[Trial]:
    """All trials of a recipe, seeds outermost, so that early results already compare the arms."""
    if recipe.compare is None:
        raise HeadwaterError(f"The recipe {recipe.name!r} has no compare section; add one, or use `headwater train`.")
    if recipe.training.devices * recipe.training.nodes > 1:
        raise HeadwaterError(
            f"{recipe.name!r} trains each model on {recipe.training.devices * recipe.training.nodes} devices, and "
            "compare gives each trial one process; train its arms with `headwater train --arm NAME --seed N` and then "
            "`headwater report`, or set training.devices=1 and training.nodes=1."
        )
    trials = [trial_of(recipe, arm, seed, out) for seed in recipe.compare.seeds for arm in recipe.compare.arms]
    folders = [trial.folder for trial in trials]
    if len(set(folders)) < len(folders):
        raise HeadwaterError(f"Two arms of {recipe.name!r} differ only in punctuation; give them different names.")
    return trials


def trial_of(recipe: Recipe, arm: str, seed: int, out: Path) -> Trial:
    """One arm of a recipe's comparison with one seed, in its folder below `out`."""
    assert recipe.compare is not None
    experiment = Experiment(
        name=recipe.name,
        title=recipe.title,
        arm=arm,
        baseline=recipe.compare.baseline,
        threshold=recipe.compare.threshold,
    )
    folder = re.sub(r"[^a-z0-9]+", "-", arm.lower()).strip("-")
    return Trial(experiment, recipe.arm(arm, seed), out / recipe.name / f"{folder}-{seed}")


def run_trials(trials: list[Trial], workers: int | None = None, on_change: OnChange | None = None) -> list[Outcome]:
    """Train the trials, `workers` at a time (default: one per core), one thread each.

    Trials whose finished record is there already are not repeated, and half-done ones go on from their checkpoint.
    Stages that several trials share are run once. A worker that dies is reported in its outcome; the others go on.
    Raises `Interrupted` after Ctrl-C.
    on_change: called with (job, steps done, "running" | "finished" | "failed"), a few times a second.
    """
    report = on_change or (lambda job, step, status: None)
    outcomes: dict[Path, Outcome] = {}
    for level in levels(trials):
        for job in level:
            if (record := finished_record(job)) is not None:
                outcomes[job.folder] = Outcome(job.label, record)
                report(job, job.recipe.training.steps, "finished")
        # A worker that dies between two jobs takes its whole pool along, through no fault of the jobs left.
        for _ in range(3):
            todo = [job for job in level if job.folder not in outcomes]
            if todo:
                outcomes |= _run_pool(todo, workers or cores(), report)
    return [_joined(trial, outcomes) for trial in trials]


def levels(trials: list[Trial]) -> list[list[Job]]:
    """All jobs, each once: first those that need nothing else, then those that need only these, …"""
    found: list[dict[Path, Job]] = []
    for trial in trials:
        for depth, job in enumerate(trial.jobs):
            if depth == len(found):
                found.append({})
            found[depth].setdefault(job.folder, job)
    return [list(level.values()) for level in found]


def _joined(trial: Trial, outcomes: dict[Path, Outcome]) -> Outcome:
    """The outcome of a trial from those of its jobs; a trial with stages gets its record here."""
    lost = "the pool of worker processes broke three times"
    for job in trial.jobs:
        outcome = outcomes.get(job.folder) or Outcome(job.label, None, lost)
        if outcome.record is None:
            where = "" if job.experiment else f"{job.label}: "
            return Outcome(trial.label, None, f"{where}{outcome.error}")
    if not trial.recipe.stages:
        return Outcome(trial.label, outcomes[trial.folder].record)
    runs = [(job.recipe, job.folder) for job in trial.jobs]
    trial.folder.mkdir(parents=True, exist_ok=True)
    record = joined(trial.recipe, trial.folder, runs, trial.experiment)
    write_record(record, trial.folder)
    return Outcome(trial.label, record)


def _run_pool(jobs: list[Job], workers: int, report: OnChange) -> dict[Path, Outcome]:
    """The outcomes of the jobs by their folders; those that a broken pool never came to are left out."""
    outcomes: dict[Path, Outcome] = {}
    # Fresh interpreters: a fork would inherit PyTorch's thread pools in whatever state they are.
    pool = ProcessPool(max_workers=min(workers, len(jobs)), context=multiprocessing.get_context("spawn"))
    try:
        pending = [(job, pool.schedule(_work, args=[job])) for job in jobs]
        while pending:
            time.sleep(0.2)
            for job, future in [(job, future) for job, future in pending if future.done()]:
                pending.remove((job, future))
                if isinstance(future.exception(), BrokenExecutor):
                    continue
                outcomes[job.folder] = outcome = _outcome(job, future)
                steps = job.recipe.training.steps if outcome.record else 0
                report(job, steps, "finished" if outcome.record else "failed")
            for job, future in pending:
                if future.running():
                    report(job, _step(job), "running")
        pool.close()
    except KeyboardInterrupt:
        pool.stop()
        raise Interrupted("Stopped; the same command goes on with the trials that are left.") from None
    except BaseException:
        pool.stop()
        raise
    finally:
        pool.join()
    return outcomes


def finished_record(job: Job) -> RunRecord | None:
    """The job's record, if it was finished with the very same settings."""
    try:
        record = read_record(job.folder)
    except HeadwaterError:
        return None
    same = record.config_hash == job.recipe.digest()
    if not same and checkpoints(job.folder):
        raise HeadwaterError(
            f"{str(job.folder)!r} holds a run with other settings; choose another --out, or remove it."
        )
    return record if same and record.status == "finished" else None


def _work(job: Job) -> RunRecord:
    """In the worker: train one model with one thread."""
    import signal

    import torch
    from transformers.utils import logging

    from headwater.training.loop import train

    # Ctrl-C reaches every process of the terminal; the parent stops the workers, with a signal they save on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return train(job.recipe, job.folder, resume=True, experiment=job.experiment)


def _outcome(job: Job, future: Future) -> Outcome:
    try:
        return Outcome(job.label, future.result())
    except ProcessExpired as error:
        return Outcome(job.label, None, f"its worker process died (exit code {error.exitcode})")
    except HeadwaterError as error:
        return Outcome(job.label, None, str(error))
    except Exception as error:  # a bug in one trial must not take the others' results along
        return Outcome(job.label, None, f"{type(error).__name__}: {error}")


def _step(job: Job) -> int:
    """Steps done so far, from the last whole line of the run's log."""
    try:
        lines = (job.folder / METRICS).read_bytes().splitlines()
        return int(lines[-1].split(b'"step":')[1].split(b",")[0]) if lines else 0
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class Summary:
    """One arm over its seeds. Differences are arm - baseline, paired by seed.

    interval: 95 % confidence interval of the mean paired difference (Student's t), None with fewer than two pairs.
    """

    arm: str
    runs: int
    mean: float
    spread: float | None
    difference: float | None
    interval: tuple[float, float] | None
    parameters: int
    tokens_per_second: float
    cache_bytes_per_token: int
    steps_to_threshold: list[int | None] | None

    def verdict(self, lower_is_better: bool) -> str:
        """ "better" or "worse" than the baseline only if the interval leaves no doubt; else "open"; "" for itself."""
        if self.difference is None:
            return ""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "open"
        return "better" if (self.interval[1] < 0) == lower_is_better else "worse"


def summarise(records: list[RunRecord], baseline: str, threshold: float | None = None) -> list[Summary]:
    """One summary per arm, in the order of first appearance. Records without a result are left out."""
    arms: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        if record.result is not None and record.status == "finished":
            arms.setdefault(record.experiment.arm if record.experiment else record.name, {})[record.seed] = record
    base = arms.get(baseline, {})
    summaries = []
    for arm, runs in arms.items():
        results = np.array([run.result for run in runs.values()])
        paired = [seed for seed in runs if seed in base] if arm != baseline else []
        differences = np.array([runs[seed].result - base[seed].result for seed in paired])  # type: ignore[operator]
        any_run = next(iter(runs.values()))
        summaries.append(
            Summary(
                arm=arm,
                runs=len(runs),
                mean=float(results.mean()),
                spread=float(results.std(ddof=1)) if len(results) > 1 else None,
                difference=float(differences.mean()) if len(differences) else None,
                interval=_interval(differences),
                parameters=any_run.parameters,
                tokens_per_second=float(np.median([run.tokens_per_second for run in runs.values()])),
                cache_bytes_per_token=any_run.cache_bytes_per_token,
                steps_to_threshold=None if threshold is None else [steps_to(run, threshold) for run in runs.values()],
            )
        )
    return summaries


def steps_to(record: RunRecord, threshold: float) -> int | None:
    """The first look at which the deciding measure reached the threshold; None if it never did."""
    for point in record.held_out:
        value = point.measures[record.measure]
        if (value <= threshold) if record.lower_is_better else (value >= threshold):
            return point.step
    return None


def _interval(differences: np.ndarray) -> tuple[float, float] | None:
    if len(differences) < 2:
        return None
    if np.ptp(differences) == 0:
        return float(differences[0]), float(differences[0])
    low, high = stats.t.interval(0.95, len(differences) - 1, loc=differences.mean(), scale=stats.sem(differences))
    return float(low), float(high)
