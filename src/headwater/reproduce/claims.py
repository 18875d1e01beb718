"""Whether what a paper claims holds in our runs: each claim by an interval, all of a table's together by Holm.

Every claim is brought to one number and a region: the number is estimated with an interval, and the claim

    holds                if the interval lies inside the region,
    does not hold        if it lies outside of it altogether,
    cannot be told       if it has parts in both, or there is no interval.

    better, sooner, larger   mean paired difference over the seeds, region (0, ∞), Student's t
    alike                    the same, region [-margin, margin]
    gains                    log of the size of the baseline that equals the arm, region (log(1 + more), ∞), jackknife
    reaches, never, …        share of the seeds, region (1/2, 1], the binomial (Clopper and Pearson)

Where a run has diverged no mean difference is left to speak of: "better" then is the share of the seeds in which the
arm is better, one that diverged being worse than any that did not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special, stats

from headwater.compare.statistics import LEVEL, ROUNDING, holm_levels
from headwater.reproduce.measures import Runs, diverged
from headwater.reproduce.table import Alike, Better, Claim, Diverges, Gains, Ordered, Reaches, Sooner

Verdict = Literal["holds", "does not hold", "cannot be told"]
Kind = Literal["mean", "share", "more"]
Interval = tuple[float, float]


class Evidence(ABC):
    """A number that a claim is about. region: where it has to be for the claim to hold, ends included or not."""

    region: Interval

    @property
    @abstractmethod
    def estimate(self) -> float | None: ...

    @property
    @abstractmethod
    def p(self) -> float | None:
        """The smallest level at which the interval lies on one side of the region's borders; None: it never does."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Seeds that it rests on."""

    @abstractmethod
    def interval(self, level: float) -> Interval | None:
        """Of confidence 1 - level; None where it is unbounded."""

    @property
    def why(self) -> str:
        """Why nothing can be told, where that is plain before any test."""
        return ""


@dataclass(frozen=True)
class Mean(Evidence):
    """The mean of paired differences, arm - against, signed so that more is as claimed."""

    values: Sequence[float]
    region: Interval = (0.0, math.inf)

    @property
    def estimate(self) -> float | None:
        return float(np.mean(self.values)) if len(self.values) else None

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def constant(self) -> bool:
        return float(np.ptp(self.values)) <= ROUNDING * max(1.0, float(np.abs(self.values).max()))

    @property
    def p(self) -> float | None:
        if len(self.values) < 2:
            return None
        if self.zero and self.region[0] == 0:
            return 1.0
        if self.constant:  # no spread for Student's t to go by: then the sign test
            return float(stats.binomtest(len(self.values), len(self.values)).pvalue)
        return _p_of_t(float(np.mean(self.values)), self._error, len(self.values) - 1, self.region)

    def interval(self, level: float) -> Interval | None:
        if len(self.values) < 2:
            return None
        mean = float(np.mean(self.values))
        if self.zero:
            return 0.0, 0.0
        if self.constant:
            return (mean, mean) if (self.p or 1.0) <= level else None
        return _t_interval(mean, self._error, len(self.values) - 1, level)

    @property
    def zero(self) -> bool:
        return float(np.abs(self.values).max()) <= ROUNDING

    @property
    def _error(self) -> float:
        return float(np.std(self.values, ddof=1)) / math.sqrt(len(self.values))

    @property
    def why(self) -> str:
        if len(self.values) == 1:
            return "one seed says nothing of chance"
        return "no seed differs" if self.zero else ""


@dataclass(frozen=True)
class Share(Evidence):
    """How many of the seeds did as claimed."""

    count: int
    seeds: int
    region: Interval = (0.5, 1.0)

    @property
    def estimate(self) -> float | None:
        return self.count / self.seeds if self.seeds else None

    @property
    def size(self) -> int:
        return self.seeds

    @property
    def p(self) -> float | None:
        return float(stats.binomtest(self.count, self.seeds).pvalue) if self.seeds else None

    def interval(self, level: float) -> Interval | None:
        if not self.seeds:
            return None
        found = stats.binomtest(self.count, self.seeds).proportion_ci(1 - level)
        return float(found.low), float(found.high)


@dataclass(frozen=True)
class Ratio(Evidence):
    """log N'/N: by the fitted law, what size of the baseline equals the arm."""

    log: float
    error: float | None
    freedom: int
    region: Interval

    @property
    def estimate(self) -> float | None:
        return self.log

    @property
    def size(self) -> int:
        return self.freedom + 1 if self.freedom else 0

    @property
    def p(self) -> float | None:
        if self.error is None or not math.isfinite(self.log):
            return None
        return _p_of_t(self.log, self.error, self.freedom, self.region)

    def interval(self, level: float) -> Interval | None:
        if self.error is None or not math.isfinite(self.log):
            return None
        return _t_interval(self.log, self.error, self.freedom, level)

    @property
    def why(self) -> str:
        if math.isnan(self.log):
            return "the baseline's losses do not fall with its size"
        if math.isinf(self.log):
            return "no baseline of any size has its loss, by the fitted law"
        return "" if self.error is not None else "the seeds leave the fitted law open"


