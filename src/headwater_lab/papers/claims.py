"""Verdicts on a paper's claims: each is judged by an interval, with Holm's correction over each table.

Every claim is reduced to one number and a region: the number is estimated with an interval, and the claim

    replicates           if the interval lies inside the region,
    fails                if it lies entirely outside,
    is inconclusive      if it overlaps the border, or there is no interval.

    better, larger           mean paired difference over the seeds, region (0, ∞), Student's t
    alike                    the same, region [-margin, margin]
    no better                the same, region (-∞, margin]
    than                     the three above for a difference of two differences: (a1 - b1) - (a2 - b2), each seed's of
                             its four runs, so that what they share cancels; Student's t
    gains                    log of the size of the baseline that equals the arm, region (log(1 + more), ∞), jackknife
    loses                    the same, region (-∞, -log(1 + more))
    reaches, never, …        share of the seeds, region (1/2, 1], the binomial (Clopper and Pearson)

Where all differences are the same number (or 0), Student's t has no spread: the interval is that number if so
many seeds of one sign are beyond chance (sign test), and otherwise there is none. Parameters, tokens and FLOPs
are counted without chance: no test is made, and the interval covers the seeds' values.

Where a run has diverged, the mean is meaningless, because only the other runs remain. "better" is then
judged by the share of seeds in which the arm is better, among those in which either arm is: one that diverged is worse
than one that did not. The other claims about means are inconclusive.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special, stats

from headwater_lab.comparison.sequential import ROUNDING
from headwater_lab.comparison.statistics import (
    count_more_pairs,
    holm_levels,
    is_constant,
    standard_error,
    t_interval,
)
from headwater_lab.papers.arms import list_claimed_arms
from headwater_lab.papers.measures import COUNTED, HALVES, Runs, describe_missing
from headwater_lab.papers.table import Claim, Diverges, Gains, Ordered, Pair, Reaches

ClaimVerdict = Literal["replicates", "fails", "inconclusive"]
EvidenceKind = Literal["mean", "share", "more"]
Interval = tuple[float, float]
ABOVE_ZERO: Interval = (0.0, math.inf)
# Largest log N'/N. An arm that would need more counts as unreachable.
MOST = 100.0
LUCKY = "a run diverged, and the mean of the others is meaningless"
# Claims about most seeds: what those seeds do, and whether it denies that they get there, or diverge.
SHARES = {
    "reaches": ("get there", False),
    "never": ("never get there", True),
    "diverges": ("diverge", False),
    "stays": ("do not diverge", True),
}


@dataclass(frozen=True)
class Evidence:
    """The number that a claim is about.

    why: why it is inconclusive, if that is clear before any test. label: the number in words. region: where it must lie
    for the claim to replicate. size: its seeds. p: the smallest level at which the interval lies on one side of the
    borders. interval: of confidence 1 - level. count_missing: seeds still needed to settle it. counted: it is exact.
    """

    why: str = ""
    kind: EvidenceKind = "mean"
    label: str = ""
    region: Interval = ABOVE_ZERO
    estimate: float | None = None
    size: int = 0
    p: float | None = None
    interval: Callable[[float], Interval | None] = lambda level: None
    count_missing: Callable[[float], int | None] = lambda level: None
    counted: bool = False


def mean_evidence(
    values: Sequence[float], region: Interval = ABOVE_ZERO, label: str = "", counted: bool = False
) -> Evidence:
    """Estimate the mean of one or more paired differences, signed as claimed. counted: they are exact."""
    size, mean, ends = len(values), float(np.mean(values)), (min(values), max(values))
    result = Evidence("", "mean", label, region, mean, size, counted=counted)
    if size == 1 and not counted:
        return replace(result, why="one seed cannot separate an effect from chance")
    if np.abs(values).max() <= ROUNDING:
        result = replace(result, why="no seed differs")
    if counted:
        return replace(result, interval=lambda level: ends)
    if is_constant(values):
        p = float(stats.binomtest(size, size).pvalue)
        return replace(result, p=p, interval=lambda level: ends if p <= level else None)
    error, spread = standard_error(values), float(np.std(values, ddof=1))
    effects = sorted(abs(mean - border) / spread for border in region if math.isfinite(border))
    if not region[0] < mean < region[1]:  # being inside takes all borders, being outside only the nearest
        effects = effects[:1]
    return replace(
        result,
        p=_p_of_t(mean, error, size - 1, region),
        interval=lambda level: t_interval(mean, error, size - 1, level),
        count_missing=lambda level: count_more_pairs(effects, size, level),
    )


def share_evidence(count: int, size: int, label: str = "") -> Evidence:
    """Estimate the share of seeds that agree with the claim, `count` of `size`."""
    test = stats.binomtest(count, size)

    def interval(level: float) -> Interval:
        bounds = test.proportion_ci(1 - level)
        return float(bounds.low), float(bounds.high)

    return Evidence("", "share", label, (0.5, math.inf), count / size, size, float(test.pvalue), interval)


def ratio_evidence(log: float, error: float | None, freedom: int, region: Interval, label: str = "") -> Evidence:
    """Judge log N'/N, the size of the baseline that equals the arm by the fitted law.

    error: its standard error, with `freedom` degrees of freedom; None if the seeds do not determine it.
    """
    why = "the seeds do not determine the fitted law" if error is None else ""
    if math.isnan(log):
        why = "the baseline's losses do not fall with its size"
    elif math.isinf(log):
        reason = "no baseline, however large, has" if log > 0 else "a baseline of almost no size has"
        why = f"{reason} its loss, by the fitted law"
    estimate = log if math.isfinite(log) else None
    result = Evidence(why, "more", label, region, estimate, freedom + 1 if freedom else 0)
    if error is None:
        return result
    p = _p_of_t(log, error, freedom, region)
    return replace(result, p=p, interval=lambda level: t_interval(log, error, freedom, level))


def _p_of_t(mean: float, error: float, freedom: int, region: Interval) -> float:
    def tail(distance: float) -> float:
        return float(special.stdtr(freedom, distance / error))

    inside = max(tail(region[0] - mean), tail(mean - region[1]))
    outside = min(tail(mean - region[0]), tail(region[1] - mean))
    return min(1.0, 2 * min(inside, outside))


@dataclass(frozen=True)
class Judged:
    """A claim and its evidence from our runs, or from computation.

    why: why the claim is inconclusive, or another remark; the evidence itself if nothing is estimated.
    what, kind: what is estimated. interval: of confidence 1 - level, at which Holm's procedure tests the claim within
        its table. p: uncorrected.
    more: seeds still needed to settle it with a probability of 80 %, if mean and spread stay the same; None if it is
        settled, needs more than 10 000, or has no mean.
    counted: computed, not measured, as FLOPs are. arms: the arms that the claim names.
    """

    says: str
    verdict: ClaimVerdict
    why: str
    what: str = ""
    kind: EvidenceKind = "mean"
    estimate: float | None = None
    interval: Interval | None = None
    level: float | None = None
    p: float | None = None
    seeds: int = 0
    more: int | None = None
    counted: bool = False
    arms: Sequence[str] = ()


def judge_claims(claims: Sequence[Claim], runs: Runs) -> list[Judged]:
    """Judge a table's claims. Claims about arms that this scale does not train are inconclusive."""
    evidence = [_find_evidence(claim, runs) for claim in claims]
    levels = holm_levels([number.p for number in evidence])
    return [_judge_claim(*judging) for judging in zip(claims, evidence, levels, strict=True)]


