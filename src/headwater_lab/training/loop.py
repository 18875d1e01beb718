"""The training loop: batch, loss, backward, step and logging, from `take_steps` to `settle_step`.

Lightning Fabric handles devices, processes, precision and loggers. `Setup` builds what a step uses, `Journal` writes
results, `Saver` saves everything. Batches are prepared in another thread while the previous step runs.
"""

from __future__ import annotations

import gc
import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from headwater.models.compiling import is_compiled
from headwater.nn.documents import make_cu_seq_lens, takes_documents
from headwater.util.errors import HeadwaterError, sentence
from headwater.util.seeding import number
from headwater_lab.data.base import LABELS, Batch, Data, Share, labels_of, main_input, units
from headwater_lab.data.images.image_data import UnreadableImage
from headwater_lab.data.rows import Rows
from headwater_lab.optimization.tensors import local_shard
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.training_section import Training
from headwater_lab.training.branching import start_branch
from headwater_lab.training.checkpoints import FOLDER, Progress, list_checkpoints, optimizer_tensors, read_progress
from headwater_lab.training.journal import Journal, OnEvent, report_full_disk_once
from headwater_lab.training.optimizers import clip_gradient, gradient_norm, learning_rate, read_group_numbers
from headwater_lab.training.processes import (
    Reading,
    add_up_scalars,
    autocast_forward,
    connect_processes,
    end_process,
    find_lost_process,
    gather_values,
    is_sharded,
    reshard_model,
    run_in_first,
    sum_processes,
    to_device,
)
from headwater_lab.training.records import Experiment, RunRecord
from headwater_lab.training.run_folder import claim_folder
from headwater_lab.training.saving import Saver, prune_checkpoints, publish_model
from headwater_lab.training.start import Setup, advise_on_memory
from headwater_lab.util.endings import Diverged, Interrupted
from headwater_lab.util.machine import choose_threads, cores, keep_freed_memory, name_cores, set_threads
from headwater_lab.util.model_kinds import is_of_images
from headwater_lab.util.process import stop_requests
from headwater_lab.util.terminal import counted

if TYPE_CHECKING:  # reading runs does not need the trainer's packages
    from lightning_fabric import Fabric

T = TypeVar("T")
# Threads for hashing a batch: 224 x 224 pixels take one core about a millisecond per image.
HASHING = 4


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    experiment: Experiment | None = None,
    on_event: OnEvent | None = None,
    trunk: Path | None = None,
) -> RunRecord:
    """Train one model by the recipe, into `folder`.

    resume: continue from the newest intact checkpoint there; with as many processes as before, the result is the same
        to the last bit as without the interruption.
    experiment: the comparison this run belongs to, for its record.
    on_event: called in the first process with (step, None) after every step, and with (step, point) for each new point
        of the curve, speed, held-out metric or warning.
    trunk: the folder of a shorter run that this one branches off, unless it has a checkpoint (see `start_branch`).

    With training.devices above 1 the first process starts the others with its own command line; all return the record
    that the first one writes to `folder`/record.json. Raises `HeadwaterError` for errors that the user can fix, and
    `Interrupted` after SIGINT or SIGTERM, with everything saved.
    """
    gc.collect()  # an earlier run of this process is in cycles, with its model, gradients and optimizer
    early_warnings: list[str] = []  # warnings before the journal exists
    begin = None if trunk is None else partial(start_branch, trunk, recipe, folder)
    with (
        connect_processes(recipe, folder) as fabric,
        claim_folder(folder, resume, fabric, early_warnings.append, begin) as checkpoint,
        use_free_cores(recipe.training, checkpoint, fabric, early_warnings.append),
        stop_requests() as stop,
        report_full_disk_once(),
    ):
        run = TrainingRun(recipe, folder, checkpoint, fabric, experiment, on_event)
        for message in early_warnings:
            run.journal.warn(message)
        try:
            with closing(run.batches), run.saver:
                run.take_steps(stop)
        except Interrupted:
            if fabric.global_rank > 0:
                end_process(failed=False)
            run.journal.write_record("stopped")
            raise
        except Exception as error:
            lost = find_lost_process(fabric, error)
            status = "stopped" if lost else "diverged" if isinstance(error, Diverged) else "failed"
            if not lost:  # otherwise the step's outcome may never arrive
                with suppress(Exception):
                    run.settle_step()
            if run.saver.failure not in (None, error):
                run.journal.warn(f"{run.saver.failure}")
            with suppress(HeadwaterError):  # report the original error, even if the disk is full
                run.journal.write_record(status, error)
            if lost:
                raise HeadwaterError(
                    f"A process of this run has ended or cannot be reached: {lost}. Continue with --resume."
                ) from error
            raise
        run.journal.write_record("finished")
        return run.journal.record


