"""The training loop: batch, loss, backward, step and logging. It can be read in one sitting.

Lightning Fabric handles devices, processes, precision and loggers. `Setup` builds what a step uses, `Journal` writes
results, `Saver` saves everything. Batches are prepared in another thread while the step before them runs.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from headwater.kernels.scratch import keep_freed_memory
from headwater.models.compiling import is_compiled
from headwater.models.kinds import is_of_images
from headwater.nn.documents import make_cu_seq_lens, takes_documents
from headwater.nn.loss import smoothed
from headwater.util.errors import HeadwaterError, sentence
from headwater.util.seeding import number
from headwater_lab.data.base import LABELS, Batch, Data, Share, labels_of, main_input, units
from headwater_lab.data.images.base import UnreadableImage
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import (
    FOLDER,
    Progress,
    Saver,
    checkpoints,
    optimizer_tensors,
    prune,
    publish_model,
)
from headwater_lab.training.optimizers import clip, gradient_norm, learning_rate
from headwater_lab.training.processes import (
    Reading,
    add_up_scalars,
    autocast,
    connected,
    first,
    leave,
    local,
    lost_process,
    reshard,
    sharded,
    to_device,
    total,
)
from headwater_lab.training.records import Experiment, RunRecord
from headwater_lab.training.run_folder import Journal, OnEvent, claimed, full_disk_told_once
from headwater_lab.training.start import Setup, memory_advice
from headwater_lab.util.endings import Diverged, Interrupted
from headwater_lab.util.machine import set_threads
from headwater_lab.util.process import stop_requests

T = TypeVar("T")
# Threads that hash a batch: pixels at 224 x 224 take a core about a millisecond an image.
HASHING = 4


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    experiment: Experiment | None = None,
    on_event: OnEvent | None = None,
    until: int | None = None,
) -> RunRecord:
    """Train one model as the recipe says, into `folder`.

    resume: continue from the newest intact checkpoint there; with as many processes as before, the result is the same
        to the last bit as without the interruption.
    experiment: the comparison this run belongs to, for its record.
    on_event: called in the first process with (step, None) after every step, and with (step, point) for each new point
        of the curve, speed, held-out metric or warning.
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
        full_disk_told_once(),
    ):
        if fabric.device.type == "cpu":
            keep_freed_memory()
        run = TrainingRun(recipe, folder, checkpoint, fabric, experiment, on_event)
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


@contextmanager
def stepping(recipe: Recipe, folder: Path) -> Iterator[TrainingRun]:
    """A recipe's training step by step, to time it, without evaluating or saving; its journal is in `folder`. The
    threads are the caller's."""
    folder.mkdir(parents=True)
    with connected(recipe, folder) as fabric:
        if fabric.device.type == "cpu":
            keep_freed_memory()
        run = TrainingRun(recipe, folder, None, fabric)
        with closing(run.batches), run.saver:
            yield run


class StepOutcome(NamedTuple):
    """A step's results, on their way from the device.

    counts: labels, the rows' fingerprint, processes asked to stop, processes whose `Saver` is done.
    """

    step: int
    loss_and_norm: Reading
    counts: Reading


