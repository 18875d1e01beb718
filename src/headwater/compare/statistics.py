"""What saved trials say: paired differences, a test that allows for the number of arms, the seeds that are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from scipy import special, stats

from headwater.records import RunRecord

# False alarms that are accepted: in so many of the comparisons of arms that are all alike at least one is called better
# or worse. And how sure "more seeds would settle it" is.
LEVEL = 0.05
POWER = 0.8
MOST = 10_000  # seeds; what takes more is as good as the same
# Results are numbers of order one; differences that are nearer than this differ by the rounding of a subtraction.
ROUNDING = 1e-12

Verdict = Literal["", "better", "worse", "open", "same", "diverged"]


@dataclass(frozen=True)
class Paired:
    """What a sample of paired differences says of their mean.

    p: of a two-sided paired t test, by itself; None with fewer than two pairs. Where all differences are one number,
        but for rounding, there is no spread for Student's t to go by: p is then the sign test's, 2^(1-n), and 1 where
        that number is 0.
    level: the level at which Holm's procedure tests this difference, among those it was tested with.
    interval: of confidence 1 - level: it leaves out 0 just where the procedure finds a difference. None where it is
        unbounded.
    more: pairs that are missing until a difference like the one seen would be found with a chance of 80 %; None where
        it is found, or cannot be told, or more than 10 000 are.
    detectable: the difference that so many pairs with such a spread would have found with a chance of 80 %; None where
        there is no spread.
    """

    differences: tuple[float, ...]
    mean: float
    p: float | None
    level: float
    interval: tuple[float, float] | None
    more: int | None
    detectable: float | None

    @property
    def found(self) -> bool:
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def holm_tests(samples: Sequence[Sequence[float]], level: float = LEVEL) -> list[Paired | None]:
    """Test several samples of paired differences, with Holm's correction for their number; None for empty ones.

    Where all samples are of models that do not differ, one or more differences are found in `level` of all cases at
    most (of normal differences).
    """
    tests = [_p(sample) for sample in samples]
    levels = holm_levels(tests, level)
    return [
        _paired(tuple(map(float, sample)), tests[index], levels[index]) if len(sample) else None
        for index, sample in enumerate(samples)
    ]


def holm_levels(tests: Sequence[float | None], level: float = LEVEL) -> list[float]:
    """The level at which Holm's procedure tests each of several p values; None: there is nothing to test.

    The smallest is tested at level/m, the next at level/(m - 1), …, until one fails; the rest fail with it, and are
    given the level that it failed at.
    """
    levels = [level] * len(tests)
    tested = [index for index, p in enumerate(tests) if p is not None]
    if tested:
        p = np.array([p for p in tests if p is not None])
        order = np.argsort(p, kind="stable")
        steps = level / np.arange(len(p), 0, -1)
        passed = int(np.logical_and.accumulate(p[order] <= steps).sum())
        for rank, place in enumerate(order):
            levels[tested[place]] = float(steps[min(rank, passed, len(p) - 1)])
    return levels


def _constant(differences: Sequence[float]) -> bool:
    """Whether the differences are one number, but for rounding."""
    return float(np.ptp(differences)) <= ROUNDING * max(1.0, float(np.abs(differences).max()))


def _zero(differences: Sequence[float]) -> bool:
    return float(np.abs(differences).max()) <= ROUNDING


def _error(differences: Sequence[float]) -> float:
    """Standard error of the mean."""
    return float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


def _p(differences: Sequence[float]) -> float | None:
    if len(differences) < 2:
        return None
    if _zero(differences):
        return 1.0
    if _constant(differences):
        return float(stats.binomtest(len(differences), len(differences)).pvalue)
    return float(2 * special.stdtr(len(differences) - 1, -abs(np.mean(differences)) / _error(differences)))


def _paired(differences: tuple[float, ...], p: float | None, level: float) -> Paired:
    mean = 0.0 if _zero(differences) else float(np.mean(differences))
    interval: tuple[float, float] | None = None
    more: int | None = None
    detectable: float | None = None
    if p is not None and _constant(differences):
        # Inverting the sign test: bounded only where so many equal signs are beyond chance.
        interval = (mean, mean) if mean == 0 or p <= level else None
    elif p is not None:
        half = float(special.stdtrit(len(differences) - 1, 1 - level / 2)) * _error(differences)
        interval = (mean - half, mean + half)
        spread = float(np.std(differences, ddof=1))
        detectable = spread * _effect(len(differences), level)
        if abs(mean) <= half:
            more = more_pairs([abs(mean) / spread], len(differences), level)
    return Paired(differences, mean, p, level, interval, more, detectable)


def power(effect: float, pairs: int, level: float = LEVEL) -> float:
    """Chance that a paired t test finds a difference of `effect` standard deviations (of the differences).

    P(|T| > t), with T of the noncentral t distribution with pairs - 1 degrees of freedom and centre effect·√pairs.
    """
    critical, centre = special.stdtrit(pairs - 1, 1 - level / 2), effect * math.sqrt(pairs)
    # Boost, which scipy asks, gives nan for some probabilities below 1e-15.
    below, beyond = np.nan_to_num(special.nctdtr(pairs - 1, centre, [critical, -critical]))
    return float(1 - below + beyond)


def _effect(pairs: int, level: float) -> float:
    """The effect that so many pairs find with a chance of `POWER`; on the wrong side it is found next to never."""
    centre = special.nctdtrinc(pairs - 1, 1 - POWER, special.stdtrit(pairs - 1, 1 - level / 2))
    return float(centre) / math.sqrt(pairs)


def more_pairs(effects: Sequence[float], pairs: int, level: float) -> int | None:
    """Pairs that are missing to find all of the effects at once with a chance of `POWER`; None: more than `MOST`.

    Of several effects the chances of missing one are added up, so that it is no less than that.
    """

    def chance(pairs: int) -> float:
        return 1 - sum(1 - power(effect, pairs, level) for effect in effects)

    if chance(MOST) < POWER:
        return None
    low, high = pairs, MOST  # bisection: power grows with the pairs
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(middle) >= POWER else (middle, high)
    return high - pairs


@dataclass(frozen=True)
class Summary:
    """One arm over its seeds. Differences are arm - baseline, paired by seed.

    runs: finished ones; mean, spread (standard deviation) and `steps_to_threshold` are theirs. diverged: seeds of which
        nothing can be averaged, with a last result that is no number among them. stopped: the step at which the arm
        was given up, by successive halving.
    paired: None for the baseline, and where no seed is finished in both.
    learning_rate: None where runs differ in it.
    """

    arm: str
    runs: int
    mean: float | None
    spread: float | None
    paired: Paired | None
    diverged: int
    stopped: int | None
    parameters: int
    tokens: int
    flops: float
    tokens_per_second: float
    cache_bytes_per_token: int
    learning_rate: float | None
    steps_to_threshold: list[int | None] | None

    @property
    def difference(self) -> float | None:
        return None if self.paired is None else self.paired.mean

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.paired is None else self.paired.interval

    def verdict(self, lower_is_better: bool) -> Verdict:
        """What can be said of the arm against the baseline.

        "better" or "worse" only if the interval leaves no doubt; "same" where no seed differs by more than rounding;
        "diverged" if any of its runs has, since those left are then the lucky ones; else "open"; "" for the baseline
        and for an arm that was given up.
        """
        if self.diverged:
            return "diverged"
        if self.paired is None:
            return ""
        if len(self.paired.differences) > 1 and _zero(self.paired.differences):
            return "same"
        if not self.paired.found:
            return "open"
        return "better" if (self.paired.mean < 0) == lower_is_better else "worse"


def summarise(records: Sequence[RunRecord], baseline: str, threshold: float | None = None) -> list[Summary]:
    """One summary per arm, in the order of first appearance, all tested together against the baseline.

    Of the records that count some are finished, some diverged, and some were given up ("stopped").
    """
    arms: dict[str, list[RunRecord]] = {}
    for record in records:
        arms.setdefault(record.experiment.arm if record.experiment else record.name, []).append(record)
    finished = {arm: _finished(runs) for arm, runs in arms.items()}
    base = finished.get(baseline, {})
    differences = {arm: _differences(runs, base) for arm, runs in finished.items() if arm != baseline}
    tested = dict(zip(differences, holm_tests(list(differences.values())), strict=True))
    return [_summary(arm, runs, finished[arm], tested.get(arm), threshold) for arm, runs in arms.items()]


def among(records: Sequence[RunRecord], arms: Sequence[str]) -> dict[tuple[str, str], Paired | None]:
    """Every two of `arms` against each other, all of these tested together: (first, second) -> first - second.

    None where they have no seed in common.
    """
    finished = {
        arm: _finished([record for record in records if record.experiment and record.experiment.arm == arm])
        for arm in arms
    }
    pairs = list(combinations(arms, 2))
    return dict(zip(pairs, holm_tests([_differences(finished[a], finished[b]) for a, b in pairs]), strict=True))


def _finished(runs: Sequence[RunRecord]) -> dict[int, RunRecord]:
    """By seed, those of an arm that a mean can be taken of."""
    return {r.seed: r for r in runs if r.status == "finished" and r.result is not None and not _diverged(r)}


def _differences(arm: dict[int, RunRecord], base: dict[int, RunRecord]) -> list[float]:
    """Of the seeds that both have."""
    return [arm[seed].result - base[seed].result for seed in sorted(arm) if seed in base]  # type: ignore[operator]


def _diverged(run: RunRecord) -> bool:
    return run.status == "diverged" or (run.status == "finished" and not math.isfinite(run.result or 0.0))


def _summary(
    arm: str, runs: list[RunRecord], finished: dict[int, RunRecord], paired: Paired | None, threshold: float | None
) -> Summary:
    results = np.array([run.result for run in finished.values()], dtype=float)
    rates = {run.recipe.get("training", {}).get("learning_rate") for run in runs}
    stopped = [run for run in runs if run.status == "stopped"]
    shown = next(iter(finished.values()), runs[0])
    return Summary(
        arm=arm,
        runs=len(finished),
        mean=float(results.mean()) if len(results) else None,
        spread=float(results.std(ddof=1)) if len(results) > 1 else None,
        paired=paired,
        diverged=sum(map(_diverged, runs)),
        stopped=max((run.held_out[-1].step for run in stopped if run.held_out), default=0) if stopped else None,
        parameters=shown.parameters,
        tokens=shown.tokens,
        flops=shown.flops,
        tokens_per_second=float(np.median([run.tokens_per_second for run in (finished or {0: shown}).values()])),
        cache_bytes_per_token=shown.cache_bytes_per_token,
        learning_rate=rates.pop() if len(rates) == 1 else None,
        steps_to_threshold=None if threshold is None else [steps_to(run, threshold) for run in finished.values()],
    )


def steps_to(record: RunRecord, threshold: float) -> int | None:
    """The first look at which the deciding measure reached the threshold; None if it never did."""
    for point in record.held_out:
        value = point.measures[record.measure]
        if (value <= threshold) if record.lower_is_better else (value >= threshold):
            return point.step
    return None
