"""Error rates of the verdicts of a comparison, measured by resampling saved trials, or by simulation.

    python tests/comparison/calibration.py                                  # simulated results
    python tests/comparison/calibration.py runs/same --arms 3 --seeds 5     # the runs of one arm, with many seeds

All arms of a measured comparison are the same model, so every difference that the tests find is a false alarm. Then a
difference is added to the first arm; the share of comparisons that find it is the power. Arms are paired with the
baseline at random, so pairing gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from scipy import optimize, stats

from headwater.util.errors import HeadwaterError
from headwater.util.seeding import number
from headwater_lab.comparison.earlier import find_conflict
from headwater_lab.comparison.sequential import LEVEL, repeated_intervals
from headwater_lab.comparison.statistics import POWER, find_power, holm_tests
from headwater_lab.training.records import RunRecord, list_records, read_record

# Draws results: [comparisons, arms with the baseline, seeds].
Sampler = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]
# Skewness of their results: 0, 2, 1.75 and 0; the last has no fourth moment.
SHAPES: dict[str, Sampler] = {
    "normal": lambda random, size: random.standard_normal(size),
    "exponential": lambda random, size: random.exponential(size=size),
    "log-normal": lambda random, size: np.exp(0.5 * random.standard_normal(size)),
    "t, 3 degrees": lambda random, size: random.standard_t(3, size),
}
FIRST = 6  # seeds before the first look, the default of compare.min_seeds


@dataclass(frozen=True)
class Rate:
    """`count` of `total`, with the binomial interval (95 %, Clopper and Pearson)."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        low, high = stats.binomtest(self.count, self.total).proportion_ci()
        return float(low), float(high)


@dataclass(frozen=True)
class Calibration:
    """The results of comparisons with a fixed number of seeds, or until decided.

    false_alarms: comparisons in which any arm was called better or worse. power: comparisons in which the first
    arm, with the planted difference, was judged correctly. seeds: their mean number up to the decision or the maximum.
    """

    false_alarms: Rate
    power: Rate
    seeds: float


def read_results(folder: Path) -> tuple[str, list[float]]:
    """Read the name of the arm with the most finished results below `folder`, and these results by seed.

    Arms of one name in different comparisons are different arms. Raises `HeadwaterError` if there is none,
    and if its runs have different settings.
    """
    results: dict[tuple[str, str], dict[int, float]] = {}
    runs: dict[tuple[str, str], list[tuple[RunRecord, Path]]] = {}
    for path in list_records(folder):
        record = read_record(path)
        experiment, result = record.experiment, record.result
        if experiment is None or experiment.phase != "comparison" or record.status != "finished":
            continue
        if result is not None and math.isfinite(result):
            name = " @ ".join(filter(None, (experiment.arm, experiment.size)))
            results.setdefault((experiment.name, name), {})[record.seed] = result
            runs.setdefault((experiment.name, name), []).append((record, path.parent))
    if not results:
        raise HeadwaterError(f"There are no finished runs of a comparison under {str(folder)!r}.")
    most = max(results, key=lambda key: len(results[key]))
    if wrong := find_conflict(runs[most]):
        raise HeadwaterError(f"{wrong}, so they are not results of one arm; name a folder that holds only one of them.")
    return most[1], [results[most][seed] for seed in sorted(results[most])]


def make_dealer(results: Sequence[float]) -> Sampler:
    """Make a sampler that assigns these results to arms, each at most once in a comparison.

    It raises `HeadwaterError` if there are too few.
    """

    def deal(random: np.random.Generator, size: tuple[int, int, int]) -> np.ndarray:
        count, arms, seeds = size
        if len(results) < arms * seeds:
            raise HeadwaterError(
                f"{arms - 1} arm{'s' if arms > 2 else ''} and a baseline with {seeds} seeds each take {arms * seeds} "
                f"trials of one arm, but there are only {len(results)}; run more seeds, or lower --arms or --seeds."
            )
        rows = np.tile(np.asarray(results, dtype=float), (count, 1))
        return random.permuted(rows, axis=1)[:, : arms * seeds].reshape(size)

    return deal


def find_planted_effect(arms: int, seeds: int) -> float:
    """Find the difference, in standard deviations of the paired differences, that a paired t test finds with `POWER`.

    At the strictest of Holm's levels, the level over the number of arms.
    """
    return float(optimize.brentq(lambda effect: find_power(effect, seeds, LEVEL / arms) - POWER, 0, 1e6))


def measure_calibration(
    draw: Sampler, arms: int, seeds: int, comparisons: int, seed: int = 0
) -> tuple[Calibration, Calibration | None]:
    """Measure comparisons of `arms` arms with `seeds` seeds each: fixed, and until decided with at most that many.

    The second is None with too few seeds for a second look. The planted difference is `find_planted_effect`.
    """
    random = np.random.default_rng(number("calibrate", seed))
    results = draw(random, (comparisons, arms + 1, seeds))
    differences = results[:, 1:] - results[:, :1]
    planted = differences.copy()
    planted[:, 0] += find_planted_effect(arms, seeds) * math.sqrt(2) * results.std(ddof=1)

    alarms = sum(any(test is not None and test.is_significant for test in holm_tests(list(d))) for d in differences)
    tests = [holm_tests(list(d))[0] for d in planted]
    right = sum(test is not None and test.is_significant and test.mean > 0 for test in tests)
    fixed = Calibration(Rate(alarms, comparisons), Rate(right, comparisons), seeds)
    if seeds <= FIRST:
        return fixed, None

    _, low, high = repeated_intervals(differences, LEVEL / arms, FIRST, seeds)
    alarms = int(((low > 0) | (high < 0)).any(axis=(1, 2)).sum())
    mean, low, high = (limits[:, 0] for limits in repeated_intervals(planted, LEVEL / arms, FIRST, seeds))
    crossing = (low > 0) | (high < 0)
    look = np.where(crossing.any(axis=1), crossing.argmax(axis=1), seeds - 1)
    right = int((crossing.any(axis=1) & (np.take_along_axis(mean, look[:, None], axis=1)[:, 0] > 0)).sum())
    return fixed, Calibration(Rate(alarms, comparisons), Rate(right, comparisons), float(look.mean() + 1))


def main(folder: Path | None = None, arms: int = 1, seeds: int = 30, comparisons: int = 2000) -> None:
    """Print false alarms between identical arms, and the share of planted differences that is found."""
    sources = SHAPES
    if folder is not None:
        name, results = read_results(folder)
        sources = {f"{len(results)} trials of {name!r}": make_dealer(results)}
    effect = find_planted_effect(arms, seeds)
    print(f"{comparisons:,} comparisons of {arms + 1} identical arms; planted: {effect:.3g} sd of paired differences")
    for source, draw in sources.items():
        rules = zip(("fixed", "until decided"), measure_calibration(draw, arms, seeds, comparisons), strict=True)
        for rule, measured in rules:
            if measured is not None:
                alarms, power = (
                    "{:.4f} ({:.4f} – {:.4f})".format(rate.value, *rate.interval)
                    for rate in (measured.false_alarms, measured.power)
                )
                print(f"{source}, {rule}: false alarms {alarms}, planted found {power}, {measured.seeds:.1f} seeds")


if __name__ == "__main__":
    typer.run(main)
