"""What a run writes about itself: record.json, metrics.jsonl, TensorBoard, Weights & Biases, events for its caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric

from headwater.cost.counts import cache_bytes_per_token, embedding_parameters, training_flops
from headwater.cost.hardware import peak_of
from headwater.models.compiling import is_compiled
from headwater.models.kinds import unit_of
from headwater.util.errors import HeadwaterError
from headwater.util.files import disk_problem, explaining
from headwater.util.output_folder import keep
from headwater_lab.data.base import Evaluation
from headwater_lab.recipe.schema import Recipe
from headwater_lab.training.parallel import first
from headwater_lab.training.records import (
    CurvePoint,
    DocumentLoss,
    Event,
    Experiment,
    HeldOutPoint,
    Notice,
    RunRecord,
    SpeedPoint,
    environment,
    stop_record,
    write_record,
)
from headwater_lab.training.run_folder import Metrics, Point, begun
from headwater_lab.training.setup import Setup
from headwater_lab.training.start import trained_event


class Activity(NamedTuple):
    """What a run does between steps, such as "evaluating, batch 7". The caller hears it; it is not recorded."""

    text: str


# Called with the step and an event: None after every step, a point of the curve, a warning, or what the run does now.
OnEvent = Callable[[int, Point | Activity | None], None]


class Mark(NamedTuple):
    """What a point of the curve needs to know of the time after its step, before the step's outcome is read."""

    step: int
    tokens: int
    flops: float
    seconds: float
    waited: float
    learning_rate: float


