"""Ladders: sizes and budgets by rule, with one multiplier of the law's rate for each arm."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
from saved import SHIFT, Here, changed_times, record

import headwater_lab as lab
from headwater import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.api.comparing import _report_overruled
from headwater_lab.api.training import _find_trial as find_recipe
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.scaling import fit_scaling
from headwater_lab.comparison.trials import choose_rate, list_trials, list_tuning_trials
from headwater_lab.comparison.tuning import find_score, find_tuned_rate
from headwater_lab.optimization.laws import LAWS, READ_FIELDS, Hyperparameters
from headwater_lab.papers.kept import _find_trial
from headwater_lab.recipe.recipe import parse
from headwater_lab.reports.page import write_report
from headwater_lab.training.records import list_records, read_record

SHARED = {"model": {"mechanisms": {"svformer": {}}}}
LADDER = {"law": "olmo", "depths": [2, 1], "width_per_layer": 8, "head_dim": 4, "tokens_per_parameter": [4, 2]}


def ladder(changes=None, training=None, **compare):
    """Make the recipe of a ladder whose models have a few hundred parameters."""
    section = {
        "baseline": "base",
        "seeds": [0],
        "arms": {"base": {}, "shift": SHIFT},
        "ladder": LADDER | (changes or {}),
    }
    values = {
        "name": "ladder",
        "data": {"kind": "induction", "length": 16, "vocab_size": 16, "held_out": 16},
        "training": {"threads": 1, "batch_size": 4} | (training or {}),
        "reporting": {"tensorboard": False, "log_every": 1},
        "compare": section | compare,
    }
    return parse(values, "test")


def test_each_depth_of_each_arm_is_built_before_any_is_trained(tmp_path):
    made = ladder({"depths": [1, 2], "tokens_per_parameter": [9]}, arms={"base": {}, "shared": SHARED})
    refusal = "Arm 'shared' of size 'd1 ×9': model: Mechanism 'svformer': no layer comes after layer 0"
    with pytest.raises(HeadwaterError, match=refusal):
        run_comparison(made, tmp_path / "out")
    with pytest.raises(HeadwaterError, match=refusal):
        lab.plan(made)
    deeper = ladder({"depths": [2, 3], "tokens_per_parameter": [9]}, arms={"base": {}, "shared": SHARED})
    assert lab.plan(deeper).runs


def test_laws_at_their_references():
    """OLMo's at 108M; marin's at 4,096 tokens a row, where it was fitted; nanochat's at 12 layers."""
    base = Hyperparameters(batch=32 * 4096, learning_rate=0.02, warmup=5e6, decay_fraction=0.3, weight_decay=0.2)
    assert LAWS["olmo"](108_000_000, 768, 2e9, base) == (2048 * 160, pytest.approx(0.0047 / 2), 108e6, 0.1, 0.2)
    small = LAWS["olmo"](108_000_000 // 8, 768, 2e9, base)
    assert (small.batch, small.learning_rate) == pytest.approx((2048 * 160 / 4, 0.0047))
    marin = LAWS["marin"](20_700_000, 512, 4e8, base)
    assert marin.learning_rate == pytest.approx(1.63 * 4e8**-0.2813 * 512**-0.3678 * math.sqrt(32))
    assert (marin.batch, marin.warmup, marin.decay_fraction, marin.weight_decay) == (32 * 4096, 4e7, 0.2, 0.2)
    assert LAWS["nanochat"](85_000_000, 768, 1.156e9, base) == pytest.approx((2**19, 0.02, 5e6, 0.5, 0.2))
    wide = LAWS["nanochat"](680_000_000, 1536, 8 * 1.156e9, base)
    batch = 2**19 * 8**0.383
    assert wide == pytest.approx((batch, 0.02 * math.sqrt(batch / 2**19), 5e6, 0.5, 0.05))


@pytest.mark.parametrize("law", LAWS)
def test_what_a_law_reads_of_a_recipe_is_listed(law):
    """The warm-up is in tokens, and so changes with the rows of a step too."""
    fields = {"batch_size": 32, "learning_rate": 0.02, "warmup_steps": 7, "decay_fraction": 0.3, "weight_decay": 0.2}

    def follow(batch_size, learning_rate, warmup_steps, decay_fraction, weight_decay):
        base = Hyperparameters(batch_size, learning_rate, warmup_steps * batch_size, decay_fraction, weight_decay)
        return LAWS[law](85_000_000, 768, 1.156e9, base)

    read = {name for name, value in fields.items() if follow(**fields) != follow(**fields | {name: 2 * value})}
    assert read == {*READ_FIELDS[law]}


def test_settings_that_a_ladder_replaces_are_told():
    told = []
    watch = SimpleNamespace(tell=told.append)
    _report_overruled(ladder(training={"learning_rate": 0.5, "weight_decay": 0.3}), [], watch)
    assert [line.partition(";")[0] for line in told] == [
        "training.batch_size has no effect, because compare.ladder sets it",
        "training.learning_rate has no effect, because compare.ladder sets it",
    ]
    told.clear()
    nanochat = {"law": "nanochat", "branches": False, "tokens_per_parameter": [90]}
    made = ladder(nanochat, {"learning_rate": 0.5, "steps": 44, "warmup_steps": 0})
    _report_overruled(made, ["training.learning_rate=0.5"], watch)
    assert [line.split()[0] for line in told] == ["training.steps"]


def test_a_ladder_has_the_law_s_settings_at_every_rung():
    made = ladder()
    assert [*made.compare.sizes] == ["d1 ×2", "d1 ×4", "d2 ×2", "d2 ×4"]
    for name, depth, ratio in (("d1 ×2", 1, 2), ("d1 ×4", 1, 4), ("d2 ×2", 2, 2), ("d2 ×4", 2, 4)):
        shapes, batches = set(), set()
        for arm in ("base", "shift"):
            recipe = made.arm(arm, 0, name)
            config = recipe.config_for(recipe.data.build())
            shapes.add((config.num_hidden_layers, config.hidden_size, config.num_attention_heads))
            training = recipe.training
            batches.add((training.steps, training.batch_size, training.learning_rate, training.warmup_steps))
            assert (training.schedule, training.decay_fraction) == ("wsd", 0.1)
            if arm == "base":
                model = HeadwaterForCausalLM(config)
                size = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n)
        assert shapes == {(depth, 8 * depth, 2 * depth)}
        rows = round(2048 * 160 * (size / 108e6) ** (2 / 3) / 16)
        rate = float(f"{0.0047 / 2 * (size / 108e6) ** (-1 / 3):.4g}")
        assert batches == {(round(ratio * size / rows / 16), rows, rate, round(size / rows / 16))}


