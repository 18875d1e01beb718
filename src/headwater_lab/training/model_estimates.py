"""Estimate models before training, as `headwater plan` and `lab.plan` do: read their names and options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import config_of
from headwater.conversion.convert import blend_options
from headwater.cost import ModelEstimate, estimate_model
from headwater.cost import counts as cost
from headwater.cost.estimate import read_precision
from headwater.cost.hardware import Hardware
from headwater.models.load import check_names, read_json, reading
from headwater.nn.documents import takes_documents
from headwater.util.errors import HeadwaterError, find_near, nearest, sentence, shown
from headwater.util.files import explain_absence, is_address
from headwater.util.precision import Precision
from headwater_lab.data.base import DataShape
from headwater_lab.data.language import count_batch_rows
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.reading import local_path
from headwater_lab.data.shards import read_manifest
from headwater_lab.data.tokenizer import local_size
from headwater_lab.recipe.messages import build_refusal, describe_unknown_field
from headwater_lab.recipe.model_section import IMAGE_FIELDS, MODEL_FIELDS
from headwater_lab.recipe.overrides import check_overrides, merge_values
from headwater_lab.recipe.recipe import Recipe, naming_arm
from headwater_lab.recipe.recipe_files import read_overrides, read_recipe, shipped_recipes
from headwater_lab.recipe.start_section import changed_config
from headwater_lab.recipe.training_section import Training
from headwater_lab.training.attention_choice import choose_attention
from headwater_lab.training.checkpoints import newest_checkpoint
from headwater_lab.training.trained_models import open_source
from headwater_lab.util.machine_speed import find_hardware as named_hardware
from headwater_lab.util.model_kinds import unit_of

_HINT = "name a preset, a recipe, a config.json or a checkpoint"
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# Training settings of a model without a recipe, unless overrides change them.
_DEFAULTS = {"data": {"kind": "induction"}, "training": {"batch_size": 1, "precision": "bf16-mixed"}}
# Fields of `training:` that affect an estimate. With a recipe, those of its budget and its attention kernel do too.
_DECISIVE = {
    *("precision", "devices", "nodes", "batch_size", "gradient_checkpointing", "loss_chunk_tokens", "ema_decay"),
}
_DECISIVE_IN_RECIPES = _DECISIVE | {
    *("steps", "gradient_accumulation_steps", "attn_implementation", "device", "distillation", "distillation.teacher"),
}


@dataclass(frozen=True)
class ConversionEstimate:
    """The estimated cost and savings of a conversion.

    before, after: the model's parameters, and bytes of its weights and of its cache, in the precision of the weights;
    cache_bytes is of a sequence of the recipe's context. flops: of healing, by stage, with the teacher's; of the
    control; of measuring on the way, on `rows` held-out rows, and of measuring all of them at the start and the end.
    step_bytes: memory of a step at its peak; teacher_bytes: of these, the teacher's weights.
    """

    before: dict[str, int]
    after: dict[str, int]
    tokens: int
    flops: dict[str, float]
    rows: int
    step_bytes: int
    teacher_bytes: int


# The most that measuring on the way may cost, as a share of healing.
MEASURING = 0.1


def estimate_conversion(
    recipe: Recipe, config: HeadwaterConfig, element: int, held_out_rows: int = 0, control: Recipe | None = None
) -> ConversionEstimate:
    """Estimate a recipe that converts a model of this config, and the recipe of its control.

    element: bytes of the model's numbers. held_out_rows: all rows of held-out data.
    Raises `HeadwaterError` if the model cannot be converted, or if its teacher, by default itself, cannot be read.
    """
    context, teacher = recipe.row_length, find_teacher(recipe, config)
    configs = recipe.configs(config if recipe.start is None else changed_config(config, recipe.start))
    if blend_options(configs[-1]) is not None or not recipe.stages:
        raise HeadwaterError("No stage of the recipe ends with the smaller model trained; leave its stages unchanged.")
    stages = _estimate_stages(recipe, configs, teacher, held_out_rows)
    if control is not None:
        tokens, costs, per_rows, peaks = zip(
            *_estimate_stages(control, [config] * len(configs), None, held_out_rows).values(), strict=True
        )
        stages["control"] = StageEstimate(sum(tokens), sum(costs), sum(per_rows), max(peaks))
    flops = {name: stage.healing for name, stage in stages.items()}
    per_row = sum(stage.measuring for stage in stages.values())
    most = _count_measured_rows(recipe, configs, held_out_rows)
    rows = min(held_out_rows, most, getattr(recipe.data, "held_out_rows", None) or most)
    before, after = (sum(cost.forward_flops(end, context).values()) for end in (config, configs[-1]))
    flops["measuring"] = per_row * rows + held_out_rows * context * (before + after + before * ("control" in stages))

    def measure_size(config: HeadwaterConfig) -> dict[str, int]:
        return {
            "decoding_flops": int(cost.decoding_flops(config, context)),
            "parameters": (count := sum(cost.parameters(config).values())),
            "cache_bytes_per_token": cost.cache_bytes_per_token(config, element),
            "cache_bytes": cost.cache_bytes(config, context, 1, element),
            "weights_bytes": count * element,
        }

    return ConversionEstimate(
        measure_size(config),
        measure_size(configs[-1]),
        sum(stage.tokens for name, stage in stages.items() if name != "control"),
        flops,
        rows,
        max(stage.peak for stage in stages.values()),
        cost.state_bytes(config, teacher=teacher).get("teacher", 0),
    )


def _count_measured_rows(recipe: Recipe, configs: Sequence[HeadwaterConfig], held_out_rows: int) -> int:
    """Count the held-out rows whose measurements cost `MEASURING` of healing.

    That of a control is taken, which has no teacher, so that one may be added later to the same conversion.
    """
    stages = _estimate_stages(recipe, configs, None, held_out_rows).values()
    healing, measuring = (sum(getattr(stage, name) for stage in stages) for name in ("healing", "measuring"))
    return max(1, int(MEASURING * healing / measuring))


def find_teacher(recipe: Recipe, config: HeadwaterConfig | None = None) -> HeadwaterConfig | None:
    """Find the config of the model that training distills from: by default `config`, or else where it starts.

    Raises `HeadwaterError` if it cannot be read.
    """
    settings = recipe.training.distillation
    if settings is None:
        return None
    default = recipe.start.checkpoint if recipe.start is not None and config is None else None
    source = settings.teacher or default
    if source is None:
        return config
    path = Path(source)
    return config_of(newest_checkpoint(path)) if path.is_dir() else open_source(source).model.config


class StageEstimate(NamedTuple):
    """Tokens of a stage, FLOPs of its training and of all its evaluations on one row, and bytes at its peak."""

    tokens: int
    healing: float
    measuring: float
    peak: int


def _estimate_stages(
    recipe: Recipe, configs: Sequence[HeadwaterConfig], teacher: HeadwaterConfig | None, held_out_rows: int
) -> dict[str, StageEstimate]:
    """Estimate the stages of a recipe, whose models have these configs, by name."""
    stages, context = {}, recipe.row_length
    for name, config, run in zip(recipe.stage_names, configs, recipe.stage_recipes, strict=True):
        training, tokens = run.training, run.tokens
        settings = PlannedModel(config, training, run, teacher=teacher).list_settings([context], training.precision)
        step = estimate_model(
            config, context=context, batch=training.batch_size, precision=training.precision, **settings
        )
        # Before the first step, at regular steps, and after the last.
        evaluations = 1 - -training.steps // (run.reporting.evaluate_every or training.steps)
        logits = 4 * config.vocab_size * context  # bytes of a row's in fp32
        # Evaluation computes them and their log-softmax, while the training state stays in memory.
        batch = min(held_out_rows, count_batch_rows(config.vocab_size, context))
        stages[name] = StageEstimate(
            tokens,
            step.at[0].training * tokens,
            evaluations * sum(step.at[0].forward.values()) * context,
            max(step.at[0].step_bytes, sum(step.state_bytes.values()) + 2 * logits * batch),
        )
    return stages


class PlannedModel(NamedTuple):
    """A model to estimate, and its training.

    run: its recipe, if there is one; recipe: that of all arms; teacher: if it is distilled.
    """

    config: HeadwaterConfig
    training: Training
    run: Recipe | None = None
    recipe: Recipe | None = None
    teacher: HeadwaterConfig | None = None

    def list_settings(self, contexts: Sequence[int], precision: Precision) -> dict[str, Any]:
        """List the settings of this column that a step's memory depends on, except rows."""
        training = self.training
        settings = {
            "gradient_checkpointing": training.gradient_checkpointing,
            "averages": training.ema_decay is not None,
        }
        if isinstance(self.config, HeadwaterVisionConfig):
            return settings
        masked = [context for context in contexts if self._has_mask(context, precision)]
        return settings | {"loss_chunk_tokens": training.loss_chunk_tokens, "masked": masked, "teacher": self.teacher}

    def _has_mask(self, context: int, precision: Precision) -> bool:
        """Whether packed rows of text have a mask in memory."""
        if self.run is None or getattr(self.run.data, "row_layout", "") != "packed":
            return False
        computed = self.training.model_copy(update={"precision": precision})
        # Assume a GPU, unless the recipe names the CPU.
        device = torch.device("cpu" if self.training.device == "cpu" else "cuda")
        kernel = choose_attention(self.config, computed, device, context)
        return not takes_documents(kernel) and kernel != "flex_attention"


