"""How often the statistics of a comparison are wrong, found by resampling saved trials.

Trials of one arm with many seeds are dealt out, without replacement, to arms that are then the same model with disjoint
seeds: whatever the tests find among these is a false alarm. With a difference added to one of them, what the tests find
is their power.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from headwater.compare.statistics import LEVEL, holm_tests, power
from headwater.errors import HeadwaterError, nearest
from headwater.records import RECORD, read_record
from headwater.seeding import number


@dataclass(frozen=True)
class Rate:
    """`found` of `tried`, with its binomial interval (95 %, Clopper and Pearson), and the rate that is stated."""

    found: int
    tried: int
    stated: float

    @property
    def value(self) -> float:
        return self.found / self.tried

    @property
    def interval(self) -> tuple[float, float]:
        low, high = stats.binomtest(self.found, self.tried).proportion_ci()
        return float(low), float(high)


@dataclass(frozen=True)
class Calibration:
    """What resampling found.

    trials: saved results that were dealt out. arms, seeds: of each resampled comparison, besides its baseline.
    spread: standard deviation of the paired differences. false_alarms: comparisons in which any arm was called better
    or worse; stated: at most the level. planted: the difference added to the first arm. power: comparisons in which
    that arm was called so in the right direction; stated: what `power` says of normal differences, tested alone for one
    arm, and at Holm's strictest level (a lower bound) for several.
    """

    trials: int
    arms: int
    seeds: int
    resamples: int
    spread: float
    false_alarms: Rate
    planted: float
    power: Rate


def results_of(folder: Path, arm: str | None = None) -> tuple[str, list[float]]:
    """An arm's name and its finished results below `folder`, by seed; default the arm with the most.

    Raises `HeadwaterError` where there is none of that name.
    """
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob(RECORD)):
        record = read_record(path)
        if record.experiment and record.experiment.part == "comparison" and record.status == "finished":
            name = " @ ".join(filter(None, (record.experiment.arm, record.experiment.size)))
            if record.result is not None:
                found.setdefault(name, {})[record.seed] = record.result
    if not found:
        raise HeadwaterError(f"There are no finished runs of a comparison under {str(folder)!r}.")
    name = arm or max(found, key=lambda name: len(found[name]))
    if name not in found:
        raise HeadwaterError(f"There are no finished runs of an arm {name!r} there; {nearest(name, found)}")
    return name, [found[name][seed] for seed in sorted(found[name])]


def calibrate(
    results: Sequence[float],
    arms: int = 1,
    seeds: int = 5,
    resamples: int = 2000,
    planted: float | None = None,
    seed: int = 0,
) -> Calibration:
    """Resample comparisons of `arms` arms with `seeds` seeds each from the results of one model.

    planted: default what the tests are said to find with a chance of 80 %.

    Raises `HeadwaterError` where there are too few results: (arms + 1)·seeds are dealt out at a time.
    """
    values = np.asarray(results, dtype=float)
    needed = (arms + 1) * seeds
    if seeds < 2 or arms < 1 or resamples < 1:
        raise HeadwaterError("Resampling needs two seeds or more, an arm and a resample; give larger numbers.")
    if len(values) < needed:
        raise HeadwaterError(
            f"{arms} arm{'s' if arms > 1 else ''} and a baseline with {seeds} seeds each take {needed} trials of one "
            f"arm, and there are {len(values)}; run more seeds, or give smaller --arms or --seeds."
        )
    random = np.random.default_rng(number("calibrate", seed))
    spread = float(np.sqrt(2) * values.std(ddof=1))
    if planted is None:
        effect = next(e for e in np.geomspace(0.01, 100, 2000) if power(float(e), seeds, LEVEL / arms) >= 0.8)
        planted = float(effect) * spread
    false, found = 0, 0
    for _ in range(resamples):
        dealt = random.permutation(values)[:needed].reshape(arms + 1, seeds)
        differences = dealt[1:] - dealt[0]
        false += any(test is not None and test.found for test in holm_tests(list(differences)))
        differences[0] += planted
        first = holm_tests(list(differences))[0]
        found += first is not None and first.found and first.mean * planted > 0
    stated = power(abs(planted) / spread, seeds, LEVEL / arms) if spread else 1.0
    return Calibration(
        trials=len(values),
        arms=arms,
        seeds=seeds,
        resamples=resamples,
        spread=spread,
        false_alarms=Rate(false, resamples, LEVEL),
        planted=planted,
        power=Rate(found, resamples, stated),
    )
