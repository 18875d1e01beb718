"""What arms cost: measured once, kept with what it depends on, and shown beside what they gain."""

import json
import sys

import pytest
from saved import SHIFT, tiny

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import cache_bytes_per_token, training_flops
from headwater.util.errors import HeadwaterError
from headwater_lab.bench.paired import PairedTimes
from headwater_lab.cli import main
from headwater_lab.comparison import arm_costs
from headwater_lab.comparison.arm_costs import COSTS, make_timed_recipe, measure_arm_costs, read_arm_costs
from headwater_lab.comparison.running import run_comparison
from headwater_lab.reports import read_comparisons
from headwater_lab.reports.cost_tables import arm_cost_rows, find_arm_costs, make_cost_table
from headwater_lab.reports.page import costs_part
from headwater_lab.training.records import read_record

DEEP = {"model": {"num_hidden_layers": 2}}
ARMS = {"base": {}, "shift": SHIFT, "deep": DEEP}


@pytest.fixture
def clock(monkeypatch):
    """Times without a clock: a step takes what it computes. Counts what is timed."""
    timed = []

    def interleave(a, b, pairs, warmup=3):
        for step in (a, b):
            step()
        timed.append(a.__self__.recipe.model)
        works = [training_flops(one.__self__.model.config, 12) for one in (a, b)]
        return PairedTimes(*([work * 1e-9 * turn for turn in (1.0, 2.0, 3.0)] for work in works))

    monkeypatch.setattr(arm_costs, "time_interleaved", interleave)
    monkeypatch.setattr(arm_costs, "_time_decoding", lambda configs, context, recipe: None)
    return timed


def arms_of(recipe):
    return {name: recipe.arm(name, 0) for name in recipe.compare.arms}


def test_costs_are_those_of_the_models_and_are_measured_once(tmp_path, clock):
    recipe = tiny({"arms": ARMS})
    found = measure_arm_costs(arms_of(recipe), "base", tmp_path)
    config = HeadwaterConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=1)
    deep = found.arms["deep"]
    assert deep.cache == cache_bytes_per_token(config) == 2 * found.arms["base"].cache
    assert found.arms["base"].training.ratio == 1
    assert deep.training.ratio == pytest.approx(deep.flops / found.arms["base"].flops)
    assert deep.training.seconds == pytest.approx(2 * 1e-9 * deep.flops / 48)  # 4 rows of 12 tokens
    assert len(clock) == 3

    # Neither seeds nor steps nor rates change a cost; what is computed does.
    again = tiny({"arms": ARMS}, training={"steps": 99, "learning_rate": 0.5}, reporting={"log_every": 1})
    assert measure_arm_costs({name: again.arm(name, 7) for name in ARMS}, "base", tmp_path) == found
    assert len(clock) == 3
    wider = {"base": {}, "shift": SHIFT, "deep": {"model": {"num_hidden_layers": 3}}}
    other = arms_of(tiny({"arms": wider}))
    assert not found.fit(other, "base")
    measure_arm_costs(other, "base", tmp_path)
    assert len(clock) == 6
    assert read_arm_costs(tmp_path).fit({name: other[name] for name in ("base", "deep")}, "base")
    # Another baseline makes them all another's.
    assert not read_arm_costs(tmp_path).fit(other, "deep")


def test_each_size_is_measured(tmp_path, clock):
    sizes = {"shallow": {}, "deep": {"model": {"num_hidden_layers": 2}}}
    recipe = tiny({"arms": {"base": {}, "shift": SHIFT}, "sizes": sizes, "costs": True})
    run_comparison(recipe, tmp_path, workers=1)
    assert len(clock) == 4
    shallow, deep = (json.loads((tmp_path / recipe.name / size / COSTS).read_text()) for size in sizes)
    assert deep["arms"]["shift"]["flops"] > shallow["arms"]["shift"]["flops"]


def test_budgets_of_a_size_are_measured_once(tmp_path, clock):
    sizes = {"short": {}, "long": {"training": {"steps": 9}}, "deep": DEEP}
    run_comparison(tiny({"arms": {"base": {}, "shift": SHIFT}, "sizes": sizes, "costs": True}), tmp_path)
    assert len(clock) == 4
    stored = [read_arm_costs(file.parent) for file in sorted(tmp_path.rglob(COSTS))]
    assert [costs.arms.keys() for costs in stored] == [{"base", "shift"}] * 3
    assert sum(costs.arms == stored[-1].arms for costs in stored) == 2


