"""How often the verdicts are wrong: with records of trials that were never run, and simulated ones."""

import numpy as np
import pytest
from saved import record
from scipy import stats

from comparison.calibration import (
    SHAPES,
    Rate,
    find_planted_effect,
    main,
    make_dealer,
    measure_calibration,
    read_results,
)
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.statistics import find_power
from headwater_lab.training.records import Experiment, write_record


def pool(count=200, shift=4.0, seed=0):
    """Results with normal noise, each in its place: what is found then is the tests' doing, not the pool's."""
    scores = stats.norm.ppf((np.arange(count) + 0.5) / count)
    return list(np.random.default_rng(seed).permutation(shift + 0.1 * scores))


def between(rate, low=0.0, high=1.0):
    """Whether a rate may be in this range, by its interval of 99.9 %."""
    ends = stats.binomtest(rate.count, rate.total).proportion_ci(0.999)
    return ends.low <= high and low <= ends.high


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_false_alarms_and_power_of_fixed_seeds_are_as_stated(seeds):
    fixed, sequential = measure_calibration(make_dealer(pool()), 1, seeds, 500)
    assert sequential is None
    assert fixed.seeds == seeds
    assert between(fixed.false_alarms, 0.05, 0.05)
    assert between(fixed.power, 0.8, 0.8)
    assert find_power(find_planted_effect(1, seeds), seeds) == pytest.approx(0.8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "arms", "seeds"), [("normal", 1, 30), ("exponential", 3, 20), ("t, 3 degrees", 3, 12)]
)
def test_several_arms_and_looks_have_no_more_false_alarms(shape, arms, seeds):
    fixed, sequential = measure_calibration(SHAPES[shape], arms, seeds, 500)
    assert between(fixed.false_alarms, high=0.05)
    assert between(fixed.power, low=0.75)
    assert sequential.false_alarms.value > 0
    assert between(sequential.false_alarms, high=0.05)
    assert 0.4 < sequential.power.value < fixed.power.value
    assert 6 < sequential.seeds < seeds


@pytest.mark.slow
def test_what_is_counted_is_what_a_loop_over_scipys_test_counts():
    values = np.random.default_rng(0).normal(size=12)
    draws = []
    deal = make_dealer(values)
    fixed, _ = measure_calibration(lambda *size: draws.append(deal(*size)) or draws[-1], 1, 6, 200)
    differences = draws[0][:, 1] - draws[0][:, 0]
    assert fixed.false_alarms.count == sum(stats.ttest_1samp(d, 0).pvalue <= 0.05 for d in differences)
    planted = find_planted_effect(1, 6) * np.sqrt(2) * draws[0].std(ddof=1)
    hits = [stats.ttest_1samp(d + planted, 0) for d in differences]
    assert fixed.power.count == sum(t.pvalue <= 0.05 and t.statistic > 0 for t in hits)
    # All twelve trials are dealt out, each once.
    assert np.allclose(np.sort(draws[0].reshape(200, 12)), np.sort(values))
    assert len({tuple(d) for d in differences}) == 200


def test_the_same_seed_deals_the_same():
    assert measure_calibration(make_dealer(pool()), 2, 3, 50) == measure_calibration(make_dealer(pool()), 2, 3, 50)
    powers = [measure_calibration(make_dealer(pool()), 2, 3, 50, seed=seed)[0].power for seed in (0, 1)]
    assert powers[0] != powers[1]


def test_a_rate_has_its_binomial_interval():
    rate = Rate(40, 1000)
    low, high = rate.interval
    assert rate.value == 0.04
    assert stats.binom.sf(39, 1000, low) == pytest.approx(0.025)
    assert stats.binom.cdf(40, 1000, high) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("arms", "seeds", "message"),
    [
        (3, 6, "3 arms and a baseline with 6 seeds each take 24 trials of one arm, but there are only 20;"),
        (1, 11, "1 arm and a baseline with 11 seeds each take 22 trials"),
    ],
)
def test_too_few_trials_are_one_sentence(arms, seeds, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        measure_calibration(make_dealer(pool(20)), arms, seeds, 10)
    assert "\n" not in str(error.value)


def save(folder, arm, seed, result, name="e", **changes):
    one = record(arm, seed, result, **changes)
    one.experiment = Experiment(
        name=name, title="E", arm=arm, baseline="base", phase=changes.pop("phase", "comparison")
    )
    place = folder / name / f"{arm}-{seed}-{one.status}"
    place.mkdir(parents=True)
    write_record(one, place)


def test_results_are_those_of_one_arm_of_one_comparison(tmp_path):
    for seed in (2, 0, 1):
        save(tmp_path, "base", seed, 1.0 + seed)
        save(tmp_path, "base", seed, 9.0, name="other")
    save(tmp_path, "base", 3, 7.0, name="other")
    save(tmp_path, "few", 0, 5.0)
    for seed, (result, status) in enumerate([(1.0, "stopped"), (None, "diverged"), (float("nan"), "finished")], 10):
        save(tmp_path, "few", seed, result, status=status)
    assert read_results(tmp_path) == ("base", [9.0, 9.0, 9.0, 7.0])
    assert read_results(tmp_path / "e") == ("base", [1.0, 2.0, 3.0])
    with pytest.raises(HeadwaterError, match="no finished runs of a comparison"):
        read_results(tmp_path / "nowhere")


def test_the_script_prints_the_rates(tmp_path, capsys):
    for seed, result in enumerate(pool(20)):
        save(tmp_path, "base", seed, float(result))
    main(tmp_path, seeds=8, comparisons=50)
    out = capsys.readouterr().out
    assert "20 trials of 'base'" in out
    for measured in measure_calibration(make_dealer(pool(20)), 1, 8, 50):
        for rate in (measured.false_alarms, measured.power):
            assert "{:.4f} ({:.4f} – {:.4f})".format(rate.value, *rate.interval) in out
