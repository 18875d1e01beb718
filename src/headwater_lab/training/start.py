"""Where a run begins: with a fresh model, or with a trained one that is grown or converted first."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.growth.pairs import has_pairs
from headwater.models.kinds import MODEL_TYPES, is_of_images
from headwater.models.load import CONFIG, model_type, read_config, read_tokenizer
from headwater.util.errors import HeadwaterError, sentence
from headwater_lab.data.base import Data
from headwater_lab.data.images import ImageData
from headwater_lab.data.tokenizer import extends
from headwater_lab.recipe.schema import Recipe, Start
from headwater_lab.training.checkpoint import check, history_of, write_model
from headwater_lab.training.places import newest_checkpoint
from headwater_lab.training.records import Event, Origin
from headwater_lab.training.refit import changes_for, check_classes, refitted, refitting
from headwater_lab.training.trained import changed, open_source, open_trained

# The folder of a changed model, before and after the run begins.
MADE, KEPT = ".start", "start"
# Rows on which a conversion measures how alike keys and values are.
SAMPLE = 16
# What a recipe may change in a trained model.
MAY_DIFFER = ("embedding_dropout", "attention_dropout", "residual_dropout", "drop_path")


@dataclass
class Beginning:
    """The checkpoint a run starts from, and what it keeps of it.

    rows: how many rows of the same data in the same order the model has already seen; the run continues after them.
    """

    start: Start
    path: Path
    config: HeadwaterConfig
    origin: Origin
    rows: int
    notices: list[str]

    @property
    def anneals(self) -> bool:
        """Whether the run moves τ to the default for its pairs: as the recipe says, else after growth that kept τ."""
        if self.start.tau is not None:
            return self.start.tau == "anneal"
        grown = [event.details for event in since_training(self.origin.history) if event.kind == "grown"]
        return any(each.get("tau") == "keep" for each in grown) and not any(each.get("freeze") for each in grown)


def prepare(start: Start, folder: Path, data: Data, device: torch.device) -> Path:
    """The checkpoint a run begins with. If it was changed, or converted from another family, it is in the run's folder
    (see `run_folder.begun`).

    data: what the run trains on, for a change that measures; device: a GPU does so faster. Called by one process.
    Raises `HeadwaterError`.
    """
    path = newest_checkpoint(Path(start.checkpoint))
    foreign = (path / CONFIG).is_file() and model_type(path) not in (None, *MODEL_TYPES)
    if not (start.grow or start.convert or start.finish_conversion or foreign):
        check(path)
        if not changes_for(read_config(path), data, start, read_tokenizer(path)):
            return path
    target = folder / MADE
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed before it began
    if foreign:
        trained = open_source(start.checkpoint)
    else:
        trained = open_trained(Path(start.checkpoint), with_state=start.optimizer_state == "keep")
    if start.convert is not None and device.type == "cuda":
        trained.model.to(device)
    made = refitted(changed(trained, start, rows_of(data) if start.convert is not None else None), data, start)
    return write_model(target, made.model, made.tokenizer, made.history, made.state)


def rows_of(data: Data) -> Tensor | None:
    """Some rows of tokens of the training data, [B, T], always the same."""
    batch = next(iter(data.batches(seed=0, batch_size=SAMPLE, start=0)))
    return batch.get("input_ids")


def begin(recipe: Recipe, path: Path, data: Data, resumed: bool = False) -> Beginning:
    """What a run begins with, from its checkpoint. Raises `HeadwaterError` if recipe, data and model do not match.

    resumed: the checkpoint is this run's own; the one it began with may be gone.
    """
    config = read_config(path)
    dropouts = {name: recipe.model[name] for name in MAY_DIFFER if name in recipe.model}
    try:
        for name, value in dropouts.items():
            setattr(config, name, value)
        config.complete_fields()
        plan_layers(config)
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"model: {sentence(error)}") from error
    assert recipe.start is not None
    _check_data(config, path, data, recipe.start)
    if recipe.start.tau is not None and not has_pairs(config):
        raise HeadwaterError("start.tau is about parameter tokens, which this model lacks; leave it out.")
    history = history_of(path)[: -1 if resumed else None]
    origin = Origin(
        checkpoint=recipe.start.checkpoint,
        tokens=sum(event.tokens for event in history),
        flops=sum(event.flops for event in history),
        history=history,
    )
    rows = _rows_used(recipe, data, history)
    notices = [] if resumed else _notices(recipe, config, rows, history)
    return Beginning(recipe.start, path, config, origin, rows, notices)


def trained_event(recipe: Recipe, data: Data, steps: int, rows: int, tokens: int, flops: float) -> Event:
    """The event that a run adds to its model's history."""
    details = dict(
        name=recipe.name,
        identity=recipe.identity,
        seed=recipe.seed,
        data=_data_key(recipe, data),
        steps=steps,
        rows=rows,
    )
    return Event(kind="trained", tokens=tokens, flops=flops, details=details)


