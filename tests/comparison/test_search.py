"""Which combination of mechanisms is best: with real runs of tiny models, in this process."""

import itertools
import math

import numpy as np
import pytest
import yaml
from saved import DIVERGES, Here, changed_times, record, tiny

from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison import running, search
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.search import (
    FINAL_SEEDS,
    VANILLA,
    choose_best,
    find_candidates,
    make_final,
    make_search,
)
from headwater_lab.comparison.trials import list_trials
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.records import read_record, write_record
from headwater_lab.util.endings import Interrupted

TWO = {"kv_shift": {}, "value_residual": {}}
BOTH = "kv_shift + value_residual"
SEARCH = ["--search", "--mechanism", "kv_shift", "--mechanism", "value_residual"]


@pytest.fixture
def here(monkeypatch):
    """Trials run in this process."""
    runs = Here()
    monkeypatch.setattr(running, "run_trials", runs)
    return runs


def recipe(**changes):
    """A recipe of two layers without a compare section, so that mechanisms that join layers fit."""
    made = tiny({}, model={"num_hidden_layers": 2, "mechanisms": {"svformer": {}}}, training={"steps": 6})
    return parse(made.model_dump(mode="json", exclude={"compare"}) | changes, "test")


def test_all_that_fit_together_are_candidates():
    three = {"svformer": {}, "value_residual": {"mode": "identity"}, "kv_shift": {}}
    arms, refused = find_candidates(recipe(), three)
    # In the registry's order, and vanilla without what the recipe itself has.
    assert list(arms) == [VANILLA, "kv_shift", "value_residual", "svformer", BOTH, "kv_shift + svformer"]
    assert arms[VANILLA] == {"model": {"mechanisms": {}}}
    assert arms[BOTH]["model"]["mechanisms"] == {"kv_shift": {}, "value_residual": {"mode": "identity"}}
    # Layers that share another's values have none of their own to mix into.
    assert list(refused) == ["value_residual + svformer", "kv_shift + value_residual + svformer"]
    assert all("has none, because it shares another layer's" in why for why in refused.values())
    arms, refused = find_candidates(recipe(), None)
    names = list(MECHANISMS.built_in)
    every = {" + ".join(some) for size in (1, 2) for some in itertools.combinations(names, size)}
    assert set(arms) - {VANILLA} | set(refused) == every
    assert len(arms) - 1 + len(refused) == len(names) * (len(names) + 1) // 2


def test_the_search_is_a_comparison_of_the_candidates():
    made = recipe()
    arms, _ = find_candidates(made, TWO)
    chosen = make_search(made, arms)
    section = chosen.compare
    assert (chosen.name, section.baseline, section.seeds) == ("tiny-search", VANILLA, [0, 1])
    assert (section.learning_rates, section.match, section.arms) == ([], "parameters", arms)
    for arm, change in arms.items():
        assert chosen.arm(arm, 0).model["mechanisms"] == change["model"]["mechanisms"]
    # What the recipe's own comparison says of rates and cost holds for the search.
    settings = {"arms": {"a": {}}, "baseline": "a", "match": "flops", "learning_rates": [1e-3, 1e-2]}
    section = make_search(recipe(compare=settings), arms).compare
    assert (section.learning_rates, section.match, section.arms) == ([1e-3, 1e-2], "flops", arms)


@pytest.mark.parametrize(
    "setting",
    [
        {"ladder": {"law": "olmo", "depths": [2]}},
        {"sizes": {"small": {"training": {"steps": 3}}}},
        {"sequential": True, "margin": 0.1, "arms": {"a": {}, "b": {}}},
    ],
)
def test_a_comparison_of_sizes_or_until_decided_is_not_searched(setting):
    made = recipe(compare={"arms": {"a": {}}, "baseline": "a"} | setting)
    arms, _ = find_candidates(made, TWO)
    with pytest.raises(HeadwaterError, match=f"compare.{next(iter(setting))} has no effect"):
        make_search(made, arms)


@pytest.mark.parametrize(("mechanism", "left"), [("kv_shift", "kv_shift"), ("pattention", "pattention")])
def test_what_cannot_be_searched_is_one_sentence(mechanism, left):
    made = recipe()
    with pytest.raises(HeadwaterError, match=f"nothing to choose: apart from vanilla, only {left} is left") as error:
        make_search(made, find_candidates(made, {mechanism: {}})[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{"name": "more"}]}, "from scratch in a single run, but 'tiny' has stages"),
        ({"start": {"checkpoint": "x"}}, "but 'tiny' has a model to start with"),
    ],
)
def test_recipes_that_are_no_run_from_scratch_are_refused(changes, message):
    with pytest.raises(HeadwaterError, match=message):
        find_candidates(recipe(**changes), TWO)


@pytest.fixture
def small(monkeypatch):
    """One seed to select with, one combination to test, two seeds to test with."""
    monkeypatch.setattr(search, "SEEDS", [0])
    monkeypatch.setattr(search, "FINALISTS", 1)
    monkeypatch.setattr(search, "FINAL_SEEDS", FINAL_SEEDS[:2])


def searched(out, **changes):
    """As the command does: (search, chosen, final)."""
    made = recipe(**changes)
    selection = make_search(made, find_candidates(made, TWO)[0])
    run_comparison(selection, out)
    best = choose_best(selection, out)
    final = make_final(selection, out, best)
    run_comparison(final, out)
    return selection, best, final


def means(recipe, out):
    found = {}
    for trial in list_trials(recipe, out):
        found.setdefault(trial.experiment.arm, []).append(read_record(trial.folder).result)
    return {arm: np.mean(results) for arm, results in found.items()}


