"""Recipes with stages, alone and in comparisons."""

import shutil
from pathlib import Path

import pytest
import yaml

from headwater import HeadwaterError
from headwater_lab.comparison import pool
from headwater_lab.comparison.pool import Outcome, run_trials
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.trials import list_trials, order_jobs
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.reports import read_comparisons, write_report
from headwater_lab.reports.comparison import differ_in_cost
from headwater_lab.training.checkpoints import newest_checkpoint, read_optimizer_state
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record
from headwater_lab.training.stages import list_stages, train_stages

PAIRS = {"mechanisms": {"pattention": {"attention_pairs": 5, "ffn_pairs": 9}}, "residual_dropout": 0.0}
STAGES = [
    {"name": "more", "training": {"steps": 4, "learning_rate": 5e-4}},
    {"name": "grown", "grow": {"attention_pairs": 12}, "training": {"steps": 6}},
]


@pytest.fixture(scope="module")
def staged(recipe):
    def make(**changes):
        options = {"training": {"steps": 8}, "reporting": {"evaluate_every": 2}, "stages": STAGES} | changes
        values = recipe(**{name: value for name, value in options.items() if name != "stages"}).model_dump(mode="json")
        values["model"] = {k: v for k, v in values["model"].items() if k != "mechanisms"} | PAIRS
        return parse(values | {"stages": options["stages"]}, "test")

    return make


@pytest.fixture(scope="module")
def whole(staged, tmp_path_factory):
    """A run through all stages, not to be changed: its folder, its record and the steps that it told of."""
    folder, seen = tmp_path_factory.mktemp("stages") / "run", []
    return folder, train_stages(staged(), folder, on_event=lambda step, point: seen.append(step)), seen


@pytest.mark.slow
def test_stages_follow_one_another_and_one_record_adds_them_up(whole):
    folder, record, seen = whole
    assert record == read_record(folder)
    parts = [read_record(folder / stage.folder) for stage in record.stages]
    assert [stage.name for stage in record.stages] == ["start", "more", "grown"]
    assert [part.recipe["training"]["steps"] for part in parts] == [8, 4, 6]
    assert [part.recipe["training"]["learning_rate"] for part in parts] == [1e-3, 5e-4, 1e-3]
    assert record.tokens == sum(part.tokens for part in parts)
    assert record.flops == pytest.approx(sum(part.flops for part in parts))
    assert [stage.total_flops for stage in record.stages] == pytest.approx(
        [parts[0].flops, parts[0].flops + parts[1].flops, record.flops]
    )
    assert parts[2].origin.flops == pytest.approx(record.stages[1].total_flops)
    assert record.parameters == parts[2].parameters > parts[0].parameters
    steps = [point.step for point in record.held_out]
    assert steps == [2, 4, 6, 8, 8, 10, 12, 12, 14, 16, 18]
    assert [point.flops for point in record.held_out] == sorted(point.flops for point in record.held_out)
    assert record.held_out[-1].tokens == record.tokens
    losses = {step: [p.metrics["loss"] for p in record.held_out if p.step == step] for step in (8, 12)}
    for before, after in losses.values():
        assert after == pytest.approx(before, rel=1e-5), "a stage begins where the one before ended"
    assert max(seen) == 18
    assert newest_checkpoint(folder).parts[-3:-1] == ("02-grown", "checkpoints")


@pytest.mark.slow
def test_finished_stages_are_not_repeated_and_one_can_be_run_alone(staged, whole, tmp_path):
    recipe, folder, losses = staged(), tmp_path / "run", [point.loss for point in whole[1].curve]
    train_stages(recipe, folder, only="start")
    with pytest.raises(HeadwaterError, match="no checkpoint folder"):
        train_stages(recipe, folder, only="grown")
    with pytest.raises(HeadwaterError, match="already holds a run"):
        train_stages(recipe, folder)
    made = read_record(folder / "stages" / "00-start")
    record = train_stages(recipe, folder, resume=True)
    assert read_record(folder / "stages" / "00-start") == made
    assert [point.loss for point in record.curve] == losses
    alone = tmp_path / "alone"
    for name in ("start", "more", "grown"):
        train_stages(recipe, alone, only=name)
    assert [point.loss for point in read_record(alone).curve] == losses
    with pytest.raises(HeadwaterError, match="no stage"):
        train_stages(recipe, alone, only="growm")


@pytest.mark.slow
def test_a_moved_run_goes_on(staged, tmp_path):
    train_stages(staged(), tmp_path / "run", only="start")
    (tmp_path / "run").rename(tmp_path / "moved")
    record = train_stages(staged(), tmp_path / "moved", resume=True)
    assert record.status == "finished"


