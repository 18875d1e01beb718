"""Guards for long runs: steps that are not finite, loss spikes, running out of memory.

failures/step-000123/      left by a run that stopped; `headwater replay` runs it
  config.json, model.safetensors (or shard-*), …    the model before the step, as in a checkpoint
  batch-R-M.safetensors    the input of forward pass M in process R
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, nn

from headwater.config import HeadwaterConfig
from headwater.data.base import Batch, labels_of, main_input
from headwater.errors import HeadwaterError
from headwater.files import disk_problem
from headwater.hardware import memory_of
from headwater.models.kinds import is_of_images
from headwater.nn.loss import smoothed
from headwater.nn.masking import takes_documents
from headwater.price import price, si
from headwater.reading import read_tensors
from headwater.recipe import Recipe, Training, parse_recorded
from headwater.training.attention import attention_of, set_attention
from headwater.training.checkpoint import Progress, check, load_model, read_progress
from headwater.training.distill import Teacher
from headwater.training.parallel import autocast

FAILURES = "failures"
# A loss this many standard deviations above its running mean is a spike; averages look back about this many steps.
DEVIATIONS, MEMORY = 6.0, 100


class Spikes:
    """Running mean and variance of the loss, as tensors, so that they are saved with the run."""

    def __init__(self) -> None:
        self.state = {f"spikes.{name}": torch.zeros(1, dtype=torch.float64) for name in ("seen", "mean", "variance")}

    def is_spike(self, loss: float) -> bool:
        """Whether this step's loss is a spike; never in the first `MEMORY` steps."""
        seen, mean, variance = self.state.values()
        spread = math.sqrt(float(variance))
        found = float(seen) >= MEMORY and loss > float(mean) + DEVIATIONS * spread
        # A spike moves the averages no more than the largest normal loss would, so that the next spike is found too.
        taken = min(loss, float(mean) + DEVIATIONS * spread) if float(seen) >= MEMORY else loss
        seen += 1
        weight = 1 / min(float(seen), MEMORY)
        difference = taken - float(mean)
        mean += weight * difference
        variance.copy_((1 - weight) * (variance + weight * difference**2))
        return found


def place_for(run: Path, step: int, progress: Progress) -> Path:
    """The folder for a step's failure. An earlier one there is removed if of this recipe, else renamed."""
    target = run / FAILURES / f"step-{step:06d}"
    if os.path.lexists(target):
        with suppress(HeadwaterError):
            if read_progress(target).recipe == progress.recipe:
                shutil.rmtree(target)
                return target
        names = (target.with_name(f"{target.name}-{number}") for number in count(1))
        target.rename(next(name for name in names if not os.path.lexists(name)))
    return target


@contextmanager
def full_disk_told_once() -> Iterator[None]:
    """Stop TensorBoard's thread from printing a traceback when the disk is full: its caller gets the error too."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or disk_problem(args.exc_value) is None:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def save_batches(folder: Path, rank: int, batches: Sequence[Batch]) -> None:
    """Save the inputs of this process's forward passes next to the model in `folder`."""
    for index, batch in enumerate(batches):
        tensors = {name: tensor.cpu().contiguous() for name, tensor in batch.items()}
        save_file(tensors, folder / f"batch-{rank}-{index}.safetensors")


@dataclass(frozen=True)
class Replay:
    """The result of repeating a saved failure.

    loss: in nats per token or image. attention: the kernel that ran. forward: the first module whose output is not
    finite; backward: the last parameter whose gradient is not, where the problem starts. None if all are finite.
    """

    step: int
    rows: list[str]
    loss: float
    norm: float
    attention: str
    forward: str | None
    backward: str | None


