"""The journal through which a run reports: its record, its log of points, TensorBoard and the caller."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.cost.counts import cache_bytes_per_token, embedding_parameters
from headwater.models.compiling import is_compiled
from headwater.plugins.external_code import hash_code
from headwater.util.errors import HeadwaterError
from headwater.util.files import disk_problem, explain_disk_errors, read_bytes, replace_text
from headwater_lab.data.base import Evaluation
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import Progress
from headwater_lab.training.processes import run_in_first
from headwater_lab.training.records import (
    CurvePoint,
    DocumentLoss,
    Event,
    Experiment,
    HeldOutPoint,
    Notice,
    Recorded,
    RunRecord,
    SpeedPoint,
    Trunk,
    list_records,
    read_environment,
    read_record,
    write_record,
)
from headwater_lab.training.run_folder import METRICS, clear_log, is_running
from headwater_lab.training.start import Setup, describe_training
from headwater_lab.util.clone import find_commit, today
from headwater_lab.util.machine import read_cpu_wait
from headwater_lab.util.machine_speed import peak_of
from headwater_lab.util.model_kinds import unit_of
from headwater_lab.util.output_folder import keep_contents
from headwater_lab.util.terminal import counted

Point = CurvePoint | HeldOutPoint | SpeedPoint | Notice
# Warn of busy cores if a run is so many times slower than before, and its threads wait for cores for this share of the
# time, over at least so many seconds. At its start there is no speed to compare with, so the bounds are higher.
SLOWED, WAITED, LONG_ENOUGH = 3.0, 0.25, 0.5
WAITED_AT_START, START_SECONDS = 0.5, 5.0
# At least so many seconds lie between two such warnings.
PAUSE = 600.0


class Metrics:
    """The points of a run, in memory and in metrics.jsonl: one JSON object a line, {"kind": …, …}.

    damage: a description of damaged lines, whose points are missing; None without any.
    """

    def __init__(self, run: Path, step: int, metric: str, writes: bool = True) -> None:
        """Read the points up to `step`, and drop what a killed run wrote after its last checkpoint.

        metric: the deciding one, which every evaluation must have.
        writes: whether this process writes the file.
        Raises `HeadwaterError` if the file cannot be read at all.
        """
        self.file, self.writes = run / METRICS, writes
        self.points: list[Point] = []
        self.damage: str | None = None
        try:
            *lines, tail = read_bytes(self.file).split(b"\n") if self.file.exists() else [b""]
        except OSError as error:
            raise HeadwaterError(f"{str(self.file)!r} cannot be read: {error.strerror}.") from error
        damaged = []
        if _read_point(tail) is not None:  # else a killed process left it incomplete, and the run repeats that step
            lines.append(tail)
        for number, line in enumerate(lines, 1):
            point = _read_point(line)
            if point is None or (isinstance(point, HeldOutPoint) and metric not in point.metrics):
                damaged.append(number)
            elif point.step <= step:
                self.points.append(point)
        if damaged:
            self.damage = f"{METRICS} is damaged: line {damaged[0]} of {len(lines)}"
            self.damage += f" and {len(damaged) - 1} more are left out" if damaged[1:] else " is left out"
        if writes:
            replace_text(self.file, "".join(map(_format_line, self.points)))

    def add_point(self, point: Point) -> None:
        """Add a point, unless it has just been added."""
        if point in self.points[-8:]:  # resuming a finished run evaluates it again, with the same result
            return
        self.points.append(point)
        if not self.writes:
            return
        # Ignore a full disk, which the next checkpoint reports. A missing line of the log is no reason to stop.
        with suppress(OSError), self.file.open("a") as file:
            file.write(_format_line(point))

    def fill_record(self, record: RunRecord) -> None:
        """Give the record all points, in order."""
        for kind, point_class in KINDS.items():
            field = "notices" if kind == "notice" else kind
            setattr(record, field, [point for point in self.points if isinstance(point, point_class)])


KINDS: dict[str, type[Point]] = {"curve": CurvePoint, "held_out": HeldOutPoint, "speed": SpeedPoint, "notice": Notice}


def _format_line(point: Point) -> str:
    kind = next(name for name, point_class in KINDS.items() if isinstance(point, point_class))
    return json.dumps({"kind": kind} | point.model_dump()) + "\n"


def _read_point(line: bytes) -> Point | None:
    """Read the point of a line; None if it is damaged."""
    try:
        values = json.loads(line.decode("utf-8"))
        return KINDS[values.pop("kind")](**values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class RunSummary:
    """A run, as read from its folder. status: "running" only while a process writes to it, else "interrupted"."""

    folder: Path
    record: RunRecord
    status: str
    step: int
    updated: float


def list_runs(folder: Path, tell: Callable[[str], None]) -> list[RunSummary]:
    """List all runs below `folder`, the most recently changed first.

    tell: called with a sentence for each damaged or unreadable file. A run with such a record is left out.
    """
    summaries = []
    for file in list_records(folder, tell):
        try:
            record = read_record(file)
        except HeadwaterError as error:
            tell(str(error))
            continue
        summaries.append(_summarize_run(file, record, tell))
    return sorted(summaries, key=lambda summary: -summary.updated)


def _summarize_run(file: Path, record: RunRecord, tell: Callable[[str], None]) -> RunSummary:
    """Summarize the run of a record, which is written at its start and at its end; points show its progress."""
    run = file.parent
    status = "running" if is_running(run) else "interrupted" if record.status == "running" else record.status
    try:
        points = Metrics(run, step=2**62, metric=record.metric, writes=False)
        if points.damage is not None:
            tell(f"{str(run)!r}: {points.damage}.")
        if "running" in (status, record.status):
            points.fill_record(record)
            record.tokens = record.curve[-1].tokens if record.curve else record.tokens
            if record.speed and record.speed[-1].tokens_per_second > 0:
                record.seconds = record.tokens / record.speed[-1].tokens_per_second
    except HeadwaterError as error:
        tell(str(error))
    steps = [point.step for point in record.curve] + [point.step for point in record.held_out]
    updated = max(path.stat().st_mtime for path in (file, run / METRICS) if path.exists())
    return RunSummary(run, record, status, max(steps, default=0), updated)


@contextmanager
def report_full_disk_once() -> Iterator[None]:
    """Stop TensorBoard's thread from printing a traceback when the disk is full: its caller gets the error too."""
    original = threading.excepthook

    def report_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or disk_problem(args.exc_value) is None:
            original(args)

    threading.excepthook = report_error
    try:
        yield
    finally:
        threading.excepthook = original


