"""What a table costs at a scale, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headwater import cost
from headwater.config import HeadwaterConfig
from headwater.data.tokenizer import byte_tokenizer
from headwater.hardware import hardware
from headwater.recipe import Recipe
from headwater.reproduce.places import Place
from headwater.reproduce.table import ScaleName

# FLOP/s of a core in fp32, and seconds that a step takes besides: least squares over runs of widths 8 to 192 on one
# machine with nothing else to do.
CORE = 6e10
STEP = 6e-3
CORES = 2
GPU = "H100"
MFU = 0.4


@dataclass(frozen=True)
class Price:
    """Training FLOPs of runs; hours: of two CPU cores, or of one H100 at an MFU of 0.4."""

    flops: float
    hours: float
    device: str


def price(places: list[Place], scale: ScaleName) -> Price:
    """Of all runs of the places; what several of them have in common counts once."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for place in places:
        if place.recipe.compare is None:
            for digest, flops, steps in list(stages(place.recipe))[: place.recipe.stage_names.index(place.arm) + 1]:
                found[place.recipe.name, digest] = flops, steps
        else:  # seeds cost alike
            for digest, flops, steps in stages(place.recipe.arm(place.arm, place.seeds[0], place.size)):
                found[place.recipe.name, digest] = flops * len(place.seeds), steps * len(place.seeds)
    total = sum(flops for flops, _ in found.values())
    if scale == "cpu":
        seconds = total / CORE + STEP * sum(steps for _, steps in found.values())
        return Price(total, seconds / (CORES * 3600), f"{CORES} cores")
    return Price(total, total / (hardware(GPU).peak("bf16-mixed") * MFU * 3600), GPU)


def stages(recipe: Recipe) -> Iterator[tuple[str, float, int]]:
    """Digest, training FLOPs and steps of each stage of a run. The data are not read for it."""
    size = recipe.model.get("vocab_size") or getattr(recipe.data, "vocabulary", None) or len(byte_tokenizer())
    data: Any = SimpleNamespace(vocab_size=size, context=row_length(recipe), tokenizer=None)
    config = recipe.config_for(data)
    configs = [config, *(later for _, later in recipe.stage_configs(config))]
    for (run, _), own in zip(recipe.chain(lambda name, _: Path(name)), configs, strict=True):
        section = run.training
        tokens = section.steps * section.batch_size * section.accumulate * row_length(run)
        yield run.digest(), tokens * _flops_per_token(own, row_length(run)), section.steps


def row_length(recipe: Recipe) -> int:
    """Tokens in a row."""
    return getattr(recipe.data, "context", None) or getattr(recipe.data, "length", None) or 1


_known: dict[tuple[str, int], float] = {}


def _flops_per_token(config: HeadwaterConfig, length: int) -> float:
    """Of training; the same for every seed, and runs differ mostly in that."""
    settings = {name: value for name, value in config.to_dict().items() if name != "initializer_seed"}
    key = repr(settings), length
    if key not in _known:
        _known[key] = cost.training_flops_per_token(config, length)
    return _known[key]