@pytest.mark.slow
def test_the_best_of_the_first_phase_are_tested_on_fresh_seeds(here, small, tmp_path):
    settings = {"arms": {"a": {}}, "baseline": "a", "learning_rates": [1e-4, 1e-2]}
    selection, best, final = searched(tmp_path, compare=settings)
    of_search = means(selection, tmp_path)
    del of_search[VANILLA]
    assert best == sorted(of_search, key=of_search.get, reverse=True)[:1]  # accuracy: more is better
    assert list(final.compare.arms) == [VANILLA, *best]
    records = {path: read_record(path) for path in changed_times(tmp_path)}
    used = {
        name: {one.seed for path, one in records.items() if name in path.parts}
        for name in ("tiny-search", "tiny-final")
    }
    assert used["tiny-final"] == set(FINAL_SEEDS[:2])
    assert used["tiny-search"] == {0, 1000}
    # Each at the learning rate that was found for it, without a second tuning, and at the baseline's size.
    assert not (tmp_path / "tiny-final" / "tuning").exists()
    rates = {}
    for one in records.values():
        if one.experiment.phase == "comparison":
            rates.setdefault(one.experiment.arm, set()).add(one.recipe["training"]["learning_rate"])
            assert one.parameters == pytest.approx(next(iter(records.values())).parameters, rel=0.02)
    assert all(len(rates[arm]) == 1 for arm in (VANILLA, *best))


def test_the_best_by_mean_are_chosen_and_none_that_diverged(tmp_path):
    made = recipe()
    selection = make_search(made, find_candidates(made, TWO)[0])
    results = {VANILLA: [0.9, 0.9], "kv_shift": [0.2, 0.4], "value_residual": [0.8, 0.1], BOTH: [0.9, None]}

    def fill():
        for trial in list_trials(selection, tmp_path):
            end = results[trial.experiment.arm][trial.recipe.seed]
            state = {"status": "diverged"} if end is None else {}
            trial.folder.mkdir(parents=True, exist_ok=True)
            write_record(record("x", 0, end, metric="accuracy", **state), trial.folder)

    fill()
    assert choose_best(selection, tmp_path) == ["value_residual", "kv_shift"]
    results |= {arm: [0.5, math.nan] for arm in ("kv_shift", "value_residual")}
    fill()
    with pytest.raises(HeadwaterError, match="Every combination diverged; lower training") as error:
        choose_best(selection, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [3, 6])  # in the first phase, and in the second
@pytest.mark.slow
def test_stopped_the_same_search_goes_on(here, small, tmp_path, monkeypatch, after):
    _, best, final = searched(tmp_path / "whole")
    trained = list(here.trained)
    assert len(trained) == 4 + 2 * 2
    here.trained.clear()
    run = here.run

    def stopping(job):
        if len(here.trained) == after:
            raise Interrupted("Stopped; run the same command again.")
        return run(job)

    monkeypatch.setattr(here, "run", stopping)
    with pytest.raises(Interrupted):
        searched(tmp_path / "cut")
    before = changed_times(tmp_path / "cut")
    finished = {path for path in before if read_record(path).status == "finished"}
    monkeypatch.setattr(here, "run", run)
    assert searched(tmp_path / "cut")[1] == best
    assert here.trained == trained
    now = changed_times(tmp_path / "cut")
    assert all(now[path] == before[path] for path in finished)
    assert means(final, tmp_path / "cut") == means(final, tmp_path / "whole")
    # Once more: nothing is left to train.
    searched(tmp_path / "cut")
    assert here.trained == trained
    assert changed_times(tmp_path / "cut") == now


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        made = recipe().model_dump(mode="json", exclude={"compare"})
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(made | changes))
        return path

    return write


def test_the_command_chooses_and_tests(run, here, small, file, tmp_path):
    path = file(compare={"baseline": "a", "arms": {"a": {}}})
    code, out, err = run("compare", path, *SEARCH, "--out", tmp_path / "out")
    assert code == 0
    assert "3 combinations and vanilla; then a test of the best 1 in 4 runs" in err
    (chosen,) = (line.removeprefix("chosen: ") for line in err.splitlines() if line.startswith("chosen: "))
    assert "the best, tested on fresh seeds" in out
    assert (tmp_path / "out" / "report.html").exists()
    arms = {read_record(p).experiment.arm for p in changed_times(tmp_path / "out" / "tiny-final")}
    assert arms == {VANILLA, chosen}


def test_the_command_refuses_before_anything_is_trained(run, here, file, tmp_path):
    for arguments, words in (
        ([*SEARCH, "model.num_hidden_layers=1"], "apart from vanilla, only kv_shift is left"),
        (["--search", "--mechanism", "kv_shft"], "did you mean 'kv_shift'?"),
        ([*SEARCH, "--arm", "a"], "--arm has no effect with --search; leave it out"),
        (SEARCH[1:], "--mechanism has no effect without --search; leave it out"),
    ):
        code, _, err = run("compare", file(), *arguments, "--out", tmp_path / "out")
        *left_out, last = err.splitlines()
        assert (code, last.startswith("headwater: "), words in last) == (2, True, True), err
        assert all(line.startswith("left out: value_residual, and 1 more: ") for line in left_out)
    assert here.trained == []


def test_where_everything_diverges_the_command_says_so(run, here, small, file, tmp_path):
    rate = DIVERGES["training"]["learning_rate"]
    code, _, err = run("compare", file(), f"training.learning_rate={rate}", *SEARCH, "--out", tmp_path / "out")
    assert code == 2
    assert err.splitlines()[-1].startswith("headwater: Every combination diverged; lower training.learning_rate")
    assert not (tmp_path / "out" / "tiny-final").exists()
