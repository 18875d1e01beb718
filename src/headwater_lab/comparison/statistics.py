"""Statistics of saved trials: paired differences, tests corrected for the number of arms, and further seeds needed."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special, stats

from headwater_lab.comparison.sequential import (
    LEVEL,
    ROUNDING,
    SeedLook,
    Standing,
    critical_values,
    find_standing,
    is_inside,
    take_looks,
)
from headwater_lab.training.records import HeldOutPoint, RunRecord, SeedPlan

# Power assumed for "more seeds would settle it".
POWER = 0.8
MOST = 10_000  # maximum number of additional seeds to report

# An interval of a ratio that spans more than this factor is not printed, but called inconclusive.
WIDEST = 10.0
INCONCLUSIVE = "inconclusive at these sizes"

Verdict = Literal["", "better", "worse", "equivalent", "inconclusive", "identical", "diverged"]


@dataclass(frozen=True)
class PairedTest:
    """The mean of a sample of paired differences, tested.

    p: of a two-sided paired t test, uncorrected; None with fewer than two pairs. If all differences are one number,
        apart from rounding, p is the sign test's, 2^(1-n), and 1 if that number is 0.
    level: the level at which Holm's procedure tests this difference, among those it was tested with.
    interval: of confidence 1 - level; it excludes 0 exactly where the procedure finds a difference. None if unbounded.
    more_pairs: pairs still needed to find such a difference with a probability of 80 %; None where it is found, where
        their number is unknown, and where it is above 10 000.
    detectable: the difference that as many pairs would find with that probability; None without a spread.
    looks, margin: of a comparison that adds seeds until it is decided; `interval` is then the last look's, `p`
        and `detectable` are None, and `more_pairs` counts seeds until any verdict.
    """

    differences: tuple[float, ...]
    mean: float
    p: float | None
    level: float
    interval: tuple[float, float] | None
    more_pairs: int | None
    detectable: float | None
    looks: tuple[SeedLook, ...] = ()
    margin: float | None = None

    @property
    def equivalent(self) -> bool:
        return self.margin is not None and self.interval is not None and is_inside(self.interval, self.margin)

    @property
    def is_significant(self) -> bool:
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def holm_tests(samples: Sequence[Sequence[float]]) -> list[PairedTest | None]:
    """Test several samples of paired differences, with Holm's correction for their number; None for empty ones.

    If no models differ, one or more differences are found in at most `LEVEL` of cases (for normal differences).
    """
    tests = [_find_p(sample) for sample in samples]
    levels = holm_levels(tests)
    return [
        _summarize_pairs(tuple(map(float, sample)), tests[index], levels[index]) if len(sample) else None
        for index, sample in enumerate(samples)
    ]


def holm_levels(tests: Sequence[float | None]) -> list[float]:
    """Find the level at which Holm's procedure tests each of several p values; None for a missing one.

    The smallest is tested at LEVEL/m, the next at LEVEL/(m - 1), …, until one fails; the rest then fail too, and
    get the level at which it failed.
    """
    levels = [LEVEL] * len(tests)
    tested = [position for position, p in enumerate(tests) if p is not None]
    if tested:
        p = np.array([p for p in tests if p is not None])
        order = np.argsort(p, kind="stable")
        steps = LEVEL / np.arange(len(p), 0, -1)
        rejected = int(np.logical_and.accumulate(p[order] <= steps).sum())
        for rank, index in enumerate(order):
            levels[tested[index]] = float(steps[min(rank, rejected, len(p) - 1)])
    return levels


def is_constant(differences: Sequence[float]) -> bool:
    """Whether the differences are all the same number, apart from rounding."""
    return float(np.ptp(differences)) <= ROUNDING * max(1.0, float(np.abs(differences).max()))


def _is_zero(differences: Sequence[float]) -> bool:
    return float(np.abs(differences).max()) <= ROUNDING


def standard_error(differences: Sequence[float]) -> float:
    """Compute the standard error of the mean."""
    return float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


def _find_p(differences: Sequence[float]) -> float | None:
    if len(differences) < 2:
        return None
    if _is_zero(differences):
        return 1.0
    if is_constant(differences):
        return float(stats.binomtest(len(differences), len(differences)).pvalue)
    return float(2 * special.stdtr(len(differences) - 1, -abs(np.mean(differences)) / standard_error(differences)))


def _summarize_pairs(differences: tuple[float, ...], p: float | None, level: float) -> PairedTest:
    mean = 0.0 if _is_zero(differences) else float(np.mean(differences))
    interval: tuple[float, float] | None = None
    more_pairs: int | None = None
    detectable: float | None = None
    if p is not None and is_constant(differences):
        # The sign test's interval: bounded only if that many equal signs are significant.
        interval = (mean, mean) if mean == 0 or p <= level else None
    elif p is not None:
        interval = t_interval(mean, standard_error(differences), len(differences) - 1, level)
        spread = float(np.std(differences, ddof=1))
        detectable = spread * _find_effect(len(differences), level)
        if interval[0] <= 0 <= interval[1]:
            more_pairs = count_more_pairs([abs(mean) / spread], len(differences), level)
    return PairedTest(differences, mean, p, level, interval, more_pairs, detectable)


def t_interval(mean: float, error: float, freedom: int, level: float) -> tuple[float, float]:
    """Compute Student's interval of confidence 1 - level."""
    half = float(special.stdtrit(freedom, 1 - level / 2)) * error
    return mean - half, mean + half


