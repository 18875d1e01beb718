"""The training loop. Lightning Fabric owns devices, processes, precision and loggers; the rest can be read here in one
sitting."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.distributed.tensor import DTensor

from headwater.cost import cache_bytes_per_token, check_memory, parameters, training_flops_per_token
from headwater.data.base import Batch, Data
from headwater.diagnostics import drowning, init_diagnostics
from headwater.errors import Diverged, HeadwaterError, Interrupted, sentence
from headwater.files import disk_problem, explaining
from headwater.hardware import peak_of
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.recipe import Recipe
from headwater.records import (
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
from headwater.seeding import number
from headwater.training import guards
from headwater.training.checkpoint import (
    FOLDER,
    Progress,
    begin_with,
    optimizer_tensors,
    prune,
    read_progress,
    restore,
    save_checkpoint,
)
from headwater.training.hooks import Hooks
from headwater.training.optim import clip, gradient_norm, learning_rate, make_optimizers
from headwater.training.parallel import (
    add_up_scalars,
    agreed,
    autocast,
    connected,
    in_precision,
    leave,
    reshard,
    scalars,
    sharded,
    share_of,
    total,
)
from headwater.training.run_folder import Metrics, Point, begun, claimed
from headwater.training.start import Beginning, begin, prepare, trained_event

T = TypeVar("T")
# Called with the run's step and what it has to say: after every step, with a point of the curve, or with a notice.
OnEvent = Callable[[int, Point | None], None]


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    experiment: Experiment | None = None,
    on_event: OnEvent | None = None,
    measure_peak: bool = False,
    until: int | None = None,
) -> RunRecord:
    """Train one model as the recipe says, into `folder`.

    resume: go on from the newest checkpoint there that is whole; with as many processes as before the result is the
        same to the last bit as without the interruption.
    experiment: the comparison this run belongs to, for its record.
    on_event: called in the first process with (step, None) after every step, and with (step, point) for each new point
        of the curve, speed, held-out measure or notice.
    until: stop after so many of the recipe's steps, measured and saved; its record says "stopped", and a run with
        `resume` goes on as if it had never stopped.
    measure_peak: measure the CPU's peak FLOP/s first, so that speeds come with an MFU; for GPUs it is known.

    With training.devices above 1 the first process starts the others with its own command line; all return the record
    that the first has written to `folder`/record.json. Raises `HeadwaterError` for whatever the user can put right, and
    `Interrupted` after SIGINT or SIGTERM, with everything saved.
    """
    with connected(recipe, folder) as fabric:
        return _train(recipe, folder, fabric, resume, experiment, on_event, measure_peak, until)


def _train(
    recipe: Recipe,
    folder: Path,
    fabric: Fabric,
    resume: bool,
    experiment: Experiment | None,
    on_event: OnEvent | None,
    measure_peak: bool,
    until: int | None,
) -> RunRecord:
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    early: list[str] = []  # notices from before there is a run to tell them
    with (
        claimed(folder, resume, fabric, early.append) as checkpoint,
        stop_requests() as stop,
        guards.full_disk_told_once(),
    ):
        run = Run(recipe, folder, checkpoint, fabric, experiment, on_event, measure_peak)
        for message in early:
            run.tell(Notice(step=run.progress.step, message=message))
        try:
            with closing(run.batches):
                run.train(stop, until)
        except Interrupted:
            run.write("stopped")
            raise
        except Exception as error:
            run.record.error = str(error)
            lost = fabric.world_size > 1 and isinstance(error, RuntimeError) and LOST.search(str(error))
            with suppress(HeadwaterError):  # the disk is full, which is less than what is told here
                run.write("stopped" if lost else "diverged" if isinstance(error, Diverged) else "failed")
            if lost:
                raise HeadwaterError(
                    f"A process of this run has ended or cannot be reached: {lost.group()}. Go on with --resume."
                ) from error
            raise
        run.write("finished" if run.progress.step == recipe.training.steps else "stopped")
        return run.record


# What PyTorch's ways of communication say when the other side is gone.
LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|[^.\n]*[Tt]imed? ?out[^.\n]*|NCCL[^.\n]*error[^.\n]*"
)


class Run:
    """Everything a run holds, and what it does with it."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        checkpoint: Path | None,
        fabric: Fabric,
        experiment: Experiment | None = None,
        on_event: OnEvent | None = None,
        measure_peak: bool = False,
    ) -> None:
        self.recipe, self.folder, self.fabric = recipe, folder, fabric
        self.on_event = on_event if fabric.global_rank == 0 else None
        self.share, self.shows = share_of(fabric), True
        self.sharded = sharded(recipe.training)
        self.data: Data = agreed(fabric, lambda: recipe.data.build(), everywhere=True)
        self.beginning: Beginning | None = None
        if (start := recipe.start) is not None:
            where = checkpoint or agreed(fabric, lambda: prepare(start, folder))
            resumed = checkpoint is not None
            self.beginning = agreed(fabric, lambda: begin(recipe, where, self.data, resumed), everywhere=True)
        self.config = agreed(
            fabric,
            lambda: recipe.config_for(self.data) if self.beginning is None else self.beginning.config,
            everywhere=True,
        )
        if fabric.device.type == "cpu" and recipe.training.strategy != "fsdp":
            check_memory(self.config)
        self.progress = Progress(
            recipe=recipe.model_dump(mode="json"), data=self.data.description, run_id=secrets.token_hex(4)
        )
        if self.beginning is not None:
            self.progress.rows = self.beginning.rows
        if checkpoint is not None:
            self.progress = agreed(fabric, lambda: progress_of(checkpoint, recipe, self.data.description))
        self.record = agreed(fabric, lambda: self.new_record(experiment))

        with self.memory_advice():
            self.build()
        if checkpoint is not None:
            agreed(
                fabric,
                lambda: restore(checkpoint, self.model, self.optimizers, self.running, self.sharded),
                everywhere=True,
            )
        elif self.beginning is not None:
            kept = start is not None and start.optimizer == "kept"
            path = self.beginning.path
            agreed(
                fabric,
                lambda: begin_with(path, self.model, self.optimizers if kept else (), self.sharded),
                everywhere=True,
            )
        self.hooks = Hooks(self.model, recipe, self.beginning, None if checkpoint is None else self.progress.kept)
        self.progress.kept = self.hooks.kept
        start_wandb(recipe, folder, fabric, self.progress.run_id)
        with explaining(self.unwritten):
            if checkpoint is None:
                agreed(fabric, lambda: begun(folder))
            self.metrics = Metrics(folder, self.progress.step, self.data.measure, writes=fabric.global_rank == 0)
        if self.metrics.damage is not None:
            self.tell(Notice(step=self.progress.step, message=f"{self.metrics.damage}."))
        self.batches = ahead(self.numbered_batches())
        known = measure_peak or fabric.device.type == "cuda"
        self.peak = peak_of(fabric.device, recipe.training.precision) if known else None
        self.flops_per_token = training_flops_per_token(self.config, self.data.context)
        self.last = (self.progress.tokens, self.progress.seconds, self.progress.waited)  # at the last point
        self.record.parameters = self.model.num_parameters()
        if checkpoint is None and self.beginning is None and not self.sharded:
            message = drowning(init_diagnostics(self.model))
            if message is not None:
                self.tell(Notice(step=0, message=message))
        if self.beginning is not None:
            for message in self.beginning.notices:
                self.tell(Notice(step=0, message=message))
        for message in self.hooks.notices if checkpoint is None else ():
            self.tell(Notice(step=0, message=message))
        self.write("running")

    def build(self) -> None:
        """Model and optimisers. `model` is the plain model that is saved; `wrapped` is what runs: split, compiled."""
        recipe, fabric = self.recipe, self.fabric
        with torch.device("meta") if self.sharded else nullcontext():
            self.model = HeadwaterForCausalLM(self.config)
        if (kernel := recipe.training.attn_implementation) is not None:
            agreed(fabric, lambda: set_attention(self.model, kernel), everywhere=True)
        if recipe.training.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        runs: torch.nn.Module = self.model
        if recipe.training.compile:
            runs = agreed(fabric, lambda: compiled(self.model, fabric.device), everywhere=True)
        in_precision(self.model, recipe.training.precision)
        self.wrapped = fabric.setup_module(runs)
        self.wrapped.train()
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            assert tensor.device.type == fabric.device.type, f"{name} is on {tensor.device}"
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.scalars = scalars(self.model) if self.sharded else []
        self.optimizers = make_optimizers(self.model, recipe.training, fabric.device)
        steppers = fabric.setup_optimizers(*self.optimizers)
        self.steppers = steppers if isinstance(steppers, tuple) else (steppers,)
        # Sums since the last point of the curve, and the loss's averages.
        self.spikes = guards.Spikes()
        sums = {name: torch.zeros(1, dtype=torch.float64) for name in ("loss", "steps")}
        self.running = sums | self.spikes.state

    def memory_advice(self) -> AbstractContextManager[None]:
        return guards.memory_advice(
            self.recipe, self.config, self.data.context, self.fabric.device, self.fabric.world_size
        )

    def new_record(self, experiment: Experiment | None) -> RunRecord:
        recipe, data, counted = self.recipe, self.data, parameters(self.config)
        return RunRecord(
            name=recipe.name,
            experiment=experiment,
            origin=None if self.beginning is None else self.beginning.origin,
            seed=recipe.seed,
            status="running",
            recipe=recipe.model_dump(mode="json"),
            config_hash=recipe.digest(),
            data=data.description,
            measure=data.measure,
            lower_is_better=data.lower_is_better,
            parameters=0,
            embeddings=counted["embedding"] + counted["output head"],
            cache_bytes_per_token=cache_bytes_per_token(self.config),
            tokens=0,
            flops=0.0,
            seconds=0.0,
            environment=environment(str(self.fabric.device), self.fabric.world_size),
        )

    def train(self, stop: threading.Event, until: int | None = None) -> None:
        """Steps to the end, which is `until` or all, or until `stop` is set in some process: then a checkpoint, and
        `Interrupted`."""
        reporting, progress = self.recipe.reporting, self.progress
        steps = min(self.recipe.training.steps, until or self.recipe.training.steps)
        if progress.step:  # killed between a checkpoint and the removal of older ones
            self.prune()
        if progress.step == steps:  # killed between its last checkpoint and its record
            self.evaluate()
        if progress.step == 0 and self.beginning is not None:  # where the model stands before it trains on
            self.evaluate()
        stopping = False
        with self.memory_advice():
            while progress.step < steps and not stopping:
                norm, stopping = self.optimise(stop.is_set())
                step, is_last = progress.step, progress.step == steps
                if is_last or step % reporting.log_every == 0:
                    self.log(norm)
                progress.result = None
                if is_last or (reporting.evaluate_every and step % reporting.evaluate_every == 0):
                    self.evaluate()
                if self.on_event is not None:
                    self.on_event(step, None)
                # A process alone need not wait for others to hear of it.
                stopping = (stopping or (self.fabric.world_size == 1 and stop.is_set())) and not is_last
                if is_last or stopping or (reporting.save_every and step % reporting.save_every == 0):
                    self.save(must=is_last or stopping)
        if stopping:
            message = f"Stopped after step {progress.step}, which is saved; go on with the same command and --resume."
            if self.fabric.global_rank > 0:
                leave(failed=False)
            raise Interrupted(message)

    def optimise(self, stop: bool) -> tuple[Tensor, bool]:
        """One optimiser step: (the gradient's norm before clipping, whether a process was asked to stop).

        The loss is the mean over all its tokens, in all processes. A step whose loss or gradient is not finite changes
        nothing and is counted; `skip_limit` of them in a row raise `HeadwaterError`, with the batch saved.
        """
        settings, progress, world = self.recipe.training, self.progress, self.fabric.world_size
        started = time.perf_counter()
        # Dropout: a function of seed, step and process, so that nothing random need be saved.
        torch.manual_seed(number("dropout", self.recipe.seed, progress.step, self.fabric.global_rank))
        rate = learning_rate(progress.step, settings)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * (settings.scalar_rate if group["name"] == "scalars" else 1.0)
        self.hooks.before_step(progress.step)
        taken = self.take(settings.accumulate)
        progress.waited += time.perf_counter() - started
        micro = [batch for batch, _, _ in taken]
        own = torch.tensor([[labels, prints, int(stop)] for _, labels, prints in taken]).sum(0)
        labels, prints, stops = total(self.fabric, own).tolist()

        # FSDP hands on gradients after each backward pass: to wait, each process would keep those of the whole model.
        waits = world > 1 and not self.sharded
        loss = torch.zeros((), device=self.fabric.device)
        counted = torch.tensor(labels, device=self.fabric.device)
        for index, batch in enumerate(micro):
            is_last = index == len(micro) - 1
            with self.fabric.no_backward_sync(self.wrapped, enabled=not is_last and waits):
                part, aimed = self.losses(self.fabric.to_device(batch), counted)
                # Processes average their gradients, and the mean is to be over all tokens.
                self.fabric.backward(aimed * world if world > 1 else aimed)
            loss += part.detach()
        if self.scalars and world > 1:
            add_up_scalars(self.scalars, world)
        loss = total(self.fabric, loss)
        norm = gradient_norm(self.parameters)
        progress.step += 1
        progress.rows += settings.batch_size * settings.accumulate
        progress.tokens += world * sum(batch["input_ids"].numel() for batch in micro)
        progress.order = hashlib.sha256(f"{progress.order}{prints}".encode()).hexdigest()
        value = float(loss)
        if math.isfinite(value) and math.isfinite(float(norm)):
            if settings.clip is not None:
                clip(self.parameters, norm, settings.clip)
            for stepper in self.steppers:
                stepper.step()
            progress.skipped_last = 0
            self.running["loss"] += value
            self.running["steps"] += 1
            if self.spikes.is_spike(value):
                mean = float(self.spikes.state["spikes.mean"])
                self.tell(Notice(step=progress.step, message=f"The loss is {value:.4g}, after {mean:.4g} on average."))
        else:
            self.skip(value, float(norm), micro)
        for stepper in self.steppers:
            stepper.zero_grad()
        progress.seconds += time.perf_counter() - started
        return norm, stops > 0

    def take(self, count: int) -> list[tuple[Batch, int, int]]:
        """The next batches. Raises `HeadwaterError`, with all saved that was done, if they cannot be read."""
        try:
            return [next(self.batches) for _ in range(count)]
        except OSError as error:
            saved = "the last checkpoint is whole"
            if self.fabric.world_size == 1 and self.progress.step:
                self.save()
                saved = f"step {self.progress.step} is saved"
            where = f" ({error.filename})" if error.filename else ""
            raise HeadwaterError(
                f"The data of step {self.progress.step + 1} cannot be read: {error.strerror or error}{where}; {saved}. "
                "Put them back and go on with --resume."
            ) from error

    def losses(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(the loss of a forward pass as it is reported, and what the gradient is of), both over `counted` tokens."""
        with autocast(self.fabric.device, self.recipe.training):
            out = self.wrapped(**batch, labels=batch["shift_labels"], num_items_in_batch=counted)
        weight = self.recipe.training.z_loss
        if not weight:
            return out.loss, out.loss
        squares = out.logits.float().logsumexp(-1).square() * (batch["shift_labels"] != -100)
        return out.loss, out.loss + weight * squares.sum() / counted

    def skip(self, loss: float, norm: float, micro: list[Batch]) -> None:
        """Count a step that was not finite; raise `HeadwaterError` at the limit."""
        progress, settings = self.progress, self.recipe.training
        progress.skipped += 1
        progress.skipped_last += 1
        what = f"the loss is {loss:g} and the gradient's norm {norm:g}"
        self.tell(Notice(step=progress.step, message=f"Step {progress.step} is left out: {what}."))
        if progress.skipped_last < settings.skip_limit:
            return
        step, count = progress.step, settings.batch_size * settings.accumulate
        progress.step, progress.rows = step - 1, progress.rows - count
        rows = self.data.rows(self.recipe.seed, progress.rows, count)
        named = ", ".join(rows[:8]) + (f" and {count - 8} more" if count > 8 else "")
        target = agreed(self.fabric, lambda: guards.place_for(self.folder, step, progress))
        save_checkpoint(
            target,
            progress,
            self.model,
            self.data.tokenizer,
            {},
            self.fabric,
            sharded=self.sharded,
            add=lambda folder: guards.save_batches(folder, self.fabric.global_rank, micro),
        )
        raise Diverged(
            f"The run diverged: at step {step} {what}, and {progress.skipped_last} steps in a row were not finite. Its "
            f"rows are {named}; `headwater replay {target}` runs it again. Lower "
            f"training.learning_rate={settings.learning_rate:g}, or lengthen the warm-up."
        )

    def tell(self, point: Point) -> None:
        """Put a point on record, and show it."""
        self.metrics.add(point)
        if self.on_event is not None:
            self.on_event(point.step, point)

    def log(self, norm: Tensor) -> None:
        """A point of the curve, the mean loss since the last one, and how fast it went."""
        progress, steps = self.progress, float(self.running["steps"])
        if steps:  # not all were left out
            point = CurvePoint(
                step=progress.step,
                tokens=progress.tokens,
                loss=float(self.running["loss"]) / steps,
                learning_rate=self.optimizers[0].param_groups[0]["lr"],
                gradient_norm=float(norm),
                flops=self.flops,
            )
            self.running["loss"].zero_()
            self.running["steps"].zero_()
            self.tell(point)
            shown = {"loss": point.loss, "learning_rate": point.learning_rate, "gradient_norm": point.gradient_norm}
            self.show(shown | {"skipped": progress.skipped})
        tokens, seconds, waited = self.last
        self.last = (progress.tokens, progress.seconds, progress.waited)
        passed = max(progress.seconds - seconds, 1e-9)
        rate = (progress.tokens - tokens) / passed
        speed = SpeedPoint(
            step=progress.step,
            tokens_per_second=rate,
            waiting=(progress.waited - waited) / passed,
            mfu=None if self.peak is None else rate * self.flops_per_token / self.peak / self.fabric.world_size,
        )
        self.tell(speed)
        speeds = {"tokens_per_second": rate, "waiting": speed.waiting, "mfu": speed.mfu}
        if self.fabric.device.type == "cuda":
            speeds["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.fabric.device) / 1e9
        self.show({name: value for name, value in speeds.items() if value is not None})

    def show(self, values: dict[str, Any]) -> None:
        """Hand numbers to TensorBoard, as long as it can write them; metrics.jsonl has them too."""
        try:
            if self.shows:
                self.fabric.log_dict(values, step=self.progress.step)
        except Exception as error:
            # The logger puts an error of its own around it.
            if (problem := disk_problem(error) or disk_problem(error.__cause__ or error)) is None:
                raise
            self.shows = False
            message = f"TensorBoard's files cannot be written ({problem}); the run goes on without them."
            self.tell(Notice(step=self.progress.step, message=message))

    def evaluate(self) -> None:
        """Measure the held-out data."""

        @torch.no_grad()
        def logits(batch: Batch) -> Tensor:
            inputs = {name: tensor for name, tensor in batch.items() if name != "shift_labels"}
            with autocast(self.fabric.device, self.recipe.training):
                return self.wrapped(**self.fabric.to_device(inputs), use_cache=False).logits

        self.wrapped.eval()
        evaluation = self.data.evaluate(logits, self.share)
        self.wrapped.train()
        if self.sharded:  # the last parameters are kept whole after a forward pass, for a backward pass to come
            reshard(self.model)
        progress = self.progress
        progress.result = evaluation.measures[self.data.measure]
        self.tell(
            HeldOutPoint(step=progress.step, tokens=progress.tokens, flops=self.flops, measures=evaluation.measures)
        )
        self.show({f"held_out/{name}": value for name, value in evaluation.measures.items()})
        self.record.documents = [DocumentLoss(**document) for document in evaluation.documents]

    def save(self, must: bool = True) -> None:
        """A checkpoint, unless the weights are broken: then the one before it is the better one to keep.

        must: raise `HeadwaterError` in that case; else the steps to come will tell.
        """
        broken = [parameter for parameter in local(self.parameters) if not bool(parameter.isfinite().all())]
        if int(total(self.fabric, torch.tensor(len(broken)))):
            what = f"after step {self.progress.step} some weights are not finite"
            if not must:
                self.tell(Notice(step=self.progress.step, message=f"Not saved: {what}."))
                return
            raise Diverged(
                f"The run diverged: {what}; lower training.learning_rate={self.recipe.training.learning_rate:g}, or "
                "lengthen the warm-up."
            )
        state = optimizer_tensors(self.model, self.optimizers)
        state |= {f"running.{name}": tensor for name, tensor in self.running.items()}
        save_checkpoint(
            self.folder / FOLDER / f"step-{self.progress.step:06d}",
            self.progress,
            self.model,
            self.data.tokenizer,
            state,
            self.fabric,
            history=self.history,
            sharded=self.sharded,
        )
        self.prune()

    def prune(self) -> None:
        """Remove the checkpoints that are not to be kept."""
        agreed(self.fabric, lambda: prune(self.folder, self.recipe.reporting.keep, self.data.lower_is_better))

    def write(self, status: str) -> None:
        """Bring the record up to date and write it."""
        record, progress = self.record, self.progress
        record.status = status  # type: ignore[assignment]
        record.tokens, record.seconds, record.waited = progress.tokens, progress.seconds, progress.waited
        record.skipped, record.order = progress.skipped, progress.order
        record.flops = self.flops
        record.curve, record.held_out = self.metrics.of(CurvePoint), self.metrics.of(HeldOutPoint)
        record.speed, record.notices = self.metrics.of(SpeedPoint), self.metrics.of(Notice)
        if self.fabric.global_rank == 0:
            try:
                with explaining(self.unwritten):
                    write_record(record, self.folder)
            except HeadwaterError:
                stop_record(self.folder)
                raise

    def unwritten(self, problem: str) -> str:
        return f"The run's files in {str(self.folder)!r} cannot be written: {problem}; then go on with --resume."

    @property
    def flops(self) -> float:
        """Training FLOPs spent by this run."""
        return self.flops_per_token * self.progress.tokens

    @property
    def history(self) -> list[Event]:
        """What was done to the model, this run included."""
        progress = self.progress
        own = trained_event(self.recipe, self.data, progress.step, progress.rows, progress.tokens, self.flops)
        return [*(self.beginning.origin.history if self.beginning else ()), own]

    def numbered_batches(self) -> Iterator[tuple[Batch, int, int]]:
        """Batches from where the run stands, each with the number of its labels and its part of the rows' hash."""
        size, row = self.recipe.training.batch_size, self.progress.rows
        for batch in self.data.batches(self.recipe.seed, size, row, self.share):
            first = row + self.share.rank * size // self.share.world
            prints = sum(fingerprint(first + i, tokens) for i, tokens in enumerate(batch["input_ids"]))
            if self.fabric.device.type == "cuda":  # so that the copy to the device need not wait
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield batch, int((batch["shift_labels"] != -100).sum()), prints
            row += size


def fingerprint(place: int, tokens: Tensor) -> int:
    """40 bits of a row's tokens and its place in the order: small enough that sums over a step never overflow."""
    content = place.to_bytes(8, "little") + tokens.numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=5).digest(), "little")


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The same, `depth` of them made in another thread while the one before is used."""
    with ThreadPoolExecutor(1, "data") as worker:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            yield waiting.popleft().result()
            waiting.append(worker.submit(next, items))


def local(parameters: list[torch.nn.Parameter]) -> Iterator[Tensor]:
    """Of each parameter what this process has of it."""
    for parameter in parameters:
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def start_wandb(recipe: Recipe, run: Path, fabric: Fabric, run_id: str) -> None:
    """Weights & Biases follows the TensorBoard files, so that there is one way of logging."""

    def start() -> None:
        if recipe.reporting.wandb is None:
            return
        try:
            import wandb
        except ImportError as error:
            raise HeadwaterError("reporting.wandb needs the wandb package: pip install 'headwater[wandb]'.") from error
        try:
            wandb.init(
                project=recipe.reporting.wandb,
                name=recipe.name,
                id=run_id,  # a resumed run goes on with its curve
                resume="allow",
                dir=run,
                config=recipe.model_dump(mode="json"),
                sync_tensorboard=True,
            )
        except wandb.Error as error:
            raise HeadwaterError(
                f"Weights & Biases refused reporting.wandb={recipe.reporting.wandb!r}: {error}"
            ) from error

    agreed(fabric, start)


def compiled(model: HeadwaterForCausalLM, device: torch.device) -> torch.nn.Module:
    """The model through torch.compile, or one sentence where the machine has no compiler for it."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise HeadwaterError(
                "training.compile needs a C++ compiler and none was found; install g++ or clang++, or set CXX, or "
                "leave training.compile=false."
            ) from error
    return torch.compile(model)  # type: ignore[return-value]


