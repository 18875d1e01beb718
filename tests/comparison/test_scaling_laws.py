"""Scaling laws: known ones are found again, inverted exactly, and their intervals hold what they should."""

from types import MappingProxyType

import numpy as np
import pytest
from saved import record
from scipy import stats
from scipy.optimize import curve_fit

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.scaling import (
    EquivalentSize,
    Estimate,
    Scaling,
    evaluate_law,
    fit_law,
    fit_scaling,
    invert_law,
)

SIZES = {"S": 1e5, "M": 4e5, "L": 1.6e6, "XL": 6.4e6}


def law(n, e, a, exponent):
    return e + a * n**-exponent


def runs(losses, seeds=(0,), sizes=SIZES, axis="parameters", more=(), tokens=MappingProxyType({}), **changes):
    """Records of arms; losses: arm -> function of N (and seed); tokens: arm -> nats a token over bits a byte."""
    made = []
    for arm, loss in losses.items():
        for size, n in sizes.items():
            for seed in seeds:
                at = (
                    {"parameters": int(n) + 500, "embedding_parameters": 500}
                    if axis == "parameters"
                    else {"tokens": int(n)}
                )
                one = record(arm, seed, 1.0, size=size, **at, **changes)
                nats = float(loss(n, seed))
                one.held_out[-1].metrics |= {"loss": nats, "bits_per_byte": nats / tokens.get(arm, 3.0)} | dict(more)
                made.append(one)
    return made


@pytest.mark.parametrize("axis", ["parameters", "tokens"])
def test_a_law_without_noise_is_found_and_inverted(axis):
    true = (1.5, 40.0, 0.3)
    losses = {"base": lambda n, _: law(n, *true), "other": lambda n, _: law(1.1 * n, *true)}
    found = fit_scaling(runs(losses, axis=axis))
    assert found.axis == axis
    assert found.metric == "loss"
    for one in found.laws[:1]:
        assert (one.e, one.a, one.exponent) == pytest.approx(true, rel=1e-4, abs=1e-9)
        assert one.error < 1e-6
    assert [one.extra.value for one in found.equivalent_sizes] == pytest.approx([0.1] * 4, abs=1e-4)
    assert [one.inside for one in found.equivalent_sizes] == [True, True, True, False]
    what = "parameters (embeddings aside)" if axis == "parameters" else "training tokens"
    assert found.sentences()[0] == f"other, S: equals a base with 10.0% more {what}."
    assert found.sentences()[-1].endswith("beyond the sizes trained.")


def test_for_an_arm_that_sees_fewer_tokens_in_the_same_time_it_is_how_much_longer():
    true = (1.5, 40.0, 0.3)
    shorter = {size: 0.75 * n for size, n in SIZES.items()}
    made = runs({"base": lambda n, _: law(n, *true)}, axis="tokens")
    made += runs({"other": lambda n, _: law(1.5 * n, *true)}, sizes=shorter, axis="tokens")
    found = fit_scaling(made).equivalent_sizes
    assert [one.extra.value for one in found] == pytest.approx([0.75 * 1.5 - 1] * 4, abs=1e-4)


def test_the_fit_is_at_least_as_good_as_a_general_one():
    random = np.random.default_rng(0)
    n = np.array(list(SIZES.values()))
    for _ in range(10):
        loss = law(n, 1.5, 40.0, 0.3) + random.normal(0, 0.01, 4)
        start = (1.5, np.log(40.0), 0.3)
        theirs, _ = curve_fit(lambda n, e, a, b: e + np.exp(a - b * np.log(n)), n, loss, p0=start, maxfev=20_000)
        ours = fit_law(n, loss)
        if theirs[0] > 0 and 1e-3 < theirs[2] < 4:
            assert np.sum((evaluate_law(ours, n) - loss) ** 2) <= np.sum((evaluate_law(theirs, n) - loss) ** 2) * (
                1 + 1e-6
            )
            assert ours == pytest.approx(theirs, rel=1e-3)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """50 laws with noise: "equals a baseline with 25 % more"."""
    random = np.random.default_rng(1)
    true = (1.5, 40.0, 0.3)
    hits = 0
    for _ in range(50):
        noisy = {
            arm: lambda n, _, factor=factor: law(factor * n, *true) + random.normal(0, 0.005)
            for arm, factor in (("base", 1.0), ("other", 1.25))
        }
        found = fit_scaling(runs(noisy, seeds=range(4)))
        low, high = found.equivalent_sizes[1].extra.interval
        hits += low <= 0.25 <= high
    assert stats.binomtest(hits, 50, 0.95).pvalue > 0.005