def test_a_record_of_a_ladder_is_known_by_its_rate(tmp_path):
    """Tables that keep runs in a file find tuning runs, and trials at any multiplier tried."""
    made = ladder({"multipliers": [0.5, 1, 2]}, tuning_seeds=[1000])
    tuning = [(trial, trial.recipe) for trial in list_tuning_trials(made, tmp_path)]
    trials = [
        (trial, choose_rate(trial.recipe, made.compare, rate))
        for trial in list_trials(made, tmp_path)
        for rate in (0.5, 2)
    ]
    assert len(tuning) == 6
    for trial, tuned in tuning + trials:
        values = {"experiment": trial.experiment, "recipe": tuned.model_dump(mode="json"), "identity": tuned.identity}
        run = record(trial.experiment.arm, trial.recipe.seed, 0.5).model_copy(update=values)
        assert _find_trial(run, made, trial.folder, tmp_path).folder == trial.folder
        assert _find_trial(run.model_copy(update={"identity": "another"}), made, trial.folder, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training": {"gradient_accumulation_steps": 2}}, "training.gradient_accumulation_steps"),
        ({"training": {"learning_rate": 0.1}}, "training.learning_rate"),
        ({"data": {"context": 8}}, "data.context"),
    ],
)
def test_an_arm_has_the_budget_and_the_rate_of_its_rung(change, field):
    with pytest.raises(HeadwaterError, match=f"'shift' sets {field}, which compare.ladder sets for all arms"):
        ladder(arms={"base": {}, "shift": SHIFT | change})


