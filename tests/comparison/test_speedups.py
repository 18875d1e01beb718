"""Ladders with known answers: predictions, projections and speedups, and the cells that say why there are none."""

import math

import numpy as np
import pytest
from saved import record
from scipy import stats

from headwater_lab.comparison.scaling import PINNED_E, fit_law, fit_scaling, group_sizes
from headwater_lab.comparison.speedup import PINNED_EXPONENT, measure_speedups
from headwater_lab.reports.words import prediction_rows, speedup_rows

DEPTHS = {"d3": 1.3e6, "d4": 3.1e6, "d6": 10.6e6, "d8": 25e6}
MARIN = (PINNED_E, 90.0, PINNED_EXPONENT)


def ladder(arms, law=MARIN, seeds=(0,), ratios=(20,), depths=DEPTHS, noise=0.0, drawn=0, **changes):
    """Records of a ladder; arms: name -> share of the baseline's compute for a loss, FLOPs and time per token over its.

    The loss is e + a/C^exponent of the FLOPs that the baseline would need.
    """
    random, (e, a, exponent), runs = np.random.default_rng(drawn), law, []
    for depth, n in depths.items():
        for ratio in ratios:
            for arm, (share, dearer, slower) in arms.items():
                for seed in seeds:
                    flops = 6 * n * ratio * n * dearer
                    loss = e + a * (flops / share) ** -exponent + random.normal(0, noise)
                    values = dict(parameters=int(n) + 500, embedding_parameters=500, tokens=int(ratio * n), flops=flops)
                    values |= dict(seconds=ratio * n * n * 1e-9 * slower, size=f"{depth} ×{ratio}") | changes
                    runs.append(record(arm, seed, loss / 3, **values))
                    runs[-1].held_out[-1].metrics["loss"] = loss
    return runs


BASE = (1.0, 1.0, 1.0)


@pytest.mark.parametrize("law", [MARIN, (2.0, 400.0, 0.17)])
def test_an_arm_that_needs_seven_tenths_of_the_compute(law):
    runs = ladder({"base": BASE, "arm": (0.7, 1.1, 1.25)}, law, seeds=(0, 1), ratios=(5, 20))
    found = measure_speedups(runs, "base")
    assert len(found) == 4 * 2 * 2
    for speedup in found:
        values = {measure: estimate.value for measure, estimate in speedup.values.items()}
        if speedup.constants == "fitted" or law is MARIN:
            expected = {"equal FLOPs": 1 / 0.7, "equal tokens": 1.1 / 0.7, "equal time": 1.1 / 0.7 / 1.25}
            expected["effective"] = 1 / 0.7 / 1.25  # marin's: (C needed / v of the baseline) / (C / v of the arm)
            assert values == pytest.approx(expected, rel=1e-3)
            assert speedup.values["effective"].interval == pytest.approx([values["effective"]] * 2, rel=1e-3)


def test_the_pinned_speedup_is_marin_s_program():
    """Its guide's example: losses 3.5422 and 3.52, 433,986 and 410,000 tokens/s, with one budget."""
    budget, runs = 3.82e17, []
    for arm, loss, speed in (("base", 3.5422, 433_986), ("arm", 3.52, 410_000)):
        runs.append(record(arm, 0, loss, metric="loss", size="d512", tokens=10**9, flops=budget, seconds=1e9 / speed))
        runs[-1].held_out[-1].metrics["bits_per_byte"] = loss / 3
    pinned, fitted = measure_speedups(runs, "base")
    a = (3.5422 - 1.6) * budget**0.0941
    needed = (a / (3.52 - 1.6)) ** (1 / 0.0941)
    effective = pinned.values["effective"]
    assert effective.value == pytest.approx((needed / 433_986) / (budget / 410_000))
    assert effective.interval is None
    assert fitted.missing == "needs 3 budgets"
    cells = [row[-1] for row in speedup_rows([pinned, fitted], ["d512"])]
    assert cells == ["needs 3 budgets"]
    assert speedup_rows([pinned], ["d512"])[0][-1] == f"×{effective.value:.2f}, one seed"


@pytest.mark.parametrize("constants", ["pinned", "fitted"])
def test_intervals_of_speedups_hold_the_truth(constants):
    hits, trials = 0, 60
    for drawn in range(trials):
        runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, seeds=range(4), noise=0.01, drawn=drawn)
        case = next(s for s in measure_speedups(runs, "base") if (s.size, s.constants) == ("d4 ×20", constants))
        low, high = case.values["effective"].interval
        hits += low <= 1 / 0.7 <= high
    assert stats.binomtest(hits, trials, 0.95).pvalue > 0.005


