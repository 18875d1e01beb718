"""What was given and would never be read is refused, or named in a notice."""

import ast
import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
import yaml

import headwater_lab
from headwater.growth.methods import GrowthOptions
from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import DATA
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import load_recipe, read_recipe
from headwater_lab.recipe.start_section import CacheConversion, Growth, Start, TrainingStage
from headwater_lab.recipe.training_section import Distillation, Reporting, Training
from headwater_lab.util.settings import ReadIf

RECIPE = {
    "name": "tiny",
    "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8},
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"steps": 2, "batch_size": 2, "threads": 1, "warmup_steps": 1},
    "reporting": {"tensorboard": False},
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("training.momentum=0.5", "with training.optimizer=adamw"),
        ("training.optimizer_options={nesterov: true}", "with training.optimizer=adamw"),
        ("training.min_learning_rate_ratio=0.5; training.schedule=constant", "with training.schedule=constant"),
        ("training.betas=[0.5,0.5]; training.optimizer=torch.optim:SGD", "with training.optimizer=torch.optim:SGD"),
        ("training.epsilon=0.5; training.optimizer=torch.optim:SGD", "with training.optimizer=torch.optim:SGD"),
        ("training.weight_decay_on=all; training.weight_decay=0", "with training.weight_decay=0"),
        ("training.scalar_learning_rate_multiplier=5", "without mechanisms"),
        ("training.label_smoothing=0.1", "on data of text"),
        ("training.z_loss=0.1; data.kind=digits", "on data of images"),
        ("reporting.evaluate_every=100", "in a run of 2 steps"),
        ("reporting.log_every=100", "in a run of 2 steps"),
        ("reporting.save_every=100", "in a run of 2 steps"),
        ("compare.margin=0.1; compare={baseline: a, arms: {a: {}, b: {seed: 1}}}", "compare.arms.b.seed has no effect"),
        ("compare.margin=0.1; compare={baseline: a, arms: {a: {}}}", "without compare.sequential=true"),
        ("compare.tuning_seeds=[5]; compare={baseline: a, arms: {a: {}}}", "without learning rates to choose from"),
    ],
)
def test_a_field_without_effect_is_refused(tiny, override, why):
    with pytest.raises(HeadwaterError) as error:
        load_recipe(tiny, override.split("; "))
    assert why in str(error.value)
    if "compare.arms" not in why:
        assert f"{override.partition('=')[0]} has no effect {why}; leave it out" in str(error.value)


def test_all_fields_without_effect_are_told_at_once(tiny):
    with pytest.raises(HeadwaterError, match="2 mistakes") as error:
        load_recipe(tiny, ["training.momentum=0.5", "reporting.log_every=100"])
    assert "training.momentum has" in str(error.value)
    assert "reporting.log_every has" in str(error.value)


def conditional(section=Recipe, path=()):
    """The fields of a recipe that only some runs read, as dotted names."""
    for name, field in section.model_fields.items():
        if any(isinstance(each, ReadIf) for each in field.metadata):
            yield ".".join((*path, name))
        inner = next(
            (each for each in (field.annotation, *get_args(field.annotation)) if hasattr(each, "model_fields")), None
        )
        if inner is not None:
            yield from conditional(inner, (*path, name))