def is_too_wide(interval: tuple[float, float] | None, shift: float = 0.0) -> bool:
    """Whether an interval of a ratio is too wide to say anything about its size. shift: the ratio minus the number."""
    return interval is not None and not interval[1] + shift <= WIDEST * (interval[0] + shift)


def find_power(effect: float, pairs: int, level: float = LEVEL) -> float:
    """Compute the probability that a paired t test finds a difference of `effect` standard deviations of differences.

    P(|T| > t), with T of the noncentral t distribution with pairs - 1 degrees of freedom and center effect·√pairs.
    """
    critical, center = special.stdtrit(pairs - 1, 1 - level / 2), effect * math.sqrt(pairs)
    # scipy calls Boost here, which returns nan for some probabilities below 1e-15.
    below, beyond = np.nan_to_num(special.nctdtr(pairs - 1, center, [critical, -critical]))
    return float(1 - below + beyond)


def _find_effect(pairs: int, level: float) -> float:
    """Find the effect that `pairs` pairs find with probability `POWER`; its wrong sign is almost never found."""
    center = special.nctdtrinc(pairs - 1, 1 - POWER, special.stdtrit(pairs - 1, 1 - level / 2))
    return float(center) / math.sqrt(pairs)


def count_more_pairs(effects: Sequence[float], pairs: int, level: float) -> int | None:
    """Count the pairs still needed to find all effects at once with probability `POWER`; None if more than `MOST`.

    The probabilities of missing each effect are added up, so the result is a lower bound on the power.
    """

    def chance(pairs: int) -> float:
        return 1 - sum(1 - find_power(effect, pairs, level) for effect in effects)

    if chance(MOST) < POWER:
        return None
    return bisect_left(range(MOST), POWER, lo=pairs + 1, key=chance) - pairs  # power grows with the pairs


class ThresholdReached(NamedTuple):
    """The first evaluation at which a run reached a threshold, and the total cost up to that point.

    seconds: a stage's wall-clock time counts in proportion to its tokens; a checkpoint's is unknown and left out.
    """

    step: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    """One arm over its seeds. Differences are arm - baseline, paired by seed.

    runs: finished ones; mean, spread (standard deviation) and `reached` are theirs. diverged: seeds
        that cannot be averaged, including those whose last result is not finite.
    paired: None for the baseline, and where no seed is finished in both.
    reached: where each finished run reached the threshold; None for one that never did.
    flops_to_threshold: the logarithms of the FLOPs up to that point over the baseline's, for seeds in which both
        reached it.
    learning_rate: None if runs differ in it.
    """

    arm: str
    runs: int
    mean: float | None
    spread: float | None
    paired: PairedTest | None
    diverged: int
    parameters: int
    tokens: int
    flops: float
    tokens_per_second: float
    cache_bytes_per_token: int
    learning_rate: float | None
    reached: list[ThresholdReached | None] | None
    flops_to_threshold: PairedTest | None

    @property
    def steps_to_threshold(self) -> list[int | None] | None:
        return None if self.reached is None else [None if point is None else point.step for point in self.reached]

    @property
    def difference(self) -> float | None:
        return None if self.paired is None else self.paired.mean

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.paired is None else self.paired.interval

    def verdict(self, lower_is_better: bool) -> Verdict:
        """The verdict on the arm against the baseline, as docs/statistics.md defines them; "" for the baseline."""
        if self.diverged:
            return "diverged"
        if self.paired is None:
            return ""
        enough = len(self.paired.differences) > 1 if self.paired.margin is None else self.paired.looks
        if enough and _is_zero(self.paired.differences):
            return "identical"
        if self.paired.equivalent:
            return "equivalent"
        if not self.paired.is_significant:
            return "inconclusive"
        return "better" if (self.paired.mean < 0) == lower_is_better else "worse"