@pytest.mark.parametrize("multipliers", [[0.5], [0.25, 0.5]])
def test_an_arm_trained_alone_has_its_tuned_rate(tmp_path, monkeypatch, multipliers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", Here())
    made = ladder({"depths": [1], "tokens_per_parameter": [2], "multipliers": multipliers})

    def find_rate():
        return find_recipe(made, "shift", "d1 ×2", [], SimpleNamespace())[0].training.learning_rate

    if len(multipliers) > 1:
        with pytest.raises(HeadwaterError, match="'shift' is not tuned in 'runs/ladder'"):
            find_rate()
    run_comparison(made, tmp_path / "runs")
    (compared,) = (
        run for run in map(read_record, list_records(tmp_path / "runs/ladder/d1-2")) if run.name.startswith("shift")
    )
    assert (
        find_rate()
        == compared.recipe["training"]["learning_rate"]
        < made.compare.sizes["d1 ×2"]["training"]["learning_rate"]
    )


def test_accumulated_batches_are_the_law_s():
    plain, accumulated = ladder(), ladder(training={"gradient_accumulation_steps": 3})
    for size in plain.compare.sizes:
        rows = [made.arm("base", 0, size).training.batch_size for made in (plain, accumulated)]
        assert rows[1] == pytest.approx(rows[0] / 3, abs=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"law": "marin"}, "law=marin sets the rate from a run's tokens, so its budgets cannot come from one run"),
        ({"law": "nanochat"}, "use law=olmo, one of tokens_per_parameter, or branches=false"),
        ({"head_dim": 16}, "1 layers are 8 wide, which is not a multiple of head_dim=16"),
        ({"depths": [2, 2]}, "depths has an entry twice"),
        ({"tokens_per_parameter": [9, 20, 10]}, "9 and 10 are too near for laws of their own"),
        ({"tokens_per_parameter": [1.0]}, r"law=olmo sets 9 steps .*; raise compare\.ladder\.tokens_per_parameter"),
        ({"law": "adam"}, "law"),
    ],
)
def test_ladders_that_cannot_be_are_refused(changes, message):
    with pytest.raises(HeadwaterError, match=message):
        ladder(changes)


def test_a_law_of_tokens_takes_a_run_a_budget():
    for law in ("marin", "nanochat"):
        ladder({"law": law, "tokens_per_parameter": [400]})
        made = ladder({"law": law, "branches": False, "tokens_per_parameter": [400, 800]})
        assert lab.plan(made).runs["ladder"][-1].saving == 0
    assert lab.plan(ladder()).runs["ladder"][-1].saving > 0.25


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"sizes": {"S": {}}}, "compare.ladder makes the sizes; leave out compare.sizes"),
        ({"learning_rates": [0.1]}, "both set the rate; use ladder.multipliers"),
    ],
)
def test_a_ladder_sets_sizes_and_rates(compare, message):
    with pytest.raises(HeadwaterError, match=message):
        ladder(**compare)