DECIDED = "compare={sequential: true, margin: 1, baseline: a, arms: {a: {}, b: {}}}"
# For each of these fields, a recipe that reads it.
READERS = {
    "training.optimizer_options": "training.optimizer_options={momentum: 0.5}; training.optimizer=torch.optim:SGD",
    "training.scalar_learning_rate_multiplier": "training.scalar_learning_rate_multiplier=5; model.mechanisms=[smear]",
    "training.min_learning_rate_ratio": "training.min_learning_rate_ratio=0.5",
    "training.decay_fraction": "training.decay_fraction=0.5; training.schedule=wsd; training.warmup_steps=0",
    "training.decay_form": "training.decay_form=1-sqrt; training.schedule=wsd; training.warmup_steps=0",
    "training.betas": "training.betas=[0.5, 0.5]",
    "training.epsilon": "training.epsilon=0.5",
    "training.momentum": "training.momentum=0.5; training.optimizer=muon",
    "training.weight_decay_on": "training.weight_decay_on=all",
    "training.z_loss": "training.z_loss=0.1",
    "training.label_smoothing": "training.label_smoothing=0.1; data.kind=digits",
    "training.distillation": "training.distillation={teacher: x}",
    "training.loss_chunk_tokens": "training.loss_chunk_tokens=4",
    "reporting.log_every": "reporting.log_every=2",
    "reporting.evaluate_every": "reporting.evaluate_every=2",
    "reporting.save_every": "reporting.save_every=1",
    "compare.tuning_seeds": "compare={tuning_seeds: [5], learning_rates: [0.1, 0.2], baseline: a, arms: {a: {}}}",
    "compare.margin": DECIDED,
    "compare.min_seeds": f"{DECIDED}; compare.min_seeds=9",
    "compare.max_seeds": f"{DECIDED}; compare.max_seeds=9",
}


def test_each_of_these_fields_is_read_in_some_case(tiny):
    assert set(conditional()) == READERS.keys()
    for overrides in READERS.values():
        load_recipe(tiny, overrides.split("; "))


def test_every_other_field_is_read_by_some_module():
    """By its name, as an attribute or a parameter."""
    root = Path(headwater_lab.__file__).parent
    own = root / "recipe"
    read = {
        name
        for path in root.rglob("*.py")
        if path.parent != own or path.name == "recipe.py"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in [getattr(node, "attr", None) or getattr(node, "arg", None)]
    }
    growth = {field.name for field in dataclasses.fields(GrowthOptions)}
    for section in (
        Training,
        Distillation,
        Reporting,
        Compare,
        Start,
        TrainingStage,
        CacheConversion,
        *map(DATA.resolve, DATA.built_in),
    ):
        assert not section.model_fields.keys() - read - {"kind"}, section
    assert Growth.model_fields.keys() == growth


def test_what_an_arm_or_a_stage_inherits_may_be_for_others(tiny):
    """A field counts for all runs if the recipe sets it, and for its own if an arm or a stage does."""
    arms = {"a": {}, "b": {"training": {"optimizer": "muon"}}}
    recipe = yaml.safe_load(tiny.read_text()) | {"compare": {"baseline": "a", "arms": arms}}
    recipe["training"]["momentum"] = 0.5
    assert read_recipe(recipe).arm("a", 0).training.momentum == 0.5
    arms["a"] = {"training": {"momentum": 0.4}}
    with pytest.raises(HeadwaterError, match=r"compare\.arms\.a\.training\.momentum has no effect with .*adamw"):
        read_recipe(recipe)
    del recipe["compare"]
    recipe["stages"] = [{"name": "second", "training": {"optimizer": "muon"}}]
    assert read_recipe(recipe).training.momentum == 0.5
    recipe["stages"][0]["training"] = {"min_learning_rate_ratio": 0.5, "schedule": "constant"}
    with pytest.raises(HeadwaterError, match="2 mistakes") as error:
        read_recipe(recipe)
    assert "stages.second.training.min_learning_rate_ratio has no effect" in str(error.value)


def test_a_field_of_the_file_may_be_for_a_run_without_the_overrides(tiny):
    recipe = yaml.safe_load(tiny.read_text())
    recipe["training"] |= {"optimizer": "muon", "momentum": 0.5, "steps": 200}
    recipe["reporting"]["evaluate_every"] = 100
    tiny.write_text(yaml.safe_dump(recipe))
    assert load_recipe(tiny, ["training.steps=2", "training.optimizer=adamw"]).training.momentum == 0.5
    recipe["training"]["optimizer"] = "adamw"
    tiny.write_text(yaml.safe_dump(recipe))
    load_recipe(tiny, ["training.optimizer=muon"])
    with pytest.raises(HeadwaterError, match=r"training\.momentum has no effect"):
        load_recipe(tiny, ["training.steps=2"])


