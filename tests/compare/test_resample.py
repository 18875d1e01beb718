"""How often the statistics are wrong, found by resampling: with records of trials that were never run."""

import numpy as np
import pytest
from saved import record
from scipy import stats

from headwater.compare.resample import Rate, calibrate, results_of
from headwater.compare.statistics import power
from headwater.errors import HeadwaterError
from headwater.records import Experiment, write_record


def pool(count=200, shift=4.0, seed=0):
    """Results with normal noise, each in its place: what is found then is the tests' doing, not the pool's."""
    scores = stats.norm.ppf((np.arange(count) + 0.5) / count)
    return list(np.random.default_rng(seed).permutation(shift + 0.1 * scores))


def within(rate):
    low, high = stats.binomtest(rate.found, rate.tried).proportion_ci(0.999)
    return low <= rate.stated <= high


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_false_alarms_and_power_are_as_stated(seeds):
    found = calibrate(pool(), 1, seeds, 500)
    assert within(found.false_alarms)
    assert within(found.power)
    assert found.power.stated == pytest.approx(0.8, abs=1e-6)
    assert found.spread == pytest.approx(np.sqrt(2) * np.std(pool(), ddof=1))
    assert found.power.stated == pytest.approx(power(found.planted / found.spread, seeds))


@pytest.mark.slow
def test_several_arms_have_no_more_false_alarms_and_no_less_power():
    found = calibrate(pool(), 3, 5, 500)
    low, high = stats.binomtest(found.false_alarms.found, 500).proportion_ci(0.999)
    assert high > 0.02
    assert low <= 0.05
    assert found.power.stated == pytest.approx(power(found.planted / found.spread, 5, 0.05 / 3))
    assert stats.binomtest(found.power.found, 500).proportion_ci(0.999).high >= found.power.stated
    # Uncorrected there would be two to three times as many.
    single = 1 - (1 - found.false_alarms.value) ** (1 / 3)
    assert single < 0.03


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("planted", [0.1, -0.1, 0.3])
def test_a_planted_difference_is_found_with_the_stated_chance_in_either_direction(planted):
    found = calibrate(pool(), 1, 5, 500, planted)
    assert found.planted == planted
    assert found.power.stated == pytest.approx(power(abs(planted) / found.spread, 5))
    # What is found on the wrong side is in the stated power and does not count: next to none here.
    assert within(found.power)


@pytest.mark.slow
def test_what_is_counted_is_what_a_loop_over_scipys_test_counts(monkeypatch):
    dealt = []
    values = pool(12)
    tests = calibrate.__globals__["holm_tests"]
    monkeypatch.setitem(calibrate.__globals__, "holm_tests", lambda d: dealt.append(np.array(d)) or tests(d))
    found = calibrate(values, 1, 6, 200, 0.1)
    plain, with_difference = dealt[::2], dealt[1::2]
    assert found.false_alarms.found == sum(stats.ttest_1samp(d[0], 0).pvalue <= 0.05 for d in plain)
    hits = [stats.ttest_1samp(d[0], 0) for d in with_difference]
    assert found.power.found == sum(t.pvalue <= 0.05 and t.statistic > 0 for t in hits)
    # All twelve trials are dealt out, each once: the sum of the two halves is the sum of all.
    for differences in plain:
        assert differences.shape == (1, 6)
        assert abs(differences.sum()) <= 2 * np.abs(np.array(values) - np.mean(values)).sum()
    assert len({tuple(d[0]) for d in plain}) == 200


@pytest.mark.slow
def test_the_same_seed_deals_the_same():
    assert calibrate(pool(), 2, 3, 50) == calibrate(pool(), 2, 3, 50)
    assert calibrate(pool(), 2, 3, 50, seed=1).power != calibrate(pool(), 2, 3, 50).power


def test_arms_that_are_all_one_number_never_alarm():
    found = calibrate([3.5] * 20, 1, 8, 100)
    assert (found.false_alarms.found, found.spread, found.planted, found.power.found) == (0, 0, 0, 0)
    # A planted one is judged by its signs: six seeds are needed.
    for seeds, share in ((5, 0), (6, 1)):
        rate = calibrate([3.5] * 20, 1, seeds, 20, 0.1).power
        assert (rate.value, rate.stated) == (share, share)


def test_a_rate_has_its_binomial_interval():
    rate = Rate(40, 1000, 0.05)
    low, high = rate.interval
    assert rate.value == 0.04
    assert stats.binom.sf(39, 1000, low) == pytest.approx(0.025)
    assert stats.binom.cdf(40, 1000, high) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(arms=3, seeds=6),
            "3 arms and a baseline with 6 seeds each take 24 trials of one arm, but there are only 20;",
        ),
        (dict(seeds=11), "1 arm and a baseline with 11 seeds each take 22 trials"),
        (dict(seeds=1), "at least two seeds"),
        (dict(resamples=0), "one resample"),
        (dict(planted=0.0), "A difference of 0.0 cannot be detected"),
        (dict(planted=float("nan")), "A difference of nan cannot be detected"),
    ],
)
def test_what_cannot_be_resampled_is_one_sentence(arguments, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        calibrate(pool(20), **arguments)
    assert "\n" not in str(error.value)
    assert calibrate(pool(24), 3, 6, 1).resamples == 1


def save(folder, arm, seed, result, name="e", **changes):
    one = record(arm, seed, result, **changes)
    one.experiment = Experiment(name=name, title="E", arm=arm, baseline="base", part=changes.pop("part", "comparison"))
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
    assert results_of(tmp_path) == ("base", [9.0, 9.0, 9.0, 7.0])
    assert results_of(tmp_path / "e") == ("base", [1.0, 2.0, 3.0])
    with pytest.raises(HeadwaterError, match="no finished runs of a comparison"):
        results_of(tmp_path / "nowhere")


@pytest.mark.slow
def test_the_command_prints_both_rates_and_refuses_in_one_sentence(run, tmp_path):
    for seed, result in enumerate(pool(20)):
        save(tmp_path, "base", seed, float(result))
    code, out, _ = run("bench", "verdicts", tmp_path, "--seeds", 4, "--resamples", 300)
    expected = calibrate(pool(20), 1, 4, 300)
    assert code == 0
    assert "20 trials of 'base', resampled to 2 arms of 4 seeds, 300 times" in out
    for rate in (expected.false_alarms, expected.power):
        assert f"{rate.value:.4f}" in out
        assert "{:.4f} – {:.4f}".format(*rate.interval) in out
    code, _, err = run("bench", "verdicts", tmp_path, "--arms", 3, "--seeds", 8)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("headwater: 3 arms and a baseline")


@pytest.mark.parametrize("option", ["--arms", "--seeds"])
def test_options_of_a_folder_are_refused_without_one(run, option):
    code, _, err = run("bench", "verdicts", option, "5")
    assert (code, f"{option} has no effect without a comparison's folder" in " ".join(err.split())) == (2, True)
