"""Learning rates that are tuned, and arms that are given up: with real runs of tiny models, in this process."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from saved import DIVERGES, SHIFT, Here, changed_times, record, tiny

import headwater.compare as comparing
from headwater.compare import compare, tuning
from headwater.compare.pool import Outcome
from headwater.compare.statistics import summarize
from headwater.compare.trials import trials_of
from headwater.compare.tuning import best_rates, found_rate, run_halving, tuning_trials
from headwater.errors import HeadwaterError, Interrupted
from headwater.papers.places import SizedArm, finished
from headwater.recipe import Halving
from headwater.records import read_record
from headwater.training.loop import train


@pytest.fixture
def here(monkeypatch):
    """Trials run in this process."""
    runs = Here()
    monkeypatch.setattr(comparing, "run_trials", runs)
    monkeypatch.setattr(tuning, "run_trials", runs)
    return runs


RATES = {"learning_rates": [1e30, 1e-5, 1e-2], "tuning_seeds": [7, 8]}


@pytest.mark.slow
def test_the_best_mean_over_the_tuning_seeds_is_the_arms_rate(here, tmp_path):
    made = tiny({"arms": {"base": {}, "shift": SHIFT}} | RATES)
    outcomes = compare(made, tmp_path)
    tries = tuning_trials(made, tmp_path)
    assert len(tries) == 2 * 2 * 3
    for arm in ("base", "shift"):
        means = {}
        for rate in made.compare.learning_rates:
            records = [
                read_record(t.folder)
                for t in tries
                if (t.experiment.arm, t.recipe.training.learning_rate) == (arm, rate)
            ]
            assert all(one.experiment.part == "tuning" for one in records)
            if rate == 1e30:
                assert all(one.status == "diverged" and "diverged" in one.error for one in records)
            else:
                assert {one.seed for one in records} == {7, 8}
                means[rate] = np.mean([one.result for one in records])
        final = [o.record for o in outcomes if o.record.experiment.arm == arm]
        assert [one.seed for one in final] == [0, 1]
        assert {one.recipe["training"]["learning_rate"] for one in final} == {max(means, key=lambda rate: means[rate])}
        assert {(one.status, one.experiment.part) for one in final} == {("finished", "comparison")}
        assert found_rate(made, arm, tmp_path) == final[0].recipe["training"]["learning_rate"]
        assert finished(SizedArm(made, Path("recipe.yaml"), arm), tmp_path).keys() == {0, 1}
        # A rate that was not tried yet may be better: the runs may have to be repeated.
        wider = tiny({"arms": {"base": {}, "shift": SHIFT}} | RATES | {"learning_rates": [1e-5, 1e-2, 2e-2]})
        assert found_rate(wider, arm, tmp_path) is None
        assert not finished(SizedArm(wider, Path("recipe.yaml"), arm), tmp_path)
    # Again: nothing is trained, what diverged neither.
    here.trained.clear()
    before = changed_times(tmp_path)
    assert [o.record for o in compare(made, tmp_path)] == [o.record for o in outcomes]
    assert here.trained == []
    assert changed_times(tmp_path) == before
    assert {path.parent for path in before} >= {job.folder for job in comparing.jobs_of(made, tmp_path)[4:]}


def outcome(trial, result, status="finished"):
    return Outcome("x", record("x", 0, result, measure="accuracy", status=status))


def test_a_rate_is_judged_by_its_mean_and_ties_go_to_the_smaller(tmp_path):
    made = tiny({"learning_rates": [3e-2, 1e-2, 1e-3], "tuning_seeds": [7, 8]})
    tries = tuning_trials(made, tmp_path)
    results = {(3e-2, 7): 0.9, (3e-2, 8): 0.1, (1e-2, 7): 0.5, (1e-2, 8): 0.75, (1e-3, 7): 0.75, (1e-3, 8): 0.5}
    by_trial = [outcome(t, results[t.recipe.training.learning_rate, t.recipe.seed]) for t in tries]
    assert best_rates(tries, by_trial) == {"base": 1e-3}
    # One seed that diverged is enough to rule a rate out, and a result that is no number is as bad.
    for worst in (outcome(None, None, "diverged"), outcome(None, math.nan)):
        broken = [worst if t.recipe.training.learning_rate < 3e-2 and t.recipe.seed == 7 else o
                  for t, o in zip(tries, by_trial, strict=True)]  # fmt: skip
        assert best_rates(tries, broken) == {"base": 3e-2}
        with pytest.raises(HeadwaterError, match="'base' diverged at every learning rate tried; add smaller ones"):
            best_rates(tries, [worst if t.recipe.seed == 7 else o for t, o in zip(tries, by_trial, strict=True)])
    with pytest.raises(HeadwaterError, match=r"Tuning .* needs every trial, but base · seed 7 failed: why"):
        best_rates(tries, [Outcome("base · seed 7", None, "why"), *by_trial[1:]])


def test_with_a_threshold_the_rate_with_the_fewest_steps_to_it_wins(tmp_path):
    made = tiny({"learning_rates": [1e-3, 1e-2, 3e-2], "tuning_seeds": [7, 8], "threshold": 0.9})
    tries = tuning_trials(made, tmp_path)

    def best(of, threshold=0.9):
        seen = [of[t.recipe.training.learning_rate, t.recipe.seed] for t in tries]
        given = [Outcome("x", record("x", 0, end, curve, measure="accuracy")) for *curve, end in seen]
        asked = [replace(t, experiment=t.experiment.model_copy(update={"threshold": threshold})) for t in tries]
        return best_rates(asked, given)["base"]

    # Steps 20 + 20, 10 + 30 (never: all of them), 10 + 20; the end alone would choose 1e-3.
    curves = {(1e-3, 7): (0.1, 0.9, 1.0), (1e-3, 8): (0.2, 0.95, 1.0), (1e-2, 7): (0.9, 0.9, 0.9),
              (1e-2, 8): (0.1, 0.2, 0.3), (3e-2, 7): (0.9, 0.8, 0.9), (3e-2, 8): (0.1, 0.9, 0.9)}  # fmt: skip
    assert best(curves) == 3e-2
    assert best(curves, None) == best(curves, "baseline") == 1e-3
    # As many steps, or none that gets there: the end decides, and then the smaller rate.
    assert best({at: (0.9, 0.9, 0.9 + at[0]) for at in curves}) == 3e-2
    assert best(dict.fromkeys(curves, (0.1, 0.2, 0.3))) == 1e-3
    # The fastest is of no use if its run with another seed diverged.
    assert best(curves | {(3e-2, 8): (0.95, 0.95, math.nan)}) == 1e-3


def test_an_arm_that_diverges_everywhere_is_one_sentence(here, tmp_path):
    with pytest.raises(HeadwaterError, match="'base' diverged at every learning rate tried") as error:
        compare(tiny({"learning_rates": [1e30, 1e31]}), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow  # as `test_halving_that_was_stopped_goes_on`, before the comparison
def test_stopped_while_tuning_the_same_call_goes_on(here, tmp_path, monkeypatch):
    made = tiny(
        {"arms": {"base": {}, "shift": SHIFT}, "seeds": [0], "learning_rates": [1e-5, 1e-2], "tuning_seeds": [7]}
    )
    whole = compare(made, tmp_path / "whole")
    count = len(here.trained)
    here.trained.clear()
    run = here.run

    def stopping(job):
        if len(here.trained) == 3:
            raise Interrupted("Stopped; run the same command again.")
        return run(job)

    monkeypatch.setattr(here, "run", stopping)
    with pytest.raises(Interrupted):
        compare(made, tmp_path / "cut")
    monkeypatch.setattr(here, "run", run)
    again = compare(made, tmp_path / "cut")
    assert len(here.trained) == len(set(here.trained)) == count
    assert [o.record.held_out for o in again] == [o.record.held_out for o in whole]


ARMS = {
    "base": {},
    **{f"arm {i}": {"training": {"learning_rate": rate}} for i, rate in enumerate((1e-5, 2e-2, 1e-4, 1e-2, 1e-6))},
    "shift": SHIFT,
    "diverges": DIVERGES,
}


def naive_halving(recipe, arms, factor, first, folder):
    """Rungs, and who was trained to each: the best ⌈n/factor⌉ of each go on, each trained anew from the beginning."""
    reached, step = {}, first
    while True:
        means = {}
        for arm in arms:
            reached[arm] = step
            results = []
            for seed in recipe.compare.seeds:
                try:
                    results.append(train(recipe.arm(arm, seed), folder / f"{arm}-{seed}-{step}", until=step).result)
                except HeadwaterError:
                    results.append(-math.inf)
            means[arm] = np.mean(results)
        if step * factor > recipe.training.steps:
            return reached
        arms = sorted(arms, key=lambda arm: means[arm])[-math.ceil(len(arms) / factor) :]
        step *= factor


@pytest.mark.slow
def test_halving_is_the_loop_and_gives_up_who_is_behind(here, tmp_path):
    made = tiny({"arms": ARMS, "halving": {"factor": 2, "steps": 3}, "seeds": [0]})
    outcomes = compare(made, tmp_path / "a")
    reached = naive_halving(made, [arm for arm in ARMS if arm != "base"], 2, 3, tmp_path / "naive")
    assert sorted(reached.values()) == [3, 3, 3, 6, 6, 12, 12]
    ends = {}
    for one in outcomes:
        arm = one.record.experiment.arm
        if arm == "base" or reached[arm] == 12:
            assert one.record.status == "finished"
            assert one.record.held_out[-1].step == 12
        elif arm == "diverges":
            assert one.record.status == "diverged"
        else:
            assert one.record.status == "stopped"
            assert one.record.held_out[-1].step == reached[arm]
        if one.record.status == "finished":
            # In one go it is the same, to the last bit.
            straight = train(made.arm(arm, one.record.seed), tmp_path / "straight" / f"{arm}-{one.record.seed}")
            assert (straight.order, straight.result) == (one.record.order, one.record.result)
            assert straight.held_out[-1] == one.record.held_out[-1]
        ends[arm, one.record.seed] = (one.record.status, one.record.result)
    assert len(outcomes) == len(ARMS)

    here.trained.clear()
    before = changed_times(tmp_path / "a")
    again = compare(made, tmp_path / "a")
    assert here.trained == []
    assert changed_times(tmp_path / "a") == before
    assert {(o.record.experiment.arm, o.record.seed): (o.record.status, o.record.result) for o in again} == ends
    summaries = {one.arm: one for one in summarize([o.record for o in again], "base")}
    assert summaries["diverges"].verdict(False) == "diverged"
    given_up = [arm for arm, step in reached.items() if step < 12 and arm != "diverges"]
    assert all(summaries[arm].stopped == reached[arm] and not summaries[arm].verdict(False) for arm in given_up)


@pytest.mark.slow
def test_halving_that_was_stopped_goes_on(here, tmp_path, monkeypatch):
    arms = {name: ARMS[name] for name in ("base", "arm 0", "arm 1", "arm 2", "shift")}
    made = tiny({"arms": arms, "halving": {"factor": 2, "steps": 3}, "seeds": [0]})
    whole = compare(made, tmp_path / "whole")
    trained, run = list(here.trained), here.run
    here.trained.clear()

    def stopping(job):
        if len(here.trained) == 6:  # in the second rung
            raise Interrupted("Stopped.")
        return run(job)

    monkeypatch.setattr(here, "run", stopping)
    with pytest.raises(Interrupted):
        compare(made, tmp_path / "cut")
    monkeypatch.setattr(here, "run", run)
    again = compare(made, tmp_path / "cut")
    assert here.trained == trained
    assert [(o.label, o.record.status, o.record.result) for o in again] == [
        (o.label, o.record.status, o.record.result) for o in whole
    ]


@pytest.mark.slow
def test_the_default_rungs_end_with_the_run(here, tmp_path):
    """Nine arms, factor 3, 12 steps: 12/9 steps, 3 and 9; what is left goes on to the end."""
    arms = {"base": {}} | {f"arm {i}": {"training": {"learning_rate": 10.0**-i}} for i in range(1, 10)}
    outcomes = compare(tiny({"arms": arms, "halving": {}, "seeds": [0]}), tmp_path)
    ends = sorted(o.record.held_out[-1].step for o in outcomes)
    assert ends == [1] * 6 + [3] * 2 + [12] * 2


@pytest.mark.parametrize(
    ("compare", "changes", "message"),
    [
        ({"halving": {"steps": 5, "factor": 3}}, {}, "steps=5 leaves no second rung in 12 steps; give 4 or fewer"),
        ({"halving": {"factor": 8}}, {}, "factor=8 gives up none of 7 arms"),
        (
            {"halving": {}, "arms": ARMS | {"long": {"training": {"steps": 20}}}},
            {},
            r"have \[12, 20\]; give them the same",
        ),
        ({"halving": {}}, {"stages": [{"name": "more"}]}, "runs with stages"),
    ],
)
def test_what_cannot_be_halved_is_refused_before_anything_is_trained(here, tmp_path, compare, changes, message):
    made = tiny({"arms": ARMS, "learning_rates": [1e-3], **compare})
    if changes:
        from headwater.recipe import parse

        made = parse(made.model_dump(mode="json") | changes, "test")
    with pytest.raises(HeadwaterError, match=message) as error:
        comparing.compare(made, tmp_path)
    assert here.trained == []
    assert "\n" not in str(error.value)


def test_runs_that_were_not_looked_at_where_halving_asks_are_refused(here, tmp_path):
    made = tiny({"arms": {"base": {}, "shift": SHIFT, "slow": {"training": {"learning_rate": 1e-5}}}, "seeds": [0]})
    compare(made, tmp_path)
    trials = trials_of(made, tmp_path)
    with pytest.raises(HeadwaterError, match=r"was not evaluated at step 3, .*choose another --out"):
        run_halving(trials, Halving(factor=2, steps=3), "base", None, None)


@pytest.mark.slow
def test_a_trial_that_failed_stops_halving_with_a_sentence(here, tmp_path, monkeypatch):
    made = tiny({"arms": ARMS, "halving": {"factor": 2, "steps": 3}, "seeds": [0]})
    run = here.run
    monkeypatch.setattr(
        here, "run", lambda job: run(job) if "shift" not in job.label else Outcome(job.label, None, "why")
    )
    with pytest.raises(HeadwaterError, match="shift · seed 0 failed: why"):
        compare(made, tmp_path)