def plan_models(
    models: Iterable[HeadwaterConfig | Recipe | Mapping[str, Any] | str | Path],
    overrides: Sequence[str] = (),
    vocab_size: int | None = None,
) -> dict[str, PlannedModel]:
    """Read models by name, for recipes one per arm and stage; a repeated name gets a number.

    models: configs; recipes; presets, shipped recipes, YAML files, config.json files, checkpoints and runs by name.
    overrides: "field=value" for all of them, "training.field=value" for how they are trained, "data.field=value" and
    "compare.field=value" for recipes. vocab_size: same as the override vocab_size. Raises `HeadwaterError`, also for
    overrides that affect no estimate.
    """
    of_model, of_recipe = _split_overrides(overrides, vocab_size)
    changes = _read_changes(of_model)
    planned: dict[str, PlannedModel] = {}
    for model in models:
        if _is_recipe(model):
            entries = _read_recipe_models(model, of_model, of_recipe, changes.get("vocab_size"))
            _refuse_unread(of_recipe, _DECISIVE_IN_RECIPES, ("compare", "data"))
        else:
            _refuse_unread(of_recipe, _DECISIVE)
            training = read_recipe(_DEFAULTS, of_recipe).training
            entries = {name: PlannedModel(config, training) for name, config in _read_configs(model, changes).items()}
        for name, entry in entries.items():
            planned[name if name not in planned else f"{name} ({len(planned) + 1})"] = entry
    if not planned:
        raise HeadwaterError("Name at least one preset, recipe, config.json or checkpoint.")
    return planned