def _judge_claim(claim: Claim, evidence: Evidence, level: float) -> Judged:
    estimate, interval = evidence.estimate, evidence.interval(level)
    verdict = verdict_of(interval, evidence.region)
    why = evidence.why
    if verdict == "inconclusive" and not why:
        why = _explain_inconclusive(evidence, interval)
    if evidence.kind == "more":  # expressed as a relative increase
        estimate = estimate and _bounded_expm1(estimate)
        interval = interval and (_bounded_expm1(interval[0]), _bounded_expm1(interval[1]))
    return Judged(
        says=claim.says,
        verdict=verdict,
        why=why,
        what=evidence.label,
        kind=evidence.kind,
        estimate=estimate,
        interval=interval,
        level=level,
        p=evidence.p,
        seeds=evidence.size,
        more=evidence.count_missing(level) if verdict == "inconclusive" else None,
        counted=evidence.counted,
        arms=list_claimed_arms(claim),
    )


def _explain_inconclusive(evidence: Evidence, interval: Interval | None) -> str:
    if interval is None:
        seeds = f"{evidence.size} seeds"
        return f"all {seeds} differ by exactly this amount, but {seeds} are too few to rule out chance"
    if evidence.kind == "more":
        (border,) = filter(math.isfinite, evidence.region)
        return f"the interval includes {math.expm1(border):+.0%}"
    if math.isfinite(evidence.region[1]):
        return "part of the interval is beyond the margin"
    return "the interval includes half" if evidence.kind == "share" else "the interval includes 0"


