"""Looks at paired differences after every seed: repeated confidence intervals, which hold at all looks together.

A t interval of fixed level would have another chance to be wrong at each look. Repeated confidence intervals
(Jennison and Turnbull 2000, chapter 9) contain the true mean at all looks at once with probability 1 - level:

    from d - c·s/√n·w(-g) to d + c·s/√n·w(g),    w(g) = 1 + max(0, g)·c/√n

d, s and g are the mean, standard deviation and skewness of the first n differences. The critical values c = c(n) spend
the level as Lan and DeMets (1983) propose: up to n of at most N differences, level·(n/N)³ (Kim and DeMets 1987).

They are exact for normal differences, whose t statistics are a Markov chain (Jennison and Turnbull 1991). Let S be the
sum of n differences and Q that of their squares. W = S/√Q fixes t, and the next difference x enters only as r = x/√Q,
which does not depend on the past; √n·r is Student's t with n degrees of freedom:

    t² = (n - 1)·W² / (n - W²),    W' = (W + r) / √(1 + r²)

w widens the interval on the side of the longer tail. It is three times the first-order correction of t for skewness
(Johnson 1978), since a few differences show less skewness than there is. As it never narrows an interval, the level
still holds for normal differences.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import interpolate, optimize, special

from headwater_lab.training.records import SeedPlan

# The share of comparisons in which any verdict is wrong.
LEVEL = 0.05
# Exponent of the spending function: 1 is close to Pocock's boundary, 3 to that of O'Brien and Fleming.
SPENDING = 3
# Cells of the numerical integration. Twice as many change critical values by less than 0.1 %.
CELLS = 160
# Results are of order one. Differences closer than this are equal up to rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class SeedLook:
    """The mean of the first `pairs` differences and its repeated confidence interval; None if that is unbounded."""

    pairs: int
    mean: float
    interval: tuple[float, float] | None


class Chain:
    """The distribution of |W| after some normal differences of mean 0, for samples inside all boundaries, in cells.

    |W| = √n·sin(a), t = √(n - 1)·tan(a); the cells have equal width in a. min_pairs: differences at the first look.
    """

    def __init__(self, min_pairs: int) -> None:
        self.pairs = min_pairs - 1
        self.points: np.ndarray | None = None
        self.masses = np.ones(1)

    def find_crossing(self, critical: np.ndarray) -> np.ndarray:
        """Compute the probability of having crossed nothing so far and |t| > critical after the next difference."""
        n = self.pairs
        if self.points is None:
            return np.asarray(2 * special.stdtr(n, -critical))
        w = self.points[:, None]
        farthest = np.sqrt(1 + w**2)  # W' = farthest · sin(turn + arctan(W)), r = tan(turn)
        reached = np.sqrt(n + 1) * np.sin(np.arctan(critical / np.sqrt(n)))
        angle = np.arcsin(np.minimum(reached / farthest, 1))

        def chance(ahead: np.ndarray) -> np.ndarray:
            """Compute the probability of W' > reached, from W = tan(ahead)."""
            low, high = (np.clip(turn, -np.pi / 2, np.pi / 2) for turn in (angle - ahead, np.pi - angle - ahead))
            return np.asarray(distribute_angle(n)(high) - distribute_angle(n)(low))

        return np.asarray(self.masses @ (chance(np.arctan(w)) + chance(-np.arctan(w))))

    def add_difference(self, critical: float) -> None:
        """Add one difference, and drop the samples that cross."""
        edges = np.linspace(0, np.arctan(critical / np.sqrt(self.pairs)), CELLS + 1)
        self.masses = -np.diff(self.find_crossing(np.sqrt(self.pairs) * np.tan(edges)))
        self.pairs += 1
        self.points = np.sqrt(self.pairs) * np.sin((edges[1:] + edges[:-1]) / 2)


