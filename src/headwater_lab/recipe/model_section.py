"""`model:` of a recipe: fields of a config, completed by the data."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from huggingface_hub.dataclasses import type_validator
from huggingface_hub.errors import StrictDataclassError
from pydantic import BeforeValidator

from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.plugins.mechanisms import as_mapping
from headwater.util.errors import HeadwaterError, nearest, sentence, shown
from headwater_lab.data.base import Data, DataShape
from headwater_lab.data.images.image_data import ImageSettings
from headwater_lab.recipe.messages import Sections, describe_unknown_field

# Allowed values of `model.base`.
BASES = ("llama", "gpt2", "vit", *PRESETS)
# Allowed fields of `model:`: what headwater adds to a Hugging Face config, without the derived ones.
MODEL_FIELDS = {"base"} | {
    field.name for field in dataclasses.fields(HeadwaterConfig) if field.name in HeadwaterConfig.__annotations__
} - {"layer_types", "materialise", "initializer_seed", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
IMAGE_FIELDS = {"base", "num_labels", *HeadwaterVisionConfig.field_names()} - {"layer_types", "initializer_seed"}


def map_mechanisms(model: Any) -> Any:
    """Turn a list of mechanisms among the fields of a model into a mapping."""
    if not isinstance(model, dict) or "mechanisms" not in model:
        return model
    mechanisms = as_mapping(model["mechanisms"])
    if not isinstance(mechanisms, dict | None):
        raise ValueError(f"model.mechanisms must map names to options, or list names, not {shown(mechanisms)}")
    return model | {"mechanisms": mechanisms}


ModelFields = Annotated[dict[str, Any], BeforeValidator(map_mechanisms)]


def wrong_fields(model: dict[str, Any], sections: Sections) -> Iterator[str]:
    """Yield a sentence for each field that the config does not have, or that is of another type there."""
    config = HeadwaterVisionConfig if sections["model"] is IMAGE_FIELDS else HeadwaterConfig
    types = {field.name: field.type for field in dataclasses.fields(config)}
    for name, value in model.items():
        if name not in sections["model"]:
            yield describe_unknown_field(str(name), "model", sections["model"], sections)
        elif name == "base":
            if value not in BASES:
                yield f"model.base must be llama, gpt2, vit or a preset; {nearest(str(value), BASES)}"
        elif name in types and name != "mechanisms":
            try:
                type_validator(name, value, types[name])
            except TypeError as error:
                yield f"model.{name}: {sentence(error).removeprefix(f'Field {name!r} ')}"


def text_config(model: dict[str, Any], seed: int, data: Data | DataShape) -> HeadwaterConfig:
    """Build the config of a text model for this data. Raises `HeadwaterError` if fields contradict each other."""
    fields = dict(model)
    base = fields.pop("base", "llama")
    makers = {"llama": HeadwaterConfig, "gpt2": HeadwaterConfig.gpt2}
    make = makers.get(base) or functools.partial(preset, base)
    of_data = {"vocab_size": data.vocab_size, "max_position_embeddings": data.context, "initializer_seed": seed}
    if data.tokenizer is not None:
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            of_data[token] = getattr(data.tokenizer, token)
    config = _build_config(make, of_data | fields)
    if config.vocab_size < data.vocab_size:
        raise HeadwaterError(
            f"model.vocab_size {config.vocab_size} is smaller than the data's {data.vocab_size} tokens; leave it out."
        )
    if config.position == "learned" and config.max_position_embeddings < data.context:
        raise HeadwaterError(
            f"model.max_position_embeddings {config.max_position_embeddings} is smaller than the data's context "
            f"{data.context}; raise it, or lower the context."
        )
    return config


def image_config(model: dict[str, Any], seed: int, settings: ImageSettings, data: Data | DataShape) -> HeadwaterConfig:
    """Build the config of an image model for this data. Raises `HeadwaterError` if fields contradict each other."""
    fields = dict(model)
    base = fields.pop("base", "vit")
    if base in ("llama", "gpt2") or (base in PRESETS and not isinstance(preset(base), HeadwaterVisionConfig)):
        raise HeadwaterError(f"model.base {base!r} is a text model; use vit or an image preset.")
    size = settings.size[0] if settings.size[0] == settings.size[1] else list(settings.size)
    of_data: dict[str, Any] = {"image_size": size, "num_channels": settings.channels}
    for name, owner in (("image_size", "image_size"), ("num_channels", "channels")):
        if fields.get(name, of_data[name]) != of_data[name]:
            raise HeadwaterError(
                f"model.{name} {fields[name]} is not the data's {of_data[name]}; leave it out, or set data.{owner}."
            )
    classes = list(getattr(data, "classes", ())) or [str(number) for number in range(data.vocab_size)]
    make = HeadwaterVisionConfig if base == "vit" else functools.partial(preset, base)
    config = _build_config(make, of_data | _name_labels(fields, classes) | {"initializer_seed": seed} | fields)
    if config.num_labels < len(classes):
        raise HeadwaterError(
            f"model.num_labels {config.num_labels} is smaller than the data's {len(classes)} classes; leave it out."
        )
    return config


def _name_labels(fields: dict[str, Any], classes: list[str]) -> dict[str, Any]:
    """Name the classes for the config; classes that the data lack get transformers' names."""
    count = fields.get("num_labels", len(classes))
    if not isinstance(count, int) or "id2label" in fields:
        return {}
    names = [*classes, *(f"LABEL_{number}" for number in range(len(classes), count))][: max(0, count)]
    return {
        "num_labels": count,
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _build_config(make: Callable[..., HeadwaterConfig], fields: dict[str, Any]) -> HeadwaterConfig:
    try:
        config = make(**fields)
        plan_layers(config)  # fail now, and not after other runs of the comparison have been trained
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"model: {sentence(error)}") from error
    return config