def _bounded_expm1(log: float) -> float:
    return math.expm1(log) if log < MOST else math.inf


def verdict_of(interval: Interval | None, region: Interval) -> ClaimVerdict:
    """Judge an interval by a region.

    A region with two borders (alike) includes them, and one that is open to one side (more than) does not.
    """
    if interval is None:
        return "inconclusive"
    low, high = interval
    if math.isinf(region[1]):
        return "replicates" if low > region[0] else "fails" if high <= region[0] else "inconclusive"
    if low >= region[0] and high <= region[1]:
        return "replicates"
    return "fails" if high < region[0] or low > region[1] else "inconclusive"


def _find_evidence(claim: Claim, runs: Runs) -> Evidence:
    """Find the evidence for a claim, if its arms have all seeds: a run that failed may be decisive."""
    gaps, absent = [], []
    for name in dict.fromkeys(list_claimed_arms(claim)):
        sized_arm, runs_by_seed = runs.arms[name], runs.find_seeds(name)
        if sized_arm is None:
            absent.append(f"{name} is not trained at this scale")
        elif not runs_by_seed:
            absent.append(f"there is no run of {name}")
        elif missing := describe_missing(name, sized_arm, runs_by_seed):
            gaps.append(missing)
    if gaps:
        return Evidence(f"not trained: {'; '.join(gaps)}")
    return Evidence(absent[0]) if absent else FIND_EVIDENCE[type(claim)](claim, runs)


def _paired_evidence(claim: Pair, runs: Runs) -> Evidence:
    """Compare two arms, or two differences of arms, in the seeds that all of them have."""
    names = list_claimed_arms(claim)
    seeds = set.intersection(*(set(runs.find_seeds(name)) for name in names))
    if not seeds:
        return Evidence(f"no seed was run for {'both' if claim.than is None else 'all of its arms'}")
    if claim.measure == "steps" and claim.test == "better":  # a run that diverged never gets there
        return _steps_evidence(claim, runs, sorted(seeds))
    if any(seeds & _diverged_seeds(runs, name) for name in names):
        if claim.test == "better" and claim.than is None:
            return _without_diverged(claim, runs, seeds)
        return Evidence(LUCKY)
    if claim.test == "no better" and claim.measure == "steps":
        return _steps_evidence(claim, runs, sorted(seeds))
    return _difference_evidence(claim, runs, sorted(seeds))


def _with_margin(claim: Pair, label: str) -> tuple[Interval, str]:
    """Find the region of a claim about a mean, and add the claim's margin, if any, to the mean's label."""
    if claim.margin is None:
        return ABOVE_ZERO, label
    region = (-claim.margin if claim.test == "alike" else -math.inf, claim.margin)
    return region, f"{label} (margin {claim.margin:g})"


def _difference_evidence(claim: Pair, runs: Runs, seeds: Sequence[int]) -> Evidence:
    units = [_name_unit(measure, runs, arm) for arm, _, measure in claim.pairs]
    same = len(set(units)) == 1
    words, gains = [], []
    for (arm, against, measure), unit in zip(claim.pairs, units, strict=True):
        lower = claim.test != "alike" and runs.lower_is_better(measure, arm)
        larger, smaller = (against, arm) if lower else (arm, against)
        words.append(f"{larger} minus {smaller}" + ("" if same else f", {unit}"))
        gains.append(_find_differences(runs, measure, larger, smaller))
    values = [gains[0][seed] - sum(gain[seed] for gain in gains[1:]) for seed in seeds]
    label = " minus ".join(f"({word})" for word in words) if len(words) > 1 else words[0]
    exact = {measure for *_, measure in claim.pairs} <= COUNTED
    return mean_evidence(values, *_with_margin(claim, label + (f", {units[0]}" if same else "")), exact)


def _without_diverged(claim: Pair, runs: Runs, seeds: set[int]) -> Evidence:
    """Count the seeds in which the arm is better; a run that diverged is worse than one that did not."""
    arm, against = (seeds & _diverged_seeds(runs, name) for name in (claim.arm, claim.against))
    lower = runs.lower_is_better(claim.measure, claim.arm)
    differences = _find_differences(runs, claim.measure, claim.arm, claim.against)
    ahead = [value for seed, value in differences.items() if seed not in arm | against and abs(value) > ROUNDING]
    won = sum((value < 0) == lower for value in ahead) + len(against - arm)
    decided = len(ahead) + len(against ^ arm)
    if not decided:
        return Evidence("no seed separates them: in each, both diverged or neither is better")
    unit = _name_unit(claim.measure, runs, claim.arm)
    label = f"seeds in which {claim.arm} has {'less' if lower else 'more'} {unit}, or is not the one that diverged"
    return share_evidence(won, decided, label)


