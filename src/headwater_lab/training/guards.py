"""Guards for long runs: the losses of a step, running out of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.text import HeadwaterConfig
from headwater.cost import price, si
from headwater.cost.hardware import memory_of
from headwater.models.kinds import is_of_images
from headwater.nn.documents import takes_documents
from headwater.nn.loss import smoothed
from headwater.util.errors import HeadwaterError
from headwater.util.files import disk_problem
from headwater_lab.data.base import Batch
from headwater_lab.recipe.schema import Recipe, Training
from headwater_lab.training.attention import attention_of
from headwater_lab.training.distill import Teacher


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
        loss_chunk_tokens=training.loss_chunk_tokens,
        **({"output_hidden_states": True} if teacher is not None and teacher.settings.hidden_weight else {}),
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
            masked = getattr(recipe.data, "row_layout", "") == "packed" and not takes_documents(attention)
            masked = masked and attention != "flex_attention"
            settings = {"context": context, "loss_chunk_tokens": training.loss_chunk_tokens, "masked": masked}
        one = price(
            config,
            batch=rows,
            precision=training.precision,
            gradient_checkpointing=training.gradient_checkpointing,
            averages=training.ema_decay is not None,
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
        if training.loss_chunk_tokens is None and not of_images:
            advice.append("training.loss_chunk_tokens=1024 (the logits of this many tokens at once)")
        if 0 < fits < rows:
            advice.append(f"training.batch_size={fits * world} with a larger training.gradient_accumulation_steps")
        elif rows > 1:
            advice.append("a smaller training.batch_size with a larger training.gradient_accumulation_steps")
        if training.strategy != "fsdp":
            advice.append("training.strategy=fsdp on several devices")
        raise HeadwaterError(
            f"Out of memory. Estimated: parameters, gradients and optimizer take {si(state)}B and the activations of "
            f"{rows} {'images' if of_images else f'rows of {context} tokens'} {si(row)}B; try {', or '.join(advice)}."
        ) from error
