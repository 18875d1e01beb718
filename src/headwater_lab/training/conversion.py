"""Converting a trained model to a smaller cache with one command: the recipe for it, its price, and what it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config.text import HeadwaterConfig
from headwater.conversion import config_of
from headwater.conversion.convert import way_of
from headwater.cost import counts as cost
from headwater.cost import price
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater_lab.recipe.schema import Change, Recipe, changed_config
from headwater_lab.training.places import newest_checkpoint
from headwater_lab.training.records import RunRecord
from headwater_lab.training.trained import open_source

RESULT, RECIPE = "conversion.json", "recipe.yaml"
# One in which a model goes over, one at a constant rate, and one that decays.
LEAST_STEPS = 3


def conversion_recipe(
    name: str,
    source: str,
    data: dict[str, Any],
    convert: dict[str, Any],
    *,
    tokens: float,
    context: int,
    batch_size: int,
    gradient_accumulation_steps: int = 1,
) -> dict[str, Any]:
    """A recipe, as plain values, that converts `source` and heals it on this many tokens.

    Half of the steps are at a constant rate after a warm-up, then the cosine decays. If `convert` has `anneal`, the
    model goes over in the first tenth of all; without, it is the smaller model from the first step. Raises
    `HeadwaterError` for too few tokens.
    """
    rows = batch_size * gradient_accumulation_steps
    steps = int(tokens // (rows * context))
    if steps < LEAST_STEPS:
        raise HeadwaterError(
            f"{tokens:,.0f} tokens are {steps} steps of {rows} rows of {context} tokens, and healing takes at "
            f"least {LEAST_STEPS}; pass --heal {LEAST_STEPS * rows * context} or more, or a smaller "
            "training.batch_size."
        )
    constant, decaying = steps - steps // 2, steps // 2
    first = max(1, steps // 10) if convert.get("anneal") else constant
    training = {
        "steps": first,
        "batch_size": batch_size,
        "learning_rate": 3e-4,
        "schedule": "constant",
        "warmup_steps": min(50, constant // 4, first),
        "distillation": {},
    }
    stages: list[dict[str, Any]] = []
    if first < constant:
        rest = {"steps": constant - first, "warmup_steps": 0}
        stages.append({"name": "finish", "finish_conversion": True, "optimizer_state": "keep", "training": rest})
    decay = {"steps": decaying, "schedule": "cosine", "warmup_steps": 0}
    stages.append({"name": "heal", "optimizer_state": "keep", "training": decay})
    return {
        "name": name,
        "data": data,
        "start": {"checkpoint": source, "convert": convert},
        "training": training,
        "stages": stages,
        "reporting": {
            "evaluate_every": max(1, constant // 4),
            "log_every": 10,
            "keep_checkpoints": 1,
            "tensorboard": False,
        },
    }


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the recipe of a conversion to its folder, for `headwater train`."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    values["data"]["kind"] = recipe.data.kind  # a default of its class, and what says which class it is
    replace_text(folder / RECIPE, json.dumps(values, indent=1) + "\n")


@dataclass(frozen=True)
class Side:
    """A model before or after. Bytes of the cache are in the precision of the model's weights."""

    parameters: int
    cache_bytes_per_token: int
    cache_bytes: int
    """Of a sequence of the recipe's context."""
    weights_bytes: int


@dataclass(frozen=True)
class ConversionPrice:
    """What a conversion costs and saves.

    flops: of healing, by stage, with the teacher's. step_bytes: memory of a step at its peak; teacher_bytes: of these,
    the teacher's weights.
    """

    before: Side
    after: Side
    tokens: int
    flops: dict[str, float]
    step_bytes: int
    teacher_bytes: int


def price_of(recipe: Recipe, config: HeadwaterConfig, element: int) -> ConversionPrice:
    """The price of a recipe that converts a model of this config. element: bytes of its numbers.

    Raises `HeadwaterError` if the model cannot be converted so.
    """
    context = int(getattr(recipe.data, "context", 0))
    theirs = _teacher(recipe, config)
    teacher = 0.0 if theirs is None else cost.forward_flops_per_token(theirs, context)
    teacher_bytes = 0 if theirs is None else sum(cost.parameters(theirs).values()) * element
    flops, peak, tokens, now = {}, 0, 0, config
    changes: list[Change | None] = [recipe.start, *recipe.stages]
    for name, change, (run, _) in zip(recipe.stage_names, changes, recipe.chain(lambda *_: Path()), strict=True):
        now = now if change is None else changed_config(now, change)
        training = run.training
        count = training.steps * training.batch_size * training.gradient_accumulation_steps * context
        flops[name] = count * (cost.training_flops_per_token(now, context) + teacher)
        tokens += count
        held = price(now, context=context, batch=training.batch_size, precision=training.precision)
        peak = max(peak, held.at[0].step_bytes)
    if way_of(now) is not None or not recipe.stages:
        raise HeadwaterError(
            "The recipe has no stage after which the model is the smaller one, trained; leave its stages as they are."
        )

    def side(config: HeadwaterConfig) -> Side:
        count = sum(cost.parameters(config).values())
        per_token = cost.cache_bytes_per_token(config, element)
        return Side(count, per_token, cost.cache_bytes(config, context, 1, element), count * element)

    return ConversionPrice(side(config), side(now), tokens, flops, peak + teacher_bytes, teacher_bytes)


def _teacher(recipe: Recipe, config: HeadwaterConfig) -> HeadwaterConfig | None:
    """The config of what the model learns from; by default, of the model that is converted. None: from the text alone.

    Raises `HeadwaterError` if it cannot be read.
    """
    settings = recipe.training.distillation
    if settings is None or settings.teacher is None:
        return None if settings is None else config
    path = Path(settings.teacher)
    return config_of(newest_checkpoint(path)) if path.is_dir() else open_source(settings.teacher).model.config


def curve_of(record: RunRecord) -> list[dict[str, float]]:
    """Held-out metrics over the tokens of healing, with the bytes a token adds to the cache of the model then."""
    ends = [(stage.tokens, stage.cache_bytes_per_token) for stage in record.stages] or [
        (record.tokens, record.cache_bytes_per_token)
    ]
    stage, end = 0, ends[0][0]
    found: list[dict[str, float]] = []
    for point in record.held_out:
        # Where stages meet there are two: of the model before the change, and after it.
        if found and point.tokens == end == found[-1]["tokens"] and stage + 1 < len(ends):
            stage += 1
            end += ends[stage][0]
        now = {"tokens": point.tokens, "cache_bytes_per_token": ends[stage][1], **point.metrics}
        if now not in found[-1:]:  # the change may be only one of the learning rate
            found.append(now)
    return found


def write_result(folder: Path, result: dict[str, Any]) -> None:
    replace_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
