"""Comparisons that look after every seed: against published boundaries, simulation, and records with known results."""

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from saved import record, tiny
from scipy import special, stats

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison import rounds
from headwater_lab.comparison.pool import run_trials
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.sequential import (
    Chain,
    critical_values,
    find_standing,
    repeated_intervals,
    skewed_error,
    take_looks,
)
from headwater_lab.comparison.trials import list_trials
from headwater_lab.recipe.recipe import parse
from headwater_lab.reports import read_comparisons, result_rows, write_report
from headwater_lab.reports.words import state_answer
from headwater_lab.training.records import SeedPlan, read_record, write_record
from headwater_lab.util.endings import Interrupted


def crossed(critical: dict[int, float]) -> float:
    """The probability of crossing any of the critical values of t, by number of differences."""
    first = min(critical)
    chain, total = Chain(first), 0.0
    for n in range(first, max(critical) + 1):
        if n in critical:
            total += chain.find_crossing(np.array([critical[n]]))[0]
        chain.add_difference(critical.get(n, 6.0))  # t is as good as never above 6, and cells are narrower for it
    return total


@pytest.mark.parametrize(
    ("looks", "constant", "power"),
    # Jennison and Turnbull (2000), tables 2.1 and 2.3, for a level of 0.05: Pocock's, and O'Brien and Fleming's.
    [
        (2, 2.178, 0),
        (2, 1.977, 0.5),
        pytest.param(5, 2.413, 0, marks=pytest.mark.slow),
        pytest.param(5, 2.040, 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_chain_finds_the_level_of_published_boundaries(looks, constant, power):
    """They are for known variances; as t values of the same tail, at looks 20 differences apart, they are close."""
    z = {20 * k: constant * (looks / k) ** power for k in range(1, looks + 1)}
    assert crossed({n: -special.stdtrit(n - 1, special.ndtr(-one)) for n, one in z.items()}) == pytest.approx(
        0.05, abs=0.0015
    )


@pytest.mark.parametrize(("level", "first", "last"), [(0.05, 3, 9)])
def test_critical_values_spend_the_level_look_by_look(level, first, last):
    """Against samples: of all that cross, the share that does by each look."""
    critical = critical_values(level, first, last)
    count = 400_000
    samples = np.random.default_rng(0).standard_normal((count, last))
    n = np.arange(1, last + 1)
    mean = np.cumsum(samples, 1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt((np.cumsum(samples**2, 1) / n - mean**2) / (n - 1))
    found = np.logical_or.accumulate(t[:, first - 1 :] >= critical, axis=1).mean(0)
    spent = level * (n[first - 1 :] / last) ** 3
    assert (np.abs(found - spent) < 4 * np.sqrt(spent / count)).all()


def test_intervals_are_t_intervals_with_these_critical_values_wider_towards_the_long_tail():
    values = [0.3, 0.1, 0.4, 0.15, 0.92, 0.6]
    critical = critical_values(0.05, 3, 8)
    mean, low, high = repeated_intervals(values, 0.05, 3, 8)
    assert np.isinf(low[:2]).all()
    for n in range(3, 7):
        part = values[:n]
        error, skew = stats.sem(part), stats.skew(part)
        c = critical[n - 3]
        assert mean[n - 1] == pytest.approx(np.mean(part))
        assert mean[n - 1] - low[n - 1] == pytest.approx(c * error * (1 + max(0, -skew) * c / math.sqrt(n)))
        assert high[n - 1] - mean[n - 1] == pytest.approx(c * error * (1 + max(0, skew) * c / math.sqrt(n)))
    turned = repeated_intervals(np.negative(values), 0.05, 3, 8)
    assert turned[1][2:] == pytest.approx(-high[2:])
    far = repeated_intervals(np.add(values, 1e6), 0.05, 3, 8)
    assert far[2][2:] == pytest.approx(high[2:] + 1e6, rel=1e-12)


def test_one_number_over_and_over_is_judged_by_its_signs():
    at = {n: look.interval for n, look in enumerate(take_looks([0.02] * 10, 0.05, 3, 10), 3)}
    assert at[5] is None
    assert at[6] == pytest.approx((0.02, 0.02))
    assert take_looks([0.0] * 10, 0.05, 3, 10)[-1].interval is None, "0 has no sign"
    assert take_looks([0.0] * 3, 0.05, 3, 10, same=True)[0].interval == (0, 0)
    assert take_looks([0.02] * 9, 0.05 / 20, 3, 10)[-1].interval is None
    assert take_looks([0.02] * 2, 0.05, 3, 10) == []


def test_two_arms_at_the_margin_are_rarely_called_equivalent_and_those_at_0_are():
    random = np.random.default_rng(0)
    sides = random.choice([-0.8, 0.8], (2000, 1))  # skewed differences have two
    _, low, high = repeated_intervals(sides + random.exponential(size=(2000, 30)) - 1, 0.05, 6, 30)
    called = (low > -0.8) & (high < 0.8)
    decided = called | (low > 0) | (high < 0)
    first = decided.argmax(axis=1)[:, None]  # 0 where nothing is decided, and then not called so
    assert 0 < np.take_along_axis(called, first, axis=1).mean() <= 0.05
    values = random.standard_normal((500, 30))
    _, low, high = repeated_intervals(values, 0.05, 6, 30)
    assert ((low > -0.8) & (high < 0.8)).any(1).mean() > 0.9


PLAN = SeedPlan(seeds=list(range(12)), min_seeds=3, margin=0.1, arms=["a", "b"], baseline="base")


@pytest.mark.parametrize(
    "wrong",
    [{"arms": []}, {"min_seeds": 1}, {"margin": 0.0}, {"margin": -1.0}, {"margin": math.inf}, {"seeds": []}],
    ids=str,
)
def test_a_plan_that_no_comparison_makes_is_refused_in_a_record_too(wrong):
    with pytest.raises(ValidationError):
        SeedPlan.model_validate(PLAN.model_dump() | wrong)


def noise(seed, size=12):
    return dict(enumerate(np.random.default_rng(seed).normal(0, 0.02, size)))


def test_a_decision_depends_on_the_seeds_up_to_it_in_order_and_on_no_later_one():
    base = dict.fromkeys(range(12), 3.0)
    arm = {seed: 3.3 + x for seed, x in noise(0).items()}
    whole = find_standing(PLAN, arm, base)
    assert whole.decided
    used = len(whole.seeds)
    assert 3 <= used < 12
    assert not find_standing(PLAN, {seed: arm[seed] for seed in range(used - 1)}, base).decided
    later = {seed: value if seed < used else -100.0 for seed, value in reversed(arm.items())}
    assert find_standing(PLAN, later, base) == whole
    assert find_standing(PLAN, later | {used: None}, base) == whole
    # A seed that is missing holds up all that come after it.
    gap = {seed: value for seed, value in arm.items() if seed != 2}
    assert (find_standing(PLAN, gap, base).seeds, find_standing(PLAN, gap, base).decided) == ([0, 1], False)


def test_runs_that_diverged():
    base = dict.fromkeys(range(12), 3.0)
    arm = {seed: 3.0 + x for seed, x in noise(1).items()}
    lost = find_standing(PLAN, arm | {1: None}, base)
    assert (lost.seeds, lost.decided) == ([0, 1], True)
    # The baseline's takes away a difference, and the next seed takes its place.
    without = find_standing(PLAN, arm, base | {1: None})
    assert without.seeds[:3] == [0, 1, 2]
    assert without.differences[:2] == pytest.approx([arm[0] - 3, arm[2] - 3])


def test_results_are_the_same_if_they_change_from_seed_to_seed_together():
    losses = {seed: 3 + x for seed, x in noise(2).items()}
    assert find_standing(PLAN, losses, losses).decided
    perfect = dict.fromkeys(range(12), 1.0)  # accuracies, which may hide that one run in ten fails
    assert not find_standing(PLAN, perfect, perfect).decided
    # Nor does a later seed decide what a look could not yet know: here that both arms are one model.
    assert not find_standing(PLAN, perfect | {6: 0.2}, perfect | {6: 0.99}).decided
    after = find_standing(PLAN, perfect | {6: 0.99}, perfect | {6: 0.99})
    assert (after.decided, after.seeds) == (True, list(range(7)))


SEQUENTIAL = {"sequential": True, "margin": 0.1, "min_seeds": 3, "max_seeds": 12}
# Of accuracies between 0 and 1.
GAIN = {"better": 0.3, "worse": -0.3, "zero": 0.0, "tiny": 0.05}


def known(folder, arms=GAIN, seeds=range(12), diverges=(), **changes):
    """A comparison whose runs are there already, with differences that are known: an arm's gain and a little noise."""
    options = {"arms": {"base": {}} | {arm: {"training": {"weight_decay": 0.1 + i}} for i, arm in enumerate(arms)}}
    made = tiny(options | SEQUENTIAL | changes)
    for trial in list_trials(made, folder):
        arm, seed = trial.experiment.arm, trial.recipe.seed
        if seed in seeds:
            # Equal differences are told by their signs: after eight seeds, for four arms.
            own = 0.0 if arm in ("base", "tiny") else noise(sorted(GAIN).index(arm))[seed] / 4
            result = 0.5 + 0.05 * noise(9)[seed] + GAIN.get(arm, 0.0) + own
            done = record(arm, seed, None if (arm, seed) in diverges else float(result), metric="accuracy")
            done.identity, done.experiment = trial.recipe.identity, trial.experiment
            done.status = "diverged" if (arm, seed) in diverges else "finished"
            trial.folder.mkdir(parents=True, exist_ok=True)
            write_record(done, trial.folder)
    return made


def test_each_arm_gets_its_verdict_and_stops(tmp_path):
    made = known(tmp_path)
    outcomes = run_comparison(made, tmp_path, workers=1)
    (found,) = read_comparisons(tmp_path)
    verdicts = {s.arm: s.verdict(found.lower_is_better) for s in found.summaries}
    assert verdicts == {"base": "", "better": "better", "worse": "worse", "zero": "equivalent", "tiny": "equivalent"}
    asked = {arm: sum(o.label.startswith(f"{arm} ·") for o in outcomes) for arm in verdicts}
    used = {s.arm: s.runs for s in found.summaries}
    assert asked == used  # with one worker, none is trained beyond its decision
    assert max(used.values()) == used["base"] < 12
    assert len(set(used.values())) > 1
    assert found.beyond == 5 * 12 - sum(used.values())
    tiny_arm = next(s for s in found.summaries if s.arm == "tiny")
    low, high = tiny_arm.interval
    assert 0 < low <= high < 0.1  # both hold, and what is smaller than the margin does not matter
    assert [row["seeds"] for row in result_rows(found)] == [str(s.runs) for s in found.summaries]
    page = write_report(tmp_path).read_text()
    assert "came after the decision" in page


@pytest.mark.slow
def test_a_planted_difference_of_trained_models_is_found_and_a_planted_zero_called_equivalent(tmp_path):
    """Of random symbols a model can learn how often each comes, and no more: losses differ as the entropies do."""
    common, share = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN", 0.011037
    entropy = -share * math.log(share) - (1 - share) * math.log((1 - share) / len(common))
    assert entropy - math.log(len(common)) == pytest.approx(0.02, abs=1e-6)
    arms = {"base": 0.0, "zero": 0.0, "0.02": share}
    for number, (name, rare) in enumerate(arms.items()):
        draw = random.Random(number)
        symbols = ("Z" if draw.random() < rare else draw.choice(common) for _ in range(400_000))
        (tmp_path / f"{name}.txt").write_text("".join(symbols))
    made = parse(
        {
            "name": "planted",
            "title": "Planted differences",
            "data": {"kind": "text", "source": str(tmp_path / "base.txt"), "tokenizer": "bytes", "context": 64}
            | {"held_out": 0.1, "held_out_bytes": 40_000, "metric": "loss"},
            "model": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
            "training": {"steps": 40, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10, "threads": 1},
            "reporting": {"save_every": None, "tensorboard": False},
            "compare": {"baseline": "base", "sequential": True, "margin": 0.01}
            | {"arms": {name: {"data": {"source": str(tmp_path / f"{name}.txt")}} for name in arms}},
        },
        "test",
    )
    run_comparison(made, tmp_path / "runs", workers=1)
    (found,) = read_comparisons(tmp_path / "runs")
    assert {s.arm: s.verdict(found.lower_is_better) for s in found.summaries} == {
        "base": "",
        "0.02": "worse",
        "zero": "equivalent",
    }
    low, high = next(s.interval for s in found.summaries if s.arm == "0.02")
    assert low < 0.02 < high


def test_the_baseline_with_other_budgets_is_not_tested_and_has_its_seeds(tmp_path):
    made = known(tmp_path, ["better", "zero"], budget_arms=["zero"])
    assert list_trials(made, tmp_path)[0].experiment.seed_plan.arms == ["better"]
    run_comparison(made, tmp_path, workers=1)
    (found,) = read_comparisons(tmp_path)
    used = {s.arm: s.runs for s in found.summaries}
    assert used["zero"] == used["base"] == used["better"]
    assert {s.arm: s.verdict(False) for s in found.summaries}["better"] == "better"
    assert next(s for s in found.summaries if s.arm == "zero").paired is None


def test_another_threshold_or_baseline_holds_for_runs_that_are_there(tmp_path):
    made = known(tmp_path, ["better", "zero"])
    run_comparison(made, tmp_path, workers=1)
    assert read_comparisons(tmp_path)[0].threshold is None
    other = made.compare.model_copy(update={"threshold": 0.6})
    run_comparison(made.model_copy(update={"compare": other}), tmp_path, workers=1)
    assert read_comparisons(tmp_path)[0].threshold == 0.6
    fixed = {"sequential": False, "margin": None, "baseline": "zero", "seeds": [0, 1, 2]}
    for path in tmp_path.glob("tiny/*/record.json"):
        one = read_record(path)
        plain = one.experiment.model_copy(update={"seed_plan": None})
        write_record(one.model_copy(update={"experiment": plain}), path.parent)
    run_comparison(made.model_copy(update={"compare": made.compare.model_copy(update=fixed)}), tmp_path, workers=1)
    assert read_comparisons(tmp_path)[0].baseline == "zero"


def test_how_many_are_trained_at_a_time_changes_nothing(tmp_path):
    run_comparison(known(tmp_path, ["better", "zero"]), tmp_path, workers=1)
    one = read_comparisons(tmp_path)[0].summaries
    asked = run_comparison(known(tmp_path, ["better", "zero"]), tmp_path, workers=20)
    assert read_comparisons(tmp_path)[0].summaries == one
    assert len(asked) > sum(s.runs for s in one)


@pytest.mark.slow
def test_interrupted_at_random_moments_it_decides_the_same(tmp_path, monkeypatch):
    """Runs are copied from where all of them are, one by one and in any order, and stop at any moment, twenty times."""
    made = known(tmp_path / "all")
    chance = random.Random(0)

    def copied(trials, workers=None, on_change=None):
        for trial in chance.sample(trials, len(trials)):
            if not (trial.folder / "record.json").exists():
                if stops and chance.random() < 0.7:
                    raise Interrupted(stops.pop())
                trial.folder.mkdir(parents=True)
                write_record(read_record(tmp_path / "all" / "tiny" / trial.folder.name), trial.folder)
        return run_trials(trials, workers, on_change)

    monkeypatch.setattr(rounds, "run_trials", copied)
    stops = []
    run_comparison(made, tmp_path / "whole", workers=3)
    stops = ["Stopped."] * 20
    for _ in range(25):
        with contextlib.suppress(Interrupted):
            run_comparison(made, tmp_path / "killed", workers=chance.choice([1, 3, 9]))
    assert not stops
    run_comparison(made, tmp_path / "killed", workers=3)
    whole, killed = (read_comparisons(tmp_path / out)[0] for out in ("whole", "killed"))
    assert whole.summaries == killed.summaries
    assert state_answer(whole) == state_answer(killed)


def test_a_diverged_arm_stops_and_the_others_go_on(tmp_path):
    made = known(tmp_path, diverges={("zero", 1)})
    outcomes = run_comparison(made, tmp_path, workers=1)
    (found,) = read_comparisons(tmp_path)
    zero = next(s for s in found.summaries if s.arm == "zero")
    assert (zero.verdict(False), zero.runs, zero.diverged) == ("diverged", 1, 1)
    assert sum(o.label.startswith("zero ·") for o in outcomes) == 3  # the first round, which was under way


def test_what_is_left_at_the_maximum_is_inconclusive(tmp_path):
    made = known(tmp_path, margin=0.0011, max_seeds=4, arms={"zero": 0.0})
    run_comparison(made, tmp_path, workers=1)
    (found,) = read_comparisons(tmp_path)
    summary = found.summaries[1]
    assert (summary.runs, summary.verdict(False)) == (4, "inconclusive")
    assert summary.paired.more_pairs > 0
    assert "is inconclusive" in state_answer(found)


def test_a_plan_cannot_change_after_its_results_and_fixed_seeds_become_part_of_one(tmp_path):
    made = known(tmp_path, ["better"])
    other = made.model_copy(update={"compare": made.compare.model_copy(update={"max_seeds": 20})})
    with pytest.raises(HeadwaterError, match="a plan made before the results"):
        run_comparison(other, tmp_path, workers=1)
    # Nor can an arm be exchanged for another one, which would have a chance to be wrong, too; nor the baseline.
    with pytest.raises(
        HeadwaterError, match=r"better-.*' holds a run of the arm 'better', which the recipe 'tiny' does"
    ):
        run_comparison(known(tmp_path.with_name("x"), ["zero"]), tmp_path, workers=1)
    with pytest.raises(HeadwaterError, match="the arms better against base"):
        run_comparison(known(tmp_path.with_name("y"), ["better", "zero"]), tmp_path, workers=1)
    turned = made.model_copy(update={"compare": made.compare.model_copy(update={"baseline": "better"})})
    with pytest.raises(HeadwaterError, match="the arms base against better"):
        run_comparison(turned, tmp_path, workers=1)
    for path in tmp_path.glob("tiny/*/record.json"):
        one = read_record(path)
        fixed = one.experiment.model_copy(update={"seed_plan": None})
        write_record(one.model_copy(update={"experiment": fixed}), path.parent)
    run_comparison(made, tmp_path, workers=1)
    assert all(read_record(path).experiment.seed_plan for path in tmp_path.glob("tiny/*/record.json"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sequential": True}, "needs compare.margin"),
        (SEQUENTIAL | {"min_seeds": 13}, "min_seeds=13 is more than compare.max_seeds=12"),
        (SEQUENTIAL | {"seeds": list(range(13))}, "lists 13 seeds"),
        (SEQUENTIAL, "needs an arm other than the baseline"),
        (
            SEQUENTIAL | {"arms": {"base": {}, "long": {}}, "budget_arms": ["long"]},
            "needs an arm other than the baseline and its",
        ),
        (
            SEQUENTIAL | {"learning_rates": [1e-3, 1e-2], "tuning_seeds": [7], "arms": {"base": {}, "b": {}}},
            r"share \[7\]",
        ),
    ],
)
def test_wrong_fields_are_one_sentence(section, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        tiny(section)
    assert "\n" not in str(error.value)


def test_seeds_count_on_from_the_listed_ones():
    made = tiny({"arms": {"base": {}, "b": {}}, "seeds": [10, 12], **SEQUENTIAL, "max_seeds": 5})
    assert made.compare.all_seeds == [10, 12, 13, 14, 15]
    plan = list_trials(made, Path("x"))[0].experiment.seed_plan
    assert (plan.seeds, len(plan.arms), plan.margin, plan.min_seeds) == ([10, 12, 13, 14, 15], 1, 0.1, 3)
    assert skewed_error(plan) == 0.09
    assert skewed_error(plan.model_copy(update={"seeds": list(range(30))})) is None


COMMAND = """
name: tiny
title: A tiny comparison
data: {kind: induction, vocab_size: 8, length: 12, held_out: 64}
model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
training: {steps: 12, batch_size: 4, threads: 1, warmup_steps: 2}
reporting: {log_every: 6, save_every: 4, tensorboard: false}
compare:
  sequential: true
  margin: 0.1
  min_seeds: 3
  max_seeds: 7
  baseline: base
  arms: {base: {}, same: {training: {weight_decay: 0.1000001}}, wide: {model: {hidden_size: 16}}}
"""


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same_decision(tmp_path):
    """The command, its workers included, is killed 20 times; then it ends as one that ran undisturbed."""
    (tmp_path / "tiny.yaml").write_text(COMMAND)
    moments = random.Random(0)

    def started(out, workers):
        command = [
            "-m",
            "headwater_lab",
            "compare",
            tmp_path / "tiny.yaml",
            "--out",
            tmp_path / out,
            "--workers",
            workers,
        ]
        return subprocess.Popen([sys.executable, *map(str, command)], start_new_session=True, stdout=subprocess.DEVNULL)

    assert started("whole", 2).wait() == 0
    for _ in range(20):
        process = started("killed", moments.choice([1, 2]))
        end = time.monotonic() + moments.uniform(4, 25)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert started("killed", 2).wait() == 0
    whole, killed = (read_comparisons(tmp_path / out)[0] for out in ("whole", "killed"))
    assert [s.arm for s in whole.summaries] == [s.arm for s in killed.summaries]
    for one, other in zip(whole.summaries, killed.summaries, strict=True):
        assert (one.mean, one.runs, one.paired, one.verdict(False)) == (
            other.mean,
            other.runs,
            other.paired,
            other.verdict(False),
        )
    assert state_answer(whole) == state_answer(killed)