def test_several_devices_are_told_to_go_stage_by_stage(staged, tmp_path):
    with pytest.raises(HeadwaterError, match="--stage start, --stage more, --stage grown"):
        train_stages(staged(training={"devices": 2}), tmp_path / "run")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a"}, {"name": "a"}], "different names"),
        ([{"name": "start"}], "different names"),
        ([{"name": "a", "training": {"stepps": 3}}], "stepps"),
        ([{"name": "a", "grow": {"attention_pairs": 0}}], "attention_pairs"),
        ([{"name": "a", "shrink": {}}], "shrink"),
        ([{"name": "a", "grow": {"heads": 3}}], r"stages\.0\.grow has no field 'heads'; .*num_attention_heads"),
        ([{"name": "../../x"}], "name"),
        ([{"name": "a"}, {"name": "b", "grow": {"attention_pairs": 3}}], "Stage 'b': .*at least 5"),
        ([{"name": "a", "grow": {"hidden_size": 8}}], "would shrink"),
        ([{"name": "a", "grow": {"hidden_size": 33, "method": "hypercloning"}}], "hypercloning multiplies"),
        ([{"name": "a", "grow": {"hidden_size": 33, "method": "clone"}}], "no growth method .clone."),
        ([{"name": "a", "grow": {"num_hidden_layers": 4, "freeze": True}}], "freeze applies only to new pairs"),
        ([{"name": "a", "optimizer_state": "keep", "training": {"optimizer": "muon"}}], "adamw but trains with muon"),
        ([{"name": "a", "grow": {"ffn_pairs": 40, "freeze": True}, "optimizer_state": "keep"}], "no state to keep"),
        (
            [
                {"name": "a", "grow": {"ffn_pairs": 40, "freeze": True}},
                {"name": "b", "grow": {"ffn_pairs": 50}, "optimizer_state": "keep"},
            ],
            "Stage 'b' trains what the stage before had frozen",
        ),
        ([{"name": "a", "data": {"kind": "induction", "lenght": 3}}], "lenght"),
    ],
)
def test_what_is_wrong_with_stages_is_said_at_once(staged, stages, message):
    values = staged(stages=[]).model_dump(mode="json")
    with pytest.raises(HeadwaterError, match=message):
        parse(values | {"stages": stages}, "test")