def _p_of_t(mean: float, error: float, freedom: int, region: Interval) -> float:
    if error == 0:
        return 0.0
    above = [float(special.stdtr(freedom, (low - mean) / error)) for low in region]  # p of "not above this border"
    inside = max(above[0], 1 - above[1])
    outside = min(1 - above[0], above[1])
    return min(1.0, 2 * min(inside, outside))


def _t_interval(mean: float, error: float, freedom: int, level: float) -> Interval:
    half = float(special.stdtrit(freedom, 1 - level / 2)) * error
    return mean - half, mean + half


@dataclass(frozen=True)
class Judged:
    """A claim and what our runs say of it.

    estimate, interval: of `what`, in words; the interval has confidence 1 - level, the level that Holm's procedure
        tests the claim at among those of its table. A mean difference, a share of the seeds, or how much more of the
        baseline's size, by kind.
    p: of the claim by itself. why: why it cannot be told, or what else is to be known. seeds: what it rests on.
    """

    says: str
    what: str
    kind: Kind
    estimate: float | None
    interval: Interval | None
    level: float
    p: float | None
    verdict: Verdict
    why: str
    seeds: int


def judge(claims: Sequence[Claim], runs: Runs, level: float = LEVEL) -> list[Judged]:
    """Judge a table's claims. Claims about arms that this scale does not train cannot be told."""
    evidence = [_evidence(claim, runs) for claim in claims]
    levels = holm_levels([None if isinstance(one, str) else one[1].p for one in evidence], level)
    return [_judged(claim, one, at) for claim, one, at in zip(claims, evidence, levels, strict=True)]


def _judged(claim: Claim, found: tuple[str, Evidence] | str, level: float) -> Judged:
    if isinstance(found, str):
        return Judged(claim.says, "", "mean", None, None, level, None, "cannot be told", found, 0)
    what, evidence = found
    estimate, interval = evidence.estimate, evidence.interval(level)
    verdict = verdict_of(interval, evidence.region)
    why = evidence.why
    if verdict == "cannot be told" and not why:
        why = "the interval has parts on both sides"
        if interval is None:
            why = f"all {evidence.size} seeds differ by this, and so few of one sign are not beyond chance"
    if isinstance(evidence, Ratio):  # told as a share more
        estimate = math.expm1(estimate) if estimate is not None and math.isfinite(estimate) else None
        interval = interval and (math.expm1(interval[0]), math.expm1(interval[1]))
    kind: Kind = "more" if isinstance(evidence, Ratio) else "share" if isinstance(evidence, Share) else "mean"
    return Judged(claim.says, what, kind, estimate, interval, level, evidence.p, verdict, why, evidence.size)


def verdict_of(interval: Interval | None, region: Interval) -> Verdict:
    """The region's borders belong to it if it has two (alike), and not if it is open to one side (more than)."""
    if interval is None:
        return "cannot be told"
    low, high = interval
    if math.isinf(region[1]) or region == (0.5, 1.0):
        return "holds" if low > region[0] else "does not hold" if high <= region[0] else "cannot be told"
    if low >= region[0] and high <= region[1]:
        return "holds"
    return "does not hold" if high < region[0] or low > region[1] else "cannot be told"


def _evidence(claim: Claim, runs: Runs) -> tuple[str, Evidence] | str:
    """(what is estimated, evidence), or why there is none."""
    names = [f"{claim.arm} @ {claim.size}"] if isinstance(claim, Gains) else [claim.arm]
    if isinstance(claim, Better | Alike | Sooner):
        names.append(claim.against)
    for name in names:
        if runs.places[name] is None:
            return f"{name} is not trained at this scale"
        if not runs.of(name):
            return f"no run of {name} is there"
    return KINDS[claim.test](claim, runs)


def _better(claim: Better, runs: Runs) -> tuple[str, Evidence] | str:
    pairs = _common(runs, claim.arm, claim.against)
    if not pairs:
        return "no seed was run of both"
    lower = runs.lower_is_better(claim.measure, claim.arm)
    more = "less" if lower else "more"
    what = f"{claim.against} − {claim.arm}" if lower else f"{claim.arm} − {claim.against}"
    lost = {
        name: {s for s, run in runs.of(name).items() if diverged(run.record)} for name in (claim.arm, claim.against)
    }
    if any(lost[name] & set(pairs) for name in lost):
        values = {name: runs.values(claim.measure, name) for name in lost}
        won = sum(
            seed not in lost[claim.arm]
            and (seed in lost[claim.against] or (values[claim.arm][seed] < values[claim.against][seed]) == lower)
            for seed in pairs
        )
        return f"seeds in which {claim.arm} has {more} {_unit(claim.measure, runs, claim.arm)}", Share(won, len(pairs))
    return f"{what}, {_unit(claim.measure, runs, claim.arm)}", Mean(
        _differences(runs, claim.measure, claim.arm, claim.against, -1 if lower else 1)
    )