def _split_overrides(overrides: Sequence[str], vocab_size: int | None) -> tuple[list[str], list[str]]:
    """Split overrides into those of models, with the size of the vocabulary, and those of recipes' other sections."""
    check_overrides(overrides)
    overrides = [*overrides, *([] if vocab_size is None else [f"vocab_size={vocab_size}"])]
    of_recipe = [text for text in overrides if text.startswith(("training.", "compare.", "data."))]
    return [text.removeprefix("model.") for text in overrides if text not in of_recipe], of_recipe


def _refuse_unread(overrides: Sequence[str], fields: set[str], sections: Sequence[str] = ()) -> None:
    """Raise `HeadwaterError` for overrides of other fields of `training:`, and of other sections than these."""
    names = [text.partition("=")[0] for text in overrides]
    unread = [
        name for name in names if name.removeprefix("training.") not in fields and name.split(".")[0] not in sections
    ]
    if unread:
        raise build_refusal("plan", [f"{name} has no effect on an estimate; leave it out" for name in unread])


def estimate_models(
    planned: Mapping[str, PlannedModel],
    *,
    context: Sequence[int] | int | None = None,
    tokens: str | float | None = None,
    images: str | float | None = None,
    hardware: str | Hardware | None = None,
    **settings: Any,
) -> list[ModelEstimate]:
    """Estimate models by name, all of text or all of images.

    context: of text; default: the first model's own, limited by the learned positions of the others. tokens, images:
    a number, or as in "300B". hardware: a device, also by name or "this". settings: batch, devices, precision and mfu,
    as in `headwater.cost.estimate_model`; None or missing values and the budget default to the first model's training.
    Raises `HeadwaterError`.
    """
    device = None if hardware is None else named_hardware(hardware)
    configs = [model.config for model in planned.values()]
    if len(set(map(unit_of, configs))) > 1:
        raise HeadwaterError("Text models and image models cannot be compared; name models of one kind.")
    context = _choose_context(configs) if not context and context != 0 else context
    contexts = [*context] if isinstance(context, Sequence) else [context or 1]
    model = next(iter(planned.values()))
    # Taken from the first model, for all columns.
    shared: dict[str, Any] = {"precision": model.training.precision, "devices": model.training.world_size}
    shared |= {name: value for name, value in settings.items() if value is not None}
    shared = {"batch": _count_device_rows(model.training.batch_size, shared["devices"])} | shared
    counts = {"tokens": tokens, "images": images}
    budget = {unit: read_count(count, unit) for unit, count in counts.items() if count is not None}
    shared |= {"context": context, "hardware": device, "precision": read_precision(shared["precision"])}
    return [
        estimate_model(
            column.config,
            name=name,
            **shared,
            **(budget or _count_budget(column.run or model.run)),
            **column.list_settings(contexts, shared["precision"]),
        )
        for name, column in planned.items()
    ]