class Journal:
    """Everything that a run reports goes through here. Only the first process writes."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        fabric: Fabric,
        setup: Setup,
        resumed: bool,
        experiment: Experiment | None = None,
        on_event: OnEvent | None = None,
        measure_peak: bool = False,
    ) -> None:
        self.recipe, self.folder, self.fabric, self.setup = recipe, folder, fabric, setup
        self.on_event = on_event if fabric.global_rank == 0 else None
        self.to_tensorboard = True
        self.record = first(fabric, new_record, recipe, setup, fabric, experiment)
        self.flops_per_unit = training_flops(setup.config, setup.data.context)
        if setup.teacher is not None:
            self.flops_per_unit += setup.teacher.flops
        known = measure_peak or fabric.device.type == "cuda"
        self.peak = peak_of(fabric.device, recipe.training.precision) if known else None
        progress = setup.progress
        self.last = (progress.tokens, progress.seconds, progress.waited)  # at the last point of the curve
        if recipe.reporting.wandb is not None:
            first(fabric, start_wandb, recipe, folder, progress.run_id)
        with explaining(self.unwritten):
            if not resumed:
                first(fabric, begun, folder)
            self.metrics = Metrics(folder, progress.step, setup.data.metric, writes=fabric.global_rank == 0)
        if self.metrics.damage is not None:
            self.warn(f"{self.metrics.damage}.")
        for message in setup.warnings:
            self.warn(message)
        self.write("running")
        first(fabric, keep, folder)

    @property
    def flops(self) -> float:
        """Training FLOPs spent by this run."""
        return self.flops_per_unit * self.setup.progress.tokens

    @property
    def history(self) -> list[Event]:
        """What was done to the model, including this run."""
        setup, progress = self.setup, self.setup.progress
        own = trained_event(self.recipe, setup.data, progress.step, progress.rows, progress.tokens, self.flops)
        return [*(setup.beginning.origin.history if setup.beginning else ()), own]

    def tell(self, point: Point) -> None:
        """Record a point, and pass it to the caller."""
        self.metrics.add(point)
        if self.on_event is not None:
            self.on_event(point.step, point)

    def warn(self, message: str, step: int | None = None) -> None:
        """Record a warning; step: the step it is about, by default the current one."""
        self.tell(Notice(step=self.setup.progress.step if step is None else step, message=message))

    def announce(self, activity: str) -> None:
        """Tell the caller what the run does now; see `Activity`."""
        if self.on_event is not None:
            self.on_event(self.setup.progress.step, Activity(activity))

    def stepped(self) -> None:
        """Tell the caller that a step is done."""
        if self.on_event is not None:
            self.on_event(self.setup.progress.step, None)

    def mark(self, learning_rate: float) -> Mark:
        """A mark at the current step, for `curve`."""
        progress = self.setup.progress
        return Mark(progress.step, progress.tokens, self.flops, progress.seconds, progress.waited, learning_rate)

    def curve(self, mark: Mark, norm: float) -> None:
        """A point of the curve: the mean loss, of steps up to the marked one, and the speed since the previous one."""
        running = self.setup.running
        steps = float(running["steps"])
        if steps:  # 0 if every step since then was skipped
            point = CurvePoint(
                step=mark.step,
                tokens=mark.tokens,
                loss=float(running["loss"]) / steps,
                learning_rate=mark.learning_rate,
                gradient_norm=norm,
                flops=mark.flops,
            )
            running["loss"].zero_()
            running["steps"].zero_()
            self.tell(point)
            shown = {"loss": point.loss, "learning_rate": point.learning_rate, "gradient_norm": point.gradient_norm}
            self.show(shown | {"skipped_steps": self.setup.progress.skipped}, mark.step)
        tokens, seconds, waited = self.last
        self.last = (mark.tokens, mark.seconds, mark.waited)
        passed = max(mark.seconds - seconds, 1e-9)
        rate = (mark.tokens - tokens) / passed
        speed = SpeedPoint(
            step=mark.step,
            tokens_per_second=rate,
            data_wait_fraction=(mark.waited - waited) / passed,
            mfu=None if self.peak is None else rate * self.flops_per_unit / self.peak / self.fabric.world_size,
        )
        self.tell(speed)
        speeds = {f"{self.record.unit}_per_second": rate, "mfu": speed.mfu}
        speeds["data_wait_fraction"] = speed.data_wait_fraction
        if self.fabric.device.type == "cuda":
            speeds["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.fabric.device) / 1e9
        self.show({name: value for name, value in speeds.items() if value is not None}, mark.step)

    def held_out(self, evaluation: Evaluation) -> None:
        """Record the held-out metrics at this step."""
        progress, metrics = self.setup.progress, evaluation.metrics
        self.tell(HeldOutPoint(step=progress.step, tokens=progress.tokens, flops=self.flops, metrics=metrics))
        self.show({f"held_out/{name}": value for name, value in metrics.items()}, progress.step)
        self.record.documents = [DocumentLoss(**document) for document in evaluation.documents]

    def show(self, values: dict[str, Any], step: int) -> None:
        """Pass the numbers of a step to TensorBoard until it fails to write them; metrics.jsonl has them too."""
        try:
            if self.to_tensorboard:
                self.fabric.log_dict(values, step=step)
        except Exception as error:
            # The logger wraps the disk's error in its own.
            if (problem := disk_problem(error) or disk_problem(error.__cause__ or error)) is None:
                raise
            self.to_tensorboard = False
            self.warn(f"TensorBoard's files cannot be written ({problem}); the run continues without them.")

    def write(self, status: str, error: Exception | None = None) -> None:
        """Update record.json. Raises `HeadwaterError` if it cannot be written."""
        record, progress, metrics = self.record, self.setup.progress, self.metrics
        record.status = status  # type: ignore[assignment]
        record.error = record.error if error is None else str(error)
        record.tokens, record.seconds, record.data_wait_seconds = progress.tokens, progress.seconds, progress.waited
        record.skipped_steps, record.data_order, record.flops = progress.skipped, progress.order, self.flops
        record.curve, record.held_out = metrics.of(CurvePoint), metrics.of(HeldOutPoint)
        record.speed, record.notices = metrics.of(SpeedPoint), metrics.of(Notice)
        if self.fabric.global_rank == 0:
            try:
                with explaining(self.unwritten):
                    write_record(record, self.folder)
            except HeadwaterError:
                stop_record(self.folder)
                raise

    def unwritten(self, problem: str) -> str:
        return f"The run's files in {str(self.folder)!r} cannot be written: {problem}; then continue with --resume."


def new_record(recipe: Recipe, setup: Setup, fabric: Fabric, experiment: Experiment | None) -> RunRecord:
    """The record of a run before its first step."""
    data = setup.data
    return RunRecord(
        name=recipe.name,
        experiment=experiment,
        origin=None if setup.beginning is None else setup.beginning.origin,
        seed=recipe.seed,
        status="running",
        recipe=recipe.model_dump(mode="json"),
        identity=recipe.identity,
        data=data.description,
        metric=data.metric,
        lower_is_better=data.lower_is_better,
        parameters=setup.model.num_parameters(),
        embedding_parameters=embedding_parameters(setup.config),
        cache_bytes_per_token=cache_bytes_per_token(setup.config),
        unit=unit_of(setup.config),
        tokens=0,
        flops=0.0,
        seconds=0.0,
        environment=environment(
            str(fabric.device), fabric.world_size, is_compiled(setup.model), setup.config._attn_implementation
        ),
    )


def start_wandb(recipe: Recipe, folder: Path, run_id: str) -> None:
    """Weights & Biases syncs the TensorBoard files, so there is one way of logging. Raises `HeadwaterError`."""
    import wandb

    try:
        wandb.init(
            project=recipe.reporting.wandb,
            name=recipe.name,
            id=run_id,  # a resumed run continues its curve
            resume="allow",
            dir=folder,
            config=recipe.model_dump(mode="json"),
            sync_tensorboard=True,
        )
    except wandb.Error as error:
        raise HeadwaterError(f"Weights & Biases refused reporting.wandb={recipe.reporting.wandb!r}: {error}") from error
