"""Trials in parallel worker processes: finished ones are not repeated, interrupted ones resume."""

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from headwater.util.errors import HeadwaterError, NotTrusted
from headwater.util.files import read_bytes
from headwater_lab.comparison.trials import Job, Trial, order_jobs
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.branching import can_branch
from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.loop import train
from headwater_lab.training.records import ENDED, RECORD, Experiment, RunRecord, find_record, read_record, write_record
from headwater_lab.training.run_folder import METRICS
from headwater_lab.training.stages import finish_stages
from headwater_lab.util.endings import Diverged, Interrupted
from headwater_lab.util.machine import cores
from headwater_lab.util.output_folder import keep_contents
from headwater_lab.util.workers import Answer, Worker, show_one_gpu

OnChange = Callable[[Job, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial or one of its jobs: a record, or the reason there is none.

    A run that diverged has both, because divergence is a result.
    """

    label: str
    record: RunRecord | None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.record is None or self.error is not None


def run_trials(trials: list[Trial], workers: int | None = None, on_change: OnChange | None = None) -> list[Outcome]:
    """Train the trials, `workers` at a time (default: one per GPU, else one per core), one thread each.

    Finished trials are not repeated, and unfinished ones resume from their checkpoint. Stages that
    several trials share are run once. A worker that dies is reported in its outcome; the others continue. Raises
    `Interrupted` after Ctrl-C.
    on_change: called with (job, steps done, "running" | "finished" | "failed"), a few times a second.
    """
    report = on_change or (lambda job, step, status: None)
    outcomes: dict[Path, Outcome] = {}
    for level in order_jobs(trials):
        for trial in trials:
            outcomes |= _list_impossible(trial, outcomes)
        for job in level:
            if job.folder not in outcomes and (record := read_finished(job)) is not None:
                outcomes[job.folder] = Outcome(job.label, record, record.error)
                report(job, job.steps, "finished")
        if todo := [job for job in level if job.folder not in outcomes]:
            outcomes |= _run_pool(todo, workers or count_workers(todo), report)
    return [_join_outcomes(trial, outcomes) for trial in trials]


def count_workers(jobs: list[Job]) -> int:
    """Count the default workers: one per GPU if the trials may use them, else one per core."""
    may_use_gpus = all(job.recipe.training.device in ("auto", "cuda") for job in jobs)
    return (may_use_gpus and torch.cuda.device_count()) or cores()


def _list_impossible(trial: Trial, outcomes: dict[Path, Outcome]) -> dict[Path, Outcome]:
    """List the stages of a trial that cannot start, because an earlier one failed."""
    failed = [index for index, job in enumerate(trial.jobs) if (o := outcomes.get(job.folder)) and o.has_failed]
    lost = trial.jobs[failed[0] + 1 :] if failed else []
    return {job.folder: Outcome(job.label, None, "the stage before it failed") for job in lost}


def _join_outcomes(trial: Trial, outcomes: dict[Path, Outcome]) -> Outcome:
    """Join the outcomes of a trial's jobs; the record of a trial with stages is written here."""
    for job in trial.jobs:
        outcome = outcomes[job.folder]
        if not trial.recipe.stages:
            return Outcome(trial.label, outcome.record, outcome.error)
        if outcome.has_failed:
            error = f"{job.label}: {outcome.error}"
            return Outcome(trial.label, outcome.record and _write_diverged(trial, outcome.record, error), error)
    runs = [(job.recipe, job.folder) for job in trial.jobs]
    trial.folder.mkdir(parents=True, exist_ok=True)
    return Outcome(trial.label, finish_stages(trial.recipe, trial.folder, runs, trial.experiment))


def _write_diverged(trial: Trial, record: RunRecord, error: str) -> RunRecord:
    """Write the record of a trial with a diverged stage: that stage's record becomes the trial's."""
    changes = {"name": trial.recipe.name, "experiment": trial.experiment, "identity": trial.recipe.identity}
    recipe = trial.recipe.model_dump(mode="json", exclude={"compare"})
    record = record.model_copy(update={**changes, "recipe": recipe, "error": error})
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_record(record, trial.folder)
    return record


def _run_pool(jobs: list[Job], workers: int, report: OnChange) -> dict[Path, Outcome]:
    """Run jobs in a pool, and return their outcomes by folder."""
    pool = _Pool(min(workers, len(jobs)))
    try:
        outcomes = pool.run(jobs, report)
    except KeyboardInterrupt:
        raise Interrupted("Stopped; run the same command again to resume the remaining trials.") from None
    finally:
        pool.end()
        for folder in (job.folder for job in jobs):
            if (folder / RECORD).exists() or list_checkpoints(folder):  # otherwise it was refused and left nothing
                keep_contents(folder)
    return outcomes


# Seconds allowed for a trial to finish its step and save.
SAVING = 60.0


class _Pool:
    """Workers by number, which determines the GPU: a replacement gets the number of the dead worker."""

    STARTS = 3  # maximum number of consecutive workers that end before they are ready

    def __init__(self, count: int) -> None:
        self.count, self.gpus = count, torch.cuda.device_count()
        self.workers: dict[int, Worker] = {}
        self.jobs: dict[Worker, Job] = {}  # the job of each
        self.answers: queue.SimpleQueue[tuple[Worker, Answer]] = queue.SimpleQueue()
        self.ready: set[Worker] = set()
        self.lost = 0  # consecutive workers that were never ready

    def run(self, jobs: list[Job], report: OnChange) -> dict[Path, Outcome]:
        """Train all jobs, in order, as workers become free."""
        waiting, outcomes = deque(jobs), dict[Path, Outcome]()
        looked = time.monotonic()
        while len(outcomes) < len(jobs):
            self.start(len(waiting))
            with suppress(queue.Empty):
                worker, answer = self.answers.get(timeout=0.2)
                if (job := self.jobs.pop(worker, None)) is not None:
                    outcomes[job.folder] = outcome = _read_outcome(job, worker, answer)
                    report(job, job.steps if outcome.record else 0, "finished" if outcome.record else "failed")
                if answer is None:
                    self.forget(worker)
                    continue
                self.ready.add(worker)
                self.lost = 0
                if waiting:
                    self.jobs[worker] = job = waiting.popleft()
                    experiment = None if job.experiment is None else job.experiment.model_dump(mode="json")
                    recipe = job.recipe.model_dump(mode="json")
                    trunk = None if job.trunk is None else str(job.trunk)
                    worker.call(recipe=recipe, folder=str(job.folder), experiment=experiment, trunk=trunk)
            if time.monotonic() - looked > 0.2:
                looked = time.monotonic()
                for job in self.jobs.values():
                    report(job, _read_step(job), "running")
        return outcomes

    def start(self, waiting: int) -> None:
        """Start workers for waiting jobs, up to the limit."""
        starting = len(self.workers) - len(self.jobs)
        free = [number for number in range(self.count) if number not in self.workers]
        for number in free[: max(0, waiting - starting)]:
            environment = show_one_gpu(number, self.gpus)
            job = f"{__name__}:train_job"
            self.workers[number] = Worker(job, lambda *answer: self.answers.put(answer), environment)

    def forget(self, worker: Worker) -> None:
        """Handle the end of a worker; raise `HeadwaterError` if none can be started."""
        self.workers = {number: started for number, started in self.workers.items() if started is not worker}
        self.lost += worker not in self.ready
        if self.lost >= self.STARTS:
            raise HeadwaterError(
                f"{self.lost} worker processes in a row ended before they got a trial (the last: {worker.ending}); "
                f"see their messages above, or try --workers 1, which needs less memory."
            )

    def end(self) -> None:
        """End the workers; those in training save first. A second Ctrl-C ends them at once."""
        workers = list(self.workers.values())
        try:
            for worker in self.jobs:
                worker.request_stop()
            until = time.monotonic() + SAVING
            while self.jobs and time.monotonic() < until:
                with suppress(queue.Empty):
                    self.jobs.pop(self.answers.get(timeout=0.2)[0], None)
            for worker in workers:
                worker.close()
            for worker in workers:
                worker.end()
        finally:
            for worker in workers:
                worker.end(0)


def check_same_run(record: RunRecord, recipe: Recipe, folder: Path) -> bool:
    """Whether a record is a run of a recipe.

    Raises `HeadwaterError` if it is not, and has ended or left a checkpoint in its folder, which would be lost.
    """
    difference = record.describe_difference(recipe)
    if difference and (record.status in ENDED or list_checkpoints(folder)):
        raise HeadwaterError(f"{str(folder)!r} holds a run {difference}; choose another --out, or remove it.")
    return not difference


def read_finished(job: Job) -> RunRecord | None:
    """Read the job's record, if it has run to its end with the same settings; None otherwise.

    Raises `HeadwaterError` if its folder holds a run with other settings or of code that has changed.
    """
    if (record := find_record(job.folder)) is None:
        return None
    is_same = check_same_run(record, job.recipe, job.folder)
    return record if is_same and record.status in ENDED else None


def train_job(recipe: dict[str, Any], folder: str, experiment: dict[str, Any] | None, trunk: str | None = None) -> None:
    """Train one model with one thread, in a worker process.

    trunk: the folder of a run to branch off, if it has a checkpoint for that; without, the result is the same.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    parsed = None if experiment is None else Experiment.model_validate(experiment)
    loaded, branch = Recipe.model_validate(recipe), None if trunk is None else Path(trunk)
    if branch is not None and not can_branch(branch, loaded):
        branch = None
    train(loaded, Path(folder), resume=True, experiment=parsed, trunk=branch)


def _read_outcome(job: Job, worker: Worker, answer: Answer) -> Outcome:
    if answer is None:
        return Outcome(job.label, None, f"its worker process died ({worker.ending})")
    kind, message = answer.get("error", (None, None))
    if kind in (None, Diverged.__name__):
        try:
            return Outcome(job.label, read_record(job.folder), message)
        except HeadwaterError as error:
            return Outcome(job.label, None, str(error))
    # Catch everything: a bug in one trial must not lose the results of the others.
    expected = kind in (HeadwaterError.__name__, NotTrusted.__name__, Interrupted.__name__)
    return Outcome(job.label, None, message if expected else f"{kind}: {message}")


def _read_step(job: Job) -> int:
    """Read the number of finished steps from the last complete line of the run's log."""
    try:
        lines = read_bytes(job.folder / METRICS).splitlines()
        return int(lines[-1].split(b'"step":')[1].split(b",")[0]) if lines else 0
    except (OSError, IndexError, ValueError):
        return 0