def _count_device_rows(rows: int, devices: Any) -> int:
    """Count one device's rows of a batch, at least one. `estimate_model` refuses what is no number of devices."""
    return max(1, rows // devices) if isinstance(devices, int) and devices > 0 else 1


def _count_budget(run: Recipe | None) -> dict[str, Any]:
    """Count the tokens or images that a recipe trains on; {} without a recipe."""
    return {} if run is None else {run.unit: run.tokens}


def _choose_context(configs: Sequence[HeadwaterConfig]) -> int | None:
    """Choose the context to estimate models at; None for image models."""
    lengths = [config.max_position_embeddings for config in configs[1:] if config.position == "learned"]
    return None if unit_of(configs[0]) == "images" else min([configs[0].max_position_embeddings, *lengths])


def _is_recipe(model: Any) -> bool:
    """Whether it is a recipe, or names one."""
    if isinstance(model, HeadwaterConfig):
        return False
    if not isinstance(model, str | Path):
        return True
    argument, path = str(model), Path(model)
    if argument in PRESETS:
        return False
    if path.suffix in (".yaml", ".yml"):
        return True
    # Shipped recipes are named also without their folders.
    return not path.exists() and any(argument in (name, name.rpartition("/")[2]) for name in shipped_recipes())


def _read_configs(model: Any, changes: dict[str, Any]) -> dict[str, HeadwaterConfig]:
    """Read the configs of one model that is not a recipe, by name."""
    if isinstance(model, HeadwaterConfig):
        _check_fields(changes, type(model))
        return {"model": type(model).from_dict(merge_values(model.to_dict(), changes)) if changes else model}
    argument, path = str(model), Path(model)
    if argument in PRESETS:
        return {argument: preset(argument, **changes)}
    _check_exists(path)
    name = path.name if path.is_dir() else path.resolve().parent.name if path.name == "config.json" else path.stem
    file = newest_checkpoint(path) / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise HeadwaterError(f"{argument!r} has no config.json; {_HINT}.")
    content = read_json(file)
    model_type = content.get("model_type") if isinstance(content, dict) else None
    kind = {kind.model_type: kind for kind in (HeadwaterConfig, HeadwaterVisionConfig)}.get(str(model_type))
    if kind is None and path.is_dir():
        config = config_of(file.parent)
        kind, content = type(config), config.to_dict()
    elif kind is None:
        raise HeadwaterError(
            f"{argument!r} is not the config of a headwater model (model_type {model_type!r}); name the model's folder."
        )
    try:
        with reading("its config", "correct it"):
            # Not from_pretrained, which would check the config before it applies the overrides.
            _check_fields(changes, kind)
            check_names(kind, content, file)
            config = kind.from_dict(merge_values(content, changes))
            plan_layers(config)
            return {name: config}
    except HeadwaterError as error:
        raise HeadwaterError(f"{argument!r}: {sentence(error)}") from error


def _check_exists(path: Path) -> None:
    """Raise `HeadwaterError` if there is no such file, with the nearest preset or recipe if it may name one."""
    if path.exists():
        return
    if os.path.lexists(path) or is_address(path):
        raise HeadwaterError(f"{explain_absence(path)}.")
    if len(path.parts) > 1 or path.suffix:
        raise HeadwaterError(f"There is no file {str(path)!r}; {_HINT}.")
    names = [*PRESETS, *shipped_recipes()]  # too many to list here
    lists = "`headwater list presets` and `headwater list recipes` list those shipped."
    guess = nearest(str(path), names) if find_near(str(path), names) else lists
    raise HeadwaterError(f"There is no preset, recipe or file {str(path)!r}; {guess}")


def _read_changes(overrides: list[str]) -> dict[str, Any]:
    """Read the model fields that overrides change, by name. Raises `HeadwaterError` for an unknown one."""
    changes, fields = read_overrides(overrides), (MODEL_FIELDS | IMAGE_FIELDS) - {"base"}
    if unknown := [name for name in changes if name not in fields]:
        sections = {"model": fields}
        raise build_refusal("plan", [describe_unknown_field(name, "model", fields, sections) for name in unknown])
    return changes


def _check_fields(changes: Mapping[str, Any], kind: type[HeadwaterConfig]) -> None:
    """Raise `HeadwaterError` for fields that only text models have, or only image models."""
    for field in changes:
        if field != "num_labels" and field not in kind.field_names():
            raise HeadwaterError(f"{field} is not a field of {kind.__name__}; leave it out.")


def _read_recipe_models(
    source: Recipe | Mapping[str, Any] | str | Path,
    overrides: list[str],
    of_recipe: list[str],
    vocab_size: int | None,
) -> dict[str, PlannedModel]:
    """Read a recipe's models by name, one for each arm and stage. Reads no data, and only local tokenizers."""
    title = repr(str(source)) if isinstance(source, str | Path) else "the recipe"
    recipe = read_recipe(source, [*(f"model.{override}" for override in overrides), *of_recipe])
    if recipe.compare is None:
        arms = {recipe.name: recipe}
    else:
        # A ladder's model has no shape but those of its sizes.
        size = next(iter(recipe.compare.sizes)) if recipe.compare.ladder is not None else None
        for (name, trial_size), trial in recipe.trials().items():
            if trial.start is None:
                with naming_arm(name, trial_size):
                    trial.configs(trial.config_for(trial.shape))
        arms = {name: recipe.arm(name, recipe.compare.seeds[0], size) for name in recipe.compare.arms}
    planned: dict[str, PlannedModel] = {}
    for name, arm in arms.items():
        config = find_config(title, arm, vocab_size, name)
        start = None
        for stage, stage_config, run in zip(arm.stage_names, arm.configs(config), arm.stage_recipes, strict=True):
            label = name if stage == "start" else f"{name}, {stage}"
            if label in planned:
                raise HeadwaterError(
                    f"An arm of {title} and a stage of another one would both be called {label!r}; rename one."
                )
            planned[label] = PlannedModel(stage_config, run.training, run, recipe, find_teacher(run, start))
            start = stage_config
    return planned


def find_config(title: str, recipe: Recipe, vocab_size: int | None, name: str | None = None) -> HeadwaterConfig:
    """Find the config of a recipe's model without its data. title, name: of the recipe and its arm, for errors.

    Raises `HeadwaterError`.
    """
    if recipe.start is not None:
        checkpoint = Path(recipe.start.checkpoint)
        if not checkpoint.is_dir():
            raise HeadwaterError(
                f"{name or recipe.name!r} begins with the checkpoint {str(checkpoint)!r}, which does not exist; create "
                "it first."
            )
        return changed_config(config_of(newest_checkpoint(checkpoint)), recipe.start)
    size = vocab_size or recipe.known_size or _read_size(recipe.data)
    if size is None and recipe.unit == "images":
        raise HeadwaterError(
            f"The classes of {title} come from its data, which plan does not load; set their number with num_labels=."
        )
    if size is None:
        raise HeadwaterError(
            f"The vocabulary of {title} comes from its tokenizer, which is not on this machine, and plan downloads "
            "nothing; pass its size with --vocab-size (vocab_size=)."
        )
    sized = {} if recipe.unit == "images" else {"vocab_size": size}
    plain = recipe.model_copy(update={"model": recipe.model | sized})
    return plain.config_for(DataShape(size, recipe.row_length))


def _read_size(data: Any) -> int | None:
    """Read the vocabulary of a recipe's `data` from its tokenizer or its prepared folders, if they are here."""
    if not isinstance(data, PreparedSettings):
        return local_size(getattr(data, "tokenizer", None))
    names = [data.source] if isinstance(data.source, str) else data.source
    return max((read_manifest(local_path(name)).tokenizer.vocab_size for name in names), default=None)


def read_count(number: str | float, option: str) -> float:
    """Read a number of tokens or images: 3e11, or as text 300B, 1.5T or 2e10. Raises `HeadwaterError`."""
    text = str(number)
    factor = _FACTORS.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text)
    except ValueError:
        value = float("nan")
    if not 0 < value * factor < float("inf"):
        raise HeadwaterError(f"--{option} ({option}=) takes a number such as 300B or 2e10, not {shown(number)}.")
    return value * factor
