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
from headwater.records import Experiment, RunRecord, read_record
from headwater.training.checkpoint import checkpoints
from headwater.training.run_folder import METRICS


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    experiment: Experiment
    recipe: Recipe
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.experiment.arm} · seed {self.recipe.seed}"


OnChange = Callable[[Trial, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: a record, or the reason there is none."""

    trial: Trial
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
    A worker that dies is reported in its outcome; the others go on. Raises `Interrupted` after Ctrl-C.
    on_change: called with (trial, steps done, "running" | "finished" | "failed"), a few times a second.
    """
    report = on_change or (lambda trial, step, status: None)
    outcomes: dict[Path, Outcome] = {}
    for trial in trials:
        if (record := finished_record(trial)) is not None:
            outcomes[trial.folder] = Outcome(trial, record)
            report(trial, trial.recipe.training.steps, "finished")
    # A worker that dies between two trials takes its whole pool along, through no fault of the trials left.
    for _ in range(3):
        todo = [trial for trial in trials if trial.folder not in outcomes]
        if todo:
            outcomes |= _run_pool(todo, workers or cores(), report)
    lost = "the pool of worker processes broke three times"
    return [outcomes.get(trial.folder) or Outcome(trial, None, lost) for trial in trials]


def _run_pool(trials: list[Trial], workers: int, report: OnChange) -> dict[Path, Outcome]:
    """The outcomes of the trials by their folders; those that a broken pool never came to are left out."""
    outcomes: dict[Path, Outcome] = {}
    # Fresh interpreters: a fork would inherit PyTorch's thread pools in whatever state they are.
    pool = ProcessPool(max_workers=min(workers, len(trials)), context=multiprocessing.get_context("spawn"))
    try:
        pending = [(trial, pool.schedule(_work, args=[trial])) for trial in trials]
        while pending:
            time.sleep(0.2)
            for trial, future in [(trial, future) for trial, future in pending if future.done()]:
                pending.remove((trial, future))
                if isinstance(future.exception(), BrokenExecutor):
                    continue
                outcomes[trial.folder] = outcome = _outcome(trial, future)
                steps = trial.recipe.training.steps if outcome.record else 0
                report(trial, steps, "finished" if outcome.record else "failed")
            for trial, future in pending:
                if future.running():
                    report(trial, _step(trial), "running")
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


def finished_record(trial: Trial) -> RunRecord | None:
    """The trial's record, if it was finished with the very same settings."""
    try:
        record = read_record(trial.folder)
    except HeadwaterError:
        return None
    same = record.config_hash == trial.recipe.digest()
    if not same and checkpoints(trial.folder):
        raise HeadwaterError(
            f"{str(trial.folder)!r} holds a run with other settings; choose another --out, or remove it."
        )
    return record if same and record.status == "finished" else None


def _work(trial: Trial) -> RunRecord:
    """In the worker: train one trial with one thread."""
    import signal

    import torch
    from transformers.utils import logging

    from headwater.training.loop import train

    # Ctrl-C reaches every process of the terminal; the parent stops the workers, with a signal they save on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return train(trial.recipe, trial.folder, resume=True, experiment=trial.experiment)


def _outcome(trial: Trial, future: Future) -> Outcome:
    try:
        return Outcome(trial, future.result())
    except ProcessExpired as error:
        return Outcome(trial, None, f"its worker process died (exit code {error.exitcode})")
    except HeadwaterError as error:
        return Outcome(trial, None, str(error))
    except Exception as error:  # a bug in one trial must not take the others' results along
        return Outcome(trial, None, f"{type(error).__name__}: {error}")


def _step(trial: Trial) -> int:
    """Steps done so far, from the last whole line of the trial's log."""
    try:
        lines = (trial.folder / METRICS).read_bytes().splitlines()
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