@contextmanager
def use_free_cores(
    settings: Training, checkpoint: Path | None, fabric: Fabric, warn: Callable[[str], None]
) -> Iterator[None]:
    """Compute inside with as many CPU threads as the recipe says, or as before the run was stopped (so that sums keep
    their order), or as the machine has free cores, with a warning if these are fewer than PyTorch's threads."""
    default = threads = torch.get_num_threads()
    if settings.threads is not None:
        threads = settings.threads
    elif fabric.device.type == "cpu":
        sharing = gather_values(fabric, name_cores()).count(name_cores())  # processes of this run on these cores
        earlier = 0 if checkpoint is None else read_progress(checkpoint).threads
        threads = earlier if 0 < earlier * sharing <= cores() else choose_threads(sharing)
        if threads < min(default, cores() // sharing) and not earlier:
            warn(
                f"Training uses {threads} of {counted(default, 'CPU thread')}, because other processes keep the other "
                "cores busy; set training.threads to change this."
            )
    if threads != default:
        set_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(default)


@contextmanager
def prepare_steps(recipe: Recipe, folder: Path) -> Iterator[TrainingRun]:
    """Train a recipe step by step, to time it, without evaluating or saving. Its journal is in `folder`."""
    folder.mkdir(parents=True)
    with connect_processes(recipe, folder) as fabric:
        run = TrainingRun(recipe, folder, None, fabric)
        with closing(run.batches), run.saver:
            yield run


class StepOutcome(NamedTuple):
    """A step's results, on their way from the device.

    counts: labels, the rows' hash, processes asked to stop, processes whose `Saver` is done.
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
        """Begin a run, or resume it from `checkpoint`."""
        on_gpu = fabric.device.type == "cuda"
        if fabric.device.type == "cpu":
            keep_freed_memory()
        super().__init__(recipe, folder, checkpoint, fabric)
        self.progress.threads = torch.get_num_threads()
        self.journal = Journal(self, checkpoint is not None, experiment, on_event)
        self.share = Share(fabric.global_rank, fabric.world_size, partial(sum_processes, fabric))
        self.by_document = takes_documents(self.config._attn_implementation)
        batches = read_batches(recipe, self.data, self.progress.rows, self.share, on_gpu, self.by_document)
        self.batches = read_ahead(batches, 2) if getattr(self.data, "reads_ahead", True) else batches
        # Optimizers that support GradScaler's `found_inf` change nothing if it is 1.
        self.skips_on_device = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers
        )
        self.saver = Saver(fabric, is_sharded(recipe.training))
        self.outcome: StepOutcome | None = None
        # Progress and learning rate at a point of the curve, until its step is settled.
        self.due: tuple[Progress, float] | None = None
        self.norm, self.stops_elsewhere = math.nan, False  # of the last settled step

    def take_steps(self, stop: threading.Event) -> None:
        """Take steps to the recipe's end. If `stop` is set in some process, save and raise `Interrupted`."""
        reporting, progress, steps = self.recipe.reporting, self.progress, self.recipe.training.steps
        self.catch_up()
        self.journal.announce("the first step takes longest" if is_compiled(self.model) else "")
        with advise_on_memory(self.recipe.training, is_of_images(self.config), self.fabric.world_size):
            while progress.step < steps:
                rate = self.take_step(stop.is_set())
                step, is_last = progress.step, progress.step == steps
                if is_last or is_due(step, reporting.log_every):
                    self.due = replace(progress), rate
                progress.result = None
                if is_last or is_due(step, reporting.evaluate_every):
                    self.evaluate()
                self.journal.report(step, None)
                # A single process need not wait until all agree to stop.
                alone = self.fabric.world_size == 1
                stopping = not is_last and (self.stops_elsewhere or (alone and stop.is_set()))
                if is_last or stopping or self.is_saving_due(step):
                    self.save_checkpoint(must=is_last or stopping)
                if stopping:
                    raise Interrupted(
                        f"Stopped after step {step}, which is saved; run the same command with --resume (resume=True)."
                    )

    def is_saving_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step: at its interval, and where longer runs branch off."""
        return is_due(step, self.recipe.reporting.save_every) or step == self.recipe.training.decay_start

    def take_step(self, stop: bool = False) -> float:
        """Take one optimizer step, and return its learning rate. stop: whether any process should stop.

        The loss is the mean over all tokens of the step, in all processes. A step whose loss or gradient is not finite
        changes nothing. That is decided on the device: the host does not wait for the step, and reads its outcome
        after it has started the next one (`settle_step`).
        """
        settings, progress = self.recipe.training, self.progress
        started = time.perf_counter()
        rate = self.set_rates()
        self.hooks.prepare_step(progress.step)
        with self.guard_data():
            batches = [next(self.batches) for _ in range(settings.gradient_accumulation_steps)]
        progress.waited += time.perf_counter() - started
        sums = [sum(batch.labels for batch in batches), sum(batch.fingerprint for batch in batches)]
        tensor = torch.tensor([*sums, stop, self.saver.is_done])
        counts = sum_processes(self.fabric, to_device(tensor, self.fabric.device))
        loss = self.run_backward(batches, counts[0])
        norm = gradient_norm(self.parameters)
        self.update_weights(norm, loss.isfinite() & norm.isfinite())
        progress.rows += settings.batch_size * settings.gradient_accumulation_steps
        progress.tokens += self.fabric.world_size * sum(units(batch.tensors) for batch in batches)
        self.settle_step()
        self.outcome = StepOutcome(progress.step, Reading(torch.stack((loss, norm))), Reading(counts))
        if progress.skipped_last + 1 >= settings.max_skipped_steps:  # the next skipped step ends the run
            self.settle_step()
        progress.seconds += time.perf_counter() - started
        return rate

    def set_rates(self) -> float:
        """Set the optimizers' learning rates for the next step, and the seed of its dropout. Returns the rate."""
        settings, step = self.recipe.training, self.progress.step
        # Reseeding dropout from seed, step and process means that no random state must be saved.
        torch.manual_seed(number("dropout", self.recipe.seed, step, self.fabric.global_rank))
        rate = learning_rate(step, settings)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate * group["ratio"]
        return rate

    def run_backward(self, batches: list[CountedBatch], labels: Tensor) -> Tensor:
        """Run the forward and backward passes of one step, with `labels` over all processes; returns its loss, 0-d."""
        world = self.fabric.world_size
        # With FSDP, delaying the reduction would keep the whole model's gradients in every process.
        waits = world > 1 and not is_sharded(self.recipe.training)
        total = torch.zeros((), device=self.fabric.device)
        for index, batch in enumerate(batches, 1):
            if len(batches) > 1:
                self.journal.announce(f"batch {index} of {len(batches)}")
            with self.fabric.no_backward_sync(self.wrapped, enabled=index < len(batches) and waits):
                loss, objective = self.compute_losses(self.fabric.to_device(batch.tensors), labels)
                # Processes average their gradients. Multiply by their number, since `count` already covers all tokens.
                self.fabric.backward(objective * world if world > 1 else objective)
            total += loss.detach()
        if self.scalars and world > 1:
            add_up_scalars(self.scalars, world)
        return sum_processes(self.fabric, total)

    def compute_losses(self, batch: Batch, count: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (the loss to report, the loss to minimize) of a batch, both over `count` tokens or images."""
        training = self.recipe.training
        count = count.clamp(min=1)  # the batches of a step may contain no answer to train on
        with autocast_forward(self.fabric.device, training):
            if "pixel_values" in batch:
                labels = smooth_labels(batch["labels"], training.label_smoothing, self.config.num_labels)
                # With mixup, labels are no single classes: the loss to report is the one to minimize.
                out = self.wrapped(pixel_values=batch["pixel_values"], labels=labels)
                loss = out.loss * (len(labels) / count)
                return loss, loss
            out = self.wrapped(
                **batch,
                labels=batch["shift_labels"],
                num_items_in_batch=count,
                skip_logits=True,
                z_loss_weight=training.z_loss,
                loss_chunk_tokens=training.loss_chunk_tokens,
                soft_targets=None if self.teacher is None else self.teacher.predict(batch),
            )
            return out.loss if out.cross_entropy is None else out.cross_entropy, out.loss

    def update_weights(self, norm: Tensor, finite: Tensor) -> None:
        """Let the optimizers step if loss and gradient are finite. norm: of the gradient."""
        limit = self.recipe.training.max_grad_norm
        if self.skips_on_device or bool(finite):
            if limit is not None:
                clip_gradient(self.parameters, norm, limit)
            for optimizer, stepper in zip(self.optimizers, self.steppers, strict=True):
                optimizer.found_inf = (~finite).float() if self.skips_on_device else None  # type: ignore[attr-defined]
                stepper.step()
        for stepper in self.steppers:
            stepper.zero_grad()
        self.progress.step += 1
        if self.average is not None:
            self.average.update(self.progress.step, finite)

    def settle_step(self) -> None:
        """Read the outcome of the last step, if not yet read: count it as done or skipped, and record the point of the
        curve that is due. Raises `Diverged`."""
        if self.outcome is None:
            return
        (step, readings, counts), self.outcome = self.outcome, None
        loss, self.norm = readings.read_values()
        _, fingerprint, stops, done = counts.read_values()
        progress = self.progress
        progress.order = hashlib.sha256(f"{progress.order}{fingerprint}".encode()).hexdigest()
        self.stops_elsewhere = stops > 0
        if done:
            self.saver.finish_saving()
        if math.isfinite(loss) and math.isfinite(self.norm):
            progress.skipped_last = 0
            self.running["loss"] += loss
            self.running["steps"] += 1
        else:
            self.count_skipped(step, f"the loss is {loss:g} and the gradient's norm {self.norm:g}")
        if self.due is not None:
            self.journal.add_curve_point(*self.due, self.norm)
            self.due = None

    def take_settled_step(self) -> None:
        """Take one step, and wait for its outcome."""
        self.take_step()
        self.settle_step()

    def catch_up(self) -> None:
        """Measure a model before its training continues, or finish what a killed run left undone."""
        step = self.progress.step
        if step:
            run_in_first(self.fabric, self.publish_checkpoint)
            # The held-out data could not be read, or the record is missing.
            missed = self.progress.result is None and is_due(step, self.recipe.reporting.evaluate_every)
        else:
            missed = self.beginning is not None
        if missed or step == self.recipe.training.steps:
            self.evaluate()

    def count_skipped(self, step: int, problem: str) -> None:
        """Count a step that was not finite. At the limit, raise `Diverged`, which names its rows."""
        progress, settings = self.progress, self.recipe.training
        progress.skipped += 1
        progress.skipped_last += 1
        self.journal.warn(f"Step {step} was skipped: {problem}.", step)
        if progress.skipped_last < settings.max_skipped_steps:
            return
        assert progress.step == step, "the run has taken further steps, of other rows"
        count = settings.batch_size * settings.gradient_accumulation_steps
        progress.step, progress.rows = step - 1, progress.rows - count
        raise self.build_divergence(
            f"at step {step} {problem}, and {progress.skipped_last} steps in a row were not finite. It used the rows "
            f"{progress.rows} to {progress.rows + count - 1} of the seed's order. Lower"
        )

    @contextmanager
    def guard_data(self) -> Iterator[None]:
        """Save the finished steps and raise `HeadwaterError` if data cannot be read in this context."""
        try:
            yield
        except (OSError, UnreadableImage) as error:
            saved = "the last checkpoint is intact"
            if self.fabric.world_size == 1 and self.progress.step:
                self.save_checkpoint()
                saved = f"step {self.progress.step} is saved"
            elif not self.progress.step:
                saved = "no step was taken yet"
            advice = "Put them back and continue with --resume."
            if isinstance(error, UnreadableImage):
                problem = sentence(error).rstrip(".")
                advice = "Put an intact one in its place and continue with --resume, or remove it and begin a new run."
            else:
                file = f" ({error.filename})" if error.filename else ""
                problem = f"The data cannot be read: {error.strerror or error}{file}"
            raise HeadwaterError(f"{problem}; {saved}. {advice}") from error

    def evaluate(self) -> None:
        """Evaluate on the held-out data. Raises as `take_step`, and `Diverged` if the last measures are not finite."""
        self.settle_step()
        compiled, most_rows, batches = is_compiled(self.model), 0, 0

        @torch.no_grad()
        def compute_logits(batch: Batch) -> Tensor:
            nonlocal most_rows, batches
            batches += 1
            self.journal.announce(f"evaluating, batch {batches}")
            rows = len(main_input(batch))
            most_rows = max(most_rows, rows)
            if compiled:  # otherwise a smaller last batch would be compiled separately
                batch = pad_rows(batch, most_rows)
            batch = with_documents(batch) if self.by_document else batch
            inputs = {name: tensor for name, tensor in batch.items() if name not in LABELS}
            if not is_of_images(self.config):
                inputs["use_cache"] = False  # type: ignore[assignment]
            with autocast_forward(self.fabric.device, self.recipe.training):
                return self.wrapped(**self.fabric.to_device(inputs)).logits[:rows]

        with self.guard_data(), self.use_average():
            self.wrapped.eval()
            evaluation = self.data.evaluate(compute_logits, self.share)
            self.wrapped.train()
            if is_sharded(self.recipe.training):  # a forward pass leaves the last parameters gathered for a backward
                reshard_model(self.model)
        for name, amount in evaluation.amounts.items():
            evaluation.metrics[f"{name}_per_parameter"] = amount / self.model.num_parameters()
        if invalid := next((name for name, value in evaluation.metrics.items() if math.isnan(value)), None):
            problem = f"after step {self.progress.step} the held-out {invalid} is nan"
            if self.progress.step >= self.recipe.training.steps:
                raise self.build_divergence(f"{problem}; lower")
            self.journal.warn(f"The model may have diverged: {problem}.")
        self.progress.result = evaluation.metrics[self.data.metric]
        self.journal.add_evaluation(evaluation)

    def use_average(self) -> AbstractContextManager[None]:
        """Put the average of the weights, if there is one, into the model for evaluation and saving."""
        return nullcontext() if self.average is None else self.average.in_place()

    def build_divergence(self, problem: str) -> Diverged:
        """Make the error of a run that has diverged. problem: ends with "lower"."""
        return Diverged(
            f"The run diverged: {problem} training.learning_rate={self.recipe.training.learning_rate:g}, or lengthen "
            "the warm-up."
        )

    def save_checkpoint(self, must: bool = True) -> None:
        """Save a checkpoint, unless the weights are not finite: then keep the previous one.

        must: wait until it is written, and raise `Diverged` if the weights are not finite, instead of warning.
        """
        self.settle_step()
        self.saver.finish_saving()
        broken = [~parameter.isfinite().all() for parameter in map(local_shard, self.parameters)]
        if int(sum_processes(self.fabric, torch.stack(broken).sum())):  # waits once for all parameters
            problem = f"after step {self.progress.step} some weights are not finite"
            if not must:
                self.journal.warn(f"Not saved: {problem}.")
                return
            raise self.build_divergence(f"{problem}; lower")
        self.progress.optimizer = read_group_numbers(self.optimizers)
        state = optimizer_tensors(self.model, self.optimizers)
        state |= {f"running.{name}": tensor for name, tensor in self.running.items()}
        if self.average is not None:
            state |= self.average.state
        with self.use_average():
            self.saver.start_saving(
                self.folder / FOLDER / f"step-{self.progress.step:06d}",
                self.progress,
                self.model,
                self.preparer,
                state,
                history=self.journal.history,
                then=self.publish_checkpoint,
                copy=not must,
            )
            if must:
                self.saver.finish_saving()

    def publish_checkpoint(self) -> None:
        """Put the newest checkpoint's model at the top of the folder, and remove the checkpoints that the recipe does
        not keep. Called by the first process."""
        publish_model(list_checkpoints(self.folder)[-1], self.folder)
        keep, branch_step = self.recipe.reporting.keep_checkpoints, self.recipe.training.decay_start
        prune_checkpoints(self.folder, keep, self.data.lower_is_better, branch_step)


def is_due(step: int, interval: int | None) -> bool:
    """Whether an event with this `interval` in steps is due after this step; None for never."""
    return interval is not None and step % interval == 0


class CountedBatch(NamedTuple):
    """A batch of this process, its number of labels, and its share of the hash of all rows in order."""

    tensors: Batch
    labels: int
    fingerprint: int


def read_batches(
    recipe: Recipe, data: Data, row: int, share: Share, pinned: bool, by_document: bool
) -> Generator[CountedBatch, None, None]:
    """Read this process's batches from row `row` of the seed's order on, count their labels and hash their rows.

    pinned: in page-locked memory, from which copies to a GPU are asynchronous.
    by_document: packed rows come `with_documents`.
    """
    size = recipe.training.batch_size  # rows over all processes
    with ThreadPoolExecutor(HASHING, "hash") as pool:
        for batch in data.batches(recipe.seed, size, row, share):
            if recipe.training.compile == "whole" and isinstance(rows := getattr(data, "train", None), Rows):
                batch = rows.fill_borders(batch)
            if by_document:
                batch = with_documents(batch)
            chunks = main_input(batch).chunk(HASHING)
            starts = accumulate(map(len, chunks), initial=row + share.rank * size // share.world)
            fingerprint = sum(pool.map(hash_rows, starts, chunks))
            if pinned:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield CountedBatch(batch, labels_of(batch), fingerprint)
            row += size


def with_documents(batch: Batch) -> Batch:
    """Add the borders of documents, for attention that takes them, where position_ids restart inside rows.

    They are found on the host, because a GPU would have to be waited for.
    """
    positions = batch.get("position_ids")
    borders = None if positions is None else make_cu_seq_lens(positions.expand(len(batch["input_ids"]), -1))
    return batch if borders is None else batch | {"cu_seq_lens_q": borders}


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Repeat the last row of a batch until it has this many."""
    missing = rows - len(main_input(batch))
    if not missing:
        return batch
    return {name: torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) for name, x in batch.items()}


def hash_rows(start: int, rows: Tensor) -> int:
    """Add up a 40-bit hash for each row's tokens or pixels and its position in the order, counted from `start`: sums
    over a step never overflow."""
    total = 0
    for position, row in enumerate(rows.contiguous().numpy(), start):
        content = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=5)
        content.update(row)  # releases Python's lock
        total += int.from_bytes(content.digest(), "little")
    return total


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield the same items, up to `depth` of them prepared in advance by another thread."""
    with ThreadPoolExecutor(1, "data") as worker:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            yield waiting.popleft().result()
            waiting.append(worker.submit(next, items))


def smooth_labels(labels: Tensor, share: float, classes: int) -> Tensor:
    """Spread this share of labels, [B] or [B, at most `classes`] probabilities, over all classes."""
    if labels.ndim == 1:
        if not share:
            return labels
        labels = torch.nn.functional.one_hot(labels, classes)
    labels = torch.nn.functional.pad(labels.float(), (0, classes - labels.shape[1]))
    return labels * (1 - share) + share / classes