def test_other_machines_and_versions_are_measured_again(tmp_path, clock, monkeypatch):
    arms = arms_of(tiny({"arms": {"base": {}}}))
    measure_arm_costs(arms, "base", tmp_path)
    stored = json.loads((tmp_path / COSTS).read_text())
    for change in ({"device_name": "another"}, {"torch": "1.0"}, {"threads": 7}):
        (tmp_path / COSTS).write_text(json.dumps(stored | change))
        clock.clear()
        assert measure_arm_costs(arms, "base", tmp_path).model_dump(mode="json") == stored
        assert len(clock) == 1
    (tmp_path / COSTS).write_text("{")
    with pytest.raises(HeadwaterError, match=r"damaged; remove it"):
        measure_arm_costs(arms, "base", tmp_path)


def test_arms_that_cannot_be_timed_are_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", lambda *_: pytest.fail("trained"))
    stages = {"stages": [{"name": "more"}]}
    with pytest.raises(HeadwaterError, match=r"the arm 'staged' has stages"):
        run_comparison(tiny({"arms": {"base": {}, "staged": stages}, "costs": True}), tmp_path)


def test_the_report_shows_which_arms_no_cheaper_one_beats(tmp_path, clock, monkeypatch):
    from saved import Here

    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", Here())
    recipe = tiny({"arms": ARMS, "costs": True}, training={"steps": 4})
    run_comparison(recipe, tmp_path)
    for arm, result in (("base", 0.5), ("shift", 0.4), ("deep", 0.6)):
        for seed in (0, 1):
            file = tmp_path / "tiny" / f"{arm}-{seed}" / "record.json"
            record = read_record(file)
            record.held_out[-1].metrics["accuracy"] = result + 0.01 * seed * (arm == "deep")
            file.write_text(record.model_dump_json())
    (comparison,) = read_comparisons(tmp_path)
    found = find_arm_costs(comparison)
    rows = arm_cost_rows(comparison, found)
    assert {row[""] for row in rows} == {"base", "shift", "deep"}
    assert "time/token" in "".join(rows[0])
    assert make_cost_table(found).row_count == 3
    # Of other settings: no cost, which the page says.
    stored = json.loads((tmp_path / "tiny" / COSTS).read_text())
    stored["settings"]["shift"] = make_timed_recipe(recipe.arm("deep", 0)).identity
    (tmp_path / "tiny" / COSTS).write_text(json.dumps(stored))
    (told,) = costs_part(comparison, "prices", "Prices").paragraphs
    assert told.startswith("prices.json holds prices of other arms or settings;")


def test_a_recipe_is_timed_before_it_runs(tmp_path, clock, capsys, monkeypatch):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["headwater", "bench", "prices", *words])
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    recipe = tiny({"arms": ARMS}).model_dump(mode="json")
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe))
    name, runs = str(tmp_path / "tiny.yaml"), str(tmp_path / "runs")
    assert run(name, "--out", runs) == 0
    text = capsys.readouterr().out
    assert all(arm in text for arm in ARMS)
    found = json.loads((tmp_path / "runs" / "tiny" / COSTS).read_text())
    assert found["arms"].keys() == ARMS.keys()
    assert len(clock) == 3
    # What has been measured stays, until a model changes.
    assert run(name, "--out", runs) == 0
    assert len(clock) == 3
    assert run(name, "compare.arms.deep.model.num_hidden_layers=3", "--out", runs) == 0
    assert len(clock) == 6
    capsys.readouterr()
    alone = tmp_path / "alone.yaml"
    alone.write_text(json.dumps(recipe | {"compare": None}))
    assert run(str(alone)) != 0
    assert "has no compare section" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_real_times_are_positive_and_relative_to_the_baseline(tmp_path):
    """With the clock: a model of four times the layers takes longer, in training and in generation."""
    recipe = tiny({"arms": {"base": {}, "deep": {"model": {"num_hidden_layers": 8}}}}, data={"length": 64})
    found = measure_arm_costs(arms_of(recipe), "base", tmp_path).arms
    assert 0.5 < found["base"].training.ratio < 2
    assert found["deep"].training.ratio > 1.5
    assert found["deep"].decoding.ratio > 1.5
    assert found["deep"].decoding.quartiles[0] <= found["deep"].decoding.ratio <= found["deep"].decoding.quartiles[1]
