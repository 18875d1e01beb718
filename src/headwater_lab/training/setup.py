"""What a run trains: its data, model and optimizers; new, from a trained checkpoint, or resumed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor, nn
from torch.utils._triton import has_triton
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import check_memory
from headwater.cost.hardware import c_compiler, sheet_of
from headwater.models.compiling import compile_model
from headwater.models.kinds import AnyModel, model_class
from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import Data
from headwater_lab.recipe.schema import Recipe, Training
from headwater_lab.training import guards
from headwater_lab.training.attention import attention_of, set_attention
from headwater_lab.training.averaging import Average
from headwater_lab.training.checkpoint import Progress, begin_with, restore
from headwater_lab.training.diagnostics import drowning, init_diagnostics
from headwater_lab.training.distill import Teacher
from headwater_lab.training.hooks import Hooks
from headwater_lab.training.optim import freeze, learning_rate, make_optimizers
from headwater_lab.training.parallel import first, in_precision, scalars, sharded, together
from headwater_lab.training.resume import progress_of
from headwater_lab.training.start import Beginning, begin, prepare


@dataclass
class Setup:
    """Everything that a training step uses.

    model: the plain model, which is saved. wrapped: the model that runs: sharded, compiled.
    optimizers: PyTorch's. steppers: these, as wrapped by Fabric.
    scalars: parameters that FSDP does not shard; the loop averages their gradients itself.
    running: sums since the last point of the curve, and running averages of the loss; saved with the run.
    average: of the weights, if the recipe asks for one.
    warnings: sentences for the record of a run that begins.
    teacher: what the run learns from beside its data.
    """

    data: Data
    beginning: Beginning | None
    progress: Progress
    model: AnyModel
    wrapped: _FabricModule
    optimizers: Sequence[torch.optim.Optimizer]
    steppers: Sequence[_FabricOptimizer]
    hooks: Hooks
    running: dict[str, Tensor]
    average: Average | None = None
    scalars: list[nn.Parameter] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    teacher: Teacher | None = None

    @property
    def config(self) -> HeadwaterConfig:
        return self.model.config

    @property
    def preparer(self) -> PreTrainedTokenizerBase | BaseImageProcessor | None:
        """What makes inputs for the model and is saved with it: the tokenizer, or the image processor."""
        return getattr(self.data, "processor", None) or self.data.tokenizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def set_up(recipe: Recipe, folder: Path, checkpoint: Path | None, fabric: Fabric) -> Setup:
    """Build everything that the recipe asks for.

    checkpoint: of this run, to resume from; None for a run that begins.
    Raises `HeadwaterError` if recipe, data, checkpoint and machine do not fit together.
    """
    with together(fabric):
        data = recipe.data.build()
    beginning = None
    if (start := recipe.start) is not None:
        where = checkpoint or first(fabric, prepare, start, folder, data, fabric.device)
        with together(fabric):
            beginning = begin(recipe, where, data, resumed=checkpoint is not None)
    with together(fabric):
        config = recipe.config_for(data) if beginning is None else beginning.config
        if fabric.device.type == "cpu" and not sharded(recipe.training):
            check_memory(config)
    if checkpoint is not None:
        progress = first(fabric, progress_of, checkpoint, recipe, data.description)
    else:
        progress = Progress(recipe=recipe.model_dump(mode="json"), data=data.description, run_id=secrets.token_hex(4))
        progress.rows = 0 if beginning is None else beginning.rows

    with memory_advice(recipe, config, data, fabric):
        model, wrapped = build(recipe, config, fabric, data.context)
        optimizers = make_optimizers(model, recipe.training, fabric.device)
        steppers = fabric.setup_optimizers(*optimizers)
    teacher = None
    if recipe.training.distillation is not None:
        with together(fabric):
            teacher = Teacher(recipe, config, data.context, fabric.device)
    running = {name: torch.zeros(1, dtype=torch.float64) for name in ("loss", "steps")}
    with together(fabric):
        if checkpoint is not None:
            average = average_of(model, recipe)
            restore(checkpoint, model, optimizers, running, sharded(recipe.training), average)
        elif beginning is not None:
            kept = beginning.start.optimizer_state == "keep"
            begin_with(beginning.path, model, optimizers if kept else (), sharded(recipe.training))
        if checkpoint is None:
            average = average_of(model, recipe)  # of the weights it begins with
    hooks = Hooks(model, recipe, beginning, None if checkpoint is None else progress.kept)
    progress.kept = hooks.kept

    warnings: list[str] = []
    if checkpoint is None:
        for check in (uncompiled, in_fp32):
            if (notice := check(recipe.training, fabric.device)) is not None:
                warnings.append(notice)
        if (notice := unfinished_warmup(recipe.training)) is not None:
            warnings.append(notice)
        warnings += getattr(data, "notices", [])
        if beginning is not None:
            warnings += beginning.notices
        elif not sharded(recipe.training) and (drowned := drowning(init_diagnostics(model))) is not None:
            warnings.append(drowned)
        warnings += hooks.notices
    return Setup(
        data=data,
        beginning=beginning,
        progress=progress,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        steppers=steppers if isinstance(steppers, tuple) else (steppers,),
        hooks=hooks,
        running=running,
        average=average,
        scalars=scalars(model) if sharded(recipe.training) else [],
        warnings=warnings,
        teacher=teacher,
    )


def average_of(model: AnyModel, recipe: Recipe) -> Average | None:
    return None if recipe.training.ema_decay is None else Average(model, recipe.training.ema_decay)


def build(recipe: Recipe, config: HeadwaterConfig, fabric: Fabric, context: int) -> tuple[AnyModel, _FabricModule]:
    """(the plain model, the model that runs: in its precision, compiled, on its device, sharded)."""
    training = recipe.training
    with torch.device("meta") if sharded(training) else nullcontext():
        model = model_class(config)(config)
    if training.trainable_mechanisms is not None:
        with together(fabric):
            freeze(model, training.trainable_mechanisms)
    with together(fabric):
        attention = attention_of(config, training, fabric.device, context)
        if attention is not None:
            set_attention(model, attention)
        if training.gradient_checkpointing:
            older: Any = model.gradient_checkpointing_enable  # the only name in transformers 5.17
            getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        if compiles(training, fabric.device):
            compile_model(model)
    in_precision(model, training.precision)
    wrapped = fabric.setup_module(model)
    wrapped.train()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device.type == fabric.device.type, f"{name} is on {tensor.device}"
    return model, wrapped


def memory_advice(recipe: Recipe, config: HeadwaterConfig, data: Data, fabric: Fabric) -> AbstractContextManager[None]:
    """See `guards.memory_advice`."""
    return guards.memory_advice(recipe, config, data.context, fabric.device, fabric.world_size)


def compiles(training: Training, device: torch.device) -> bool:
    """Whether to compile the model: by default on a GPU, where it can be. Raises `HeadwaterError` if asked in vain."""
    if training.compile is None:
        return device.type == "cuda" and has_triton() and not lacks_compiler(device)
    if training.compile and lacks_compiler(device):
        on_gpu = ("C", "gcc or clang", "CC")
        kind, names, variable = on_gpu if device.type == "cuda" else ("C++", "g++ or clang++", "CXX")
        raise HeadwaterError(
            f"training.compile needs a {kind} compiler, but none was found; install {names}, or set {variable}, or "
            "leave training.compile=false."
        )
    return training.compile


def lacks_compiler(device: torch.device) -> bool:
    """Whether PyTorch's compiler misses the one it needs: for C++ on a CPU, and for C, as Triton does, on a GPU."""
    if device.type == "cuda":
        return os.name == "posix" and c_compiler() is None  # on Windows Triton brings its own
    if device.type != "cpu":
        return False
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return True
    return False


