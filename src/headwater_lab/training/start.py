"""Build the data, model and optimizers of a run: new, from a trained checkpoint, or resumed.

A run that learns from a teacher minimizes (arXiv 1503.02531)

    (1 - w)·loss + w·T²·KL(p_T ‖ q_T)        p_T = softmax(teacher's logits / T)

Each is a mean over the tokens that have a label. The teacher is held once, in the precision it was saved in, without
gradients and without a cache.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils._triton import has_triton
from transformers import PreTrainedTokenizerBase

from headwater.config.planner import plan_layers
from headwater.config.rope import FOLLOW_LENGTH
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost.counts import parameters, training_flops
from headwater.cost.hardware import sheet_of
from headwater.growth.parameter_tokens import has_pairs
from headwater.kernels.fused_loss import SoftTargets
from headwater.mechanisms.capabilities import ActsInTraining, Step
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.compiling import compile_model
from headwater.models.load import read_config, read_generation_config
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError, sentence
from headwater.util.precision import Precision
from headwater_lab.data.base import LABELS, Batch, Data
from headwater_lab.data.images import ImageData
from headwater_lab.data.tokenizer import begin_texts, has_all_tokens
from headwater_lab.data.tokenizer_files import find_tokenizer
from headwater_lab.optimization.schedules import find_decay_start
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.start_section import Start
from headwater_lab.recipe.training_section import Distillation, Training
from headwater_lab.training.attention_choice import choose_attention, set_attention
from headwater_lab.training.checkpoints import (
    Progress,
    begin_with,
    check_sums,
    is_from_elsewhere,
    newest_checkpoint,
    read_history,
    read_progress,
    restore_run,
)
from headwater_lab.training.initialization import measure_initialization, warn_drowning
from headwater_lab.training.model_changes import change_model, check_classes, describe_refit, list_refits, refit_model
from headwater_lab.training.optimizers import (
    Average,
    freeze_others,
    learning_rate,
    make_optimizers,
    write_group_numbers,
)
from headwater_lab.training.processes import fail_together, is_sharded, list_scalars, run_in_first
from headwater_lab.training.records import Event, Origin, find_record
from headwater_lab.training.run_folder import CHANGED
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import is_foreign, open_source, open_trained
from headwater_lab.util.machine import c_compiler, check_memory
from headwater_lab.util.model_kinds import AnyModel, is_of_images, model_class

if TYPE_CHECKING:  # reading runs does not need the trainer's packages
    from lightning_fabric import Fabric
    from lightning_fabric.wrappers import _FabricModule

# Most tokens, and rows, on which a conversion measures and aligns keys and values.
SAMPLE, SAMPLE_ROWS = 16_384, 32
# Config fields that a recipe may change in a trained model, and those of them that extend its context.
MAY_DIFFER = ("embedding_dropout", "attention_dropout", "residual_dropout", "drop_path")
POSITIONS = ("max_position_embeddings", "rope_parameters")
# Fields that may change when a run resumes: its length and the hardware, but not the model or the data.
MAY_CHANGE = {
    *("training.steps", "training.device", "training.devices", "training.nodes", "training.strategy"),
    *("training.threads", "training.attn_implementation", "training.compile", "training.cuda_graphs"),
    *("training.gradient_checkpointing", "training.loss_chunk_tokens", "training.max_skipped_steps"),
    *("training.timeout_minutes", "data.workers"),
    "start.checkpoint",  # the checkpoint may have been moved
}


def resume_progress(checkpoint: Path, recipe: Recipe, data: dict[str, Any]) -> tuple[Progress, list[str]]:
    """Read a run's progress, if this recipe may resume it, and warnings for its record. Raises `HeadwaterError` if not.

    data: the current facts about the data.
    """
    progress = read_progress(checkpoint)
    values = recipe.model_dump(mode="json")
    _check_changes(progress.recipe, values)
    _check_decay(progress, recipe)
    if progress.step > recipe.training.steps:
        raise HeadwaterError(
            f"The run is already at step {progress.step}, past training.steps={recipe.training.steps}."
        )
    for fact in ("sha256", "train_tokens", "held_out_sha256"):
        if progress.data.get(fact) != data.get(fact):
            raise HeadwaterError(
                f"The data have changed since this run was started ({fact} {progress.data.get(fact)!r}, now "
                f"{data.get(fact)!r}); restore them, or start a new run with another --out."
            )
    record = find_record(checkpoint.parents[1])
    if record is not None and record.changed_code:
        raise HeadwaterError(
            f"{record.changed_code[0]} has changed since this run was started; restore it, or start a new run with "
            "another --out."
        )
    warning = _warn_rescheduled(progress, recipe.training)
    progress.recipe = values
    return progress, [] if warning is None else [warning]


def _check_changes(old_values: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise `HeadwaterError` for fields that differ from those that a run was started with, and may not."""
    changes = [change for change in list_changes(old_values, values) if change[0] not in MAY_CHANGE]
    changes = [change for change in changes if change[1] is not None] or changes  # None: another kind of data's
    if changes:
        started = ", ".join(f"{name}={old!r}" for name, old, _ in changes)
        raise HeadwaterError(
            f"This run was started with {started} and cannot be resumed with {', '.join(repr(c[2]) for c in changes)}; "
            f"restore {'it' if len(changes) == 1 else 'them'}, or start a new run with another --out."
        )


