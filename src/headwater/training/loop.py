"""The training loop. Lightning Fabric owns device, precision and loggers; the rest can be read here in one sitting."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import TensorBoardLogger
from torch import Tensor

from headwater.cost import cache_bytes_per_token, training_flops_per_token
from headwater.data.base import Batch
from headwater.errors import HeadwaterError, Interrupted
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.recipe import Recipe
from headwater.records import CurvePoint, DocumentLoss, Experiment, HeldOutPoint, RunRecord, environment, write_record
from headwater.training.checkpoint import Progress, checkpoints, load_model, read_progress, restore, save_checkpoint
from headwater.training.optim import learning_rate, make_optimizer
from headwater.training.run_folder import Metrics, claimed

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)

OnPoint = Callable[[int, CurvePoint | HeldOutPoint | None], None]


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    experiment: Experiment | None = None,
    on_point: OnPoint | None = None,
) -> RunRecord:
    """Train one model as the recipe says, into `folder`.

    resume: go on from the newest checkpoint there; the result is the same to the last bit as without the interruption.
    experiment: the comparison this run belongs to, for its record.
    on_point: called with (step, new point of the curve or None) after every step, for progress displays.

    Returns the record that was written to `folder`/record.json. Raises `HeadwaterError` for whatever the user can put
    right, and `Interrupted` after SIGINT or SIGTERM, with everything saved.
    """
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    with claimed(folder, resume) as checkpoint, stop_requests() as stop:
        try:
            run = Run(recipe, folder, checkpoint, experiment)
        except HeadwaterError as error:
            older = checkpoints(folder)[:-1]
            if not older or "damaged" not in str(error):
                raise
            raise HeadwaterError(f"{error} Remove that folder to go on from {older[-1].name}.") from error
        try:
            run.train(stop, on_point)
        except Interrupted:
            raise
        except Exception as error:
            run.record.status, run.record.error = "failed", str(error)
            run.write()
            raise
        run.record.status = "finished"
        run.write()
        return run.record


class Run:
    """Everything a run holds, and what it does with it."""

    def __init__(
        self, recipe: Recipe, folder: Path, checkpoint: Path | None, experiment: Experiment | None = None
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.data = recipe.data.build()
        self.config = recipe.config_for(self.data)
        self.progress = Progress(recipe=recipe.model_dump(mode="json"))
        if checkpoint is not None:
            self.progress = read_progress(checkpoint)
            check_same_run(recipe, self.progress)

        self.fabric = make_fabric(recipe, folder)
        torch.manual_seed(recipe.seed)  # dropout; parameters and data have generators of their own
        # `model` is the plain model that is saved; `wrapped` is what runs: compiled, in the precision asked for.
        self.model = HeadwaterForCausalLM(self.config) if checkpoint is None else load_model(checkpoint)
        if recipe.training.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.optimizer = make_optimizer(self.model, recipe.training, self.fabric.device)
        runs = compiled(self.model, self.fabric.device) if recipe.training.compile else self.model
        self.wrapped, self.fabric_optimizer = self.fabric.setup(runs, self.optimizer)
        self.wrapped.train()
        # Sums since the last point of the curve.
        self.running = {name: torch.zeros((), dtype=torch.float64) for name in ("loss", "steps")}
        if checkpoint is not None:
            self.running = restore(checkpoint, self.model, self.optimizer)

        self.metrics = Metrics(folder, self.progress.step)
        self.batches = self.data.batches(recipe.seed, recipe.training.batch_size, self.progress.rows)
        self.record = RunRecord(
            name=recipe.name,
            experiment=experiment,
            seed=recipe.seed,
            status="running",
            recipe=recipe.model_dump(mode="json"),
            config_hash=recipe.digest(),
            data=self.data.description,
            measure=self.data.measure,
            lower_is_better=self.data.lower_is_better,
            parameters=self.model.num_parameters(),
            cache_bytes_per_token=cache_bytes_per_token(self.config),
            tokens=self.progress.tokens,
            flops=0.0,
            seconds=self.progress.seconds,
            environment=environment(str(self.fabric.device)),
        )
        self.write()

    def train(self, stop: threading.Event, on_point: OnPoint | None) -> None:
        """Steps to the end, or until `stop` is set: then a checkpoint, and `Interrupted`."""
        reporting, steps = self.recipe.reporting, self.recipe.training.steps
        if self.progress.step == steps:  # killed between its last checkpoint and its record
            self.evaluate()
        while self.progress.step < steps:
            norm = self.optimise()
            step, point = self.progress.step, None
            is_last = step == steps
            if is_last or step % reporting.log_every == 0:
                point = self.log(norm)
            if is_last or (reporting.evaluate_every and step % reporting.evaluate_every == 0):
                self.evaluate()
            if on_point is not None:
                on_point(step, point)
            stopping = stop.is_set() and not is_last  # asked once: what is raised for must be saved
            if is_last or stopping or (reporting.save_every and step % reporting.save_every == 0):
                self.save()
            if stopping:
                raise Interrupted(
                    f"Stopped after step {step}, which is saved; go on with the same command and --resume."
                )

    def optimise(self) -> Tensor:
        """One optimiser step; returns the gradient's norm before clipping. The loss is the mean over all its tokens.

        Raises `HeadwaterError` before the step if loss or gradient are not finite: the last checkpoint stays good.
        """
        settings, progress = self.recipe.training, self.progress
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, settings)
        micro = [self.fabric.to_device(next(self.batches)) for _ in range(settings.accumulate)]
        counted = torch.stack([(batch["shift_labels"] != -100).sum() for batch in micro]).sum()
        loss = torch.zeros((), device=self.fabric.device)
        for batch in micro:
            part = self.wrapped(**batch, labels=batch["shift_labels"], num_items_in_batch=counted).loss
            self.fabric.backward(part)
            loss += part.detach()
        limit = math.inf if settings.clip is None else settings.clip
        norm = self.fabric.clip_gradients(self.wrapped, self.fabric_optimizer, max_norm=limit, error_if_nonfinite=False)
        assert norm is not None
        if not (loss.isfinite() and norm.isfinite()):
            raise HeadwaterError(
                f"The run diverged: at step {progress.step + 1} the loss is {float(loss):g} and the gradient's norm "
                f"{float(norm):g}; lower training.learning_rate={settings.learning_rate:g}, or lengthen the warm-up."
            )
        self.fabric_optimizer.step()
        self.fabric_optimizer.zero_grad()

        progress.step += 1
        progress.rows += settings.batch_size * settings.accumulate
        progress.tokens += sum(batch["input_ids"].numel() for batch in micro)
        self.running["loss"] += loss.cpu().double()
        self.running["steps"] += 1
        progress.seconds += time.perf_counter() - started
        return norm

    def log(self, norm: Tensor) -> CurvePoint:
        """Add a point to the curve: the mean loss since the last one."""
        point = CurvePoint(
            step=self.progress.step,
            tokens=self.progress.tokens,
            loss=float(self.running["loss"] / self.running["steps"]),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            gradient_norm=float(norm),
        )
        for total in self.running.values():
            total.zero_()
        self.metrics.add(point)
        self.fabric.log_dict({"loss": point.loss, "learning_rate": point.learning_rate}, step=point.step)
        return point

    def evaluate(self) -> None:
        """Measure the held-out data."""

        @torch.no_grad()
        def logits(batch: Batch) -> Tensor:
            inputs = {name: tensor for name, tensor in batch.items() if name != "shift_labels"}
            return self.wrapped(**self.fabric.to_device(inputs), use_cache=False).logits

        self.wrapped.eval()
        evaluation = self.data.evaluate(logits)
        self.wrapped.train()
        step, tokens = self.progress.step, self.progress.tokens
        self.metrics.add(HeldOutPoint(step=step, tokens=tokens, measures=evaluation.measures))
        self.fabric.log_dict({f"held_out/{name}": value for name, value in evaluation.measures.items()}, step=step)
        self.record.documents = [DocumentLoss(**document) for document in evaluation.documents]

    def save(self) -> None:
        save_checkpoint(
            self.folder,
            self.progress,
            self.model,
            self.data.tokenizer,
            self.optimizer,
            self.running,
            self.recipe.reporting.keep,
        )

    def write(self) -> None:
        """Bring the record up to date and write it."""
        record, progress = self.record, self.progress
        record.tokens, record.seconds = progress.tokens, progress.seconds
        record.flops = training_flops_per_token(self.config, self.data.context) * progress.tokens
        record.curve, record.held_out = self.metrics.curve, self.metrics.held_out
        write_record(record, self.folder)


def make_fabric(recipe: Recipe, run: Path) -> Fabric:
    reporting = recipe.reporting
    if reporting.wandb is not None:
        try:
            import wandb
        except ImportError as error:
            raise HeadwaterError("reporting.wandb needs the wandb package: pip install 'headwater[wandb]'.") from error
        # W&B follows the TensorBoard files, so that there is one way of logging.
        try:
            wandb.init(
                project=reporting.wandb,
                name=recipe.name,
                dir=run,
                config=recipe.model_dump(mode="json"),
                sync_tensorboard=True,
            )
        except wandb.Error as error:
            raise HeadwaterError(f"Weights & Biases refused reporting.wandb={reporting.wandb!r}: {error}") from error
    to_files = reporting.tensorboard or reporting.wandb is not None
    device = recipe.training.device
    try:
        return Fabric(
            accelerator=device,
            devices=1,
            precision=recipe.training.precision,
            loggers=[TensorBoardLogger(run, name="tensorboard", version="")] if to_files else [],
        )
    except (RuntimeError, ValueError) as error:
        raise HeadwaterError(f"training.device={device} cannot be used: {' '.join(str(error).split())}") from error


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


def check_same_run(recipe: Recipe, progress: Progress) -> None:
    """A resumed run must be the same model on the same rows; how long it runs and what it reports may change."""
    old, new = progress.recipe, recipe.model_dump(mode="json")
    for section in ("model", "data", "seed", "training"):
        before, now = old.get(section), new[section]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            changed = [key for key in changed if (section, key) not in MAY_CHANGE]
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


MAY_CHANGE = {("training", name) for name in ("steps", "device", "threads", "compile", "gradient_checkpointing")}


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that a step is finished and saved; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