def test_a_stage_that_cannot_follow_from_a_checkpoint_is_refused_before_any_is_trained(staged, recipe, tmp_path):
    train(recipe(training={"steps": 1}, model={"num_key_value_heads": 1, "mechanisms": None}), tmp_path / "trained")
    wrong = {"name": "wider", "grow": {"num_key_value_heads": 3}, "training": {"steps": 1}}
    begun = {"start": {"checkpoint": str(tmp_path / "trained")}, "stages": [wrong]}
    options = staged(stages=[]).model_dump(mode="json") | begun
    del options["model"]["mechanisms"]
    with pytest.raises(HeadwaterError, match="Stage 'wider'"):
        train_stages(parse(options, "test"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    compare = {"baseline": "a", "arms": {"a": {}, "b": {"training": {"steps": 2}}}, "seeds": [0]}
    with pytest.raises(HeadwaterError, match="Arm 'a': Stage 'wider'"):
        run_comparison(parse(options | {"compare": compare}, "test"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_may_change_once_the_first_stage_is_finished(staged, recipe, tmp_path):
    sizes = {"num_key_value_heads": 1, "mechanisms": None}
    train(recipe(training={"steps": 1}, model=sizes), tmp_path / "trained")
    deeper = {"name": "deeper", "grow": {"num_hidden_layers": 3}, "training": {"steps": 1}}
    begun = {"start": {"checkpoint": str(tmp_path / "trained")}, "stages": [deeper]}
    options = staged(stages=[], training={"steps": 1}).model_dump(mode="json") | begun
    del options["model"]["mechanisms"]
    train_stages(parse(options, "test"), tmp_path / "run", only="start")
    shutil.rmtree(tmp_path / "trained")
    train(recipe(training={"steps": 1}, model=sizes | {"num_hidden_layers": 4}), tmp_path / "trained")
    assert train_stages(parse(options, "test"), tmp_path / "run", resume=True).status == "finished"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_has_no_counterpart_in_the_smaller_model_begins_with_no_past(recipe, tmp_path, optimizer):
    """A copy of the first layer, which has no maps of MUDD's, has some."""
    values = recipe(training={"steps": 3, "optimizer": optimizer}).model_dump(mode="json")
    values["model"] |= {"mechanisms": {"mudd": {}}}
    deeper = {"num_hidden_layers": 2 * values["model"]["num_hidden_layers"], "method": "identity"}
    stage = {"name": "deeper", "grow": deeper, "optimizer_state": "keep", "training": {"steps": 2}}
    record = train_stages(parse(values | {"stages": [stage]}, "test"), tmp_path / "run")
    assert record.status == "finished"
    place = newest_checkpoint(tmp_path / "run" / "stages" / "01-deeper")
    state = read_optimizer_state(place)
    steps = {name: float(count) for name, count in state.items() if name.endswith(".step")}
    new = [name for name, count in steps.items() if count == 2]
    assert new
    assert all("layers.1.mechanisms.mudd" in name for name in new), new
    assert {count for name, count in steps.items() if name not in new} == {5}


def test_a_stage_may_train_on_data_of_another_kind(staged):
    recipe = staged(stages=[{"name": "a", "data": {"kind": "induction", "length": 9}}])
    assert recipe.chain(lambda name, _: Path(name))[1][0].data.length == 9


def test_stages_are_overridden_by_name_or_number(staged, tmp_path):
    values = staged(stages=[*STAGES, {"name": "1.4b"}]).model_dump(mode="json", exclude={"compare"})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    changes = ["stages.grown.training.steps=7", "stages.0.tau=keep", "stages.1.4b.grow.ffn_pairs=40"]
    stages = load_recipe(file, changes).stages
    assert (stages[1].training["steps"], stages[0].tau, stages[2].grow.ffn_pairs) == (7, "keep", 40)
    assert stages[1].grow.attention_pairs == 12
    with pytest.raises(HeadwaterError, match=r"no such stage; did you mean 'grown'"):
        load_recipe(file, ["stages.grow.training.steps=7"])


@pytest.fixture
def here(monkeypatch):
    """Comparisons train in this process, which saves starting others."""

    def outcome(job):
        try:
            return Outcome(job.label, train(job.recipe, job.folder, resume=True, experiment=job.experiment))
        except HeadwaterError as error:
            return Outcome(job.label, None, str(error))

    monkeypatch.setattr(pool, "_run_pool", lambda jobs, *_: {job.folder: outcome(job) for job in jobs})


@pytest.mark.slow
def test_arms_share_the_stages_in_which_they_begin_alike(staged, tmp_path, here):
    values = staged(stages=[]).model_dump(mode="json")
    grown = {"name": "grown", "grow": {"attention_pairs": 12}, "training": {"steps": 6}}
    arms = {
        "small": {"stages": [{"name": "more", "training": {"steps": 6}}]},
        "grown": {"stages": [grown]},
        "large": {"model": {"mechanisms": {"pattention": {"attention_pairs": 12}}}},
    }
    recipe = parse(values | {"name": "growth", "compare": {"baseline": "small", "seeds": [0], "arms": arms}}, "test")
    trials = list_trials(recipe, tmp_path)
    first, second = order_jobs(trials)
    assert [job.label for job in first] == ["stage start · seed 0", "large · seed 0"]
    assert [job.label for job in second] == ["stage more · seed 0", "stage grown · seed 0"]
    outcomes = run_trials(trials, workers=2)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    records = {outcome.record.experiment.arm: outcome.record for outcome in outcomes}
    assert records["small"].held_out[3].metrics == records["grown"].held_out[3].metrics
    assert records["grown"].total_flops > records["small"].total_flops > records["large"].total_flops
    assert differ_in_cost(list(records.values()))
    (comparison,) = read_comparisons(tmp_path)
    assert {summary.arm for summary in comparison.summaries} == {"small", "grown", "large"}
    assert "growth" in write_report(tmp_path).read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("stages/*/record.json")}
    assert len(before) == 3
    run_trials(trials, workers=2)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is trained twice"


@pytest.mark.slow
def test_a_stage_that_fails_is_named(staged, tmp_path, here):
    values = staged(stages=[]).model_dump(mode="json")
    # The weights are broken after they were made: that no recipe shows.
    arms = {"base": {}, "wrong": {"stages": [{"name": "more", "grow": {"attention_pairs": 9}}]}}
    recipe = parse(values | {"compare": {"baseline": "base", "seeds": [0], "arms": arms}}, "test")
    trials = list_trials(recipe, tmp_path)
    first, second = trials[1].jobs
    train(first.recipe, first.folder)
    (newest_checkpoint(first.folder) / "model.safetensors").write_bytes(b"")
    outcomes = run_trials(trials, workers=2)
    assert outcomes[0].error is None
    assert outcomes[1].record is None
    assert second.label in outcomes[1].error
    assert "damaged" in outcomes[1].error


def test_the_digest_of_a_stage_says_what_came_before_and_not_where_it_lies(staged, tmp_path):
    one, other = list_stages(staged(), tmp_path / "a"), list_stages(staged(), tmp_path / "b")
    assert [recipe.identity for recipe, _ in one] == [recipe.identity for recipe, _ in other]
    longer = list_stages(staged(training={"steps": 9}), tmp_path / "a")
    assert all(a.identity != b.identity for (a, _), (b, _) in zip(one, longer, strict=True))
