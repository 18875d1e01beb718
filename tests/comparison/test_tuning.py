"""Learning rates that are tuned: with real runs of tiny models, in this process."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from saved import SHIFT, Here, changed_times, record, tiny

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison import running
from headwater_lab.comparison.pool import Outcome
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.trials import list_tuning_trials
from headwater_lab.comparison.tuning import choose_rates, describe_edge, find_tuned_rate
from headwater_lab.papers.arms import SizedArm, finished_runs
from headwater_lab.training.records import read_record
from headwater_lab.util.endings import Interrupted


@pytest.fixture
def here(monkeypatch):
    """Trials run in this process."""
    runs = Here()
    monkeypatch.setattr(running, "run_trials", runs)
    return runs


RATES = {"learning_rates": [1e30, 1e-5, 1e-2], "tuning_seeds": [7, 8]}


@pytest.mark.slow
def test_the_best_mean_over_the_tuning_seeds_is_the_arms_rate(here, tmp_path):
    made = tiny({"arms": {"base": {}, "shift": SHIFT}} | RATES)
    outcomes = run_comparison(made, tmp_path)
    tries = list_tuning_trials(made, tmp_path)
    assert len(tries) == 2 * 2 * 3
    for arm in ("base", "shift"):
        means = {}
        for rate in made.compare.learning_rates:
            records = [
                read_record(t.folder)
                for t in tries
                if (t.experiment.arm, t.recipe.training.learning_rate) == (arm, rate)
            ]
            assert all(one.experiment.phase == "tuning" for one in records)
            if rate == 1e30:
                assert all(one.status == "diverged" and "diverged" in one.error for one in records)
            else:
                assert {one.seed for one in records} == {7, 8}
                means[rate] = np.mean([one.result for one in records])
        final = [o.record for o in outcomes if o.record.experiment.arm == arm]
        assert [one.seed for one in final] == [0, 1]
        assert {one.recipe["training"]["learning_rate"] for one in final} == {max(means, key=lambda rate: means[rate])}
        assert {(one.status, one.experiment.phase) for one in final} == {("finished", "comparison")}
        assert find_tuned_rate(made, arm, tmp_path) == final[0].recipe["training"]["learning_rate"]
        assert finished_runs(SizedArm(made, Path("recipe.yaml"), arm), tmp_path).keys() == {0, 1}
        # A rate that was not tried yet may be better: the runs may have to be repeated.
        wider = tiny({"arms": {"base": {}, "shift": SHIFT}} | RATES | {"learning_rates": [1e-5, 1e-2, 2e-2]})
        assert find_tuned_rate(wider, arm, tmp_path) is None
        assert not finished_runs(SizedArm(wider, Path("recipe.yaml"), arm), tmp_path)
    # Again: nothing is trained, what diverged neither.
    here.trained.clear()
    before = changed_times(tmp_path)
    assert [o.record for o in run_comparison(made, tmp_path)] == [o.record for o in outcomes]
    assert here.trained == []
    assert changed_times(tmp_path) == before
    assert {path.parent for path in before} >= {job.folder for job in running.list_jobs(made, tmp_path)[4:]}


def outcome(trial, result, status="finished"):
    return Outcome("x", record("x", 0, result, metric="accuracy", status=status))


def test_a_rate_is_judged_by_its_mean_and_ties_go_to_the_smaller(tmp_path):
    made = tiny({"learning_rates": [3e-2, 1e-2, 1e-3], "tuning_seeds": [7, 8]})
    tries = list_tuning_trials(made, tmp_path)
    results = {(3e-2, 7): 0.9, (3e-2, 8): 0.1, (1e-2, 7): 0.5, (1e-2, 8): 0.75, (1e-3, 7): 0.75, (1e-3, 8): 0.5}
    by_trial = [outcome(t, results[t.recipe.training.learning_rate, t.recipe.seed]) for t in tries]
    assert choose_rates(tries, by_trial) == {"base": 1e-3}
    # One seed that diverged is enough to rule a rate out, and a result that is no number is as bad.
    for worst in (outcome(None, None, "diverged"), outcome(None, math.nan)):
        broken = [worst if t.recipe.training.learning_rate < 3e-2 and t.recipe.seed == 7 else o
                  for t, o in zip(tries, by_trial, strict=True)]  # fmt: skip
        assert choose_rates(tries, broken) == {"base": 3e-2}
        with pytest.raises(HeadwaterError, match="'base' diverged at every learning rate tried; add smaller ones"):
            choose_rates(tries, [worst if t.recipe.seed == 7 else o for t, o in zip(tries, by_trial, strict=True)])
    with pytest.raises(HeadwaterError, match=r"Tuning .* needs every trial, but base · seed 7 failed: why"):
        choose_rates(tries, [Outcome("base · seed 7", None, "why"), *by_trial[1:]])


def test_a_best_rate_at_the_end_of_those_tried_is_named():
    tried = [1.0, 0.5, 2.0]
    assert "of base, 0.5, is the smallest one tried; add smaller ones" in describe_edge("base", 0.5, tried)
    assert "of shift, 2, is the largest one tried; add larger ones" in describe_edge("shift", 2.0, tried)
    assert not describe_edge("inner", 1.0, tried)
    assert not describe_edge("base", 0.5, [0.5])


def test_a_run_with_a_best_rate_at_the_end_says_so(here, tmp_path):
    messages: list[str] = []
    rates = {"learning_rates": [1e-5, 1e-3], "tuning_seeds": [7]}
    run_comparison(tiny({"arms": {"base": {}, "shift": SHIFT}} | rates), tmp_path, tell=messages.append)
    assert [line.split()[5].rstrip(",") for line in messages] == ["base", "shift"]


def test_a_single_rate_is_taken_without_tuning_runs(here, tmp_path):
    made = tiny({"arms": {"base": {}, "shift": SHIFT}, "learning_rates": [2e-3]})
    outcomes = run_comparison(made, tmp_path)
    assert {outcome.record.recipe["training"]["learning_rate"] for outcome in outcomes} == {2e-3}
    assert not list(tmp_path.rglob("tuning"))
    again = run_comparison(made, tmp_path)
    assert [outcome.record for outcome in again] == [outcome.record for outcome in outcomes]


def test_with_a_threshold_the_rate_with_the_fewest_steps_to_it_wins(tmp_path):
    made = tiny({"learning_rates": [1e-3, 1e-2, 3e-2], "tuning_seeds": [7, 8], "threshold": 0.9})
    tries = list_tuning_trials(made, tmp_path)

    def best(of, threshold=0.9):
        seen = [of[t.recipe.training.learning_rate, t.recipe.seed] for t in tries]
        outcomes = [Outcome("x", record("x", 0, end, curve, metric="accuracy")) for *curve, end in seen]
        asked = [replace(t, experiment=t.experiment.model_copy(update={"threshold": threshold})) for t in tries]
        return choose_rates(asked, outcomes)["base"]

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
        run_comparison(tiny({"learning_rates": [1e30, 1e31]}), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_stopped_while_tuning_the_same_call_goes_on(here, tmp_path, monkeypatch):
    made = tiny(
        {"arms": {"base": {}, "shift": SHIFT}, "seeds": [0], "learning_rates": [1e-5, 1e-2], "tuning_seeds": [7]}
    )
    whole = run_comparison(made, tmp_path / "whole")
    count = len(here.trained)
    here.trained.clear()
    run = here.run

    def stopping(job):
        if len(here.trained) == 3:
            raise Interrupted("Stopped; run the same command again.")
        return run(job)

    monkeypatch.setattr(here, "run", stopping)
    with pytest.raises(Interrupted):
        run_comparison(made, tmp_path / "cut")
    monkeypatch.setattr(here, "run", run)
    again = run_comparison(made, tmp_path / "cut")
    assert len(here.trained) == len(set(here.trained)) == count
    assert [o.record.held_out for o in again] == [o.record.held_out for o in whole]