def list_changes(
    old_values: dict[str, Any],
    new_values: dict[str, Any],
    sections: Sequence[str] = ("model", "data", "seed", "training", "start"),
) -> Iterator[tuple[str, Any, Any]]:
    """List the fields of these sections in which two recipes' values differ: name, old and new value."""
    for section in sections:
        old, new = old_values.get(section), new_values[section]
        fields = {section: (old, new)}
        if isinstance(old, dict) and isinstance(new, dict):
            fields = {f"{section}.{key}": (old.get(key), new.get(key)) for key in {**old, **new}}
        yield from ((name, old, new) for name, (old, new) in fields.items() if old != new)


def _check_decay(progress: Progress, recipe: Recipe) -> None:
    """Raise `HeadwaterError` for a run whose rate has decayed for another number of steps than the recipe's."""
    steps = progress.recipe["training"]["steps"]
    if (end := recipe.training.steps) == steps or recipe.training.decay_start is None:
        return
    start = min(recipe.training.decay_start, find_decay_start(steps, recipe.training.decay_fraction))
    if progress.step > start:
        raise HeadwaterError(
            f"The run is at step {progress.step}, and by training.steps={steps} or {end} its rate decays after step "
            f"{start}; begin a new run at an earlier step of it with --trunk (trunk=)."
        )


def _warn_rescheduled(progress: Progress, training: Training) -> str | None:
    """Warn that the steps so far had other learning rates than those of a run with the recipe's number of steps."""
    steps, last = progress.recipe["training"]["steps"], max(0, progress.step - 1)
    earlier = training.model_copy(update={"steps": steps})
    old, new = learning_rate(last, earlier), learning_rate(last, training)
    if old == new:
        return None
    return (
        f"training.steps was {steps} until here and is now {training.steps}: the last learning rate was {old:.3g}, and "
        f"by the new schedule would have been {new:.3g}. A new run of this recipe gives another model."
    )


class Beginning(NamedTuple):
    """The checkpoint that a run starts from, and what the run keeps of it.

    rows: the number of rows of the same data in the same order that the model has already seen; the run continues after
    them. tau: "anneal" if the run moves τ to the default for its pairs, else "keep".
    """

    start: Start
    path: Path
    config: HeadwaterConfig
    origin: Origin
    rows: int
    tau: str
    notices: list[str]


