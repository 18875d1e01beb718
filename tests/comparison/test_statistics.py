"""Statistics of comparisons, against loops, other libraries and simulation."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from saved import record
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from headwater_lab.comparison.equivalent_flops import measure_equivalent_flops
from headwater_lab.comparison.sequential import ROUNDING, take_looks
from headwater_lab.comparison.statistics import (
    PairedTest,
    _find_effect,
    count_more_pairs,
    find_power,
    holm_tests,
    is_constant,
    is_too_wide,
    judge_other_quantity,
    steps_to,
    summarize_arms,
)
from headwater_lab.reports.comparison import Comparison
from headwater_lab.reports.page import results_table
from headwater_lab.reports.words import cost_rows, equivalent_flops_rows, result_rows, state_answer, write_factor
from headwater_lab.training.records import Origin, SeedPlan, StageRecord


def of(arm, results, **changes):
    return [record(arm, seed, result, **changes) for seed, result in enumerate(results)]


def naive_holm(samples, level=0.05):
    """(p, whether found, interval) of each sample, one step after the other."""
    p = [stats.ttest_1samp(sample, 0.0).pvalue for sample in samples]
    left = list(range(len(samples)))
    answers = {}
    failed = None
    while left:
        smallest = min(left, key=lambda index: p[index])
        at = level / len(left) if failed is None else failed
        if p[smallest] > at:
            failed = at
        interval = stats.ttest_1samp(samples[smallest], 0.0).confidence_interval(1 - at)
        answers[smallest] = (p[smallest], failed is None, tuple(interval))
        left.remove(smallest)
    return [answers[index] for index in range(len(samples))]


def random_samples(random, ties):
    arms, seeds = random.integers(1, 8), random.integers(2, 9)
    samples = [list(random.normal(random.choice([0, 0.5, 2]), 1, seeds)) for _ in range(arms)]
    return samples + ([list(samples[0]), [-x for x in samples[-1]]] if ties else [])


@pytest.mark.parametrize("ties", [False, True])
def test_holm_is_the_loop_and_intervals_leave_out_0_just_where_it_finds(ties):
    random = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        samples = random_samples(random, ties)
        tests = holm_tests(samples)
        for test, (p, is_found, interval) in zip(tests, naive_holm(samples), strict=True):
            assert test.p == pytest.approx(p, rel=1e-9)
            assert test.is_significant == is_found
            low, high = test.interval
            assert (low > 0 or high < 0) == is_found
            assert test.more_pairs is None or not is_found
            if not ties:  # which of two equal ones comes first is open
                assert test.interval == pytest.approx(interval, rel=1e-9)
            found += is_found
    assert 20 < found < 230


def test_holm_is_that_of_statsmodels():
    random = np.random.default_rng(5)
    samples = [list(random.normal(shift, 1, 6)) for shift in (0, 0.5, 1, 1.5, 2, 3, 4)]
    tests = holm_tests(samples)
    rejected, *_ = multipletests([test.p for test in tests], method="holm")
    assert [test.is_significant for test in tests] == list(rejected)
    assert 0 < sum(rejected) < 7


def test_an_arm_that_fails_is_tested_at_the_level_it_failed_at():
    random = np.random.default_rng(1)
    clear, unclear = list(10 + random.normal(size=6)), list(random.normal(size=6))
    assert [test.level for test in holm_tests([unclear, clear, unclear])] == [0.025, 0.05 / 3, 0.025]
    assert [test.level for test in holm_tests([clear, clear])] == [0.025, 0.05]
    assert holm_tests([clear, [], [1.0]])[1] is None
    assert holm_tests([clear, [], [1.0]])[0].level == 0.05  # what cannot be tested takes no part


def test_no_difference_at_all_is_the_same():
    for base, other in (([3.0, 2.0], [3.0, 2.0]), ([0.3, 0.3, 1.0], [0.1 + 0.2, 0.3, 1.0])):
        summary = summarize_arms([*of("base", base), *of("other", other)], "base")[1]
        assert (summary.paired.p, summary.interval, summary.paired.more_pairs) == (1, (0, 0), None)
        assert summary.verdict(True) == summary.verdict(False) == "identical"


@pytest.mark.parametrize("seeds", range(2, 9))
def test_one_number_over_and_over_is_judged_by_its_signs(seeds):
    base = np.linspace(0.3, 2.1, seeds)
    paired = summarize_arms([*of("base", base), *of("other", base - 0.1)], "base")[1].paired
    assert len(set(paired.differences)) > 1 or seeds < 4  # subtraction rounds
    assert paired.p == pytest.approx(2.0 ** (1 - seeds))
    assert paired.detectable is None
    if paired.p > 0.05:
        assert paired.interval is None
        assert not paired.is_significant
    else:
        assert paired.interval == pytest.approx((-0.1, -0.1))
        assert paired.is_significant


def test_one_seed_and_no_shared_seed_leave_everything_open():
    one, none = (summarize_arms([record("base", 0, 3.0), record("other", seed, 2.0)], "base")[1] for seed in (0, 1))
    assert (one.difference, one.interval, one.paired.p, one.verdict(True)) == (-1, None, None, "inconclusive")
    assert (none.paired, none.verdict(True)) == (None, "")


def test_seeds_that_only_one_arm_has_are_not_paired():
    records = [record("base", 0, 3.0), record("base", 1, 2.0), record("other", 1, 1.5), record("other", 2, 9.0)]
    assert summarize_arms(records, "base")[1].paired.differences == (-0.5,)


def test_means_and_intervals_are_students():
    base, other = [3.0, 3.5, 2.5], [2.9, 3.3, 2.45]
    summary = summarize_arms([*of("base", base), *of("other", other)], "base")[1]
    differences = np.subtract(other, base)
    half = 4.302652729911275 * differences.std(ddof=1) / np.sqrt(3)  # t quantile 0.975 with 2 degrees of freedom
    assert summary.difference == pytest.approx(differences.mean())
    assert summary.interval == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert summary.mean == pytest.approx(np.mean(other))
    assert summary.spread == pytest.approx(np.std(other, ddof=1))
    assert summary.tokens_per_second == 500


@pytest.mark.parametrize(
    ("other", "lower", "verdict"),
    [
        ([2.0, 2.1, 1.9], True, "better"),
        ([2.0, 2.1, 1.9], False, "worse"),
        ([4.0, 4.1, 3.9], True, "worse"),
        ([2.0, 4.1, 3.0], True, "inconclusive"),
    ],
)
def test_a_verdict_needs_an_interval_without_zero(other, lower, verdict):
    base = [3.0, 3.05, 2.9]
    assert summarize_arms([*of("base", base), *of("other", other)], "base")[1].verdict(lower) == verdict


def test_arms_that_diverged():
    records = [
        *of("base", [3.0, 3.1, 2.9]),
        *of("fine", [2.0, 2.3, 2.0]),
        *of("lucky", [1.0, 1.2]),
        record("lucky", 2, float("nan"), status="diverged"),
        record("no number", 0, float("nan")),
        record("no number", 1, 2.0),
        record("never looked at", 0, None, status="diverged"),
    ]
    found = {summary.arm: summary for summary in summarize_arms(records, "base")}
    assert found["fine"].paired.level == 0.025  # beside "lucky" alone: the others have no two pairs
    assert found["fine"].verdict(True) == "better"
    lucky = found["lucky"]
    assert (lucky.runs, lucky.diverged, lucky.mean, lucky.verdict(True)) == (2, 1, pytest.approx(1.1), "diverged")
    assert (found["no number"].runs, found["no number"].diverged) == (1, 1)
    assert found["never looked at"].verdict(True) == "diverged"


def test_false_alarms_are_as_rare_as_stated():
    """Three arms that share one baseline, all of one model, 600 times: at most 5 % have any finding."""
    random = np.random.default_rng(2)
    alarms = 0
    for _ in range(600):
        base = random.normal(size=5)
        alarms += any(test.is_significant for test in holm_tests(list(random.normal(size=(3, 5)) - base)))
    assert stats.binomtest(alarms, 600).proportion_ci(0.99).low <= 0.05
    assert alarms > 6, "a test that never finds anything has no false alarms either"


@pytest.mark.parametrize(
    ("pairs", "effect", "level"), [(3, 3.0, 0.05), (5, 1.5, 0.05), (8, 1.2, 0.05 / 3), (2, 9, 0.05)]
)
def test_stated_power_is_what_simulation_finds(pairs, effect, level):
    samples = np.random.default_rng(3).normal(effect, 1, (4000, pairs))
    found = int((stats.ttest_1samp(samples, 0.0, axis=1).pvalue <= level).sum())
    interval = stats.binomtest(found, 4000).proportion_ci(0.99)
    assert interval.low <= find_power(effect, pairs, level) <= interval.high


def test_power_is_a_number_everywhere_and_that_of_statsmodels():
    for level in (0.05, 0.05 / 14, 0.05 / 100):
        for pairs in (2, 3, 5, 8, 20, 100, 10_000):
            powers = [find_power(effect, pairs, level) for effect in np.geomspace(1e-3, 1e3, 60)]
            assert np.isfinite(powers).all()
            assert (np.diff(powers) > -1e-9).all()
            assert find_power(0.0, pairs, level) == pytest.approx(level)
            assert find_power(_find_effect(pairs, level), pairs, level) == pytest.approx(0.8, abs=1e-4)
            if pairs <= 100:  # theirs is nan for more
                assert find_power(0.3, pairs, level) == pytest.approx(TTestPower().power(0.3, pairs, level), abs=1e-6)


@pytest.mark.parametrize("effect", [0.1, 0.4, 0.9])
def test_seeds_that_are_missing_are_the_fewest_that_would_do(effect):
    total = count_more_pairs([effect], 3, 0.05) + 3
    assert find_power(effect, total) >= 0.8 > find_power(effect, total - 1)
    assert count_more_pairs([0.0], 3, 0.05) is None
    assert count_more_pairs([0.01], 3, 0.05) is None


def test_what_could_have_been_found_is_said():
    random = np.random.default_rng(4)
    sample = list(random.normal(0.1, 1, 6))
    test = holm_tests([sample])[0]
    assert test.detectable == pytest.approx(np.std(sample, ddof=1) * _find_effect(6, 0.05))
    assert test.more_pairs == count_more_pairs([abs(np.mean(sample)) / np.std(sample, ddof=1)], 6, 0.05)


def test_the_best_look_has_the_least_loss_or_the_greatest_accuracy():
    for measure, step in (("bits_per_byte", 10), ("accuracy", 20)):
        assert record("a", 0, 0.5, curve=[0.2, 0.9], metric=measure).best.step == step


def test_costs_up_to_a_threshold_include_every_stage_and_are_compared_seed_by_seed():
    def staged(arm, seed, result, factor):
        run = record(arm, seed, result, curve=[3.0, 2.5, 2.4])
        looks = [look.model_copy(update={"flops": factor * look.tokens}) for look in run.held_out]
        shared = dict(parameters=9, steps=20, tokens=200, flops=1.0, total_tokens=1, total_flops=1.0, result=2.5)
        parts = [
            StageRecord(name="a", folder="stages/00-a", seconds=1.0, **shared),
            StageRecord(name="b", folder="stages/01-b", seconds=8.0, **shared),
        ]
        return run.model_copy(update={"held_out": looks, "stages": parts, "tokens": 400, "seconds": 9.0})

    origin = Origin(checkpoint="x", tokens=1, flops=700.0, history=[])
    changes = {"stages": [], "origin": origin}
    base = [staged("base", seed, 2.0, 1.0).model_copy(update=changes) for seed in (0, 1)]
    other = [staged("other", 0, 1.9, 2.0), staged("other", 1, 2.1, 2.0)]
    first, second = summarize_arms([*base, *other], "base", "baseline")
    assert first.reached == [(40, 1100.0, 9.0)] * 2
    assert second.reached == [(40, 800.0, 9.0), None], "each seed has the baseline's own end as its goal"
    assert second.steps_to_threshold == [40, None]
    assert second.flops_to_threshold.differences == (pytest.approx(math.log(800 / 1100)),)
    third = summarize_arms([*base, *other], "base", 2.4)[1]
    assert third.reached == [(30, 600.0, 1.0 + 8.0 / 2)] * 2, "half of the second stage"
    assert third.flops_to_threshold.mean == pytest.approx(math.log(600 / 1000))
    assert summarize_arms([*base, *other], "base")[1].reached is None


def test_steps_to_a_threshold():
    assert steps_to(record("a", 0, 0.999, curve=[0.2, 0.98, 0.991, 0.97], metric="accuracy"), 0.99) == 30
    assert steps_to(record("a", 0, 0.5, metric="accuracy"), 0.99) is None
    assert steps_to(record("a", 0, 1.0, curve=[3.0, float("nan"), 1.4]), 1.5) == 30


def paid(arm, seed, result, flops):
    run = record(arm, seed, result)
    return run.model_copy(update={"flops": flops})


def naive_worth(result, points):
    """By bisection on the line between two budgets."""
    for (f0, r0), (f1, r1) in pairwise(sorted(points)):
        if r1 <= result <= r0:
            low, high = math.log(f0), math.log(f1)
            for _ in range(100):
                middle = (low + high) / 2
                there = r0 + (r1 - r0) * (middle - math.log(f0)) / (math.log(f1) - math.log(f0))
                low, high = (middle, high) if there > result else (low, middle)
            return low
    raise AssertionError


def test_what_a_result_is_worth_in_flops_of_the_baseline():
    random = np.random.default_rng(3)
    budgets = {"less": 0.7e9, "base": 1e9, "more": 1.4e9}
    records, expected = [], []
    for seed in range(5):
        noise, power = random.normal(0, 0.1), random.uniform(0.05, 0.1)
        law = {arm: 9 * flops**-power + noise for arm, flops in budgets.items()}
        records += [paid(arm, seed, law[arm], flops) for arm, flops in budgets.items()]
        own = 9 * (1.2e9 * random.uniform(0.95, 1.05)) ** -power + noise
        records += [paid("saves", seed, own, 0.9e9)]
        expected.append(naive_worth(own, [(flops, law[arm]) for arm, flops in budgets.items()]) - math.log(0.9e9))
        records += [paid("bad", seed, law["less"] + 0.1, 1e9), paid("good", seed, law["more"] - 0.1, 1e9)]
    saves, bad, good = measure_equivalent_flops(records, "base", ["less", "more"])
    assert saves.factor.differences == pytest.approx(expected)
    assert saves.factor.is_significant
    assert 1.2 < math.exp(saves.factor.mean) < 1.45
    assert (saves.below, saves.above, saves.flops) == (0, 0, 0.9e9)
    assert (bad.below, bad.above, math.exp(bad.factor.mean)) == (5, 0, pytest.approx(0.7))
    assert (good.below, good.above, math.exp(good.factor.mean)) == (0, 5, pytest.approx(1.4))
    page = Comparison("made", "Made", "base", None, None, records, ["less", "more"])
    rows = equivalent_flops_rows(page)
    assert list(rows[0])[2] == "worth in FLOPs of base [98.33 %, Holm]"  # the others have bounds, not intervals
    factors = {name: factor for name, _, factor in map(dict.values, rows)}
    assert factors == {
        "saves": write_factor(saves.factor),
        "bad": "at most ×0.70",
        "good": "at least ×1.40",
    }
    assert equivalent_flops_rows(Comparison("made", "Made", "base", None, None, records)) == []
    # What is said of an arm that diverged is of the other seeds only.
    lost = [one.model_copy(update={"status": "diverged"}) if one.name == "saves-4" else one for one in records]
    page = Comparison("made", "Made", "base", 8.0, None, lost, ["less", "more"])
    (told,) = [[*row.values()][2] for row in equivalent_flops_rows(page) if row[""] == "saves"]
    assert told.endswith(", without 1 seed that diverged")
    dearer = [one.model_copy(update={"flops": 2 * one.flops}) if one.name == "bad-0" else one for one in lost]
    page = Comparison("made", "Made", "base", 8.0, None, dearer, ["less", "more"])
    assert {row[""]: [*row.values()][1] for row in cost_rows(page)}["saves"].endswith("of 5")
    tested = {one.arm: one.paired for one in summarize_arms(records, "base", None, ["less", "more"])}
    assert [arm for arm, paired in tested.items() if paired is None] == ["less", "base", "more"]


def test_beside_a_plan_intervals_hold_wherever_one_stops():
    plan = SeedPlan(seeds=list(range(10)), min_seeds=3, margin=0.1, arms=["arm", "few"], baseline="base")
    sample = [0.31, 0.28, 0.35, 0.3]
    found = judge_other_quantity({"arm": sample, "few": sample[:2], "none": []}, plan)
    assert found["arm"].interval == take_looks(sample, 0.025, 3, 10)[-1].interval
    fixed = holm_tests([sample])[0].interval
    assert found["arm"].interval[0] < fixed[0] < fixed[1] < found["arm"].interval[1]
    assert (found["few"].interval, found["few"].mean, found["none"]) == (None, pytest.approx(0.295), None)
    assert judge_other_quantity({"arm": sample}, None)["arm"] == holm_tests([sample])[0]


def test_worth_takes_accuracy_too_and_leaves_out_a_budget_that_is_no_better():
    def made(arm, seed, value, flops):
        return paid(arm, seed, value, flops).model_copy(update={"lower_is_better": False})

    records = [made("base", 0, 0.5, 100.0), made("same", 0, 0.45, 200.0), made("more", 0, 0.7, 400.0)]
    records += [made("arm", 0, 0.6, 100.0), made("arm", 1, 0.6, 100.0), made("base", 1, 0.5, 100.0)]
    (one,) = measure_equivalent_flops(records, "base", ["same", "more"])
    assert one.factor.differences == (pytest.approx(math.log(2.0)),), "seed 1 has no curve"


def test_differences_apart_by_more_than_rounding_are_not_constant():
    """Of numbers below 1, rounding is absolute; of larger ones, relative."""
    assert is_constant([0.25, 0.25 + 0.9 * ROUNDING])
    assert not is_constant([0.25, 0.25 + 1.5 * ROUNDING])
    assert is_constant([100.0, 100.0 + 90 * ROUNDING])
    assert not is_constant([100.0, 100.0 + 150 * ROUNDING])


@pytest.mark.parametrize(("effects", "distinct"), [([2.0], 1), ([0.0, 0.0], 1), ([2.0, 0.0], 2), ([2.0, 1.9, 0.0], 3)])
def test_the_table_names_the_level_of_each_interval(effects, distinct):
    random, seeds = np.random.default_rng(5), 4
    results = {
        f"arm {i}": [1 - effect + random.normal(0, 0.05) for _ in range(seeds)] for i, effect in enumerate(effects)
    }
    runs = [record(arm, seed, value) for arm, values in results.items() for seed, value in enumerate(values)]
    runs += [record("base", seed, 1.0) for seed in range(seeds)]
    page = Comparison("made", "Made", "base", None, None, runs)
    levels = set()
    for row in result_rows(page):
        (column,) = [name for name in row if name.startswith("minus base")]
        beside = [text for name, text in row.items() if name.startswith("level")]
        assert (", Holm" in " ".join(row)) == (len(effects) > 1)
        if row[""] == "base":
            assert beside in ([], [""])
            continue
        level = float((beside[0] if beside else re.search(r"\[(.*?) %", column)[1]).removesuffix(" %"))
        differences = np.array(results[row[""]]) - 1.0
        naive = stats.t.interval(level / 100, seeds - 1, differences.mean(), stats.sem(differences))
        printed = [float(end) for end in re.search(r"\[(.*), (.*)\]", row[column]).groups()]
        assert printed == pytest.approx(naive, abs=1e-3)
        levels.add(level)
    assert len(levels) == distinct
    assert results_table(page).columns == list(row)  # of the report
    assert levels <= {round(100 * (1 - 0.05 / m), 2) for m in range(1, len(effects) + 1)}


def test_an_interval_of_a_ratio_wider_than_ten_times_is_not_printed():
    def factor(low, high):
        return write_factor(PairedTest((0.0, 0.0), (low + high) / 2, 0.5, 0.05, (low, high), None, None))

    assert factor(math.log(0.5), math.log(4.9)) == "×1.57 [0.50, 4.90]"
    for low, high in ((math.log(0.5), math.log(5.1)), (-2000.0, 2000.0), (-2000.0, 1.0)):
        assert factor(low, high) == "inconclusive at these sizes"
    assert not is_too_wide((1.0, 10.0))
    assert is_too_wide((1.0, math.inf))
    assert is_too_wide((0.0, math.nan))
    assert not is_too_wide(None)


def test_a_verdict_from_two_seeds_carries_its_caution():
    for seeds, caution in ((2, True), (3, False)):
        runs = [record("base", seed, 1.0 + seed) for seed in range(seeds)]
        better = [record("good", seed, 0.5 + seed + 1e-4 * seed**2) for seed in range(seeds)]
        same = [record("good", seed, 1.0 + (1 if seed else -1) + seed) for seed in range(seeds)]
        for arm, verdict in ((better, "better"), (same, "inconclusive")):
            answer = state_answer(Comparison("made", "Made", "base", None, None, runs + arm))
            assert verdict in answer
            assert ("Caution: two seeds" in answer) == (caution and verdict == "better")


def test_small_differences_are_shown():
    noise = (1e-5, -1e-5, 2e-5)
    arm = [1.0 - 3e-4 + shift for shift in noise]
    comparison = Comparison("made", "Made", "base", None, None, of("base", [1.0] * 3) + of("arm", arm))
    low, high = comparison.summaries[1].interval
    cell = next(text for name, text in result_rows(comparison)[1].items() if name.startswith("minus base"))
    assert cell == f"-0.000293 [{low:.6f}, {high:.6f}]"
    assert f"better than base by 0.000293 {comparison.unit} (95 % interval 0.000" in state_answer(comparison)


def test_the_answer_names_what_diverged_or_failed():
    lost = record("base", 2, None, status="diverged")
    runs = [*of("base", [1.0, 1.1]), lost, *of("good", [0.5, 0.61, 0.5]), *of("wild", [0.5, 0.6])]
    runs.append(record("wild", 2, None, status="diverged"))
    answer = state_answer(Comparison("made", "Made", "base", None, None, runs))
    assert answer.startswith("good is better than base by")
    assert answer.endswith(" Diverged, and left out: base in 1 of 3 seeds and wild in 1 of 3 seeds.")
    answer = state_answer(
        Comparison("made", "Made", "base", None, None, [run for run in runs if run.experiment.arm != "good"])
    )
    assert answer.startswith("Nothing can be compared with base. Diverged, and left out: base in 1 of 3")


def test_a_threshold_that_the_first_look_reaches_is_reached():
    """Runs that begin with a trained model are measured before the first step."""
    runs = [*of("base", [3.0, 3.1]), *of("arm", [2.0, 2.1])]
    for run in runs:
        run.held_out.insert(0, run.held_out[0].model_copy(update={"step": 0}))
    rows = result_rows(Comparison("made", "Made", "base", 3.05, None, runs))
    assert [row["steps to 3.05"] for row in rows] == ["0, never", "0, 0"]
