"""Which combination of mechanisms is best: with real runs of tiny models, in this process."""

import itertools
import math

import numpy as np
import pytest
import yaml
from saved import DIVERGES, Here, changed_times, record, tiny

import headwater.compare as comparing
from headwater.compare import compare, tuning
from headwater.compare.search import FRESH, VANILLA, best_arms, candidates, final_recipe, search_recipe
from headwater.compare.trials import trials_of
from headwater.errors import HeadwaterError, Interrupted
from headwater.recipe import Halving, parse
from headwater.records import read_record, write_record
from headwater.registry import REGISTRY

TWO = {"kv_shift": {}, "value_residual": {}}
BOTH = "kv_shift + value_residual"


@pytest.fixture
def here(monkeypatch):
    """Trials run in this process."""
    runs = Here()
    monkeypatch.setattr(comparing, "run_trials", runs)
    monkeypatch.setattr(tuning, "run_trials", runs)
    return runs


def recipe(**changes):
    """A recipe of two layers without a compare section, so that mechanisms that join layers fit."""
    made = tiny({}, model={"num_hidden_layers": 2, "mechanisms": {"svformer": {}}}, training={"steps": 6})
    return parse(made.model_dump(mode="json", exclude={"compare"}) | changes, "test")


def test_all_that_fit_together_are_candidates():
    three = {"svformer": {}, "value_residual": {"mode": "identity"}, "kv_shift": {}}
    arms, refused = candidates(recipe(), three)
    # In the registry's order, and vanilla without what the recipe itself has.
    assert list(arms) == [VANILLA, "kv_shift", "value_residual", "svformer", BOTH, "kv_shift + svformer"]
    assert arms[VANILLA] == {"model": {"mechanisms": {}}}
    assert arms[BOTH]["model"]["mechanisms"] == {"kv_shift": {}, "value_residual": {"mode": "identity"}}
    # Layers that share another's values have none of their own to mix into.
    assert list(refused) == ["value_residual + svformer", "kv_shift + value_residual + svformer"]
    assert all("has none, because it shares another layer's" in why for why in refused.values())
    assert list(candidates(recipe(), three, most=1)[0]) == [VANILLA, "kv_shift", "value_residual", "svformer"]
    arms, refused = candidates(recipe(), None)
    names = list(REGISTRY)
    every = {" + ".join(some) for size in (1, 2) for some in itertools.combinations(names, size)}
    assert set(arms) - {VANILLA} | set(refused) == every
    assert len(arms) - 1 + len(refused) == len(names) * (len(names) + 1) // 2


def test_the_search_is_a_comparison_of_the_candidates():
    made = recipe()
    arms, _ = candidates(made, TWO)
    search = search_recipe(made, arms, 3, 2, Halving(), [1e-3], "parameters")
    section = search.compare
    assert (search.name, section.baseline, section.seeds, section.halving.factor) == (
        "tiny-search",
        VANILLA,
        [0, 1, 2],
        3,
    )
    assert (section.learning_rates, section.equal, section.arms) == ([1e-3], "parameters", arms)
    for arm, change in arms.items():
        assert search.arm(arm, 0).model["mechanisms"] == change["model"]["mechanisms"]
    # Too few of whom one in four could go on: all are trained to the end.
    assert search_recipe(made, arms, 1, 1, Halving(factor=4)).compare.halving is None