class TrainingRun(Setup):
    """A run: its steps, with a point of the curve, an evaluation or a checkpoint after some of them."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        checkpoint: Path | None,
        fabric: Fabric,
        experiment: Experiment | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """checkpoint: to resume from; None to begin."""
        super().__init__(recipe, folder, checkpoint, fabric)
        self.journal = Journal(self, checkpoint is not None, experiment, on_event)
        self.share = Share(fabric.global_rank, fabric.world_size, partial(total, fabric))
        self.by_document = takes_documents(self.config._attn_implementation)
        on_gpu = fabric.device.type == "cuda"
        self.batches = batches(recipe, self.data, self.progress.rows, self.share, on_gpu, self.by_document)
        # Optimizers that support GradScaler's `found_inf` change nothing if it is 1.
        self.skips_on_device = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers
        )
        self.saver = Saver(fabric, sharded(recipe.training))
        self.outcome: StepOutcome | None = None
        # Progress and learning rate at a point of the curve, until its step is settled.
        self.due: tuple[Progress, float] | None = None
        self.norm, self.others_stop = math.nan, False  # of the last settled step

    def train(self, stop: threading.Event, until: int | None = None) -> None:
        """Take steps until `until` or the recipe's end, or until `stop` is set in some process; then save, and raise
        `Interrupted`."""
        reporting, progress = self.recipe.reporting, self.progress
        steps = min(self.recipe.training.steps, until or self.recipe.training.steps)
        if progress.step:  # killed between a checkpoint and what follows it
            first(self.fabric, self.publish)
        if progress.step == 0:  # the model's quality before training continues
            due = self.beginning is not None
        else:  # killed between its last checkpoint and its record, or the held-out data could not be read
            due = progress.step == steps or (progress.result is None and self.evaluates(progress.step))
        if due:
            self.evaluate()
        self.journal.announce("the first step takes longest" if is_compiled(self.model) else "")
        stopping = False
        with memory_advice(self.recipe.training, is_of_images(self.config), self.fabric.world_size):
            while progress.step < steps and not stopping:
                rate = self.step(stop.is_set())
                step, is_last = progress.step, progress.step == steps
                if is_last or step % reporting.log_every == 0:
                    self.due = replace(progress), rate
                progress.result = None
                if is_last or self.evaluates(step):
                    self.settle()
                    self.evaluate()
                self.journal.report(step, None)
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

    def step(self, stop: bool = False) -> float:
        """One optimizer step; returns its learning rate. `stop`: whether this process was asked to stop, which it tells
        the others.

        The loss is the mean over all tokens of the step, in all processes. A step whose loss or gradient is not finite
        changes nothing. That is decided on the device: the host does not wait for the step, and reads its outcome
        after it has started the next one (`settle`).
        """
        settings, progress = self.recipe.training, self.progress
        started = time.perf_counter()
        # Dropout is a function of seed, step and process, so no random state needs saving.
        torch.manual_seed(number("dropout", self.recipe.seed, progress.step, self.fabric.global_rank))
        rate = learning_rate(progress.step, settings)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            of_scalars = settings.scalar_learning_rate_multiplier if group["name"] == "scalars" else 1.0
            group["lr"] = rate * of_scalars
        self.hooks.prepare_step(progress.step)
        with self.reading():
            parts = [next(self.batches) for _ in range(settings.gradient_accumulation_steps)]
        progress.waited += time.perf_counter() - started
        sums = sum(each.labels for each in parts), sum(each.fingerprint for each in parts)
        own = torch.tensor([*sums, stop, self.saver.is_done])
        counts = total(self.fabric, to_device(own, self.fabric.device))

        loss = self.backward([each.batch for each in parts], counts[0])
        norm = gradient_norm(self.parameters)
        finite = loss.isfinite() & norm.isfinite()
        if self.skips_on_device or bool(finite):
            if settings.max_grad_norm is not None:
                clip(self.parameters, norm, settings.max_grad_norm)
            for optimizer, stepper in zip(self.optimizers, self.steppers, strict=True):
                optimizer.found_inf = (~finite).float() if self.skips_on_device else None  # type: ignore[attr-defined]
                stepper.step()
        for stepper in self.steppers:
            stepper.zero_grad()
        progress.step += 1
        if self.average is not None:
            self.average.update(progress.step, finite)
        progress.rows += settings.batch_size * settings.gradient_accumulation_steps
        progress.tokens += self.fabric.world_size * sum(units(each.batch) for each in parts)
        self.settle()
        self.outcome = StepOutcome(progress.step, Reading(torch.stack((loss, norm))), Reading(counts))
        if progress.skipped_last + 1 >= settings.max_skipped_steps:  # the next skipped step ends the run
            self.settle()
        progress.seconds += time.perf_counter() - started
        return rate

    def settled_step(self) -> None:
        """One step, with its outcome."""
        self.step()
        self.settle()

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
        if self.scalars and world > 1:
            add_up_scalars(self.scalars, world)
        return total(self.fabric, loss)

    def losses(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(the loss to report, the loss to minimize) of a batch, both over `counted` tokens or images."""
        training, teacher = self.recipe.training, self.teacher
        counted = counted.clamp(min=1)  # a step may have no answer of a conversation
        with autocast(self.fabric.device, training):
            if "pixel_values" in batch:
                labels = smoothed(batch["labels"], training.label_smoothing, self.config.num_labels)
                # With mixup, labels are no single classes: the loss to report is the one to minimize.
                out = self.wrapped(pixel_values=batch["pixel_values"], labels=labels)
                loss = out.loss * (len(labels) / counted)
                return loss, loss
            out = self.wrapped(
                **batch,
                labels=batch["shift_labels"],
                num_items_in_batch=counted,
                skip_logits=teacher is None,
                output_z_loss=training.z_loss > 0,
                loss_chunk_tokens=training.loss_chunk_tokens,
            )
            aimed = out.loss + training.z_loss * out.z_loss if training.z_loss else out.loss
            return out.loss, aimed if teacher is None else teacher.aim(aimed, out.logits, batch, counted)

    def settle(self) -> None:
        """Read the outcome of the last step, if not yet read: count it as done or skipped, and record the point of the
        curve that is due. Raises `Diverged`."""
        if self.outcome is None:
            return
        (step, readings, counts), self.outcome = self.outcome, None
        loss, self.norm = readings.values()
        _, fingerprint, stops, done = counts.values()
        progress = self.progress
        progress.order = hashlib.sha256(f"{progress.order}{fingerprint}".encode()).hexdigest()
        self.others_stop = stops > 0
        if done:
            self.saver.finish()
        if math.isfinite(loss) and math.isfinite(self.norm):
            progress.skipped_last = 0
            self.running["loss"] += loss
            self.running["steps"] += 1
        else:
            self.skip(step, loss, self.norm)
        if self.due is not None:
            self.journal.curve(*self.due, self.norm)
            self.due = None

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
        raise self.diverged(
            f"at step {step} {what}, and {progress.skipped_last} steps in a row were not finite. Its rows are {named}. "
            "Lower"
        )

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
            advice = "Put them back and continue with --resume."
            if isinstance(error, UnreadableImage):
                what = sentence(error).rstrip(".")
                advice = "Put an intact one in its place and continue with --resume, or remove it and begin a new run."
            else:
                where = f" ({error.filename})" if error.filename else ""
                what = f"The data cannot be read: {error.strerror or error}{where}"
            raise HeadwaterError(f"{what}; {saved}. {advice}") from error

    def evaluates(self, step: int) -> bool:
        """Whether the recipe has the model evaluated after this step, unless it is the last one anyway."""
        every = self.recipe.reporting.evaluate_every
        return every is not None and step % every == 0

    def evaluate(self) -> None:
        """Evaluate on the held-out data. Raises as `step`, and `Diverged` if the run's last measures are no numbers."""
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
            if not is_of_images(self.config):
                inputs["use_cache"] = False  # type: ignore[assignment]
            with autocast(self.fabric.device, self.recipe.training):
                return self.wrapped(**self.fabric.to_device(inputs)).logits[:rows]

        with self.reading(), self.averaged():
            self.wrapped.eval()
            evaluation = self.data.evaluate(logits, self.share)
            self.wrapped.train()
            if sharded(self.recipe.training):  # a forward pass leaves the last parameters unsharded for a backward pass
                reshard(self.model)
        if broken := next((name for name, value in evaluation.metrics.items() if math.isnan(value)), None):
            what = f"after step {self.progress.step} the held-out {broken} is nan"
            if self.progress.step >= self.recipe.training.steps:
                raise self.diverged(f"{what}; lower")
            self.journal.warn(f"The model may have diverged: {what}.")
        self.progress.result = evaluation.metrics[self.data.metric]
        self.journal.held_out(evaluation)

    def averaged(self) -> AbstractContextManager[None]:
        """The average of the weights in the model, if there is one: what is evaluated and saved."""
        return nullcontext() if self.average is None else self.average.in_place()

    def diverged(self, what: str) -> Diverged:
        """what: ends with "lower"."""
        return Diverged(
            f"The run diverged: {what} training.learning_rate={self.recipe.training.learning_rate:g}, or lengthen the "
            "warm-up."
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
            raise self.diverged(f"{what}; lower")
        state = optimizer_tensors(self.model, self.optimizers)
        state |= {f"running.{name}": tensor for name, tensor in self.running.items()}
        with self.averaged():
            self.saver.start(
                self.folder / FOLDER / f"step-{self.progress.step:06d}",
                self.progress,
                self.model,
                self.preparer,
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


class Counted(NamedTuple):
    """A batch of this process, its number of labels, and its part of the hash of all rows in order."""

    batch: Batch
    labels: int
    fingerprint: int


def batches(
    recipe: Recipe, data: Data, row: int, share: Share, pinned: bool, by_document: bool
) -> Generator[Counted, None, None]:
    """This process's batches from row `row` of the seed's order on.

    pinned: in page-locked memory, from which copies to a GPU are asynchronous.
    by_document: packed rows come `with_documents`.
    """
    made = data.batches(recipe.seed, recipe.training.batch_size, row, share)
    found = counted(made, recipe.training.batch_size, row, share, pinned, by_document)
    return ahead(found) if getattr(data, "reads_ahead", True) else found


def counted(
    made: Iterator[Batch], size: int, row: int, share: Share, pinned: bool, by_document: bool
) -> Generator[Counted, None, None]:
    """size: rows of a batch over all processes."""
    with ThreadPoolExecutor(HASHING, "hash") as pool:
        for batch in made:
            if by_document:
                batch = with_documents(batch)
            parts = main_input(batch).chunk(HASHING)
            firsts = accumulate(map(len, parts), initial=row + share.rank * size // share.world)
            prints = sum(pool.map(fingerprint, firsts, parts))
            if pinned:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield Counted(batch, labels_of(batch), prints)
            row += size


def with_documents(batch: Batch) -> Batch:
    """With the borders of its documents, for attention that takes them, where position_ids restart inside rows.

    Found here, where the numbers are: looking for them on a GPU would wait for it.
    """
    positions = batch.get("position_ids")
    borders = None if positions is None else make_cu_seq_lens(positions.expand(len(batch["input_ids"]), -1))
    return batch if borders is None else batch | {"cu_seq_lens_q": borders}


def filled(batch: Batch, rows: int) -> Batch:
    """A batch that repeats its last row to have this many."""
    missing = rows - len(main_input(batch))
    if not missing:
        return batch
    return {name: torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) for name, x in batch.items()}


def fingerprint(first: int, rows: Tensor) -> int:
    """The sum of a 40-bit hash for each row's tokens or pixels and its place in the order, counted from `first`: sums
    over a step never overflow."""
    total = 0
    for place, row in enumerate(rows.contiguous().numpy(), first):
        content = hashlib.blake2b(place.to_bytes(8, "little"), digest_size=5)
        content.update(row)  # outside Python's lock
        total += int.from_bytes(content.digest(), "little")
    return total


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items, of which another thread prepares up to `depth` in advance."""
    with ThreadPoolExecutor(1, "data") as worker:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            yield waiting.popleft().result()
            waiting.append(worker.submit(next, items))
