"""How often the statistics of a comparison are wrong, found by resampling saved trials.

Trials of one arm with many seeds are dealt, without replacement, to arms that are then the same model with disjoint
seeds: any difference that the tests find is a false alarm. The share of added differences that the tests
find is their power. Seeds are disjoint, so pairing gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from headwater.compare.earlier import mixed
from headwater.compare.sequential import LEVEL, ROUNDING
from headwater.compare.statistics import POWER, holm_tests, power
from headwater.errors import HeadwaterError
from headwater.records import RunRecord, read_record, record_files
from headwater.seeding import number


@dataclass(frozen=True)
class Rate:
    """`found` of `tried`, with its binomial interval (95 %, Clopper and Pearson), and the stated rate."""

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
    """The results of resampling.

    trials: saved results that were dealt. arms, seeds: of each resampled comparison, besides its baseline.
    spread: standard deviation of the paired differences. false_alarms: comparisons in which any arm was called better
    or worse; stated: at most the level. planted: the difference added to the first arm. power: comparisons in which
    that arm was called so in the right direction; stated: `power` for normal differences with that spread, at
    the level over the number of arms. For several arms this is a lower bound: Holm's procedure tests the arm there only
    where its p is the smallest, and less strictly after another arm was found.
    """

    trials: int
    arms: int
    seeds: int
    resamples: int
    spread: float
    false_alarms: Rate
    planted: float
    power: Rate


def results_of(folder: Path) -> tuple[str, list[float]]:
    """The arm with the most finished results below `folder`: its name and these, by seed.

    Arms of one name in different comparisons are different arms. Raises `HeadwaterError` if there are none, and if the
    arm's runs have different settings.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    runs: dict[tuple[str, str], list[tuple[RunRecord, Path]]] = {}
    for path in record_files(folder):
        record = read_record(path)
        one, result = record.experiment, record.result
        if one is None or one.part != "comparison" or record.status != "finished":
            continue
        if result is not None and math.isfinite(result):
            name = " @ ".join(filter(None, (one.arm, one.size)))
            found.setdefault((one.name, name), {})[record.seed] = result
            runs.setdefault((one.name, name), []).append((record, path.parent))
    if not found:
        raise HeadwaterError(f"There are no finished runs of a comparison under {str(folder)!r}.")
    most = max(found, key=lambda key: len(found[key]))
    if wrong := mixed(runs[most]):
        raise HeadwaterError(f"{wrong}, so they are not results of one arm; name a folder that holds only one of them.")
    return most[1], [found[most][seed] for seed in sorted(found[most])]


def calibrate(
    results: Sequence[float],
    arms: int = 1,
    seeds: int = 5,
    resamples: int = 2000,
    planted: float | None = None,
    seed: int = 0,
) -> Calibration:
    """Resample comparisons of `arms` arms with `seeds` seeds each from the results of one model.

    planted: a difference of either sign; default: one with a stated power of 80 %.

    Raises `HeadwaterError` if there are fewer than (arms + 1)·seeds results, and for an invalid difference.
    """
    values = np.asarray(results, dtype=float)
    needed = (arms + 1) * seeds
    if seeds < 2 or arms < 1 or resamples < 1:
        raise HeadwaterError("Resampling needs at least two seeds, one arm and one resample; choose larger numbers.")
    if len(values) < needed:
        raise HeadwaterError(
            f"{arms} arm{'s' if arms > 1 else ''} and a baseline with {seeds} seeds each take {needed} trials of one "
            f"arm, but there are only {len(values)}; run more seeds, or lower --arms or --seeds."
        )
    if planted is not None and (planted == 0 or not math.isfinite(planted)):
        raise HeadwaterError(f"A difference of {planted} cannot be detected; pass another as planted, or leave it out.")
    random = np.random.default_rng(number("calibrate", seed))
    spread = float(np.sqrt(2) * values.std(ddof=1))
    strictest = LEVEL / arms
    if planted is None:
        effect = optimize.brentq(lambda effect: power(effect, seeds, strictest) - POWER, 0, 1e6)
        planted = float(effect) * spread
    false, found = 0, 0
    for _ in range(resamples):
        dealt = random.permutation(values)[:needed].reshape(arms + 1, seeds)
        differences = dealt[1:] - dealt[0]
        false += any(test is not None and test.found for test in holm_tests(list(differences)))
        differences[0] += planted
        first = holm_tests(list(differences))[0]
        found += first is not None and first.found and first.mean * planted > 0
    if spread > ROUNDING:
        stated = power(abs(planted) / spread, seeds, strictest)
    else:  # identical differences are tested by their signs
        stated = float(abs(planted) > ROUNDING and 2.0 ** (1 - seeds) <= strictest)
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
