"""The training loop. Lightning Fabric handles devices, processes, precision and loggers; this file has the rest,
and can be read in one sitting.

`setup` builds what a step uses, `batches` prepares the data, `journal` writes results, `checkpoint` saves everything.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from headwater.cost.hardware import set_threads
from headwater.models.compiling import is_compiled
from headwater.models.kinds import is_of_images
from headwater.nn.documents import takes_documents
from headwater.util.errors import Diverged, HeadwaterError, Interrupted, sentence
from headwater.util.freed_memory import keep_freed_memory
from headwater.util.process import stop_requests
from headwater.util.seeding import number
from headwater_lab.data.base import LABELS, Batch, main_input, units
from headwater_lab.data.images.base import UnreadableImage
from headwater_lab.recipe.schema import Recipe
from headwater_lab.training import guards
from headwater_lab.training.batches import Counted, batches, filled, with_documents
from headwater_lab.training.checkpoint import FOLDER, optimizer_tensors, prune
from headwater_lab.training.journal import Journal, Mark, OnEvent
from headwater_lab.training.model_folder import publish_model
from headwater_lab.training.optim import clip, gradient_norm, learning_rate
from headwater_lab.training.parallel import (
    Reading,
    add_up_scalars,
    autocast,
    connected,
    first,
    leave,
    local,
    lost_process,
    placed,
    reshard,
    sharded,
    share_of,
    to_device,
    total,
)
from headwater_lab.training.places import checkpoints
from headwater_lab.training.records import Experiment, RunRecord
from headwater_lab.training.run_folder import claimed
from headwater_lab.training.saving import Saver
from headwater_lab.training.setup import memory_advice, set_up


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

    resume: continue from the newest intact checkpoint there; with as many processes as before, the result is the same
        to the last bit as without the interruption.
    experiment: the comparison this run belongs to, for its record.
    on_event: called in the first process with (step, None) after every step, and with (step, point) for each new point
        of the curve, speed, held-out metric or warning.
    measure_peak: measure the CPU's peak FLOP/s first, so that the MFU can be computed; a GPU's peak is known.
    until: stop after this many of the recipe's steps, evaluated and saved; the record says "stopped", and a run with
        `resume` continues as if it had never stopped.

    With training.devices above 1 the first process starts the others with its own command line; all return the record
    that the first one writes to `folder`/record.json. Raises `HeadwaterError` for errors that the user can fix, and
    `Interrupted` after SIGINT or SIGTERM, with everything saved.
    """
    if recipe.training.threads is not None:
        set_threads(recipe.training.threads)
    early: list[str] = []  # warnings from before the journal exists
    with (
        connected(recipe, folder) as fabric,
        claimed(folder, resume, fabric, early.append) as checkpoint,
        stop_requests() as stop,
        guards.full_disk_told_once(),
    ):
        if fabric.device.type == "cpu":
            keep_freed_memory()
        run = TrainingRun(recipe, folder, checkpoint, fabric, experiment, on_event, measure_peak)
        for message in early:
            run.journal.warn(message)
        try:
            with closing(run.batches), run.saver:
                run.train(stop, until)
        except Interrupted:
            run.journal.write("stopped")
            raise
        except Exception as error:
            lost = lost_process(fabric, error)
            status = "stopped" if lost else "diverged" if isinstance(error, Diverged) else "failed"
            if not lost:  # or its outcome may never arrive
                with suppress(Exception):
                    run.settle()
            if run.saver.failure not in (None, error):
                run.journal.warn(f"{run.saver.failure}")
            with suppress(HeadwaterError):  # a full disk matters less than the error itself
                run.journal.write(status, error)
            if lost:
                raise HeadwaterError(
                    f"A process of this run has ended or cannot be reached: {lost}. Continue with --resume."
                ) from error
            raise
        run.journal.write("finished" if run.progress.step == recipe.training.steps else "stopped")
        return run.journal.record