def summarize_arms(
    records: Sequence[RunRecord],
    baseline: str,
    threshold: float | Literal["baseline"] | None = None,
    budgets: Sequence[str] = (),
) -> list[Summary]:
    """Summarize each arm, in the order of first appearance, all tested together against the baseline.

    threshold: of the deciding metric; "baseline": what the baseline ends with, seed by seed.
    budgets: arms that are the baseline with other budgets, and are not tested.
    Uses finished and diverged records; of comparisons that add seeds until they are decided, only
    those up to the decision.
    """
    records = choose_decisive(records, baseline)
    finished = finished_runs(records)
    plan, base = plan_of(records), finished.get(baseline, {})
    compared = [arm for arm in finished if arm not in (baseline, *budgets)]
    if plan is not None:
        stands = find_standings(records, baseline, plan)
        tested = {arm: _summarize_standing(standing, plan) for arm, standing in stands.items()}
    else:
        differences = [_find_differences(finished[arm], base) for arm in compared]
        tested = dict(zip(compared, holm_tests(differences), strict=True))
    ends = {seed: run.result for seed, run in base.items()}
    reached: dict[str, dict[int, ThresholdReached | None]] = {}
    for arm, runs in finished.items():
        thresholds = {seed: ends.get(seed) if threshold == "baseline" else threshold for seed in runs}
        reached[arm] = {seed: _find_reached(run, thresholds[seed]) for seed, run in runs.items()}
    ratios = {arm: _log_ratios(reached[arm], reached.get(baseline, {})) for arm in compared}
    flops_to_threshold = judge_other_quantity(ratios, plan)
    return [
        _summarize_arm(
            arm,
            runs,
            finished[arm],
            paired=tested.get(arm),
            reached=None if threshold is None else [*reached[arm].values()],
            flops_to_threshold=flops_to_threshold.get(arm),
        )
        for arm, runs in _by_arm(records).items()
    ]


def _summarize_arm(arm: str, runs: Sequence[RunRecord], finished: Mapping[int, RunRecord], **tests: Any) -> Summary:
    """Summarize an arm's runs, of which `finished` count. tests: further fields of `Summary`."""
    results = np.array([run.result for run in finished.values()], dtype=float)
    rates = {run.recipe.get("training", {}).get("learning_rate") for run in runs}
    example = next(iter(finished.values()), runs[0])
    return Summary(
        arm=arm,
        runs=len(results),
        mean=float(results.mean()) if len(results) else None,
        spread=float(results.std(ddof=1)) if len(results) > 1 else None,
        diverged=sum(record.has_diverged for record in runs),
        parameters=example.parameters,
        tokens=example.tokens,
        flops=example.flops,
        tokens_per_second=float(np.median([run.tokens_per_second for run in finished.values() or [example]])),
        cache_bytes_per_token=example.cache_bytes_per_token,
        learning_rate=rates.pop() if len(rates) == 1 else None,
        **tests,
    )


def judge_other_quantity(samples: Mapping[str, Sequence[float]], plan: SeedPlan | None) -> dict[str, PairedTest | None]:
    """Test a quantity other than the compared one, by arm.

    With a plan, the number of seeds depends on the results: the interval is then the repeated one of the last look,
    which holds at any stopping point; None before the plan's first look.
    """
    if plan is None:
        return dict(zip(samples, holm_tests(list(samples.values())), strict=True))
    level, tests = LEVEL / len(plan.arms), dict.fromkeys(samples)
    for arm, sample in samples.items():
        if len(sample):
            sample_looks = take_looks(sample, level, plan.min_seeds, len(plan.seeds))
            mean, interval = float(np.mean(sample)), sample_looks[-1].interval if sample_looks else None
            tests[arm] = PairedTest(tuple(sample), mean, None, level, interval, None, None)
    return tests


def plan_of(records: Sequence[RunRecord]) -> SeedPlan | None:
    """Find how the comparison adds seeds until it is decided; None if its seeds are fixed."""
    plans = (record.experiment.seed_plan for record in records if record.experiment)
    return next(filter(None, plans), None)


def choose_decisive(records: Sequence[RunRecord], baseline: str) -> list[RunRecord]:
    """Choose the records that count: with a plan, an arm's up to its decision, and the baseline's up to the last.

    How many seeds are trained beyond a decision depends on the number of workers, and must not change any result.
    """
    plan = plan_of(records)
    if plan is None:
        return list(records)
    seeds = {arm: set(standing.seeds) for arm, standing in find_standings(records, baseline, plan).items()}
    of_baseline = set().union(*seeds.values())
    seeds[baseline] = of_baseline

    def counts(record: RunRecord) -> bool:
        of_arm = seeds.get(record.arm, of_baseline)  # arms with another budget use the baseline's seeds
        return record.seed in of_arm or not of_arm

    return list(filter(counts, records))


