"""Cost of each arm of a comparison: counted, and timed against the baseline on this machine in alternation.

The figures are in prices.json next to the runs (`ArmCosts`). All are measured again if an arm, the device or a version
has changed.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from headwater import __version__
from headwater.cost.counts import cache_bytes_per_token
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater_lab.bench.decoding_speed import decode_in_turns
from headwater_lab.bench.paired import PairedTimes, time_interleaved
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.loop import prepare_steps
from headwater_lab.training.records import device_name
from headwater_lab.util.machine import set_threads
from headwater_lab.util.model_kinds import is_of_images

COSTS = "prices.json"
# Number of timed pairs of training steps, and of generations.
STEPS, GENERATIONS = 24, 9
# Maximum tokens of a timed generation, a quarter of the context, so that the cache is nearly full.
TOKENS = 32

Tell = Callable[[str], None]


class TimeRatio(BaseModel):
    """A time and its ratio to the baseline's in the same turns."""

    seconds: float
    """Per token or image, median over the turns."""
    ratio: float
    """Median over the turns of this time divided by the baseline's."""
    quartiles: tuple[float, float]
    """Quartiles of the turns' ratios."""


class ArmCost(BaseModel):
    """The cost of one arm. For the baseline, the times are against a second copy of it, and show the noise."""

    parameters: int
    flops: float
    """Training FLOPs per token, or per image."""
    cache: int
    """Bytes that a token adds to the cache, in fp32."""
    training: TimeRatio
    """Time of training, per token or image."""
    decoding: TimeRatio | None
    """Time of generation with a nearly full cache, per token; null for images."""


class ArmCosts(BaseModel, extra="forbid"):
    """The costs of a comparison's arms at one size."""

    device: str
    """cpu, cuda or mps."""
    device_name: str
    """The GPU's or the processor's name."""
    threads: int
    torch: str
    headwater: str
    baseline: str
    settings: dict[str, str]
    """By arm: the identity of everything about it that a time depends on."""
    arms: dict[str, ArmCost] = {}

    def fit(self, arms: Mapping[str, Recipe], baseline: str) -> bool:
        """Whether these costs include `arms`, measured against this baseline."""
        return self.baseline == baseline and self.settings.items() >= find_identities(arms).items()


def make_timed_recipe(recipe: Recipe) -> Recipe:
    """Make the recipe that is timed for a trial: the same work per step for any seed, rate and number of steps.

    Its identity says whether a cost still holds.
    """
    training = recipe.training.model_copy(
        update={"steps": 1000, "learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0, "threads": None}
    )
    return recipe.model_copy(update={"seed": 0, "training": training, "compare": None})


def find_identities(arms: Mapping[str, Recipe]) -> dict[str, str]:
    return {name: make_timed_recipe(recipe).identity for name, recipe in arms.items()}


def read_arm_costs(folder: Path) -> ArmCosts | None:
    """Read the costs in a comparison's folder; None if there are none. Raises `HeadwaterError` if they are damaged."""
    file = folder / COSTS
    if not file.is_file():
        return None
    try:
        return ArmCosts.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise HeadwaterError(f"{str(file)!r} is damaged; remove it, and measure again.") from error


def check_timeable(arms: Mapping[str, Recipe]) -> None:
    """Raise `HeadwaterError` for recipes with stages or for several devices, which cannot be timed."""
    for name, recipe in arms.items():
        if recipe.stages or recipe.training.world_size > 1:
            reason = "stages" if recipe.stages else "several devices"
            raise HeadwaterError(f"Costs are measured for whole runs on one device, but the arm {name!r} has {reason}.")


def measure_arm_costs(
    arms: Mapping[str, Recipe],
    baseline: str,
    folder: Path,
    tell: Tell = lambda line: None,
    measured: dict[tuple[str, str], ArmCost] | None = None,
) -> ArmCosts:
    """Time the arms, one after the other, and write prices.json in `folder`, unless it has them.

    arms: a recipe of each, of any seed. tell: called with a line for each arm that is timed. measured: costs by the
    settings of arm and baseline, which are taken from there, and added: budgets of one size do the same work a step.
    Raises `HeadwaterError` as `check_timeable` does.
    """
    measured = {} if measured is None else measured
    check_timeable(arms)
    threads = torch.get_num_threads()
    trial_threads = arms[baseline].training.threads or 1  # the same number as in trials
    set_threads(trial_threads)
    try:
        device = choose_device(arms[baseline])
        machine: dict[str, Any] = {"device": device.type, "device_name": device_name(device), "threads": trial_threads}
        machine |= {"torch": torch.__version__, "headwater": __version__}
        costs = read_arm_costs(folder)
        if costs is not None and costs.fit(arms, baseline) and costs.model_dump(include=set(machine)) == machine:
            return costs
        costs = ArmCosts(**machine, baseline=baseline, settings=find_identities(arms))
        for name, recipe in arms.items():
            if (key := (costs.settings[name], costs.settings[baseline])) not in measured:
                tell(f"prices: {name} on {costs.device_name}")
                measured[key] = _measure_cost(recipe, arms[baseline])
            costs.arms[name] = measured[key]
        replace_text(folder / COSTS, costs.model_dump_json(indent=1) + "\n")
        return costs
    finally:
        torch.set_num_threads(threads)


def choose_device(recipe: Recipe) -> torch.device:
    """Choose the device that a recipe trains on here."""
    name = recipe.training.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device(name)


def _measure_cost(arm: Recipe, baseline: Recipe) -> ArmCost:
    arm, baseline = make_timed_recipe(arm), make_timed_recipe(baseline)
    with (
        tempfile.TemporaryDirectory() as folder,
        prepare_steps(arm, Path(folder) / "a") as a,
        prepare_steps(baseline, Path(folder) / "b") as b,
    ):
        times = time_interleaved(a.take_settled_step, b.take_settled_step, STEPS)
        config, context = a.model.config, a.data.context
        sizes = [run.progress.tokens / run.progress.step for run in (a, b)]
        training = _summarize_times([t / sizes[0] for t in times.a], [t / sizes[1] for t in times.b])
        parameters = sum(parameter.numel() for parameter in a.model.parameters())
        configs = config, b.model.config
    return ArmCost(
        parameters=parameters,
        flops=a.flops_per_unit,
        cache=cache_bytes_per_token(config),
        training=training,
        decoding=None if is_of_images(config) else _time_decoding(configs, context, arm),
    )


def _time_decoding(configs: tuple, context: int, recipe: Recipe) -> TimeRatio:
    """Time greedy generation of the last tokens of a context, by models with random weights."""
    device = choose_device(recipe)
    dtype = recipe.training.precision.compute if device.type == "cuda" else torch.float32
    models = {
        name: HeadwaterForCausalLM(config).to(device, dtype).eval() for name, config in zip("ab", configs, strict=True)
    }
    tokens = max(2, min(TOKENS, context // 4))
    prompt = max(1, context - tokens)
    vocabulary = min(config.vocab_size for config in configs)
    ids = torch.randint(vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    runs = decode_in_turns(models, ids, tokens, GENERATIONS)
    seconds, base = ([generation.seconds_per_token for generation in runs[name]] for name in "ab")
    return _summarize_times(seconds, base)


def _summarize_times(seconds: list[float], base: list[float]) -> TimeRatio:
    paired = PairedTimes(seconds, base)
    return TimeRatio(seconds=statistics.median(seconds), ratio=paired.ratio, quartiles=paired.quartiles)
