"""Trials side by side in worker processes: finished ones are not repeated, interrupted ones go on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout
from pebble import ProcessExpired, ProcessPool

from headwater.compare.trials import Job, Trial, levels
from headwater.errors import Diverged, HeadwaterError, Interrupted
from headwater.hardware import cores
from headwater.records import RunRecord, read_record, write_record
from headwater.training.checkpoint import checkpoints
from headwater.training.run_folder import METRICS
from headwater.training.stages import joined

OnChange = Callable[[Job, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial or one of its jobs: a record, or the reason there is none.

    A run that diverged has both: that is a result.
    """

    label: str
    record: RunRecord | None
    error: str | None = None


def run_trials(trials: list[Trial], workers: int | None = None, on_change: OnChange | None = None) -> list[Outcome]:
    """Train the trials, `workers` at a time (default: one per GPU, else one per core), one thread each.

    Trials whose result is there already are not repeated, and half-done ones go on from their checkpoint. Stages that
    several trials share are run once. A worker that dies is reported in its outcome; the others go on. Raises
    `Interrupted` after Ctrl-C.
    on_change: called with (job, steps done, "running" | "finished" | "failed"), a few times a second.
    """
    report = on_change or (lambda job, step, status: None)
    outcomes: dict[Path, Outcome] = {}
    for level in levels(trials):
        for trial in trials:
            outcomes |= _in_vain(trial, outcomes)
        for job in level:
            if job.folder not in outcomes and (record := result_of(job)) is not None:
                outcomes[job.folder] = Outcome(job.label, record, record.error)
                report(job, job.steps, "finished")
        # A worker that dies between two jobs takes its whole pool along, through no fault of the jobs left.
        for _ in range(3):
            todo = [job for job in level if job.folder not in outcomes]
            if todo:
                outcomes |= _run_pool(todo, workers or default_workers(todo), report)
    return [_joined(trial, outcomes) for trial in trials]


def default_workers(jobs: list[Job]) -> int:
    """One per GPU where the trials may use them, else one per core."""
    return gpus() or cores() if all(job.recipe.training.device in ("auto", "cuda") for job in jobs) else cores()


def gpus() -> int:
    """GPUs of this machine, counted without waking them."""
    import torch

    return torch.cuda.device_count()


def _in_vain(trial: Trial, outcomes: dict[Path, Outcome]) -> dict[Path, Outcome]:
    """The stages of a trial that have nothing to begin with, since one before them came to nothing."""
    failed = [place for place, job in enumerate(trial.jobs) if (o := outcomes.get(job.folder)) and _came_to_nothing(o)]
    lost = trial.jobs[failed[0] + 1 :] if failed else []
    return {job.folder: Outcome(job.label, None, "the stage before it failed") for job in lost}


def _came_to_nothing(outcome: Outcome) -> bool:
    return outcome.record is None or outcome.error is not None


def _joined(trial: Trial, outcomes: dict[Path, Outcome]) -> Outcome:
    """The outcome of a trial from those of its jobs; a trial with stages gets its record here."""
    lost = "the pool of worker processes broke three times"
    for job in trial.jobs:
        outcome = outcomes.get(job.folder) or Outcome(job.label, None, lost)
        if not trial.recipe.stages:
            return Outcome(trial.label, outcome.record, outcome.error)
        if _came_to_nothing(outcome):
            error = f"{job.label}: {outcome.error}"
            return Outcome(trial.label, outcome.record and _diverged(trial, outcome.record, error), error)
    runs = [(job.recipe, job.folder) for job in trial.jobs]
    trial.folder.mkdir(parents=True, exist_ok=True)
    record = joined(trial.recipe, trial.folder, runs, trial.experiment)
    write_record(record, trial.folder)
    return Outcome(trial.label, record)


def _diverged(trial: Trial, record: RunRecord, error: str) -> RunRecord:
    """Write the record of a trial whose stage has diverged: that stage's, as the trial's."""
    own = {"name": trial.recipe.name, "experiment": trial.experiment, "config_hash": trial.recipe.digest()}
    recipe = trial.recipe.model_dump(mode="json", exclude={"compare"})
    record = record.model_copy(update={**own, "recipe": recipe, "error": error})
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_record(record, trial.folder)
    return record


def _run_pool(jobs: list[Job], workers: int, report: OnChange) -> dict[Path, Outcome]:
    """The outcomes of the jobs by their folders; those that a broken pool never came to are left out."""
    outcomes: dict[Path, Outcome] = {}
    count = min(workers, len(jobs))
    # Fresh interpreters: a fork would inherit PyTorch's thread pools in whatever state they are.
    context = multiprocessing.get_context("spawn")
    slots = Path(tempfile.mkdtemp(prefix="headwater-"))
    pool = ProcessPool(max_workers=count, context=context, initializer=_start_worker, initargs=[slots, count, gpus()])
    try:
        with _deaf_to_interrupts():
            pending = [(job, pool.schedule(_work, args=[job])) for job in jobs]
        while pending:
            time.sleep(0.2)
            for job, future in [(job, future) for job, future in pending if future.done()]:
                pending.remove((job, future))
                if isinstance(future.exception(), BrokenExecutor):
                    continue
                outcomes[job.folder] = outcome = _outcome(job, future)
                steps = job.steps if outcome.record else 0
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
        shutil.rmtree(slots, ignore_errors=True)
    return outcomes


def result_of(job: Job) -> RunRecord | None:
    """The job's record, if it was run as far as it is to go with the very same settings."""
    try:
        record = read_record(job.folder)
    except HeadwaterError:
        return None
    same = record.config_hash == job.recipe.digest()
    if not same and checkpoints(job.folder):
        raise HeadwaterError(
            f"{str(job.folder)!r} holds a run with other settings; choose another --out, or remove it."
        )
    if not same:
        return None
    there = record.status in ("finished", "diverged") or (
        job.until is not None and any(point.step >= job.steps for point in record.held_out)
    )
    return record if there else None


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started here never sees Ctrl-C, from its first moment on; neither does what it starts.

    Ctrl-C reaches every process of the terminal; the parent stops the workers, with a signal they save on.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_slot: BaseFileLock | None = None  # of this process, if it is a worker


def _start_worker(slots: Path, count: int, gpus: int) -> None:
    """In the worker: see one GPU alone, its own, where there are some.

    slots: a folder with a lock for each of `count` workers. The lock of one that died is free for the one that follows
    it, which so has the same GPU.
    """
    global _slot
    if not gpus:
        return
    for number in range(count):
        lock = FileLock(slots / str(number))
        with suppress(Timeout):
            lock.acquire(timeout=0)
            _slot = lock
            break
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number % gpus]


def _work(job: Job) -> RunRecord:
    """In the worker: train one model with one thread."""
    import torch
    from transformers.utils import logging

    from headwater.training.loop import train

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return train(job.recipe, job.folder, resume=True, experiment=job.experiment, until=job.until)


def _outcome(job: Job, future: Future) -> Outcome:
    try:
        return Outcome(job.label, future.result())
    except ProcessExpired as error:
        return Outcome(job.label, None, f"its worker process died (exit code {error.exitcode})")
    except Diverged as error:
        return Outcome(job.label, read_record(job.folder), str(error))
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