def _steps_evidence(claim: Pair, runs: Runs, seeds: Sequence[int]) -> Evidence:
    """Compare the steps to the threshold, counted up to the end of the shorter run."""
    steps = {name: runs.count_steps(name) for name in (claim.arm, claim.against)}
    reached = {name: [steps_by_seed[seed] is not None for seed in seeds] for name, steps_by_seed in steps.items()}
    if not any(map(any, reached.values())):
        return Evidence("neither gets there in any seed")
    values = []
    for seed in seeds:
        end = min(runs.find_seeds(name)[seed].record.recipe["training"]["steps"] for name in steps)
        arm, against = (end if (n := steps_by_seed[seed]) is None else min(n, end) for steps_by_seed in steps.values())
        values.append(float(against - arm))
    never = "" if all(map(all, reached.values())) else " (never: all of its steps)"
    return mean_evidence(values, *_with_margin(claim, f"{claim.against} minus {claim.arm}, steps to get there{never}"))


def _seeds_evidence(claim: Reaches | Diverges, runs: Runs) -> Evidence:
    """Count the seeds that do as the claim says."""
    words, denied = SHARES[claim.test]
    if isinstance(claim, Diverges):
        agree = runs.find_lost(claim.arm, claim.unlearned)
    else:
        agree = {seed: steps is not None for seed, steps in runs.count_steps(claim.arm).items()}
    count = sum(agrees != denied for agrees in agree.values())
    return share_evidence(count, len(agree), f"seeds of {claim.arm} that {words}")


def _law_evidence(claim: Gains, runs: Runs) -> Evidence:
    equal_and_axis = runs.find_equivalent_size(f"{claim.arm} @ {claim.size}")
    if isinstance(equal_and_axis, str):
        return Evidence(equal_and_axis)
    equal, axis = equal_and_axis
    estimate = equal.extra
    log = math.log1p(estimate.value) if estimate.value > -1 else -math.inf if estimate.value == -1 else math.nan
    if abs(log) > MOST:
        log = math.copysign(math.inf, log)
    has_error = estimate.error is not None and estimate.error > ROUNDING and math.isfinite(log)
    beyond = "" if equal.inside else "; beyond the sizes trained"
    label = f"how many more {axis} the baseline needs for the loss of {claim.arm} at {claim.size}{beyond}"
    border = math.log1p(claim.more)
    region = (border, math.inf) if claim.test == "gains" else (-math.inf, 0.0 - border)
    return ratio_evidence(log, estimate.error if has_error else None, estimate.freedom, region, label)


def _order_evidence(claim: Ordered, runs: Runs) -> Evidence:
    if _diverged_seeds(runs, claim.arm):
        return Evidence(LUCKY)
    larger, smaller = runs.measure_seeds(claim.first, claim.arm), runs.measure_seeds(claim.second, claim.arm)
    units = (_name_unit(measure, runs, claim.arm) for measure in (claim.first, claim.second))
    exact = {claim.first, claim.second} <= COUNTED
    values = [larger[seed] - smaller[seed] for seed in larger]
    return mean_evidence(values, counted=exact, label=f"{' minus '.join(units)}, {claim.arm}")


FIND_EVIDENCE: Mapping[type, Callable[..., Evidence]] = {
    Pair: _paired_evidence,
    Reaches: _seeds_evidence,
    Diverges: _seeds_evidence,
    Gains: _law_evidence,
    Ordered: _order_evidence,
}


def _diverged_seeds(runs: Runs, name: str) -> set[int]:
    return {seed for seed, run in runs.find_seeds(name).items() if run.record.has_diverged}


def _find_differences(runs: Runs, measure: str, arm: str, against: str) -> dict[int, float]:
    """Subtract `against` from `arm`, seed by seed."""
    values, base = runs.measure_seeds(measure, arm), runs.measure_seeds(measure, against)
    return {seed: values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())}


def _name_unit(measure: str, runs: Runs, name: str) -> str:
    if measure == "result":
        measure = next((run.record.metric for run in runs.find_seeds(name).values()), measure)
    if measure in HALVES:
        return f"accuracy over the {measure} half"
    text = measure.removeprefix("census:").removeprefix("scalar:").removeprefix("task:").replace("_", " ")
    return f"({text.replace('+', ' + ')})" if "+" in text else text