def since_training(history: list[Event]) -> list[Event]:
    """What was done to a model since it was last trained."""
    trained = [index for index, event in enumerate(history) if event.kind == "trained"]
    return history[trained[-1] + 1 :] if trained else history


def _data_key(recipe: Recipe, data: Data) -> dict[str, Any]:
    return {"settings": recipe.data.model_dump(mode="json"), "sha256": data.description.get("sha256")}


def _rows_used(recipe: Recipe, data: Data, history: list[Event]) -> int:
    """How many rows of this data, in this seed's order, the last training used."""
    last = next((event for event in reversed(history) if event.kind == "trained"), None)
    if last is None or last.details.get("seed") != recipe.seed or last.details.get("data") != _data_key(recipe, data):
        return 0
    rows = last.details.get("rows")
    return rows if isinstance(rows, int) and rows > 0 else 0


def _notices(recipe: Recipe, config: HeadwaterConfig, rows: int, history: list[Event]) -> list[str]:
    said = {name: value for name, value in recipe.model.items() if name not in (*MAY_DIFFER, "base")}
    other = [name for name, value in said.items() if name != "mechanisms" and getattr(config, name, None) != value]
    notices = [refitting(event) for event in since_training(history) if event.kind == "refitted"]
    if other and recipe.start is not None and recipe.start.previous is None:
        notices.append(
            f"The model is the checkpoint's, so the recipe's model section is ignored: {other[0]} is "
            f"{getattr(config, other[0], None)!r} there, and {said[other[0]]!r} in the recipe."
        )
    if rows:
        notices.append(
            f"The model was trained on the first {rows:,} rows of these data; training continues after them."
        )
    return notices


def _check_data(config: HeadwaterConfig, path: Path, data: Data, start: Start) -> None:
    source = start.checkpoint
    if is_of_images(config) != isinstance(data, ImageData):
        raise HeadwaterError(
            f"{source!r} is {'an image' if is_of_images(config) else 'a text'} model, but the data are "
            f"{'text' if is_of_images(config) else 'images'}; use data that it can be trained on."
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
    if config.vocab_size < data.vocab_size:
        raise HeadwaterError(
            f"The checkpoint's vocabulary has {config.vocab_size} tokens and the data's {data.vocab_size}; use the "
            "tokenizer the model was trained with (data.tokenizer), or one that adds tokens to it."
        )
    if config.position == "learned" and config.max_position_embeddings < data.context:
        raise HeadwaterError(
            f"The checkpoint has {config.max_position_embeddings} learned positions and data.context is "
            f"{data.context}; lower data.context."
        )
    own = read_tokenizer(path)
    if own is not None and data.tokenizer is not None and not extends(data.tokenizer, own):
        raise HeadwaterError(
            f"The data's tokenizer is not the one {source!r} was trained with, nor one that adds tokens "
            f"to it; set data.tokenizer={source!r}, or prepare the data with it."
        )