def prepare_start(start: Start, folder: Path, data: Data, device: torch.device) -> Path:
    """Return the checkpoint a run begins with. If it was changed, or converted from another family, it is in the run's
    folder (see `run_folder.clear_log`).

    data: the run's data, for a change that measures; device: a GPU does so faster. Called by one process.
    Raises `HeadwaterError`.
    """
    path = newest_checkpoint(Path(start.checkpoint))
    foreign = is_foreign(path)
    if not (start.grow or start.convert or start.finish_conversion or foreign):
        check_sums(path)
        if not list_refits(read_config(path), data, start, find_tokenizer(path)):
            return path
    target = folder / CHANGED
    shutil.rmtree(target, ignore_errors=True)  # left by a run that was killed before it began
    if foreign:
        trained = open_source(start.checkpoint)
    else:
        trained = open_trained(Path(start.checkpoint), with_state=start.optimizer_state == "keep")
    rows = None
    if start.convert is not None:
        if device.type == "cuda":
            trained.model.to(device)
        # Use the same rows every time.
        count = max(1, min(SAMPLE_ROWS, SAMPLE // data.context))
        rows = next(iter(data.batches(seed=0, batch_size=count, start=0))).get("input_ids")
    changed = refit_model(change_model(trained, start, rows), data, start)
    return write_model(target, changed.model, changed.tokenizer, changed.history, changed.state)


def read_beginning(recipe: Recipe, path: Path, data: Data, resumed: bool = False) -> Beginning:
    """Read what a run begins with. Raises `HeadwaterError` if recipe, data and checkpoint do not match.

    resumed: the checkpoint is this run's own; the one that it began with may be gone.
    """
    assert recipe.start is not None
    config = _read_config(path, recipe)
    _check_data(config, path, data, recipe.start)
    if recipe.start.tau is not None and not has_pairs(config):
        raise HeadwaterError("start.tau applies to parameter tokens, which this model does not have; leave it out.")
    history = read_history(path)[: -1 if resumed else None]
    origin = Origin(
        checkpoint=recipe.start.checkpoint,
        tokens=sum(event.tokens for event in history),
        flops=sum(event.flops for event in history),
        history=history,
    )
    last_index = max((index for index, event in enumerate(history) if event.kind == "trained"), default=-1)
    changes = history[last_index + 1 :]
    rows = _count_rows(recipe, data, history[last_index].details) if last_index >= 0 else 0
    tau = recipe.start.tau or _choose_tau(changes)
    notices = [] if resumed else _list_notices(recipe, config, rows, changes)
    return Beginning(recipe.start, path, config, origin, rows, tau, notices)


def _count_rows(recipe: Recipe, data: Data, details: dict[str, Any]) -> int:
    """Count the rows of this data, in this seed's order, that the last training used. details: of its event."""
    rows = details.get("rows")
    same_order = details.get("seed") == recipe.seed and details.get("data") == _describe_data(recipe, data)
    return rows if same_order and isinstance(rows, int) and rows > 0 else 0


def _choose_tau(changes: list[Event]) -> str:
    """Choose how the run treats τ. changes: of the model since it was last trained."""
    growth = [event.details for event in changes if event.kind == "grown"]
    anneals = any(details.get("tau") == "keep" for details in growth)
    return "anneal" if anneals and not any(details.get("freeze") for details in growth) else "keep"


def _read_config(path: Path, recipe: Recipe) -> HeadwaterConfig:
    """Read the config of a checkpoint, with the recipe's changes."""
    config = read_config(path)
    try:
        for name in (name for name in list_changeable(config) if name in recipe.model):
            setattr(config, name, recipe.model[name])
        rope = getattr(config, "rope_parameters", None)
        if rope is not None and rope["rope_type"] not in FOLLOW_LENGTH:
            config.max_position_embeddings = max(config.max_position_embeddings, getattr(recipe.data, "context", 0))
        config.complete_fields()
        plan_layers(config)
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"model: {sentence(error)}") from error
    return config


def list_changeable(config: HeadwaterConfig) -> tuple[str, ...]:
    """List the config fields that a recipe may change in this trained model."""
    return (*MAY_DIFFER, *(POSITIONS if getattr(config, "position", None) == "rope" else ()))


def describe_training(recipe: Recipe, data: Data, progress: Progress, flops: float) -> Event:
    """Make the event that a run adds to its model's history."""
    details = {
        "name": recipe.name,
        "identity": recipe.identity,
        "seed": recipe.seed,
        "data": _describe_data(recipe, data),
        "steps": progress.step,
        "rows": progress.rows,
    }
    return Event(kind="trained", tokens=progress.tokens, flops=flops, details=details)


def _describe_data(recipe: Recipe, data: Data) -> dict[str, Any]:
    settings = recipe.data.model_dump(mode="json", exclude={"held_out_rows"})  # of evaluations during this run alone
    return {"settings": settings, "sha256": data.description.get("sha256")}


def _list_notices(recipe: Recipe, config: HeadwaterConfig, rows: int, changes: list[Event]) -> list[str]:
    assert recipe.start is not None
    notices = _describe_changes(recipe.start, changes)
    if recipe.start.previous is not None:  # the stage before has shown the rest
        return notices
    ignored = [
        name
        for name, value in recipe.model.items()
        if name not in (*list_changeable(config), "base", "mechanisms") and getattr(config, name, None) != value
    ]
    if ignored:
        fields = (f"{name} is {getattr(config, name, None)!r} there, not {recipe.model[name]!r}" for name in ignored)
        notices.append(f"The model is the checkpoint's, so the recipe's is ignored: {'; '.join(fields)}.")
    if rows:
        notices.append(
            f"The model was trained on the first {rows:,} rows of these data; training continues after them."
        )
    return notices


def _describe_changes(start: Start, changes: list[Event]) -> list[str]:
    """Describe in sentences what was done to the model before the run."""
    notices = [describe_refit(event) for event in changes if event.kind == "refitted"]
    if start.convert is not None and start.convert.choose:
        mechanisms = next(event.details["mechanisms"] for event in changes if event.kind == "converted")
        chosen = ", ".join(f"{name}={options}" for name, options in mechanisms.items())
        notices.append(f"The layers that share were chosen by how similar they are: {chosen}.")
    if tokens := sum(event.details.get("aligned_tokens", 0) for event in changes):
        notices.append(f"Keys and values were fitted to those that replace them on {tokens:,} tokens.")
    return notices


def _check_data(config: HeadwaterConfig, path: Path, data: Data, start: Start) -> None:
    source = start.checkpoint
    if (of_images := is_of_images(config)) != isinstance(data, ImageData):
        kind, unfit = ("an image", "text") if of_images else ("a text", "images")
        raise HeadwaterError(
            f"{source!r} is {kind} model, but the data are {unfit}; use data that it can be trained on."
        )
    if isinstance(config, HeadwaterVisionConfig) and isinstance(data, ImageData):
        check_classes(config, data)
        if config.num_channels != data.settings.channels:
            raise HeadwaterError(
                f"The checkpoint takes images of {config.num_channels} channels; set data.channels to that."
            )
        return
    if start.new_classifier:
        raise HeadwaterError("start.new_classifier is for image models; leave it out for text.")
    check_tokenizer(source, config, find_tokenizer(path), data)
    _check_positions("checkpoint", config, data.context)


def check_tokenizer(
    source: str, config: HeadwaterConfig, tokenizer: PreTrainedTokenizerBase | None, data: Data
) -> None:
    """Raise `HeadwaterError` if the tokens of data are not those of the model `source`, or more than it knows."""
    if config.vocab_size < data.vocab_size:
        raise HeadwaterError(
            f"The checkpoint's vocabulary has {config.vocab_size} tokens and the data's {data.vocab_size}; use the "
            "tokenizer the model was trained with (data.tokenizer), or one that adds tokens to it."
        )
    if tokenizer is not None and data.tokenizer is not None and not has_all_tokens(data.tokenizer, tokenizer):
        raise HeadwaterError(
            f"The data's tokenizer is not the one {source!r} was trained with, nor one that adds tokens "
            f"to it; set data.tokenizer={source!r}, or prepare the data with it."
        )


def _check_positions(owner: str, config: HeadwaterConfig, context: int) -> None:
    if config.position == "learned" and config.max_position_embeddings < context:
        raise HeadwaterError(
            f"The {owner} has {config.max_position_embeddings} learned positions and data.context is {context}; lower "
            "data.context."
        )


class Hooks:
    """The modules of a model that act before each step, with their state in checkpoints.

    state: that, by the module's name. notices: warnings for the record of a run that begins, or None.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, beginning: Beginning | None, state: dict[str, Any] | None
    ) -> None:
        """Take the `state` of a resumed run; None for a new one."""
        start = {} if beginning is None else beginning.start.model_dump(mode="json") | {"tau": beginning.tau}
        self.first = Step(0, recipe.training.steps, recipe.training.warmup_steps, start)
        mechanisms = {name: module for name, module in model.named_modules() if isinstance(module, ActsInTraining)}
        if state is None:
            answers = {name: module.prepare_training(self.first) for name, module in mechanisms.items()}
            state = {name: value for name, value in answers.items() if value is not None}
        self.state = state
        self.modules = [(mechanisms[name], value) for name, value in state.items()]
        counts = Counter(type(module) for module, _ in self.modules)
        self.notices = [kind.describe_training(count, self.first) for kind, count in counts.items()]

    def prepare_step(self, number: int) -> None:
        """Call the modules; number: the step, from 0."""
        step = self.first._replace(number=number)
        for module, state in self.modules:
            module.prepare_step(state, step)


class Teacher:
    """The model that a run learns from. Raises `HeadwaterError` if it cannot be read, or has other tokens."""

    def __init__(self, recipe: Recipe, config: HeadwaterConfig, data: Data, device: torch.device) -> None:
        settings = recipe.training.distillation
        assert settings is not None
        self.settings: Distillation = settings
        source = settings.teacher or (recipe.start.checkpoint if recipe.start is not None else None)
        assert source is not None
        teacher = open_source(str(Path(source)))
        model = teacher.model
        if is_of_images(model.config) or model.config.vocab_size != config.vocab_size:
            kind = "is an image model"
            if not is_of_images(model.config):
                kind = f"has a vocabulary of {model.config.vocab_size} tokens"
            raise HeadwaterError(
                f"training.distillation: the teacher {source!r} {kind}, and the model one of {config.vocab_size}; use "
                "a teacher with the same vocabulary."
            )
        assert isinstance(model, HeadwaterForCausalLM)
        check_tokenizer(source, model.config, teacher.tokenizer, data)
        _check_positions(f"teacher {source!r}", model.config, data.context)
        self.model = recipe.training.precision.cast_activations(model.to(device)).eval().requires_grad_(False)

    def predict(self, batch: Batch) -> SoftTargets:
        """Run the teacher over a batch."""
        inputs = {name: tensor for name, tensor in batch.items() if name not in LABELS}
        with torch.no_grad():
            hidden = self.model.scale_hidden(self.model.model(**inputs, use_cache=False).last_hidden_state)
        head, cap = self.model.lm_head.weight, self.model.config.logit_softcap
        return SoftTargets(hidden, head, cap, self.settings.weight, self.settings.temperature)


@contextmanager
def advise_on_memory(training: Training, of_images: bool, world: int) -> Iterator[None]:
    """Turn running out of memory into a `HeadwaterError` that suggests what needs less."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        remedies = {
            "training.gradient_checkpointing=true": not training.gradient_checkpointing,
            "training.loss_chunk_tokens=1024": not (training.loss_chunk_tokens or training.distillation or of_images),
            "a smaller training.batch_size with a larger training.gradient_accumulation_steps": True,
            "training.strategy=fsdp on several devices": not is_sharded(training),
        }
        advice = ", ".join(remedy for remedy, helps in remedies.items() if helps)
        raise HeadwaterError(
            f"Out of memory with {training.batch_size // world} rows per process; try {advice}. `headwater plan "
            "RECIPE` estimates what a step takes."
        ) from error


