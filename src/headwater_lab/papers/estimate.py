"""Cost of a table at a scale, before anything is trained."""

from collections.abc import Iterator

from headwater.cost.counts import training_flops
from headwater.util.precision import Precision
from headwater_lab.data.base import DataShape
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.papers.arms import SizedArm
from headwater_lab.papers.table import ScaleName
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.util.machine_speed import find_hardware

# fp32 FLOP/s of a core, and additional seconds per step: least squares of relative errors over 300 arms of widths 64 to
# 160, the fastest run of each, two at a time on an AMD EPYC (family 25, model 1). Most take 0.8 to 1.4 times that.
CORE = 4e10
STEP = 4e-2
CORES = 2
GPU = "H100"
MFU = 0.4
# The device for which hours are estimated, by scale.
DEVICES = {"cpu": f"{CORES} cores", "gpu": GPU, "paper": GPU}
# Per token, by config and length.
_flops_by_config: dict[tuple[str, int], float] = {}


def estimate_cost(arms: list[SizedArm], scale: ScaleName) -> tuple[float, float]:
    """Estimate the training FLOPs of all runs of some arms, tuning included, and their hours on `DEVICES[scale]`.

    Stages that arms share count once.
    """
    costs: dict[tuple[str, str], tuple[float, int]] = {}
    for arm in arms:
        section, runs = arm.recipe.compare, []
        if section is None:
            runs.append((list(count_stage_costs(arm.recipe))[: arm.recipe.stage_names.index(arm.arm) + 1], 1))
        else:  # all seeds have the same cost
            runs.append((list(count_stage_costs(arm.recipe.arm(arm.arm, arm.seeds[0], arm.size))), len(arm.seeds)))
            if len(section.tried_rates) > 1:  # rates are tuned at the first size, for all sizes
                tuned = arm.recipe.arm(arm.arm, section.tuning_seeds[0], next(iter(section.sizes), None))
                runs.append((list(count_stage_costs(tuned)), len(section.tried_rates) * len(section.tuning_seeds)))
        for of_run, number in runs:
            for identity, flops, steps in of_run:
                costs[arm.recipe.name, identity] = flops * number, steps * number
    total = sum(flops for flops, _ in costs.values())
    if scale == "cpu":
        return total, (total / CORE + STEP * sum(steps for _, steps in costs.values())) / (CORES * 3600)
    return total, total / (find_hardware(GPU).peak(Precision.BF16_MIXED) * MFU * 3600)


def count_stage_costs(recipe: Recipe) -> Iterator[tuple[str, float, int]]:
    """Yield the identity, training FLOPs and steps of each stage of a run, without reading the data."""
    size = recipe.known_size or len(byte_tokenizer())
    configs = recipe.configs(recipe.config_for(DataShape(size, recipe.row_length)))
    for run, config in zip(recipe.stage_recipes, configs, strict=True):
        # Left out of the key, because the cost does not depend on it, and runs differ mostly in the seed.
        key = repr(config.to_dict() | {"initializer_seed": None}), run.row_length
        if key not in _flops_by_config:
            _flops_by_config[key] = training_flops(config, run.row_length)
        yield run.identity, run.tokens * _flops_by_config[key], run.training.steps