@pytest.mark.parametrize("pinned", [False, True])
def test_predictions_and_projections_hold_the_truth(pinned):
    inside, projected, trials = 0, 0, 60
    target = 1e21
    truth = MARIN[0] + MARIN[1] * target ** -MARIN[2]
    for drawn in range(trials):
        runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, seeds=range(4), noise=0.01, drawn=drawn)
        scaling = fit_scaling(runs, [target])
        check, projection = (p for p in scaling.predictions if (p.arm, p.pinned) == ("base", pinned))
        low, high = check.loss.interval
        inside += low <= check.measured <= high
        low, high = projection.loss.interval
        projected += low <= truth <= high
    assert stats.binomtest(inside, trials, 0.95).pvalue > 0.005
    assert stats.binomtest(projected, trials, 0.95).pvalue > 0.005


def test_laws_over_compute_are_found_and_projected():
    law = (2.0, 400.0, 0.17)
    scaling = fit_scaling(ladder({"base": BASE, "arm": (0.7, 1.1, 1.0)}, law, seeds=(0, 1)), [1e19])
    assert scaling.axis == "flops"
    assert (scaling.laws[0].e, scaling.laws[0].a, scaling.laws[0].exponent) == pytest.approx(law, rel=1e-3)
    assert [equal.extra.value for equal in scaling.equivalent_sizes] == pytest.approx([1 / 0.7 - 1] * 4, rel=1e-3)
    assert "more training FLOPs" in scaling.sentences()[0]
    by_arm = {p.arm: p for p in scaling.predictions if not p.pinned and p.measured is None}
    assert by_arm["base"].loss.value == pytest.approx(2.0 + 400.0 * 1e19**-0.17, rel=1e-4)
    assert by_arm["arm"].loss.value == pytest.approx(2.0 + 400.0 * (1e19 / 0.7) ** -0.17, rel=1e-4)
    checks = [p for p in scaling.predictions if not p.pinned and p.measured is not None]
    assert [p.loss.value for p in checks] == pytest.approx([p.measured for p in checks], rel=1e-4)
    assert [p.n for p in checks] == [max(n for n, _ in scaling.points[p.arm]) for p in checks]
    # A law of another form, which passes through fewer sizes, misses the largest.
    missed = [p for p in scaling.predictions if p.pinned and p.measured is not None]
    assert all(abs(p.loss.value - p.measured) > 0.005 for p in missed)


def test_a_pinned_fit_is_least_squares():
    n, loss = np.array([1.0, 4.0, 16.0, 64.0]), np.array([3.0, 2.6, 2.3, 2.05])
    e, log_a, exponent = fit_law(n, loss, 1.6)
    assert e == 1.6
    best = np.sum((1.6 + np.exp(log_a) * n**-exponent - loss) ** 2)
    for a, b in np.array(np.meshgrid(np.linspace(1.2, 1.6, 81), np.linspace(0.2, 0.4, 81))).reshape(2, -1).T:
        assert best <= np.sum((1.6 + a * n**-b - loss) ** 2) + 1e-12
    assert fit_law(n[:2], loss[:2], 1.6)[2] == pytest.approx(math.log(1.4 / 1.0) / math.log(4), rel=1e-6)


def test_the_sizes_of_a_ladder_are_grouped_by_budget_and_by_parameters():
    groups = dict(group_sizes(ladder({"base": BASE}, ratios=(5.01, 120.3))))
    assert groups["5 tokens per parameter"] == ["d3 ×5.01", "d4 ×5.01", "d6 ×5.01", "d8 ×5.01"]
    assert groups["120 tokens per parameter"] == ["d3 ×120.3", "d4 ×120.3", "d6 ×120.3", "d8 ×120.3"]
    assert groups["1,300,000 parameters"] == ["d3 ×5.01", "d3 ×120.3"]
    assert len(groups) == 6
    near = dict(group_sizes(ladder({"base": BASE}, ratios=(10, 10.9, 11.8))))  # each within a tenth of the one before
    assert [name for name in near if "tokens" in name] == ["11 tokens per parameter", "12 tokens per parameter"]
    # With three budgets of one size, the law is over tokens, and its speedups are fitted.
    budgets = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, ratios=(5, 10, 20), depths={"d3": 1.3e6})
    assert fit_scaling(budgets).axis == "tokens"
    fitted = [s for s in measure_speedups(budgets, "base") if s.constants == "fitted"]
    assert [s.values["equal FLOPs"].value for s in fitted] == pytest.approx([1 / 0.7] * 3, rel=1e-3)


