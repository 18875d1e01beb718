"""Models of transformers' families: load them, and convert them to headwater's and back, with the same logits."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion.families import UNSUPPORTED, find_family
from headwater.conversion.family import Family
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.load import (
    CONFIG,
    build_model,
    check_finite,
    config_from,
    model_type,
    read_config,
    read_weights,
    reading,
    weight_files,
)
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.models.quantization import check_full_precision
from headwater.plugins.trust import trust_names_in
from headwater.util.errors import HeadwaterError
from headwater.util.files import local
from headwater.util.hub import check_reachable

# A buffer in old checkpoints of GPT-2 that no current model has.
OLD_BUFFER = ".attn.masked_bias"


def from_transformers(source: str | Path | PreTrainedModel, family: str | None = None) -> Any:
    """Convert a model of one of `FAMILIES` to headwater's, with the same logits.

    source: a checkpoint's folder or its name on the Hugging Face hub (its dtype is kept, none of its code is run), or
        a model, which is not changed.
    family: the name of its `Family`, "package.module:NAME" for an external one; default: its model_type.

    Raises `HeadwaterError` for an unknown family, a missing checkpoint, tensors that do not match its config, and
    features of the family that headwater does not support.
    """
    trust_names_in(family)
    model = source if isinstance(source, PreTrainedModel) else load_transformers(source, family)
    chosen = find_family(family or model.config.model_type)
    if not isinstance(model, chosen.model):
        raise HeadwaterError(_describe_other_head(type(model).__name__, chosen))
    config = chosen.read_config(model.config)
    tensors = chosen.read_tensors(untied_state_dict(model), config)
    return assemble_model(chosen.headwater_model, config, tensors, model)


def to_transformers(model: HeadwaterPreTrainedModel, family: str) -> PreTrainedModel:
    """Convert the model to the family `family`, with the same logits; it is not changed.

    Raises `HeadwaterError` for an unknown family and, naming the first, for a field of the model's config that the
    family cannot express, such as its mechanisms.
    """
    trust_names_in(family)
    chosen = find_family(family)
    if not isinstance(model, chosen.headwater_model):
        raise HeadwaterError(
            f"A {type(model).__name__} has no {chosen.name} format; choose a family of the same kind of model."
        )
    config = chosen.write_config(model.config)
    tensors = chosen.write_tensors(untied_state_dict(model), model.config)
    converted = assemble_model(chosen.model, config, tensors, model)
    # Save under the family's checkpoint names, which can differ from its module names.
    vars(converted).pop("_weight_conversions", None)
    return converted


def assemble_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, tensors: dict[str, Tensor], like: PreTrainedModel
) -> Any:
    """Build a model of class `model_class` with these `tensors`, and the device, mode and generation config of `like`.

    The model may use the memory of the tensors. Raises `HeadwaterError` if they do not match the config.
    """
    model, mismatches = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=like.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _check_tensors(mismatches, "The model")
    model.name_or_path = model.config.name_or_path = ""  # transformers writes "None" there
    if like.can_generate():
        model.generation_config = copy.deepcopy(like.generation_config)
    return model.to(like.device).train(like.training)


def load_transformers(source: str | Path, family: str | None = None) -> PreTrainedModel:
    """Load a checkpoint of one of `FAMILIES` as transformers' own model, with every tensor checked.

    family: as in `from_transformers`. Weights are read only after its config has been converted without
    error. Raises `HeadwaterError` as `from_transformers` does.
    """
    trust_names_in(family)
    name, folder = str(source), local(source)
    try:
        if folder.is_dir():
            chosen, family_config, _ = _read_configs(folder, family)
            tensors = read_weights(weight_files(folder, pickled=True))
            model, mismatches = build_model(chosen.model, family_config, tensors, folder)
        else:
            check_reachable("model", name)
            with reading("it", "use an intact checkpoint"):
                saved = PreTrainedConfig.get_config_dict(name)[0]
                chosen = _choose_family(family, saved.get("model_type", "none"), saved)
                family_config = chosen.model.config_class.from_pretrained(name)
                chosen.read_config(family_config)
                model, mismatches = chosen.model.from_pretrained(
                    name,
                    config=family_config,
                    dtype="auto",
                    weights_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # mismatches are reported below
                )
    except HeadwaterError as error:
        raise HeadwaterError(f"{name!r} cannot be loaded: {error}") from error
    _check_tensors(mismatches, repr(name))
    check_finite(untied_state_dict(model), repr(name))
    return model


def config_of(folder: Path) -> HeadwaterConfig:
    """Return the config of a headwater model or one of any of `FAMILIES` as ours, without reading its weights.

    Raises `HeadwaterError` as `from_transformers` does.
    """
    if model_type(folder) in (HeadwaterConfig.model_type, HeadwaterVisionConfig.model_type):
        return read_config(folder)
    try:
        return _read_configs(folder)[2]
    except HeadwaterError as error:
        raise HeadwaterError(f"{str(folder)!r} cannot be loaded: {error}") from error


def _read_configs(folder: Path, family: str | None = None) -> tuple[Family, PreTrainedConfig, HeadwaterConfig]:
    """Return the family of a checkpoint's folder, its config, and the config converted to ours."""
    kind = model_type(folder)
    if kind is None:
        raise HeadwaterError(f"it is not a checkpoint: it has no {CONFIG} that says what model it is.")
    chosen = _choose_family(family, kind, PreTrainedConfig.get_config_dict(folder)[0])
    family_config = config_from(chosen.model.config_class, folder)
    return chosen, family_config, chosen.read_config(family_config)


def _check_tensors(mismatches: dict[str, Iterable[Any]], owner: str) -> None:
    """Raise `HeadwaterError` naming the first tensor that does not match the config of `owner`."""
    for kind, problem in (
        ("mismatched_keys", "has a different shape than its config requires"),
        ("missing_keys", "is missing"),
        ("unexpected_keys", "is not part of the model it describes"),
    ):
        names = sorted(str(entry if isinstance(entry, str) else entry[0]) for entry in mismatches.get(kind) or ())
        names = [name for name in names if not name.endswith(OLD_BUFFER)]
        if names:
            raise HeadwaterError(
                f"{owner} does not match its config: {names[0]!r} {problem}; use a complete checkpoint with its own "
                f"config."
            )


def untied_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors, a tied one once. Raises `HeadwaterError` if they are quantized."""
    check_full_precision(model)
    tied = set(model.all_tied_weights_keys)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _choose_family(family: str | None, kind: str, config: dict[str, Any]) -> Family:
    """Choose the family of a checkpoint: the requested one, else that of `kind`, the model_type in its config.json."""
    if family and kind not in UNSUPPORTED:
        return find_family(family)
    chosen = find_family(kind)
    # Image models only: a text model without its head fails on missing weights, and a tied head needs none of its own.
    saved = config.get("architectures")
    if chosen.headwater_model is not HeadwaterForCausalLM and saved and chosen.model.__name__ not in saved:
        raise HeadwaterError(_describe_other_head(str(saved[0]), chosen))
    return chosen


def _describe_other_head(name: str, family: Family) -> str:
    of_text = family.headwater_model is HeadwaterForCausalLM
    head = "language-model head" if of_text else "classifier of the class token alone"
    return f"A {name} has no {head}; use a {family.model.__name__}."