def set_attention(model: HeadwaterForCausalLM, name: str) -> None:
    """Raises `HeadwaterError` where the kernel is not installed, or cannot do what the model asks for."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise HeadwaterError(f"training.attn_implementation: {sentence(error)}") from error


def progress_of(checkpoint: Path, recipe: Recipe, data: dict[str, Any]) -> Progress:
    """Where the run stood. A resumed run must be the same model on the same rows; how long it runs, on what, and what
    it reports may change. Raises `HeadwaterError`.

    data: the facts about the data as they are now.
    """
    progress = read_progress(checkpoint)
    old, new = progress.recipe, recipe.model_dump(mode="json")
    for section in ("model", "data", "seed", "training", "start"):
        before, now = old.get(section), new[section]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            changed = [key for key in changed if (section, key) not in MAY_CHANGE]
            if section == "training":  # written whole: a field that is not there came later
                changed = [key for key in changed if key in before]
            if not changed:
                continue
            key = changed[0]
            what, was, now = f"{section}.{key}", before.get(key), now.get(key)
        else:
            what, was = section, before
        raise HeadwaterError(
            f"This run was started with {what}={was!r} and cannot be resumed with {now!r}; put it back, or start a new "
            "run with another --out."
        )
    if progress.step > recipe.training.steps:
        raise HeadwaterError(
            f"The run is at step {progress.step} already, past training.steps={recipe.training.steps}."
        )
    for fact in ("sha256", "train_tokens", "held_out_sha256"):
        if progress.data.get(fact) != data.get(fact):
            raise HeadwaterError(
                f"The data have changed since this run was started ({fact} {progress.data.get(fact)!r}, now "
                f"{data.get(fact)!r}); put them back, or start a new run with another --out."
            )
    progress.recipe = new
    return progress


MAY_CHANGE = {
    ("training", name)
    for name in (
        "steps",
        "device",
        "devices",
        "nodes",
        "strategy",
        "threads",
        "attn_implementation",
        "compile",
        "gradient_checkpointing",
        "skip_limit",
        "timeout",
    )
} | {("start", "checkpoint")}  # it may have been moved


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that a step is finished and saved; a second one stops at once.

    What is ignored stays ignored: a shell starts jobs in the background deaf to SIGINT.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