def test_the_jackknife_is_that_of_the_equation():
    random = np.random.default_rng(2)
    noise = {(arm, n, seed): random.normal(0, 0.01) for arm in "bo" for n in SIZES.values() for seed in range(3)}
    losses = {
        arm: lambda n, seed, arm=arm: law(n, 1.5, 40.0, 0.3) + noise[arm[0], n, seed] - 0.01 * (arm == "other")
        for arm in ("base", "other")
    }
    found = fit_scaling(runs(losses, seeds=range(3))).equivalent_sizes[0]

    def needed(seeds):
        base, other = (np.array([np.mean([losses[a](n, s) for s in seeds]) for n in SIZES.values()]) for a in losses)
        return np.log(invert_law(fit_law(np.array(list(SIZES.values())), base), other[0]) / SIZES["S"])

    parts = [needed([s for s in range(3) if s != left]) for left in range(3)]
    half = stats.t.ppf(0.975, 2) * np.sqrt(2 / 3 * np.sum((parts - np.mean(parts)) ** 2))
    middle = needed(range(3))
    assert found.extra.value == pytest.approx(np.exp(middle) - 1, rel=1e-6)
    assert found.extra.interval == pytest.approx((np.exp(middle - half) - 1, np.exp(middle + half) - 1), rel=1e-4)


def test_a_loss_below_all_of_the_law_is_infinitely_far():
    losses = {"base": lambda n, _: law(n, 1.5, 40.0, 0.3), "other": lambda n, _: 1.2 - 1e-8 * n}
    found = fit_scaling(runs(losses, seeds=(0, 1)))
    assert all(
        one.extra.value == np.inf and one.extra.interval is None and not one.inside for one in found.equivalent_sizes
    )
    assert found.sentences()[0] == "other, S: no base of any size reaches its loss, by the fitted law."


def test_a_baseline_that_does_not_fall_equals_nothing():
    losses = {"base": lambda n, _: 1.0 + 1e-8 * n, "other": lambda n, _: law(n, 1.5, 40.0, 0.3)}
    found = fit_scaling(runs(losses, seeds=(0, 1)))
    assert found.laws[0].a == 0
    assert found.laws[0].e == pytest.approx(np.mean([1.0 + 1e-8 * n for n in SIZES.values()]))
    assert "do not fall" in found.sentences()[0]


def test_what_is_missing_is_left_out():
    losses = {arm: lambda n, _: law(n, 1.5, 40.0, 0.3) for arm in ("base", "whole", "lacks", "broken", "wild")}
    made = runs(losses, seeds=(0, 1))
    made = [one for one in made if (one.experiment.arm, one.experiment.size) != ("lacks", "M")]
    for one in made:
        if (one.experiment.arm, one.experiment.size) == ("broken", "L"):
            one.held_out[-1].metrics["loss"] = float("nan")
        if (one.experiment.arm, one.experiment.size, one.seed) == ("whole", "S", 1):
            one.status = "failed"
        if (one.experiment.arm, one.experiment.size, one.seed) == ("wild", "S", 1):
            one.status = "diverged"
    found = fit_scaling(made)
    assert list(found.points) == ["base", "whole"]
    assert found.sentences()[-1] == "wild has no law, because a run diverged."
    assert found.equivalent_sizes[0].extra.interval is None  # one seed is left that all have
    assert fit_scaling([one for one in made if one.experiment.arm != "base"]) is None
    assert fit_scaling([]) is None
    made[0].status = "diverged"
    with pytest.raises(HeadwaterError, match="a run of the baseline diverged"):
        fit_scaling(made)
    made[0].status = "finished"
    # A size that the baseline lacks is none.
    without = [one for one in made if (one.experiment.arm, one.experiment.size) != ("base", "XL")]
    assert [len(points) for points in fit_scaling(without).points.values()] == [3, 3]


