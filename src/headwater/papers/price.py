"""What a table costs at a scale, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from headwater.compare import equalized
from headwater.compare.tuning import rungs
from headwater.config import HeadwaterConfig
from headwater.data.tokenizer import byte_tokenizer
from headwater.hardware import cores, hardware
from headwater.papers.places import SizedArm
from headwater.papers.table import ScaleName
from headwater.recipe import Recipe
from headwater.training.costs import training_flops

# FLOP/s of a core in fp32, and additional seconds per step: least squares of relative errors over 300 arms of widths 64
# to 160, the fastest run of each, two at a time on an AMD EPYC (family 25, model 1). Most take 0.8 to 1.4 times that.
CORE = 4e10
STEP = 4e-2
CORES = 2
GPU = "H100"
MFU = 0.4


@dataclass(frozen=True)
class TablePrice:
    """Training FLOPs of runs; hours: of two CPU cores, or of one H100 at an MFU of 0.4."""

    flops: float
    hours: float
    device: str


def price(places: list[SizedArm], scale: ScaleName) -> TablePrice:
    """The price of all runs of the places, and of those that tune their learning rates; shared stages count once."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for place in places:
        if place.recipe.compare is None:
            for digest, flops, steps in list(stages(place.recipe))[: place.recipe.stage_names.index(place.arm) + 1]:
                found[place.recipe.name, digest] = flops, steps
        else:  # all seeds cost the same
            section = place.recipe.compare
            for digest, flops, steps in stages(place.recipe.arm(place.arm, place.seeds[0], place.size)):
                found[place.recipe.name, digest] = flops * len(place.seeds), steps * len(place.seeds)
            if section.learning_rates:  # tuned at the first size, for all
                tries = len(section.learning_rates) * len(section.tuning_seeds)
                first = next(iter(section.sizes), None)
                for digest, flops, steps in stages(place.recipe.arm(place.arm, section.tuning_seeds[0], first)):
                    found[place.recipe.name, digest] = flops * tries, steps * tries
    total = sum(flops for flops, _ in found.values())
    if scale == "cpu":
        seconds = total / CORE + STEP * sum(steps for _, steps in found.values())
        return TablePrice(total, seconds / (CORES * 3600), f"{CORES} cores")
    return TablePrice(total, total / (hardware(GPU).peak("bf16-mixed") * MFU * 3600), GPU)


@dataclass(frozen=True)
class Budget:
    """The maximum cost of a comparison: runs, and their tokens, FLOPs and hours on `device`."""

    runs: int
    tokens: int
    flops: float
    hours: float
    device: str


def budget(recipe: Recipe, workers: int | None = None, finalists: tuple[int, int] | None = None) -> Budget:
    """The price of everything that `compare` trains for a recipe without stages.

    With successive halving, as if the most expensive arms were those that continue; until decided, as if none were
    decided before the maximum of seeds. finalists: (arms, seeds) of the comparison of the baseline and the best arms
    that follows, as if the most expensive arms were the best.
    """
    recipe = equalized(recipe)
    section = recipe.compare
    assert section is not None
    sizes: list[str | None] = list(section.sizes) or [None]
    arms = {(arm, size): _whole(recipe.arm(arm, section.seeds[0], size)) for arm in section.arms for size in sizes}
    seeds = len(section.all_seeds)
    tries = len(section.learning_rates) * len(section.tuning_seeds)
    # What is trained: a run, how many times, and which share of its steps.
    parts = [(arms[arm, sizes[0]], tries, 1.0) for arm in section.arms if tries]
    if section.halving is None:
        parts += [(one, seeds, 1.0) for one in arms.values()]
    else:
        whole = recipe.training.steps
        candidates = sorted((arms[arm, None] for arm in section.arms if arm != section.baseline), reverse=True)
        reached = halving_rungs(len(candidates), section.halving.factor, section.halving.steps, whole)
        parts += [(arms[section.baseline, None], seeds, 1.0)]
        parts += [(one, seeds, steps / whole) for one, steps in zip(candidates, reached, strict=True)]
    if finalists is not None:
        best = sorted((one for (arm, _), one in arms.items() if arm != section.baseline), reverse=True)
        parts += [(one, finalists[1], 1.0) for one in [arms[section.baseline, sizes[0]], *best[: finalists[0]]]]
    flops = sum(one[0] * count * share for one, count, share in parts)
    steps = sum(one[1] * count * share for one, count, share in parts)
    tokens = round(sum(one[2] * count * share for one, count, share in parts))
    gpu = recipe.training.device in ("auto", "cuda") and torch.cuda.is_available()
    side_by_side = workers or section.workers or cores()
    seconds = flops / (hardware(GPU).peak("bf16-mixed") * MFU) if gpu else (flops / CORE + STEP * steps) / side_by_side
    device = GPU if gpu else f"{side_by_side} core{'s' if side_by_side > 1 else ''}"
    return Budget(sum(count for _, count, _ in parts), tokens, flops, seconds / 3600, device)


def _whole(recipe: Recipe) -> tuple[float, int, int]:
    """FLOPs, steps and tokens of a run without stages."""
    section = recipe.training
    (_, flops, steps), *_ = stages(recipe)
    return flops, steps, steps * section.batch_size * section.accumulate * recipe.row_length


def halving_rungs(arms: int, factor: int, first: int | None, steps: int) -> list[int]:
    """The steps that each arm reaches under successive halving, in descending order."""
    ladder = rungs(arms, factor, first, steps)
    reached = [steps] * ladder[-1][1]
    for (rung, count), (_, next_count) in reversed(list(pairwise(ladder))):
        reached += [rung] * (count - next_count)
    return reached


def stages(recipe: Recipe) -> Iterator[tuple[str, float, int]]:
    """Digest, training FLOPs and steps of each stage of a run. The data are not read for it."""
    size = recipe.known_size or len(byte_tokenizer())
    data: Any = SimpleNamespace(vocab_size=size, context=recipe.row_length, tokenizer=None)
    config = recipe.config_for(data)
    configs = [config, *(later for _, later in recipe.stage_configs(config))]
    for (run, _), own in zip(recipe.chain(lambda name, _: Path(name)), configs, strict=True):
        section = run.training
        tokens = section.steps * section.batch_size * section.accumulate * run.row_length
        yield run.digest(), tokens * _flops_per_token(own, run.row_length), section.steps


_known: dict[tuple[str, int], float] = {}


def _flops_per_token(config: HeadwaterConfig, length: int) -> float:
    """Of training; the same for every seed, and runs differ mostly in that."""
    settings = {name: value for name, value in config.to_dict().items() if name != "initializer_seed"}
    key = repr(settings), length
    if key not in _known:
        _known[key] = training_flops(config, length)
    return _known[key]