def replay(folder: Path, device: str = "auto") -> Replay:
    """Repeat the forward and backward passes of a saved failure, in the run's precision and with its attention kernel,
    or another where that one cannot run; not compiled.

    Raises `HeadwaterError` if `folder` holds none.
    """
    files = sorted(folder.glob("batch-*.safetensors"))
    if not files:
        raise HeadwaterError(f"{str(folder)!r} holds no saved failure; name a folder like runs/NAME/failures/step-….")
    check(folder)
    progress = read_progress(folder)
    recipe = parse_recorded(progress.recipe, str(folder))
    fabric = Fabric(accelerator=device, devices=1, precision="32-true")
    model = load_model(folder, finite=False)  # in the dtypes it was saved in
    batches = [fabric.to_device(read_tensors(file)) for file in files]
    training, context = recipe.training, main_input(batches[0]).shape[1]
    with suppress(HeadwaterError):  # of another machine
        if (attention := attention_of(model.config, training, fabric.device, context)) is not None:
            set_attention(model, attention)
    bad: list[str] = []

    def look(name: str):
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point()):
                bad.append(name)

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(look(name))
    wrapped = fabric.setup_module(model)
    wrapped.train()
    teacher = None if training.distill is None else Teacher(recipe, model.config, context, fabric.device)
    counted = torch.tensor(sum(map(labels_of, batches)), device=fabric.device)
    loss = 0.0
    for batch in batches:
        with autocast(fabric.device, training):
            part, aimed = losses(wrapped, batch, counted, training, teacher)
        fabric.backward(aimed)
        loss += float(part.detach())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = float(nn.utils.get_total_norm(grads.values()))
    wrong = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    return Replay(
        step=progress.step + 1,
        rows=recipe.data.build().rows(
            recipe.seed, progress.rows, recipe.training.batch_size * recipe.training.accumulate
        ),
        loss=loss,
        norm=norm,
        attention=model.config._attn_implementation,
        forward=bad[0] if bad else None,
        backward=wrong[-1] if wrong else None,
    )


def losses(
    model: nn.Module, batch: Batch, counted: Tensor, training: Training, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor]:
    """(the loss to report, the loss to minimize) of a batch, both over `counted` tokens or images."""
    counted = counted.clamp(min=1)  # a step may have no answer of a conversation
    if "pixel_values" in batch:
        classes: int = model.config.num_labels  # type: ignore[union-attr, assignment]
        labels = smoothed(batch["labels"], training.label_smoothing, classes)
        # With mixup, labels are no single classes: the loss to report is the one to minimize.
        loss = model(pixel_values=batch["pixel_values"], labels=labels).loss * (len(labels) / counted)
        return loss, loss
    out = model(
        **batch,
        labels=batch["shift_labels"],
        num_items_in_batch=counted,
        skip_logits=teacher is None,
        output_z_loss=training.z_loss > 0,
        loss_chunk=training.loss_chunk,
        **({"output_hidden_states": True} if teacher is not None and teacher.settings.hidden else {}),
    )
    aimed = out.loss + training.z_loss * out.z_loss if training.z_loss else out.loss
    return out.loss, aimed if teacher is None else teacher.aim(aimed, out, batch, counted)


@contextmanager
def memory_advice(
    recipe: Recipe, config: HeadwaterConfig, context: int, device: torch.device, world: int
) -> Iterator[None]:
    """Turn running out of memory into a `HeadwaterError` with the estimate of `headwater plan` for this model."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        said = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in said:
            raise
        training = recipe.training
        rows = training.batch_size // world
        of_images = is_of_images(config)
        settings: dict[str, Any] = {}
        if not of_images:
            attention = attention_of(config, training, device, context)
            masked = getattr(recipe.data, "rows", "") == "packed" and not takes_documents(attention)
            masked = masked and attention != "flex_attention"
            settings = {"context": context, "loss_chunk": training.loss_chunk, "masked": masked}
            settings["sparse_tables"] = training.sparse_tables
        one = price(
            config,
            batch=rows,
            precision=training.precision,
            gradient_checkpointing=training.gradient_checkpointing,
            averages=training.ema is not None,
            **settings,
        )
        at = one.at[0]
        state = sum(one.state_bytes.values()) / (world if training.strategy == "fsdp" else 1)
        row = at.step_bytes - sum(one.state_bytes.values())
        free = memory_of(device) - state
        fits = max(0, int(free / (row / rows)))
        advice = []
        if training.gradient_checkpointing is not True:
            advice.append(f"training.gradient_checkpointing=true ({si(at.activation_bytes_checkpointed)}B instead)")
        if training.loss_chunk is None and not of_images:
            advice.append("training.loss_chunk=1024 (the logits of this many tokens at once)")
        if 0 < fits < rows:
            advice.append(f"training.batch_size={fits * world} with a larger training.accumulate")
        elif rows > 1:
            advice.append("a smaller training.batch_size with a larger training.accumulate")
        if training.strategy != "fsdp":
            advice.append("training.strategy=fsdp on several devices")
        raise HeadwaterError(
            f"Out of memory. Estimated: parameters, gradients and optimizer take {si(state)}B and the activations of "
            f"{rows} {'images' if of_images else f'rows of {context} tokens'} {si(row)}B; try {', or '.join(advice)}."
        ) from error