def test_a_limit_or_a_time_that_nothing_reaches_is_named(run, tiny, tmp_path):
    (tmp_path / "text.txt").write_text("some text to read\n" * 500)
    data = [f"data={{kind: text, source: {tmp_path}/text.txt}}", "data.context=8", "data.held_out_bytes=9000000"]
    code, _, err = run("train", tiny, *data, "training.timeout_minutes=1", "--out", tmp_path / "run")
    assert code == 0
    assert "data.held_out_bytes=9,000,000 has no effect" in err
    assert "training.timeout_minutes has no effect in a single process" in err


def test_a_warm_up_as_long_as_the_run_is_not_named(run, tiny, tmp_path):
    code, _, err = run("train", tiny, "training.warmup_steps=2", "--out", tmp_path / "run")
    assert code == 0
    assert "warm-up" not in err
    code, _, err = run("train", tiny, "training.warmup_steps=4", "--out", tmp_path / "short")
    assert "the learning rate only reaches 0.0005 of 0.001" in err
    assert json.loads((tmp_path / "short" / "record.json").read_text())["notices"]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("config", "en", "data.config is for datasets"),
        ("image_column", "picture", "data.image_column is for datasets"),
        ("label_column", "class", "data.label_column is for datasets"),
        ("split", "test", "has no folder 'test'; leave out data.split"),
    ],
)
def test_a_folder_of_images_refuses_what_a_dataset_has(tmp_path, field, value, why):
    pytest.importorskip("PIL")
    (tmp_path / "class").mkdir()
    data = {"kind": "images", "source": str(tmp_path), "image_size": 8, "augmentation": None, field: value}
    with pytest.raises(HeadwaterError, match=why):
        read_recipe({"data": data}).data.build()


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        (["--tasks", "arc_easy", "--stride", "4"], "--stride has no effect without --text"),
        (["--text", "x.txt", "--shots", "2"], "--shots has no effect without --tasks"),
    ],
)
def test_evaluate_refuses_what_belongs_to_another_option(run, options, unread):
    code, _, err = run("evaluate", "runs/nothing", *options)
    assert code == 2
    assert unread in err


@pytest.mark.parametrize(
    ("file", "options", "unread"),
    [
        ("a.txt", ["--by", "part"], "--by is for tables"),
        ("a.txt", ["--text-column", "body"], "--text-column is for tables"),
        ("a.txt", ["--split", "train"], "--split is for datasets on the hub"),
        ("a.jsonl", ["--config", "en"], "--config is for datasets on the hub"),
        ("a.jsonl", ["--separator", "---"], "--separator is for text files"),
    ],
)
def test_prepare_refuses_what_its_source_does_not_have(run, tmp_path, file, options, unread):
    (tmp_path / "a.txt").write_text("a text\n" * 2000)
    (tmp_path / "a.jsonl").write_text('{"text": "a text", "part": "b"}\n' * 100)
    code, _, err = run("data", "prepare", tmp_path / file, *options, "--out", tmp_path / "out")
    assert code == 2
    assert unread in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_compare_names_an_override_that_every_arm_sets_itself(run, tmp_path, forked_workers):
    arms = {name: {"training": {"learning_rate": rate}} for name, rate in (("a", 0.001), ("b", 0.002))}
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"compare": {"baseline": "a", "seeds": [0, 1], "arms": arms}}))
    _, _, err = run("compare", path, "training.learning_rate=0.5", "seed=7", "--out", tmp_path / "out", "--workers", 1)
    assert "training.learning_rate has no effect, because every arm or size sets it" in err
    assert "seed has no effect, because compare.seeds sets it" in err


@pytest.mark.parametrize(
    ("table", "option"),
    [
        ("kv-shifting/figure-2", "--scale=gpu"),
        ("kv-shifting/figure-2", "--device=cpu"),
        ("tokenformer/table-1", "--workers=1"),
    ],
)
def test_reproduce_refuses_options_where_nothing_is_trained(run, tmp_path, table, option):
    code, _, err = run("reproduce", table, option, "--out", tmp_path)
    assert code == 2
    assert f"{option.partition('=')[0]} has no effect for {table}" in " ".join(err.split())
