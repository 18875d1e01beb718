"""A model for the data of a run: more tokens, learned positions for another size, a classifier for other classes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.models.kinds import is_of_images
from headwater.nn.patches import resized
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.data.base import Data
from headwater_lab.data.images import ImageData
from headwater_lab.data.tokenizer import extends
from headwater_lab.recipe.schema import Change
from headwater_lab.training.records import Event
from headwater_lab.training.trained import Trained

POSITIONS, CLASSIFIER = "model.embed_positions.weight", "classifier."


def changes_for(
    config: HeadwaterConfig,
    data: Data,
    change: Change,
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None = None,
) -> dict[str, Any]:
    """The fields of a model's config that the data change: vocab_size of a text model, or image_size and id2label.

    tokenizer: the model's. The data's may add tokens to it.

    Classes that only have numbers in the model take the data's
    names. Other names are an error in `check_classes`, unless `change` asks for a new classifier.
    """
    if not isinstance(config, HeadwaterVisionConfig) or not isinstance(data, ImageData):
        grows = data.tokenizer is not None and not is_of_images(config) and data.vocab_size > config.vocab_size
        return {"vocab_size": data.vocab_size} if grows and extends(data.tokenizer, tokenizer) else {}
    found: dict[str, Any] = {}
    if config.image_shape != data.settings.size:
        found["image_size"] = list(data.settings.size)
    names = names_of(config)
    unnamed = names == [f"LABEL_{number}" for number in range(len(names))]
    if change.new_classifier:
        found["id2label"] = dict(enumerate(data.classes))
    elif unnamed and len(data.classes) <= len(names):
        found["id2label"] = dict(enumerate([*data.classes, *names[len(data.classes) :]]))
    return found


def refitted(trained: Trained, data: Data, change: Change) -> Trained:
    """The model with what `changes_for` says; unchanged if that is nothing. Raises `HeadwaterError`."""
    model = trained.model
    changes = changes_for(model.config, data, change, trained.tokenizer)
    if "vocab_size" in changes:
        return with_more_tokens(trained, data)
    if not changes or not isinstance(model, HeadwaterForImageClassification):
        return trained
    config = copy.deepcopy(model.config)
    if "id2label" in changes:
        config.num_labels = len(changes["id2label"])
        config.id2label = changes["id2label"]
        config.label2id = {name: number for number, name in changes["id2label"].items()}
    old = config.grid
    if "image_size" in changes:
        config.image_size = changes["image_size"]
        config.complete_fields()
    made = HeadwaterForImageClassification(config).to(model.dtype)
    weights = model.state_dict()
    if POSITIONS in weights:
        weights[POSITIONS] = resized(weights[POSITIONS].float(), old, config.grid)
    if change.new_classifier:
        weights |= {name: tensor for name, tensor in made.state_dict().items() if name.startswith(CLASSIFIER)}
    made.load_state_dict(weights)
    interpolated = POSITIONS in weights and config.grid != old
    if trained.state and (change.new_classifier or interpolated):
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for a new classifier or for interpolated positions; use "
            "start.optimizer_state=fresh, or data of the checkpoint's classes and size."
        )
    details: dict[str, Any] = {
        name: {"image_size": list(each.image_shape), "classes": each.num_labels}
        for name, each in (("from", model.config), ("to", config))
    }
    details |= {"new_classifier": change.new_classifier, "interpolated": interpolated}
    event = Event(kind="refitted", details=details)
    return replace(trained, model=made.eval(), history=[*trained.history, event], original=None)


def with_more_tokens(trained: Trained, data: Data) -> Trained:
    """A text model with the data's tokenizer. Raises `HeadwaterError` if the optimizer's state is to be kept."""
    if trained.state:
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for new tokens; use start.optimizer_state=fresh, or data with the "
            "checkpoint's tokenizer."
        )
    model, old = trained.model, trained.model.config.vocab_size
    with torch.random.fork_rng(devices=[]):  # transformers draws the embedding's new rows
        torch.manual_seed(model.config.initializer_seed)
        model.resize_token_embeddings(data.vocab_size)
    details = {"from": {"vocab_size": old}, "to": {"vocab_size": data.vocab_size}}
    event = Event(kind="refitted", details=details)
    return replace(trained, tokenizer=data.tokenizer, history=[*trained.history, event], original=None)


def refitting(event: Event) -> str:
    """What `refitted` has done, in a sentence."""
    old, new = event.details["from"], event.details["to"]
    if "vocab_size" in new:
        sizes = f"{new['vocab_size']} tokens now, {old['vocab_size']} before"
        return f"The model was fitted to the data's tokenizer, which has more tokens: it knows {sizes}."
    said = []
    if old["image_size"] != new["image_size"]:
        before, after = ("{} x {}".format(*each["image_size"]) for each in (old, new))
        how = ", with learned positions interpolated" if event.details["interpolated"] else ""
        said.append(f"it takes images of {after} pixels now, of {before} before{how}")
    if event.details["new_classifier"]:
        said.append(f"a new classifier has {new['classes']} classes in place of {old['classes']}")
    elif not said:
        said.append("its classes, which were numbers, have the data's names")
    return f"The model was fitted to the data: {' and '.join(said)}."


def check_classes(config: HeadwaterVisionConfig, data: ImageData) -> None:
    """Raises `HeadwaterError` unless the model's first classes are the data's, by name."""
    names = names_of(config)
    if names[: len(data.classes)] == data.classes:
        return
    pairs = zip(names, data.classes, strict=False)
    number = next((number for number, (one, other) in enumerate(pairs) if one != other), len(names))
    model = names[number] if number < len(names) else "none"
    own = data.classes[number]
    raise HeadwaterError(
        f"The checkpoint has {len(names)} classes and the data {len(data.classes)}, and they differ: class {number} is "
        f"{shown(model)} in the checkpoint and {shown(own)} in the data; set start.new_classifier=true to train a new "
        "classifier for the data's."
    )


def names_of(config: HeadwaterVisionConfig) -> list[str]:
    """The names of the model's classes, in order."""
    return [str(config.id2label[number]) for number in range(config.num_labels)]