class Setup:
    """Everything that a training step uses. Raises `HeadwaterError` if recipe, data, checkpoint and machine do not fit.

    model: the plain model, which is saved. wrapped: the model that runs: sharded, compiled.
    optimizers: PyTorch's. steppers: these, as wrapped by Fabric. parameters: the trainable ones.
    scalars: parameters that FSDP does not shard; the loop averages their gradients itself.
    running: sums since the last point of the curve; saved with the run.
    average: of the weights, if the recipe asks for one. teacher: the model that the run also learns from.
    preparer: the tokenizer or image processor, which makes the model's inputs and is saved with it.
    """

    def __init__(self, recipe: Recipe, folder: Path, checkpoint: Path | None, fabric: Fabric) -> None:
        """Resume this run from `checkpoint`; None for a new run."""
        self.recipe, self.folder, self.fabric = recipe, folder, fabric
        training = recipe.training
        with fail_together(fabric):
            self.data = data = recipe.data.build()
        self.beginning: Beginning | None = None
        if recipe.start is not None:
            path = checkpoint or run_in_first(fabric, prepare_start, recipe.start, folder, data, fabric.device)
            with fail_together(fabric):
                self.beginning = read_beginning(recipe, path, data, resumed=checkpoint is not None)
        self.preparer = getattr(data, "processor", None) or self.choose_tokenizer()
        with fail_together(fabric):
            config = recipe.config_for(data) if self.beginning is None else self.beginning.config
            if fabric.device.type == "cpu" and not is_sharded(training):
                check_memory(config)
        self.progress = self.begin_progress(checkpoint)
        with advise_on_memory(training, is_of_images(config), fabric.world_size):
            self.model, self.wrapped = build_model(recipe, config, fabric, data.context)
            self.optimizers = make_optimizers(self.model, training)
            steppers = fabric.setup_optimizers(*self.optimizers)
        self.config = self.model.config
        self.steppers = steppers if isinstance(steppers, tuple) else (steppers,)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.scalars = list_scalars(self.model) if is_sharded(training) else []
        self.running = {name: torch.zeros(1, dtype=torch.float64) for name in ("loss", "steps")}
        with fail_together(fabric):
            teaches = training.distillation is not None
            self.teacher = Teacher(recipe, config, data, fabric.device) if teaches else None
        with fail_together(fabric):
            self.average = self.load_weights(checkpoint)
        self.hooks = Hooks(self.model, recipe, self.beginning, None if checkpoint is None else self.progress.kept)
        self.progress.kept = self.hooks.state
        if checkpoint is None:
            self.warnings = self.list_warnings()

    @cached_property
    def flops_per_unit(self) -> float:
        """Training FLOPs per token or image, with the teacher's."""
        teacher = None if self.teacher is None else self.teacher.model.config
        return training_flops(self.config, self.data.context, teacher)

    def choose_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Choose the tokenizer to save: it begins texts as training does, unless the model is from elsewhere."""
        tokenizer = self.data.tokenizer
        keeps = self.beginning is not None and is_from_elsewhere(self.beginning.origin.history)
        return tokenizer if tokenizer is None or keeps else begin_texts(tokenizer)

    def begin_progress(self, checkpoint: Path | None) -> Progress:
        """Read the progress of a resumed run, or begin a new one."""
        description = self.data.description
        if checkpoint is not None:
            progress, self.warnings = run_in_first(self.fabric, resume_progress, checkpoint, self.recipe, description)
            return progress
        rows = 0 if self.beginning is None else self.beginning.rows
        values = self.recipe.model_dump(mode="json")
        return Progress(rows=rows, recipe=values, data=description, run_id=secrets.token_hex(4))

    def load_weights(self, checkpoint: Path | None) -> Average | None:
        """Read the weights of a resumed run, or those that it starts from. Returns their average, if there is one."""
        training = self.recipe.training
        if self.beginning is not None:
            read_generation_config(self.model, self.beginning.path)
        if checkpoint is None and self.beginning is not None:
            optimizers = self.optimizers if self.beginning.start.optimizer_state == "keep" else ()
            begin_with(self.beginning.path, self.model, optimizers, is_sharded(training))
        average = None if training.ema_decay is None else Average(self.model, training.ema_decay)
        if checkpoint is not None:
            restore_run(checkpoint, self.model, self.optimizers, self.running, is_sharded(training), average)
            write_group_numbers(self.optimizers, self.progress.optimizer)
        return average

    def list_warnings(self) -> list[str]:
        """List warnings for the record of a run that begins."""
        training, device = self.recipe.training, self.fabric.device
        warnings = [warn_uncompiled(training, device), warn_fp32(training, device), warn_short_run(training)]
        if self.fabric.world_size == 1:
            default = Training.model_fields["timeout_minutes"].default
            unread = {"timeout_minutes": training.timeout_minutes != default, "strategy": training.strategy == "ddp"}
            warnings += [f"training.{name} has no effect in a single process." for name in unread if unread[name]]
        if training.scalar_learning_rate_multiplier != 1 and not any(
            group["name"] == "scalars" for optimizer in self.optimizers for group in optimizer.param_groups
        ):
            warnings.append("training.scalar_learning_rate_multiplier has no effect: the model has no such scalars.")
        warnings += getattr(self.data, "notices", [])
        if self.beginning is not None:
            warnings += self.beginning.notices
        elif not is_sharded(training):
            warnings.append(warn_drowning(measure_initialization(self.model)))
        return [warning for warning in (*warnings, *self.hooks.notices) if warning is not None]


def build_model(
    recipe: Recipe, config: HeadwaterConfig, fabric: Fabric, context: int
) -> tuple[AnyModel, _FabricModule]:
    """Build (the plain model, the model that runs: in its precision, compiled, on its device, sharded)."""
    training = recipe.training
    with fail_together(fabric):
        with torch.device("meta") if is_sharded(training) else nullcontext():
            model = make_model(training, config, fabric.device, context)
        if training.gradient_checkpointing:
            older: Any = model.gradient_checkpointing_enable  # transformers 5.17 has no other name
            getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        if training.cuda_graphs:
            check_cuda_graphs(fabric)
        if is_compiling(training, fabric.device):
            compile_model(model, whole=training.compile == "whole", cuda_graphs=training.cuda_graphs)
    wrapped = fabric.setup_module(training.precision.cast_activations(model.to(training.precision.weights)))
    wrapped.train()
    return model, wrapped


def make_model(training: Training, config: HeadwaterConfig, device: torch.device, context: int) -> AnyModel:
    """Make a plain model with the attention kernel and the trainable parameters of its training on a device.

    context: tokens of a row. Raises `HeadwaterError`.
    """
    model = model_class(config)(config)
    check_counts(model)
    if training.trainable_mechanisms is not None:
        freeze_others(model, training.trainable_mechanisms)
    attention = choose_attention(config, training, device, context)
    if attention is not None:
        set_attention(model, attention)
    return model


def check_counts(model: AnyModel) -> None:
    """Raise `HeadwaterError` if mechanisms from outside state other parameters than they have, and so wrong FLOPs."""
    outside = [name for name in model.config.mechanisms or {} if name not in MECHANISMS.built_in]
    if not outside:
        return
    counted, measured = sum(parameters(model.config).values()), model.num_parameters()
    if counted != measured:
        raise HeadwaterError(
            f"The model has {measured:,} parameters, but {counted:,} are counted; correct count_cost() of "
            f"{' or '.join(outside)}."
        )


def is_compiling(training: Training, device: torch.device) -> bool:
    """Whether to compile the model: by default on a GPU that can. Raises `HeadwaterError` if that is impossible."""
    if training.compile is None:
        return device.type == "cuda" and has_triton() and find_missing_compiler(device) is None
    if training.compile and (missing := find_missing_compiler(device)) is not None:
        raise HeadwaterError(f"training.compile needs {missing}, or leave training.compile=false.")
    return bool(training.compile)


def check_cuda_graphs(fabric: Fabric) -> None:
    """Raise `HeadwaterError` if steps cannot be replayed as CUDA graphs."""
    if fabric.device.type != "cuda" or fabric.world_size > 1:
        raise HeadwaterError("training.cuda_graphs needs a single NVIDIA GPU; leave it out.")


def find_missing_compiler(device: torch.device) -> str | None:
    """Find what PyTorch's compiler lacks: a C++ compiler on a CPU, or a C compiler on a GPU, which Triton needs."""
    if device.type == "cuda" and os.name == "posix" and c_compiler() is None:  # on Windows Triton brings its own
        return "a C compiler, but none was found; install gcc or clang, or set CC"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler, but none was found; install g++ or clang++, or set CXX"
    return None