def _alike(claim: Alike, runs: Runs) -> tuple[str, Evidence] | str:
    pairs = _common(runs, claim.arm, claim.against)
    if not pairs:
        return "no seed was run of both"
    if any(diverged(runs.of(name)[seed].record) for name in (claim.arm, claim.against) for seed in pairs):
        return "a run diverged, and a mean of the others says nothing"
    what = f"{claim.arm} − {claim.against}, {_unit(claim.measure, runs, claim.arm)} (margin {claim.margin:g})"
    return what, Mean(_differences(runs, claim.measure, claim.arm, claim.against), (-claim.margin, claim.margin))


def _sooner(claim: Sooner, runs: Runs) -> tuple[str, Evidence] | str:
    """A run that never got there counts with all of its steps: the least that it would need."""
    pairs = _common(runs, claim.arm, claim.against)
    if not pairs:
        return "no seed was run of both"

    def steps(name: str) -> dict[int, int]:
        place = runs.places[name]
        assert place is not None
        whole = {seed: run.record.recipe["training"]["steps"] for seed, run in runs.of(name).items()}
        return {seed: whole[seed] if n is None else n for seed, n in runs.steps(name).items()}

    arm, against = steps(claim.arm), steps(claim.against)
    there = [s for s in pairs if not (runs.steps(claim.arm)[s] is None and runs.steps(claim.against)[s] is None)]
    if not there:
        return "neither gets there in any seed"
    return f"{claim.against} − {claim.arm}, steps", Mean([against[seed] - arm[seed] for seed in there])


def _reaches(claim: Reaches, runs: Runs) -> tuple[str, Evidence] | str:
    steps = runs.steps(claim.arm)
    never = claim.test == "never"
    count = sum((n is None) == never for n in steps.values())
    return f"seeds of {claim.arm} that {'never get there' if never else 'get there'}", Share(count, len(steps))


def _diverges(claim: Diverges, runs: Runs) -> tuple[str, Evidence] | str:
    lost = runs.lost(claim.arm, claim.unlearned)
    stays = claim.test == "stays"
    count = sum(one != stays for one in lost.values())
    return f"seeds of {claim.arm} that {'do not diverge' if stays else 'diverge'}", Share(count, len(lost))


def _gains(claim: Gains, runs: Runs) -> tuple[str, Evidence] | str:
    found = runs.equal(f"{claim.arm} @ {claim.size}")
    if found is None:
        return "a law needs three sizes or more, and the same seeds at each"
    more = found.more
    log = math.log1p(more.value) if more.value > -1 and not math.isnan(more.value) else more.value
    region = (math.log1p(claim.more), math.inf)
    beyond = "" if found.inside else "; beyond the sizes trained"
    return f"how much more the baseline needs for the loss of {claim.arm} at {claim.size}{beyond}", Ratio(
        log, more.error, more.freedom, region
    )


def _larger(claim: Ordered, runs: Runs) -> tuple[str, Evidence] | str:
    first, second = runs.values(claim.first, claim.arm), runs.values(claim.second, claim.arm)
    return f"{_unit(claim.first)} − {_unit(claim.second)}, {claim.arm}", Mean([first[s] - second[s] for s in first])


KINDS: Mapping[str, Callable[..., tuple[str, Evidence] | str]] = {
    "better": _better,
    "alike": _alike,
    "sooner": _sooner,
    "reaches": _reaches,
    "never": _reaches,
    "diverges": _diverges,
    "stays": _diverges,
    "gains": _gains,
    "larger": _larger,
}


def _common(runs: Runs, one: str, other: str) -> list[int]:
    return sorted(runs.of(one).keys() & runs.of(other).keys())


def _differences(runs: Runs, measure: str, one: str, other: str, sign: int = 1) -> list[float]:
    first, second = runs.values(measure, one), runs.values(measure, other)
    return [sign * (first[seed] - second[seed]) for seed in sorted(first.keys() & second.keys())]


def _unit(measure: str, runs: Runs | None = None, name: str = "") -> str:
    if measure == "result" and runs is not None:
        measure = next((run.record.measure for run in runs.of(name).values()), measure)
    return measure.replace("census:", "").replace("scalar:", "").replace("task:", "").replace("_", " ")