def test_a_ladder_is_tuned_once_branched_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", Here())
    made = ladder({"multipliers": [0.25, 1.0]})
    assert [cost.runs for cost in lab.plan(made).runs["ladder"]] == [4, 2, 2, 2, 2, 12]
    outcomes = run_comparison(made, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 8
    tries = {(trial.experiment.arm, trial.rate): trial for trial in list_tuning_trials(made, tmp_path)}
    lowest = list_trials(made, tmp_path)[0].recipe.training.learning_rate
    for trial in list_trials(made, tmp_path):
        arm, run = trial.experiment.arm, read_record(trial.folder)
        best = max((0.25, 1.0), key=lambda rate: find_score(read_record(tries[arm, rate].folder)))
        assert find_tuned_rate(made, arm, tmp_path) == best
        assert run.recipe["training"]["learning_rate"] == best * trial.recipe.training.learning_rate
        assert (run.trunk is not None) == trial.experiment.size.endswith("×4")
        assert read_record(tries[arm, 0.25].folder).recipe["training"]["learning_rate"] == 0.25 * lowest
    before = changed_times(tmp_path)
    run_comparison(made, tmp_path)
    assert changed_times(tmp_path) == before
    # Other budgets are added to the same folder, and the old ones are not trained again.
    longer = ladder({"multipliers": [0.25, 1.0], "tokens_per_parameter": [4, 2, 8]})
    run_comparison(longer, tmp_path)
    after = changed_times(tmp_path)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 4
    assert read_record(tmp_path / "ladder" / "d1-8" / "base-0").trunk.folder == "../../d1-4/base-0"


def test_the_report_of_a_ladder_has_laws_projections_and_speedups(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", Here())
    # The models are not of text.
    monkeypatch.setattr("headwater_lab.comparison.speedup.explain_unpinned", lambda *_: "")
    three = {"depths": [1, 2, 3], "tokens_per_parameter": [2, 4], "projections": [1e12]}
    run_comparison(ladder(three, seeds=[0, 1]), tmp_path)
    before = [read_record(path.parent).curve for path in list_records(tmp_path)]
    run_comparison(ladder(three | {"projections": [1e13, 1e14]}, seeds=[0, 1]), tmp_path)  # only the report changes
    assert [read_record(path.parent).curve for path in list_records(tmp_path)] == before
    for _ in range(2):  # it replaces its files
        write_report(tmp_path, ["csv", "png"])
    page, tables = (tmp_path / "report.html").read_text(), tmp_path / "tables"
    assert "no law, which needs 3 sizes or budgets; there are 2" in page
    for name in ("ladder-scaling-2-tokens-per-parameter", "ladder-scaling-4-tokens-per-parameter", "ladder-speedup"):
        assert (tmp_path / "figures" / f"{name}.png").exists()
    with (tables / "ladder-scaling-4-tokens-per-parameter-predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {float(row["flops"]) for row in rows if not row["measured"]} == {1e13, 1e14}
    records = [read_record(path.parent) for path in list_records(tmp_path)]
    with (tables / "ladder-speedup-pinned.csv").open() as file:
        lines = list(csv.DictReader(file))
    rows = [row for row in lines if row["measure"] == "effective"]
    assert rows
    assert {row["missing"] for row in lines if not row["measure"]} <= {"no baseline reaches its loss"}
    assert len({row["size"] for row in lines}) == 6

    def average(arm, size):
        runs = [run for run in records if (run.experiment.arm, run.experiment.size) == (arm, size)]
        numbers = [(run.held_out[-1].metrics["loss"], run.flops, run.tokens / run.seconds) for run in runs]
        return np.mean(numbers, 0)

    for row in rows:
        base, base_flops, base_speed = average("base", row["size"])
        loss, flops, speed = average("shift", row["size"])
        needed = base_flops * ((base - 1.6) / (loss - 1.6)) ** (1 / 0.0941)
        assert float(row["speedup"]) == pytest.approx((needed / base_speed) / (flops / speed))


def test_no_law_in_parameters_is_fitted_to_several_budgets():
    sizes = {"a": 1000, "a2": 1000, "b": 2000, "c": 4000}
    runs = [
        record(arm, seed, 2 + 1 / size, size=name, parameters=size)
        for name, size in sizes.items()
        for arm in ("base", "shift")
        for seed in (0, 1)
    ]
    with pytest.raises(HeadwaterError, match="Several of the 4 sizes have equal parameters and different budgets"):
        fit_scaling(runs)