def warn_uncompiled(training: Training, device: torch.device) -> str | None:
    """Warn if a run is not compiled only because the machine has no C compiler."""
    if training.compile is not None or device.type != "cuda" or not has_triton():
        return None
    missing = find_missing_compiler(device)
    return None if missing is None else f"The model is not compiled, which is slower: Triton needs {missing}."


def warn_short_run(training: Training) -> str | None:
    """Warn if the run ends before its learning rate has reached the peak."""
    if training.warmup_steps <= training.steps:
        return None
    highest = learning_rate(training.steps - 1, training)
    return (
        f"The warm-up is longer than the run, so the learning rate only reaches {highest:.3g} of "
        f"{training.learning_rate:.3g}; set training.warmup_steps to less than training.steps={training.steps}."
    )


def warn_fp32(training: Training, device: torch.device) -> str | None:
    """Warn if a run computes in fp32 on a GPU that has bf16."""
    if device.type != "cuda" or training.precision is not Precision.FP32:
        return None
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    sheet = sheet_of(torch.cuda.get_device_properties(device).name)
    figures = "" if sheet is None else f", {sheet.flops / 1e12:.0f} TFLOP/s instead of {sheet.flops_fp32 / 1e12:.0f}"
    return (
        "The run computes in fp32 (training.precision=32-true). This GPU multiplies matrices much faster "
        f"in bf16{figures}; set training.precision=bf16-mixed, unless you need fp32."
    )