def uncompiled(training: Training, device: torch.device) -> str | None:
    """A notice if a run is not compiled only because the machine has no C compiler."""
    if not (training.compile is None and device.type == "cuda" and has_triton() and lacks_compiler(device)):
        return None
    return (
        "The model is not compiled, which is slower, because Triton needs a C compiler and none was found; install gcc "
        "or clang, or set CC."
    )


def unfinished_warmup(training: Training) -> str | None:
    """A notice if the run ends before its learning rate has reached the peak."""
    if training.warmup_steps <= training.steps:
        return None
    highest = learning_rate(training.steps - 1, training)
    return (
        f"The warm-up is longer than the run, so the learning rate only reaches {highest:.3g} of "
        f"{training.learning_rate:.3g}; set training.warmup_steps to less than training.steps={training.steps}."
    )


def in_fp32(training: Training, device: torch.device) -> str | None:
    """A notice if a run computes in fp32 on a GPU that has bf16."""
    if device.type != "cuda" or training.precision != "32-true":
        return None
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    sheet = sheet_of(torch.cuda.get_device_properties(device).name)
    figures = "" if sheet is None else f", {sheet.flops / 1e12:.0f} TFLOP/s instead of {sheet.flops_fp32 / 1e12:.0f}"
    return (
        "The run computes in fp32 (training.precision=32-true). This GPU multiplies matrices much faster "
        f"in bf16{figures}; set training.precision=bf16-mixed, unless you need fp32."
    )