def find_standings(records: Sequence[RunRecord], baseline: str, plan: SeedPlan) -> dict[str, Standing]:
    """Find the state of each arm that is tested against the baseline."""
    results = {
        arm: {
            run.seed: None if run.has_diverged else run.result
            for run in runs
            if run.has_diverged or (run.status == "finished" and run.result is not None)
        }
        for arm, runs in _by_arm(records).items()
    }
    base = results.pop(baseline, {})
    return {arm: find_standing(plan, arm_results, base) for arm, arm_results in results.items() if arm in plan.arms}


def _by_arm(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    arms: dict[str, list[RunRecord]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


def _summarize_standing(standing: Standing, plan: SeedPlan) -> PairedTest | None:
    if not standing.differences:
        return None
    d, level, max_pairs = standing.differences, LEVEL / len(plan.arms), len(plan.seeds)
    mean = 0.0 if _is_zero(d) else float(np.mean(d))
    more_pairs = None
    if standing.looks and not standing.decided and not is_constant(d):
        # Significance in a fixed sample that is as strict as the last look, for the nearer of the verdicts.
        spread, critical = float(np.std(d, ddof=1)), critical_values(level, plan.min_seeds, max_pairs)[-1]
        strict = float(2 * special.stdtr(max_pairs - 1, -critical))
        apart = [abs(mean) / spread]
        within = [(plan.margin - side * mean) / spread for side in (1, -1)]
        likely = [apart, within] if min(within) > 0 else [apart]
        needed = [count_more_pairs(effects, len(d), strict) for effects in likely]
        more_pairs = min(filter(None, needed), default=None)
    interval = standing.looks[-1].interval if standing.looks else None
    return PairedTest(tuple(d), mean, None, level, interval, more_pairs, None, tuple(standing.looks), plan.margin)


def finished_runs(records: Sequence[RunRecord]) -> dict[str, dict[int, RunRecord]]:
    """List the runs that a mean can use, by arm and seed."""
    return {
        arm: {r.seed: r for r in runs if r.status == "finished" and r.result is not None and not r.has_diverged}
        for arm, runs in _by_arm(records).items()
    }


def _find_reached(run: RunRecord, threshold: float | None) -> ThresholdReached | None:
    point = None if threshold is None else _find_point(run, threshold)
    if point is None:
        return None
    flops = point.flops + (run.origin.flops if run.origin else 0.0)
    steps, tokens, seconds = 0, 0, 0.0
    for stage in run.stages or []:
        if steps + stage.steps >= point.step:
            share = (point.tokens - tokens) / stage.tokens
            return ThresholdReached(point.step, flops, seconds + stage.seconds * share)
        steps, tokens, seconds = steps + stage.steps, tokens + stage.tokens, seconds + stage.seconds
    return ThresholdReached(point.step, flops, run.seconds * point.tokens / run.tokens)


def _log_ratios(arm: dict[int, ThresholdReached | None], base: dict[int, ThresholdReached | None]) -> list[float]:
    """Compute log ratios of the FLOPs to the threshold, for the seeds in which both reach it."""
    pairs = ((arm[seed], base.get(seed)) for seed in sorted(arm))
    return [math.log(a.flops / b.flops) for a, b in pairs if a and b and a.flops and b.flops]


def compare_all_pairs(records: Sequence[RunRecord], arms: Sequence[str]) -> dict[tuple[str, str], PairedTest | None]:
    """Test all pairs of `arms` together: (first, second) -> first - second; None if they share no seed."""
    finished = finished_runs(records)
    pairs = list(combinations(arms, 2))
    return dict(zip(pairs, holm_tests([_find_differences(finished[a], finished[b]) for a, b in pairs]), strict=True))


def _find_differences(arm: dict[int, RunRecord], base: dict[int, RunRecord]) -> list[float]:
    """Subtract the results of `base` in the seeds that both have."""
    return [arm[seed].result - base[seed].result for seed in sorted(arm) if seed in base]  # type: ignore[operator]


def steps_to(record: RunRecord, threshold: float) -> int | None:
    """Find the step at which the deciding metric first reached the threshold; None if it never did."""
    point = _find_point(record, threshold)
    return None if point is None else point.step


def _find_point(record: RunRecord, threshold: float) -> HeldOutPoint | None:
    for point in record.held_out:
        value = point.metrics[record.metric]
        if (value <= threshold) if record.lower_is_better else (value >= threshold):
            return point
    return None