class Steps:
    """A run that takes a step whenever it is told to, and neither evaluates nor saves."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.model, self.data = run, run.model, run.data

    def step(self) -> None:
        """One step, with its outcome."""
        self.run.step(False)
        self.run.settle()

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.run.progress.step

    @property
    def units(self) -> int:
        """Tokens so far, or images."""
        return self.run.progress.tokens


@contextmanager
def stepping(recipe: Recipe, folder: Path) -> Iterator[Steps]:
    """A recipe's training step by step, to time it; its journal is in `folder`. The threads are the caller's."""
    folder.mkdir(parents=True)
    with connected(recipe, folder) as fabric:
        if fabric.device.type == "cpu":
            keep_freed_memory()
        run = TrainingRun(recipe, folder, None, fabric)
        with closing(run.batches), run.saver:
            yield Steps(run)


class StepOutcome(NamedTuple):
    """A step's results, on their way from the device.

    counts: labels, the rows' fingerprint, processes asked to stop, processes whose `Saver` was ready, in its `phase`.
    """

    step: int
    loss_and_norm: Reading
    counts: Reading
    phase: int


class TrainingRun:
    """A run: its steps, with a point of the curve, an evaluation or a checkpoint after some of them."""

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
        """checkpoint: to resume from; None to begin."""
        self.recipe, self.folder, self.fabric = recipe, folder, fabric
        self.setup = setup = set_up(recipe, folder, checkpoint, fabric)
        self.data, self.model, self.wrapped, self.progress = setup.data, setup.model, setup.wrapped, setup.progress
        self.parameters, self.running, self.average = setup.parameters, setup.running, setup.average
        resumed = checkpoint is not None
        self.journal = Journal(recipe, folder, fabric, setup, resumed, experiment, on_event, measure_peak)
        self.share = share_of(fabric)
        self.by_document = takes_documents(self.model.config._attn_implementation)
        on_gpu = fabric.device.type == "cuda"
        self.batches = batches(recipe, self.data, self.progress.rows, self.share, on_gpu, self.by_document)
        # Optimizers that support GradScaler's `found_inf` change nothing if it is 1.
        self.skips_on_device = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in setup.optimizers
        )
        self.saver = Saver(fabric, sharded(recipe.training), neighbors=placed(recipe.training)[0])
        self.outcome: StepOutcome | None = None
        self.due: Mark | None = None  # of a point of the curve, until its step is settled
        self.norm, self.others_stop = math.nan, False  # of the last settled step
        self.rate = math.nan  # of the last step

    def train(self, stop: threading.Event, until: int | None = None) -> None:
        """Take steps until `until` or the recipe's end, or until `stop` is set in some process; then save, and raise
        `Interrupted`."""
        reporting, progress = self.recipe.reporting, self.progress
        steps = min(self.recipe.training.steps, until or self.recipe.training.steps)
        if progress.step:  # killed between a checkpoint and what follows it
            first(self.fabric, self.publish)
        if progress.step == 0:  # the model's quality before training continues
            due = self.setup.beginning is not None
        else:  # killed between its last checkpoint and its record, or the held-out data could not be read
            due = progress.step == steps or (progress.result is None and self.evaluates(progress.step))
        if due:
            self.evaluate()
        self.journal.announce("the first step takes longest" if is_compiled(self.model) else "")
        stopping = False
        with memory_advice(self.recipe, self.setup.config, self.data, self.fabric):
            while progress.step < steps and not stopping:
                self.step(stop.is_set())
                step, is_last = progress.step, progress.step == steps
                if is_last or step % reporting.log_every == 0:
                    self.due = self.journal.mark(self.rate)
                progress.result = None
                if is_last or self.evaluates(step):
                    self.settle()
                    self.evaluate()
                self.journal.stepped()
                # A single process has no others to wait for.
                stopping = self.others_stop or (self.fabric.world_size == 1 and stop.is_set())
                stopping = stopping and not is_last
                if is_last or stopping or (reporting.save_every and step % reporting.save_every == 0):
                    self.save(must=is_last or stopping)
        if stopping:
            message = f"Stopped after step {progress.step}, which is saved; run the same command with --resume."
            if self.fabric.global_rank > 0:
                leave(failed=False)
            raise Interrupted(message)

    def step(self, stop: bool) -> None:
        """One optimizer step. `stop`: whether this process was asked to stop, which it tells the others.

        The loss is the mean over all tokens of the step, in all processes. A step whose loss or gradient is not finite
        changes nothing. That is decided on the device: the host does not wait for the step, and reads its outcome
        after it has started the next one (`settle`).
        """
        settings, progress, setup = self.recipe.training, self.progress, self.setup
        started = time.perf_counter()
        # Dropout is a function of seed, step and process, so no random state needs saving.
        torch.manual_seed(number("dropout", self.recipe.seed, progress.step, self.fabric.global_rank))
        self.rate = rate = learning_rate(progress.step, settings)
        for optimizer in setup.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = (
                    rate
                    * (settings.scalar_learning_rate_multiplier if group["name"] == "scalars" else 1.0)
                    * group.get("rate", 1.0)
                )
        setup.hooks.prepare_step(progress.step)
        taken = self.take(settings.gradient_accumulation_steps)
        progress.waited += time.perf_counter() - started
        own = torch.tensor([[each.labels, each.fingerprint, 0, 0] for each in taken]).sum(0)
        own += torch.tensor([0, 0, int(stop), int(self.saver.ready)])
        phase = self.saver.phase
        counts = total(self.fabric, to_device(own, self.fabric.device))

        micro = [each.batch for each in taken]
        loss = self.backward(micro, counts[0])
        norm = gradient_norm(self.parameters)
        finite = loss.isfinite() & norm.isfinite()
        if self.skips_on_device or bool(finite):
            if settings.max_grad_norm is not None:
                clip(self.parameters, norm, settings.max_grad_norm)
            for optimizer, stepper in zip(setup.optimizers, setup.steppers, strict=True):
                optimizer.found_inf = (~finite).float() if self.skips_on_device else None  # type: ignore[attr-defined]
                stepper.step()
        for stepper in setup.steppers:
            stepper.zero_grad()
        progress.step += 1
        if self.average is not None:
            self.average.update(progress.step, finite)
        progress.rows += settings.batch_size * settings.gradient_accumulation_steps
        progress.tokens += self.fabric.world_size * sum(map(units, micro))
        self.settle()
        self.outcome = StepOutcome(progress.step, Reading(torch.stack((loss, norm))), Reading(counts), phase)
        if progress.skipped_last + 1 >= settings.max_skipped_steps:  # the next skipped step ends the run
            self.settle()
        progress.seconds += time.perf_counter() - started

    def settle(self) -> None:
        """Read the outcome of the last step, if not yet read: count it as done or skipped, and record the point of the
        curve that is due. Raises `Diverged`."""
        if self.outcome is None:
            return
        self.count()
        if self.due is not None:
            self.journal.curve(self.due, self.norm)
            self.due = None

    def count(self) -> None:
        """Count the step whose outcome has arrived."""
        assert self.outcome is not None
        (step, readings, counts, phase), self.outcome = self.outcome, None
        loss, self.norm = readings.values()
        _, fingerprint, stops, ready = counts.values()
        progress = self.progress
        progress.order = hashlib.sha256(f"{progress.order}{fingerprint}".encode()).hexdigest()
        self.others_stop = stops > 0
        if ready == self.fabric.world_size and phase == self.saver.phase:
            self.saver.advance()
        if not (math.isfinite(loss) and math.isfinite(self.norm)):
            self.skip(step, loss, self.norm)
            return
        progress.skipped_last = 0
        self.running["loss"] += loss
        self.running["steps"] += 1

    def take(self, count: int) -> list[Counted]:
        """The next batches. Raises `HeadwaterError`, with all finished steps saved, if they cannot be read."""
        with self.reading():
            return [next(self.batches) for _ in range(count)]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """If data cannot be read within it, save the finished steps and raise `HeadwaterError`."""
        try:
            yield
        except (OSError, UnreadableImage) as error:
            saved = "the last checkpoint is intact"
            if self.fabric.world_size == 1 and self.progress.step:
                self.save()
                saved = f"step {self.progress.step} is saved"
            elif not self.progress.step:
                saved = "no step was taken yet"
            if isinstance(error, UnreadableImage):
                raise HeadwaterError(
                    f"{sentence(error).rstrip('.')}; {saved}. Put an intact one in its place and continue with "
                    "--resume, or remove it and begin a new run."
                ) from error
            where = f" ({error.filename})" if error.filename else ""
            raise HeadwaterError(
                f"The data cannot be read: {error.strerror or error}{where}; {saved}. "
                "Put them back and continue with --resume."
            ) from error

    def backward(self, micro: list[Batch], counted: Tensor) -> Tensor:
        """Forward and backward passes of one step with `counted` labels over all processes; returns its loss."""
        world = self.fabric.world_size
        # Under FSDP, delaying the reduction would keep the gradients of the whole model in every process.
        waits = world > 1 and not sharded(self.recipe.training)
        loss = torch.zeros((), device=self.fabric.device)
        for index, batch in enumerate(micro):
            if len(micro) > 1:
                self.journal.announce(f"batch {index + 1} of {len(micro)}")
            is_last = index == len(micro) - 1
            with self.fabric.no_backward_sync(self.wrapped, enabled=not is_last and waits):
                part, aimed = self.losses(self.fabric.to_device(batch), counted)
                # Processes average their gradients, but the mean must be over all tokens.
                self.fabric.backward(aimed * world if world > 1 else aimed)
            loss += part.detach()
        if self.setup.scalars and world > 1:
            add_up_scalars(self.setup.scalars, world)
        return total(self.fabric, loss)

    def losses(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(the loss to report, the loss to minimize), both over `counted` tokens or images."""
        with autocast(self.fabric.device, self.recipe.training):
            return guards.losses(self.wrapped, batch, counted, self.recipe.training, self.setup.teacher)

    def skip(self, step: int, loss: float, norm: float) -> None:
        """Count a step that was not finite. At the limit, raise `Diverged`, which names its rows."""
        progress, settings = self.progress, self.recipe.training
        progress.skipped += 1
        progress.skipped_last += 1
        what = f"the loss is {loss:g} and the gradient's norm {norm:g}"
        self.journal.warn(f"Step {step} was skipped: {what}.", step)
        if progress.skipped_last < settings.max_skipped_steps:
            return
        assert progress.step == step, "the run has taken further steps, of other rows"
        count = settings.batch_size * settings.gradient_accumulation_steps
        progress.step, progress.rows = step - 1, progress.rows - count
        rows = self.data.rows(self.recipe.seed, progress.rows, count)
        named = ", ".join(rows[:8]) + (f" and {count - 8} more" if count > 8 else "")
        raise Diverged(
            f"The run diverged: at step {step} {what}, and {progress.skipped_last} steps in a row were not finite. Its "
            f"rows are {named}. Lower training.learning_rate={settings.learning_rate:g}, or lengthen the warm-up."
        )

    def evaluates(self, step: int) -> bool:
        """Whether the recipe has the model evaluated after this step, unless it is the last one anyway."""
        every = self.recipe.reporting.evaluate_every
        return every is not None and step % every == 0

    def evaluate(self) -> None:
        """Evaluate on the held-out data. Raises as `take`, and `Diverged` if the run's last measures are no numbers."""
        self.settle()
        compiled, most, batches = is_compiled(self.model), 0, 0

        @torch.no_grad()
        def logits(batch: Batch) -> Tensor:
            nonlocal most, batches
            batches += 1
            self.journal.announce(f"evaluating, batch {batches}")
            rows = len(main_input(batch))
            most = max(most, rows)
            if compiled:  # a last batch of fewer rows would be compiled for itself
                batch = filled(batch, most)
            batch = with_documents(batch) if self.by_document else batch
            inputs = {name: tensor for name, tensor in batch.items() if name not in LABELS}
            if not is_of_images(self.model.config):
                inputs["use_cache"] = False  # type: ignore[assignment]
            with autocast(self.fabric.device, self.recipe.training):
                return self.wrapped(**self.fabric.to_device(inputs)).logits[:rows]

        with self.reading(), nullcontext() if self.average is None else self.average.in_place():
            self.wrapped.eval()
            evaluation = self.data.evaluate(logits, self.share)
            self.wrapped.train()
            if sharded(self.recipe.training):  # a forward pass leaves the last parameters unsharded for a backward pass
                reshard(self.model)
        if broken := next((name for name, value in evaluation.metrics.items() if math.isnan(value)), None):
            what = f"after step {self.progress.step} the held-out {broken} is nan"
            if self.progress.step >= self.recipe.training.steps:
                raise self.diverged(what)
            self.journal.warn(f"The model may have diverged: {what}.")
        self.progress.result = evaluation.metrics[self.data.metric]
        self.journal.held_out(evaluation)

    def diverged(self, what: str) -> Diverged:
        return Diverged(
            f"The run diverged: {what}; lower training.learning_rate={self.recipe.training.learning_rate:g}, or "
            "lengthen the warm-up."
        )

    def save(self, must: bool = True) -> None:
        """Save a checkpoint, unless the weights are not finite: then keep the previous one.

        must: wait until it is written, and raise `Diverged` if the weights are not finite; otherwise warn.
        """
        self.settle()
        self.saver.finish()
        broken = [~parameter.isfinite().all() for parameter in map(local, self.parameters)]
        if int(total(self.fabric, torch.stack(broken).sum())):  # one wait for all
            what = f"after step {self.progress.step} some weights are not finite"
            if not must:
                self.journal.warn(f"Not saved: {what}.")
                return
            raise self.diverged(what)
        state = optimizer_tensors(self.model, self.setup.optimizers)
        state |= {f"running.{name}": tensor for name, tensor in self.running.items()}
        with nullcontext() if self.average is None else self.average.in_place():
            self.saver.start(
                self.folder / FOLDER / f"step-{self.progress.step:06d}",
                self.progress,
                self.model,
                self.setup.preparer,
                state | ({} if self.average is None else self.average.state),
                history=self.journal.history,
                then=self.publish,
                copy=not must,
            )
            if must:
                self.saver.finish()

    def publish(self) -> None:
        """Put the newest checkpoint's model at the top of the folder, and remove the checkpoints that the recipe does
        not keep. Called by the first process."""
        publish_model(checkpoints(self.folder)[-1], self.folder)
        prune(self.folder, self.recipe.reporting.keep_checkpoints, self.data.lower_is_better)
