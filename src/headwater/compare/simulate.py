"""How often comparisons that look after every seed are wrong, and how many seeds they save, found by simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.compare.resample import Rate
from headwater.compare.sequential import LEVEL, anytime_critical, repeated_intervals
from headwater.compare.statistics import power
from headwater.seeding import number

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# Of mean 0 and standard deviation 1. Skewness: 0, 2, 1.75 and 0; the last has no fourth moment.
SHAPES: dict[str, Sampler] = {
    "normal": lambda random, size: random.standard_normal(size),
    "exponential": lambda random, size: random.exponential(size=size) - 1,
    "log-normal": lambda random, size: (
        (np.exp(0.5 * random.standard_normal(size)) - np.exp(1 / 8)) / np.sqrt(np.exp(0.5) - np.exp(0.25))
    ),
    "t, 3 degrees": lambda random, size: random.standard_t(3, size) / np.sqrt(3),
}
# Of mean 0 and too skewed for the stated rate; few seeds do not show such tails at all. Noise is in units of what a run
# that fails loses.
EXTREME: dict[str, Sampler] = {
    "log-normal differences, σ = 1": lambda random, size: np.exp(random.standard_normal(size)) - np.exp(0.5),
    "one run in ten fails, noise 1/10": lambda random, size: _failing(random, size, 0.1, 0.1),
    "one run in twenty fails, noise 1/50": lambda random, size: _failing(random, size, 0.05, 0.02),
}


def _failing(random: np.random.Generator, size: tuple[int, ...], share: float, noise: float) -> np.ndarray:
    return share - (random.random(size) < share) + noise * random.standard_normal(size)


CHUNK = 200_000  # differences at a time


@dataclass(frozen=True)
class Planted:
    """A planted difference, found at `rate` with `seeds` seeds on average.

    fixed: seeds of a paired t test with the same power, all of which it always trains. anytime, anytime_seeds: the
    share that an e-process finds by the same maximum, and its seeds.
    """

    rate: Rate
    seeds: float
    fixed: int
    anytime: Rate
    anytime_seeds: float

    @property
    def saved(self) -> float:
        return 1 - self.seeds / self.fixed


def false_differences(
    shape: str, first: int, last: int, arms: int = 1, simulations: int = 10_000, seed: int = 0, shared: bool = True
) -> Rate:
    """Comparisons in which any arm is called better or worse at any look, though no true mean differs.

    With one arm, the differences have the shape. With several, the results of all arms and of the baseline that they
    share have it, unless `shared` is false: then the differences of each arm have it, independently.
    """
    random = np.random.default_rng(number(f"sequential {shape} {first} {last} {arms} {shared}", seed))
    found, left, at_once = 0, simulations, max(1, CHUNK // (arms * last))
    while left:
        count = min(left, at_once)
        if shared and arms > 1:
            results = (SHAPES | EXTREME)[shape](random, (count, arms + 1, last))
            differences = results[:, 1:] - results[:, :1]
        else:
            differences = (SHAPES | EXTREME)[shape](random, (count, arms, last))
        _, low, high = repeated_intervals(differences, LEVEL / arms, first, last)
        found += int(((low > 0) | (high < 0)).any(axis=(1, 2)).sum())
        left -= count
    return Rate(found, simulations, LEVEL)


def false_equivalence(
    shape: str, margin: float, first: int, last: int, arms: int = 1, simulations: int = 10_000, seed: int = 0
) -> Rate:
    """Arms that are called equivalent, though they differ by just the margin, in standard deviations."""
    random = np.random.default_rng(number(f"equivalence {shape} {first} {last} {arms}", seed))
    sides = random.choice([-margin, margin], (simulations, 1))  # skewed differences have two
    _, low, high = repeated_intervals(
        sides + (SHAPES | EXTREME)[shape](random, (simulations, last)), LEVEL / arms, first, last
    )
    inside = (-margin < low) & (high < margin)
    decided = inside | (low > 0) | (high < 0)
    at = decided.argmax(axis=1)[:, None]  # 0 where nothing is decided, and then not inside
    return Rate(int(np.take_along_axis(inside, at, axis=1).sum()), simulations, LEVEL)


def planted(effect: float, first: int, last: int, arms: int = 1, simulations: int = 10_000, seed: int = 0) -> Planted:
    """Seeds and power for a normal difference of `effect` standard deviations, one of `arms`; without a margin."""
    random = np.random.default_rng(number(f"planted {effect} {first} {last} {arms}", seed))
    differences = effect + random.standard_normal((simulations, last))
    level, n = LEVEL / arms, np.arange(1, last + 1)
    mean, low, high = repeated_intervals(differences, level, first, last)
    found, seeds = _crossed((low > 0) | (high < 0), last)
    right = int((found & (np.take_along_axis(mean, seeds[:, None] - 1, axis=1)[:, 0] > 0)).sum())
    squares = np.cumsum((differences - effect) ** 2, axis=1) / n - (mean - effect) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt(squares / (n - 1))
    ever, anytime_seeds = _crossed((t > anytime_critical(n, level)) & (n >= first), last)
    wanted = min(right, simulations - 1) / simulations
    fixed = next(n for n in itertools.count(2) if power(effect, n, level) >= wanted)
    return Planted(
        rate=Rate(right, simulations, float(right / simulations)),
        seeds=float(seeds.mean()),
        fixed=fixed,
        anytime=Rate(int(ever.sum()), simulations, 0.0),
        anytime_seeds=float(anytime_seeds.mean()),
    )


def _crossed(crossings: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """(whether each sample crosses, seeds until it does or until the maximum)."""
    found = np.asarray(crossings.any(axis=1))
    return found, np.where(found, crossings.argmax(axis=1) + 1, last)