def test_what_cannot_be_told_says_why():
    arms = {"base": BASE, "arm": (0.7, 1.0, 1.0)}

    def reasons(runs, **options):
        return {s.constants: s.missing for s in measure_speedups(runs, "base", **options) if s.size == "d3 ×20"}

    two = dict(list(DEPTHS.items())[:2])
    assert reasons(ladder(arms, depths=two)) == {"pinned": "", "fitted": "needs 3 budgets"}
    low = ladder(arms, (0.5, 12.0, 0.08))
    assert reasons(low) == {"pinned": "loss below 1.6", "fitted": ""}
    rows = prediction_rows(fit_scaling(low))
    assert {row["largest size, E = 1.6"] for row in rows} == {"loss below 1.6"}
    images = ladder(arms, unit="images")
    assert reasons(images)["pinned"] == "not in nats per token"
    apart = [run for run in ladder(arms, seeds=(0, 1)) if run.seed == (run.experiment.arm == "arm")]
    assert set(reasons(apart).values()) == {"no seed in common"}
    assert reasons(ladder(arms, (3.0, 1e-9, -0.4)))["fitted"] == "the baseline's losses do not fall"
    ends = ladder({"base": BASE, "arm": (1e-99, 1.0, 1.0)}, law=(2.0, 400.0, 0.17))
    for run in ends:
        if run.experiment.arm == "arm":
            run.held_out[-1].metrics |= {"loss": 1.9, "bits_per_byte": 1.9 / 3}
    assert reasons(ends)["fitted"] == "no baseline reaches its loss"
    noisy = measure_speedups(ladder(arms, seeds=(0, 1), noise=0.05, drawn=3), "base")
    assert "inconclusive with 2 seeds" in {row[2] for row in speedup_rows(noisy[::2], ["d3 ×20"])}


def test_a_run_that_diverged_at_once_ends_nothing():
    runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, seeds=(0, 1))
    expected = measure_speedups(runs, "base")
    assert measure_speedups([*runs, record("wild", 0, None, size="d3 ×20", status="diverged")], "base") == expected
    assert measure_speedups([record("wild", 0, None, status="diverged")], "base") == []
    lost = record("arm", 2, None, size="d3 ×20", status="diverged")
    assert {(s.size, s.missing) for s in measure_speedups([*runs, lost], "base") if not s.values} == {
        ("d3 ×20", "1 run diverged")
    }


def test_pinned_constants_are_for_subwords():
    runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)})
    for run in runs:
        end = run.held_out[-1].metrics
        end["bits_per_byte"] = end["loss"] / math.log(2) / 1.1
    speedups = measure_speedups(runs, "base")
    assert {s.missing for s in speedups if s.constants == "pinned"} == {"only 1.1 bytes a token"}
    assert {s.missing for s in speedups if s.constants == "fitted"} == {""}
    scaling = fit_scaling(runs, [1e21])
    assert not scaling.pinned_laws
    assert not any(prediction.pinned for prediction in scaling.predictions)
    for run in runs:
        run.metric = "loss"
        del run.held_out[-1].metrics["bits_per_byte"]
    assert {s.missing for s in measure_speedups(runs, "base") if s.constants == "pinned"} == {"not of text"}
    assert not fit_scaling(runs).pinned_laws


def test_a_speedup_beyond_the_trained_sizes_is_marked():
    runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, law=(2.0, 400.0, 0.17), seeds=(0, 1))
    fitted = [s for s in measure_speedups(runs, "base") if s.constants == "fitted"]
    assert {s.size: s.inside for s in fitted} == {"d3 ×20": True, "d4 ×20": True, "d6 ×20": True, "d8 ×20": False}
    (row,) = [row for row in speedup_rows(fitted, ["d6 ×20", "d8 ×20"]) if row[1] == "effective"]
    assert [cell.endswith(" *") for cell in row[2:]] == [False, True]


def test_sizes_of_equal_tokens_share_a_law_over_compute():
    arms = {"base": BASE, "arm": (0.7, 1.0, 1.0)}
    runs = [run for depth, n in DEPTHS.items() for run in ladder(arms, ratios=(2e7 / n,), depths={depth: n})]
    fitted = [s for s in measure_speedups(runs, "base") if s.constants == "fitted"]
    assert len({run.tokens for run in runs}) == 1
    assert [s.values["equal FLOPs"].value for s in fitted] == pytest.approx([1 / 0.7] * 4, rel=1e-3)


def test_what_one_seed_decides_is_inconclusive():
    """Without it, no compute reaches the arm's loss."""
    runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)}, law=(2.0, 400.0, 0.17), seeds=(0, 1, 2))
    for run in runs:
        if run.experiment.arm == "arm" and run.experiment.size == "d8 ×20":
            loss = {0: 2.5, 1: 1.7, 2: 1.7}[run.seed]
            run.held_out[-1].metrics |= {"loss": loss, "bits_per_byte": loss / 3}
    scaling = fit_scaling(runs)
    (equal,) = [equal for equal in scaling.equivalent_sizes if equal.size == "d8 ×20"]
    assert equal.extra.interval == (-1.0, math.inf)
    assert "a base with its loss are inconclusive" in scaling.sentences()[-1]
    assert scaling.seeds == 3


def test_times_of_different_machines_are_not_compared():
    runs = ladder({"base": BASE, "arm": (0.7, 1.0, 1.0)})
    for run in runs:
        if run.experiment.arm == "arm":
            run.environment.device_name = "another"
    first = measure_speedups(runs, "base")[0]
    assert list(first.values) == ["equal tokens", "equal FLOPs"]
    assert speedup_rows([first], [first.size])[0][-1] == "runs on different machines"
    timed = measure_speedups(runs, "base", {first.size: {"arm": 1.25}})[0]
    assert timed.values["effective"].value == pytest.approx(1 / 0.7 / 1.25, rel=1e-6)