@functools.lru_cache(maxsize=256)
def distribute_angle(n: int) -> interpolate.CubicHermiteSpline:
    """Compute the distribution function of arctan(r), whose density is proportional to cosⁿ⁻¹."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 2001)
    peak = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(math.pi)
    distribution = special.stdtr(n, np.sqrt(n) * np.tan(angles))
    return interpolate.CubicHermiteSpline(angles, distribution, peak * np.cos(angles) ** (n - 1))


@functools.lru_cache(maxsize=64)
def critical_values(level: float, min_pairs: int, max_pairs: int) -> tuple[float, ...]:
    """Compute c(n) for n from `min_pairs` (2 or more) to `max_pairs`.

    All intervals without their w together contain the mean with probability `1 - level`.
    """
    chain, values, spent_before = Chain(min_pairs), [], 0.0
    for n in range(min_pairs, max_pairs + 1):
        spent = level * ((n / max_pairs) ** SPENDING - spent_before)
        critical = math.exp(optimize.brentq(lambda log: chain.find_crossing(np.exp([log]))[0] - spent, -5, 30))  # noqa: B023
        chain.add_difference(critical)
        values.append(critical)
        spent_before = (n / max_pairs) ** SPENDING
    return tuple(values)


def repeated_intervals(
    differences: Sequence[float] | np.ndarray,
    level: float,
    min_pairs: int,
    max_pairs: int,
    same: bool | Sequence[bool] = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the means and the lower and upper limits of the first 1, 2, … differences; ±∞ if unbounded.

    differences: [..., differences], as all three results.

    Differences that are all one number, apart from rounding, have no spread: the interval is that number from the
    moment on that this many equal signs are rarer than the level (sign test, 2^(1-n)). 0 has no sign, and is unbounded;
    unless the results are `same` by construction, from the start or at these looks: then it is known at once.
    """
    d = np.asarray(differences, dtype=float)
    n = np.arange(1, d.shape[-1] + 1)
    c = np.full(len(n), math.inf)
    c[min_pairs - 1 :] = critical_values(level, min_pairs, max_pairs)[: max(0, len(n) - min_pairs + 1)]
    start = d[..., :1]  # subtracted first, since sums of powers lose digits if the mean is large
    mean, square, cube = (np.cumsum((d - start) ** power, axis=-1) / n for power in (1, 2, 3))
    variance = np.maximum(square - mean**2, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = np.nan_to_num((cube - 3 * mean * square + 2 * mean**3) / variance**1.5)
        bound = (n - 2) / np.sqrt(n - 1)  # the largest skewness that n numbers can have
        skew = np.clip(skew, -bound, bound)
        reach = c * np.sqrt(variance / (n - 1))
        low, high = (side * reach * (1 + np.maximum(0, side * skew) * c / np.sqrt(n)) for side in (-1, 1))
    low, high = (np.where(n < min_pairs, side * math.inf, limits) for side, limits in ((-1, low), (1, high)))
    mean = mean + start
    largest = np.maximum.accumulate(np.abs(d), axis=-1)
    spread = np.maximum.accumulate(d, axis=-1) - np.minimum.accumulate(d, axis=-1)
    constant = spread <= ROUNDING * np.maximum(1, largest)
    mean = np.where(largest <= ROUNDING, 0.0, mean)
    is_known = (n >= min_pairs) & np.where(largest > ROUNDING, 2.0 ** (1 - n) <= level, same)
    width = np.where(is_known, 0.0, math.inf)
    return mean, mean + np.where(constant, -width, low), mean + np.where(constant, width, high)


def take_looks(
    differences: Sequence[float], level: float, min_pairs: int, max_pairs: int, same: bool | Sequence[bool] = False
) -> list[SeedLook]:
    """Look at the first `min_pairs`, …, all differences, of at most `max_pairs`; see `repeated_intervals`."""
    if len(differences) < min_pairs:
        return []
    columns = (column.tolist() for column in repeated_intervals(differences, level, min_pairs, max_pairs, same))
    return [
        SeedLook(n, mean, (low, high) if math.isfinite(low) and math.isfinite(high) else None)
        for n, (mean, low, high) in enumerate(zip(*columns, strict=True), 1)
        if n >= min_pairs
    ]


def is_inside(interval: tuple[float, float], margin: float) -> bool:
    """Whether a difference is smaller than the margin: the verdict "equivalent"."""
    return -margin < interval[0] and interval[1] < margin


def is_decisive(interval: tuple[float, float] | None, margin: float) -> bool:
    """Whether an arm needs no further seed: its difference is not 0, or is less than the margin."""
    return interval is not None and (interval[0] > 0 or interval[1] < 0 or is_inside(interval, margin))


@dataclass(frozen=True)
class Standing:
    """The state of an arm: a function of its results in the plan's order up to its decision.

    seeds: those that count, with and without a difference. decided: it needs no further seed.
    """

    seeds: list[int]
    differences: list[float]
    looks: list[SeedLook]
    decided: bool


def find_standing(plan: SeedPlan, arm: Mapping[int, float | None], base: Mapping[int, float | None]) -> Standing:
    """Find the state of an arm. arm, base: results by seed; None for a run that diverged.

    The first seed that either lacks ends the sample, because leaving out a seed could change the
    decision. A seed in which the baseline diverged has no difference. Results that change from seed to seed and are
    always the baseline's come from the same model; an accuracy of 1 in every seed may hide rare failures.
    """
    seeds: list[int] = []
    paired: list[tuple[int, float]] = []  # (seeds up to this one, difference)
    diverged = False
    for seed in plan.seeds:
        if seed not in arm or seed not in base:
            break
        seeds.append(seed)
        result, base_result = arm[seed], base[seed]
        if result is None:
            diverged = True
            break
        if base_result is not None:
            paired.append((len(seeds), result - base_result))
    differences = [difference for _, difference in paired]
    same = [len({base[seed] for seed in seeds[:count]} - {None}) > 1 for count, _ in paired]  # by what a look has seen
    arm_looks = take_looks(differences, LEVEL / len(plan.arms), plan.min_seeds, len(plan.seeds), same)
    for count, look in enumerate(arm_looks, 1):
        if is_decisive(look.interval, plan.margin):
            return Standing(seeds[: paired[look.pairs - 1][0]], differences[: look.pairs], arm_looks[:count], True)
    return Standing(seeds, differences, arm_looks, decided=diverged)


def skewed_error(plan: SeedPlan) -> float | None:
    """The share of wrong verdicts on one arm whose differences are strongly skewed, if it is above `LEVEL`.

    Measured with exponential and log-normal differences, rounded up (docs/statistics.md). With a maximum of 30 or more
    seeds, most of the level is spent where there are enough seeds.
    """
    if len(plan.seeds) >= 30:
        return None
    return 0.09 if plan.min_seeds < 6 else 0.07