def test_two_sizes_are_too_few_for_three_constants():
    losses = {"base": lambda n, _: law(n, 1.5, 40.0, 0.3), "other": lambda n, _: law(n, 1.5, 39.0, 0.3)}
    two = {"S": 1e5, "M": 4e5}
    assert fit_scaling(runs(losses, sizes=two)) is None
    with pytest.raises(HeadwaterError, match="3 sizes with different parameters, but these have 2"):
        fit_scaling(runs(losses, sizes={"S": 1e5, "M": 4e5, "M again": 4e5}))


def test_losses_of_other_tokens_are_not_compared():
    """By token `other` looks better, having shorter ones; by byte it is what a tenth fewer parameters give."""
    losses = {"base": lambda n, _: law(n, 3.0, 80.0, 0.3), "other": lambda n, _: law(0.9 * n, 3.0, 80.0, 0.3) / 2}
    found = fit_scaling(runs(losses, tokens={"base": 2.0, "other": 1.0}))
    assert found.metric == "bits_per_byte"
    assert [one.extra.value for one in found.equivalent_sizes] == pytest.approx([-0.1] * 4, abs=1e-4)
    assert found.laws[0].e == pytest.approx(1.5, rel=1e-4)
    same = fit_scaling(runs(losses))
    assert same.metric == "loss"
    assert all(one.extra.value == np.inf for one in same.equivalent_sizes)


def test_a_constant_at_its_bound():
    losses = {"base": lambda n, seed: law(n, 0.0, 8.0 + 0.01 * seed, 0.07) - 1e-7 * np.sqrt(n)}
    found = fit_scaling(runs(losses, seeds=(0, 1, 2))).laws[0]
    assert found.e == 0.0


def test_the_law_is_of_the_domain_that_decides():
    losses = {"base": lambda n, _: law(n, 1.5, 40.0, 0.3), "other": lambda n, _: law(n, 1.5, 39.0, 0.3)}
    # The mean of the domains has no one ratio of bits to nats; each domain has.
    parts = {"loss/a": 2.0, "bits_per_byte/a": 1.0, "loss/b": 3.0, "bits_per_byte/b": 2.0}
    made = runs(losses, more=parts.items(), tokens={"other": 4.0})
    assert fit_scaling(made).metric == "loss"
    for one in made:
        one.held_out[-1].metrics["loss/b"] = one.held_out[-1].metrics["loss"]
        one.held_out[-1].metrics["bits_per_byte/b"] = one.held_out[-1].metrics["loss"] / 3
    by_b = [one.model_copy(update={"metric": "bits_per_byte/b"}) for one in made]
    assert fit_scaling(by_b).metric == "loss/b"
    made[0].held_out[-1].metrics["bits_per_byte/a"] = 1.1  # another tokenizer, which only this domain shows
    assert fit_scaling(made).metric == "bits_per_byte"


def test_tasks_are_judged_by_their_loss_or_refused():
    losses = {"base": lambda n, _: law(n, 1.5, 40.0, 0.3), "other": lambda n, _: law(n, 1.5, 39.0, 0.3)}
    found = fit_scaling(runs(losses, metric="accuracy"))
    assert found.metric == "loss"
    assert found.points["base"][0][1] == pytest.approx(law(1e5, 1.5, 40.0, 0.3))
    made = runs(losses, metric="accuracy")
    for one in made:
        del one.held_out[-1].metrics["loss"]
    with pytest.raises(HeadwaterError, match="A scaling law needs losses"):
        fit_scaling(made)
    same = runs(losses, sizes={"S": 1e5, "M": 1e5, "L": 1e5})
    with pytest.raises(HeadwaterError, match="differ neither in parameters nor in tokens"):
        fit_scaling(same)


def test_a_size_that_is_known_to_a_factor_of_ten_at_best_is_inconclusive():
    def say(low, high):
        more = Estimate(0.5, (low, high), 1.0, 2)
        return Scaling("parameters", "loss", "base", {}, [], [EquivalentSize("b", "S", more, True)]).sentences()[0]

    assert say(-0.5, 4.0) == "b, S: equals a base with 50.0% more parameters (embeddings aside) [-50.0%, +400.0%]."
    for ends in ((-1.0, 83426666692.5), (-0.5, 4.1), (-1.0, float("inf"))):
        assert (
            say(*ends)
            == "b, S: the parameters (embeddings aside) of a base with its loss are inconclusive at these sizes."
        )