@pytest.mark.parametrize(
    ("mechanisms", "arguments", "message"),
    [
        ({"kv_shift": {}}, {"final": 1}, "nothing to choose: besides vanilla only kv_shift is left"),
        ({"pattention": {}}, {"final": 1}, "only pattention is left"),
        (TWO, {"final": 4}, "--final 4 is more than the 3 available combinations; use 3 or fewer"),
        (TWO, {"halving": Halving(), "equal": "flops"}, "add --no-halving, or use --equal parameters"),
        (TWO, {"rates": [-1.0]}, r"compare.learning_rates.0: input should be greater than 0, not -1"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(mechanisms, arguments, message):
    made = recipe()
    with pytest.raises(HeadwaterError, match=message) as error:
        search_recipe(made, candidates(made, mechanisms)[0], **{"seeds": 2, "final": 2} | arguments)
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
        candidates(recipe(**changes), TWO)


def searched(here, out, seeds=1, final_seeds=2, halving=None, rates=(), count=1):
    """As the command does: (search, chosen, final)."""
    made = recipe()
    search = search_recipe(made, candidates(made, TWO)[0], seeds, count, halving, rates, "parameters")
    compare(search, out)
    best = best_arms(search, out, count)
    final = final_recipe(search, out, best, final_seeds)
    compare(final, out)
    return search, best, final


def means(recipe, out):
    found = {}
    for trial in trials_of(recipe, out):
        found.setdefault(trial.experiment.arm, []).append(read_record(trial.folder).result)
    return {arm: np.mean(results) for arm, results in found.items()}


@pytest.mark.slow
def test_the_best_of_the_first_phase_are_tested_on_fresh_seeds(here, tmp_path):
    search, best, final = searched(here, tmp_path, rates=[1e-4, 1e-2])
    of_search = means(search, tmp_path)
    del of_search[VANILLA]
    assert best == sorted(of_search, key=of_search.get, reverse=True)[:1]  # accuracy: more is better
    assert list(final.compare.arms) == [VANILLA, *best]
    records = {path: read_record(path) for path in changed_times(tmp_path)}
    used = {
        name: {one.seed for path, one in records.items() if name in path.parts}
        for name in ("tiny-search", "tiny-final")
    }
    assert used["tiny-final"] == {FRESH, FRESH + 1}
    assert used["tiny-search"] == {0, 1000}
    # Each at the learning rate that was found for it, without a second tuning, and at the baseline's size.
    assert not (tmp_path / "tiny-final" / "tuning").exists()
    rates = {}
    for one in records.values():
        if one.experiment.part == "comparison":
            rates.setdefault(one.experiment.arm, set()).add(one.recipe["training"]["learning_rate"])
            assert one.parameters == pytest.approx(next(iter(records.values())).parameters, rel=0.02)
    assert all(len(rates[arm]) == 1 for arm in (VANILLA, *best))


def test_those_trained_longest_are_chosen_first_and_none_that_diverged(tmp_path):
    made = recipe()
    search = search_recipe(made, candidates(made, TWO)[0], 5, 3)
    results = {  # of each seed: its looks
        VANILLA: [[0.9]] * 5,
        "kv_shift": [[0.1, 0.2]] * 5,
        "value_residual": [[0.8]] * 5,
        BOTH: [[0.1, 0.9]] * 4 + [None],
    }

    def fill():
        for trial in trials_of(search, tmp_path):
            looks = results[trial.experiment.arm][trial.recipe.seed]
            state = {"status": "diverged"} if looks is None else {"curve": looks[:-1]}
            one = record("x", 0, looks and looks[-1], measure="accuracy", **state)
            trial.folder.mkdir(parents=True, exist_ok=True)
            write_record(one, trial.folder)

    fill()
    assert best_arms(search, tmp_path, 3) == ["kv_shift", "value_residual"]
    assert best_arms(search, tmp_path, 1) == ["kv_shift"]
    results |= dict.fromkeys(("kv_shift", "value_residual"), [[0.5]] * 4 + [[math.nan]])
    fill()
    with pytest.raises(HeadwaterError, match="Every combination diverged; lower training") as error:
        best_arms(search, tmp_path, 2)
    assert "\n" not in str(error.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [3, 6])  # in the first phase, and in the second
@pytest.mark.slow
def test_stopped_the_same_search_goes_on(here, tmp_path, monkeypatch, after):
    halving = Halving(factor=3, steps=2)
    _, best, final = searched(here, tmp_path / "whole", halving=halving)
    trained = list(here.trained)
    assert len(trained) == 1 + 3 + 1 + 2 * 2  # vanilla, the first rung, whoever goes on; and the final
    here.trained.clear()
    run = here.run

    def stopping(job):
        if len(here.trained) == after:
            raise Interrupted("Stopped; run the same command again.")
        return run(job)

    monkeypatch.setattr(here, "run", stopping)
    with pytest.raises(Interrupted):
        searched(here, tmp_path / "cut", halving=halving)
    before = changed_times(tmp_path / "cut")
    finished = {path for path in before if read_record(path).status == "finished"}
    monkeypatch.setattr(here, "run", run)
    assert searched(here, tmp_path / "cut", halving=halving)[1] == best
    assert here.trained == trained
    now = changed_times(tmp_path / "cut")
    assert all(now[path] == before[path] for path in finished)
    assert means(final, tmp_path / "cut") == means(final, tmp_path / "whole")
    # Once more: nothing is left to train.
    searched(here, tmp_path / "cut", halving=halving)
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


def test_the_command_chooses_and_tests(run, here, file, tmp_path):
    arguments = ["--mechanism", "kv_shift", "--mechanism", "value_residual", "--seeds", 1, "--final-seeds", 2]
    path = file(compare={"baseline": "a", "arms": {"a": {}}})
    code, out, err = run("search", path, *arguments, "--final", 1, "--out", tmp_path / "out")
    assert code == 0
    assert "compare section is ignored" in err
    assert "3 combinations and vanilla; one in 3 continues at each rung" in err
    (chosen,) = (line.removeprefix("chosen: ") for line in err.splitlines() if line.startswith("chosen: "))
    assert "the best, tested on fresh seeds" in out
    assert (tmp_path / "out" / "report.html").exists()
    arms = {read_record(p).experiment.arm for p in changed_times(tmp_path / "out" / "tiny-final")}
    assert arms == {VANILLA, chosen}


def test_the_command_refuses_before_anything_is_trained(run, here, file, tmp_path):
    both = ["--mechanism", "kv_shift", "--mechanism", "value_residual"]
    for arguments, words in (
        ([*both, "model.num_hidden_layers=1"], "besides vanilla only kv_shift is left"),
        (["--mechanism", "kv_shft"], "did you mean 'kv_shift'?"),
        ([*both, "--final", "9"], "--final 9 is more than the 3 available combinations"),
        ([*both, "--equal", "flops"], "--no-halving"),
        ([*both, "--learning-rate", "0"], "greater than 0"),
    ):
        code, _, err = run("search", file(), *arguments, "--out", tmp_path / "out")
        *left_out, last = err.splitlines()
        assert (code, last.startswith("headwater: "), words in last) == (2, True, True), err
        assert all(line.startswith("left out: value_residual, and 1 more: ") for line in left_out)
    assert here.trained == []


def test_where_everything_diverges_the_command_says_so(run, here, file, tmp_path):
    rate = DIVERGES["training"]["learning_rate"]
    arguments = ["--mechanism", "kv_shift", "--mechanism", "value_residual", "--seeds", 1, "--out", tmp_path / "out"]
    code, _, err = run("search", file(), f"training.learning_rate={rate}", *arguments)
    assert code == 2
    assert err.splitlines()[-1].startswith("headwater: Every combination diverged; lower training.learning_rate")
    assert not (tmp_path / "out" / "tiny-final").exists()