class Activity(NamedTuple):
    """An activity of a run between steps, such as "evaluating, batch 7". It is reported to the caller, not recorded."""

    text: str


# Called with the step and an event: None after every step, a point of the curve, a warning, or what the run does now.
OnEvent = Callable[[int, Point | Activity | None], None]


class Journal:
    """The channel for everything that a run reports. Only the first process writes."""

    def __init__(
        self,
        run: Setup,
        resumed: bool,
        experiment: Experiment | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.run, self.folder, self.progress, fabric = run, run.folder, run.progress, run.fabric
        recipe, is_first = run.recipe, fabric.global_rank == 0
        self.on_event = on_event if is_first else None
        self.to_tensorboard = True
        self.record = run_in_first(fabric, build_record, run, experiment)
        on_gpu = fabric.device.type == "cuda"
        self.peak = peak_of(fabric.device, recipe.training.precision) if on_gpu else None
        self.previous = replace(run.progress)  # progress at the previous point of the curve
        self.fastest, self.cpu_wait = 0.0, (time.perf_counter(), read_cpu_wait())  # tokens/s; moment and seconds
        self.warned_at = -PAUSE
        if recipe.reporting.wandb is not None:
            run_in_first(fabric, start_wandb, recipe, self.folder, run.progress.run_id)
        with explain_disk_errors(self.describe_failure):
            if not resumed:
                run_in_first(fabric, clear_log, self.folder)
            self.metrics = Metrics(self.folder, run.progress.step, run.data.metric, writes=is_first)
        for message in [*([] if self.metrics.damage is None else [f"{self.metrics.damage}."]), *run.warnings]:
            self.warn(message)
        self.write_record("running")
        run_in_first(fabric, keep_contents, self.folder)

    def count_flops(self, tokens: int) -> float:
        """Count the training FLOPs of this many tokens or images."""
        return self.run.flops_per_unit * tokens

    @property
    def history(self) -> list[Event]:
        """The history of the model, including this run."""
        run, progress = self.run, self.progress
        event = describe_training(run.recipe, run.data, progress, self.count_flops(progress.tokens))
        return [*(run.beginning.origin.history if run.beginning else ()), event]

    def add_point(self, point: Point) -> None:
        """Record a point, and pass it to the caller."""
        self.metrics.add_point(point)
        self.report(point.step, point)

    def report(self, step: int, event: Point | Activity | None) -> None:
        """Call the caller's `on_event`."""
        if self.on_event is not None:
            self.on_event(step, event)

    def warn(self, message: str, step: int | None = None) -> None:
        """Record a warning; step: the step it concerns, by default the current one."""
        self.add_point(Notice(step=self.progress.step if step is None else step, message=message))

    def announce(self, activity: str) -> None:
        """Tell the caller the run's current activity; see `Activity`."""
        self.report(self.progress.step, Activity(activity))

    def add_curve_point(self, progress: Progress, learning_rate: float, norm: float) -> None:
        """Record the mean loss of the steps up to this progress, and the speed, since the previous point.

        progress: a copy from after its step; later steps may have been taken since.
        """
        running, step, fabric = self.run.running, progress.step, self.run.fabric
        steps = float(running["steps"])
        if steps:  # 0 if every step since then was skipped
            values = {"loss": float(running["loss"]) / steps, "learning_rate": learning_rate, "gradient_norm": norm}
            for total in running.values():
                total.zero_()
            flops = self.count_flops(progress.tokens)
            self.add_point(CurvePoint(step=step, tokens=progress.tokens, flops=flops, **values))
            self.log_values(values | {"skipped_steps": self.progress.skipped}, step)
        previous, self.previous = self.previous, progress
        seconds = max(progress.seconds - previous.seconds, 1e-9)
        rate = (progress.tokens - previous.tokens) / seconds
        mfu = None if self.peak is None else rate * self.run.flops_per_unit / self.peak / fabric.world_size
        waited = (progress.waited - previous.waited) / seconds
        self.add_point(SpeedPoint(step=step, tokens_per_second=rate, data_wait_fraction=waited, mfu=mfu))
        self.warn_of_busy_cores(rate, progress.step)
        speeds = {f"{self.record.unit}_per_second": rate, "data_wait_fraction": waited, "mfu": mfu}
        if fabric.device.type == "cuda":
            speeds["peak_memory_gb"] = torch.cuda.max_memory_allocated(fabric.device) / 1e9
        self.log_values({name: value for name, value in speeds.items() if value is not None}, step)

    def warn_of_busy_cores(self, rate: float, step: int) -> None:
        """Warn if training is or has become slow while its threads wait for cores. rate: tokens/s."""
        (moment, waited), self.cpu_wait = self.cpu_wait, (time.perf_counter(), read_cpu_wait())
        seconds, waited = self.cpu_wait[0] - moment, self.cpu_wait[1] - waited
        slowdown, self.fastest = self.fastest / rate, max(self.fastest, rate)
        change, is_slow = f"has become {slowdown:.0f} times slower", slowdown > SLOWED
        share, least = WAITED, LONG_ENOUGH
        if not slowdown:
            change, is_slow, share, least = "is slow from its start", True, WAITED_AT_START, START_SECONDS
        if not is_slow or waited < share * seconds or seconds < least or self.run.fabric.device.type != "cpu":
            return
        self.fastest = rate  # the next warning is of the next change
        if self.cpu_wait[0] - self.warned_at < PAUSE:
            return
        self.warned_at = self.cpu_wait[0]
        threads = torch.get_num_threads()
        fewer = "" if threads == 1 else ", or stop it, and continue with --resume and a lower training.threads"
        self.warn(
            f"Training {change}, because other processes use its CPU cores. It has {counted(threads, 'thread')}: stop "
            f"the other processes{fewer}.",
            step,
        )

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Record the held-out metrics at this step."""
        progress, metrics = self.progress, evaluation.metrics
        flops = self.count_flops(progress.tokens)
        self.add_point(HeldOutPoint(step=progress.step, tokens=progress.tokens, flops=flops, metrics=metrics))
        self.log_values({f"held_out/{name}": value for name, value in metrics.items()}, progress.step)
        self.record.documents = [DocumentLoss(**document) for document in evaluation.documents]

    def log_values(self, values: dict[str, Any], step: int) -> None:
        """Pass the numbers of a step to TensorBoard until a write fails; metrics.jsonl has them too."""
        try:
            if self.to_tensorboard:
                self.run.fabric.log_dict(values, step=step)
        except Exception as error:
            # The logger wraps the disk's error in its own.
            if (problem := disk_problem(error) or disk_problem(error.__cause__ or error)) is None:
                raise
            self.to_tensorboard = False
            self.warn(f"TensorBoard's files cannot be written ({problem}); the run continues without them.")

    def write_record(self, status: str, error: Exception | None = None) -> None:
        """Update record.json. Raises `HeadwaterError` if it cannot be written."""
        record, progress = self.record, self.progress
        record.status = status  # type: ignore[assignment]
        record.error = record.error if error is None else str(error)
        record.tokens, record.flops = progress.tokens, self.count_flops(progress.tokens)
        record.seconds, record.data_wait_seconds = progress.seconds, progress.waited
        record.skipped_steps, record.data_order = progress.skipped, progress.order
        record.recorded = Recorded(date=today(), commit=find_commit())
        self.metrics.fill_record(record)
        if self.run.fabric.global_rank == 0:
            with explain_disk_errors(self.describe_failure):
                write_record(record, self.folder)

    def describe_failure(self, problem: str) -> str:
        """Write the sentence for files that cannot be written."""
        return f"The run's files in {str(self.folder)!r} cannot be written: {problem}; then continue with --resume."


def build_record(run: Setup, experiment: Experiment | None) -> RunRecord:
    """Make the record of a run before its first step."""
    recipe, data, config, fabric = run.recipe, run.data, run.config, run.fabric
    return RunRecord(
        name=recipe.name,
        experiment=experiment,
        origin=None if run.beginning is None else run.beginning.origin,
        trunk=None if run.progress.trunk is None else Trunk(**run.progress.trunk),
        seed=recipe.seed,
        status="running",
        recipe=recipe.model_dump(mode="json"),
        identity=recipe.identity,
        code=hash_code(recipe.model_dump(mode="json", include={"model", "data", "training"})),
        data=data.description,
        metric=data.metric,
        lower_is_better=data.lower_is_better,
        parameters=run.model.num_parameters(),
        embedding_parameters=embedding_parameters(config),
        cache_bytes_per_token=cache_bytes_per_token(config),
        unit=unit_of(config),
        tokens=0,
        flops=0.0,
        seconds=0.0,
        environment=read_environment(
            str(fabric.device), fabric.world_size, is_compiled(run.model), config._attn_implementation
        ),
    )


def start_wandb(recipe: Recipe, folder: Path, run_id: str) -> None:
    """Start Weights & Biases, which syncs the TensorBoard files. Raises `HeadwaterError`."""
    import wandb

    try:
        wandb.init(
            project=recipe.reporting.wandb,
            name=recipe.name,
            id=run_id,  # lets a resumed run continue its curve
            resume="allow",
            dir=folder,
            config=recipe.model_dump(mode="json"),
            sync_tensorboard=True,
        )
    except wandb.Error as error:
        raise HeadwaterError(f"Weights & Biases refused reporting.wandb={recipe.reporting.wandb!r}: {error}") from error
