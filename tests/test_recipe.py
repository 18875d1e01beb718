"""Recipes: typed fields, overrides, and what is said when something is wrong."""

from pathlib import Path

import pytest

from headwater.data.synthetic import InductionData, InductionSettings
from headwater.errors import HeadwaterError
from headwater.recipe import MODEL_FIELDS, Recipe, load_recipe, parse

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\ndata: {kind: text, source: x}\ntraining: {steps: 5}\n")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    recipe = load_recipe(path)
    data = InductionData(InductionSettings())
    recipe.config_for(data)
    for arm in recipe.compare.arms if recipe.compare else ():
        recipe.arm(arm, 0).config_for(data)


def test_overrides_are_dotted_and_typed(file):
    recipe = load_recipe(
        file,
        [
            "training.steps=7",
            "training.learning_rate=3e-4",
            "model.mechanisms.kv_shift={}",
            "reporting.save_every=null",
        ],
    )
    assert recipe.training.steps == 7
    assert recipe.training.learning_rate == 3e-4
    assert recipe.model == {"mechanisms": {"kv_shift": {}}}
    assert recipe.reporting.save_every is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lerning_rate=1", r"training has no field 'lerning_rate'; did you mean 'learning_rate'\?"),
        ("trainig.steps=1", r"the recipe has no field 'trainig'; did you mean 'training'\?"),
        ("data.sorce=x", r"data has no field 'sorce'; did you mean 'source'\?"),
        ("model.hiden_size=3", r"model has no field 'hiden_size'; did you mean 'hidden_size'\?"),
        ("model.base=bert", "must be llama, gpt2 or a preset"),
        ("data.kind=txt", "data.kind must be one of: text, prepared, induction"),
        ("training.steps=many", "training.steps: .*integer.*'many'"),
        ("training.steps=0", "training.steps: .*greater than or equal to 1"),
        ("training.precision=fp8", "training.precision: .*bf16-mixed"),
        ("data.held_out=2", "data.held_out: .*less than 1"),
        ("training.steps", "not of the form"),
        ("compare.baseline=x", "the field 'compare.arms' is missing"),
        ("data.source=${nowhere}", "nowhere"),
        ("training.betas=[2,3]", "training.betas.*less than 1"),
    ],
)
def test_a_wrong_field_is_named_with_the_nearest_known_one(file, override, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        load_recipe(file, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("name: x\n", "the field 'data' is missing"),
        ("data: {kind: text, source: x}\ncompare: {baseline: b, arms: {a: {}}}\n", "baseline 'b' is not an arm"),
        (
            "data: {kind: text, source: x}\ncompare: {baseline: a, arms: {a: {}, b: {modle: {}}}}\n",
            r"arm 'b': the recipe has no field 'modle'; did you mean 'model'\?",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(HeadwaterError, match=message) as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(HeadwaterError, match="There is no recipe"):
        load_recipe(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "not divisible"),
        ({"mechanisms": {"kv_shft": {}}}, r"no mechanism named 'kv_shft'; did you mean 'kv_shift'\?"),
        ({"mechanisms": {"kv_shift": {"windw": 3}}}, "has no option 'windw'"),
        ({"hidden_size": "wide"}, r"'hidden_size' expected int, got str \(value: 'wide'\)"),
        ({"mechanisms": {"value_residual": {"mode": "learnabl"}}}, "learnable"),
        ({"rope_parameters": {"rope_typ": "yarn"}}, r"no field 'rope_typ'; did you mean 'rope_type'\?"),
        ({"mechanisms": ["kv_shift"]}, "'mechanisms' .*expected dict, got list"),
        ({"vocab_size": 3}, "vocab_size 3 is smaller than"),
        ({"position": "learned", "max_position_embeddings": 8}, "max_position_embeddings 8 is smaller"),
    ],
)
def test_a_model_that_cannot_be_is_one_sentence(model, message):
    recipe = parse({"data": {"kind": "induction"}, "model": model}, "test")
    with pytest.raises(HeadwaterError, match=message) as error:
        recipe.config_for(InductionData(InductionSettings()))
    assert "\n" not in str(error.value)


def test_an_override_that_yaml_would_misread_is_plain_text(file):
    assert load_recipe(file, ["data.source=*.txt"]).data.source == "*.txt"


def test_arms_change_only_what_they_say():
    values = {
        "data": {"kind": "induction"},
        "model": {"hidden_size": 32},
        "compare": {"baseline": "a", "arms": {"a": {}, "b": {"model": {"mechanisms": {"kv_shift": {}}}}}},
    }
    recipe = parse(values, "test")
    a, b = recipe.arm("a", 3), recipe.arm("b", 3)
    assert (a.seed, a.compare) == (3, None)
    assert b.model == {"hidden_size": 32, "mechanisms": {"kv_shift": {}}}
    assert a.data == b.data
    assert a.training == b.training


def test_digest_follows_what_decides_the_result_and_nothing_else():
    def digest(**changes):
        return parse({"data": {"kind": "induction"}} | changes, "test").digest()

    assert digest() == digest(name="other", title="t", reporting={"log_every": 3})
    assert digest() != digest(seed=1)
    assert digest() != digest(training={"steps": 2})
    first = {"mechanisms": {"kv_shift": {}, "value_residual": {}}}
    second = {"mechanisms": {"value_residual": {}, "kv_shift": {}}}
    assert digest(model=first) != digest(model=second)


def test_every_field_is_documented():
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()

    def walk(model):
        for name, field in model.model_fields.items():
            assert f"`{name}`" in page, name
            assert field.description or name in ("kind", "training", "reporting", "compare", "arms"), name

    from headwater.data.prepared import PreparedSettings
    from headwater.data.text import TextSettings
    from headwater.recipe import Compare, Growth, Reporting, Stage, Start, Training, Widening

    sections = (Training, Reporting, Compare, Start, Stage, Growth, Widening)
    for model in (Recipe, *sections, TextSettings, PreparedSettings, InductionSettings):
        walk(model)
    for name in MODEL_FIELDS:
        assert f"`{name}`" in page, name


def test_a_preset_may_be_the_base(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "data: {kind: induction}\nmodel: {base: resformer-82m-sparse, hidden_size: 64, intermediate_size: 96}\n"
    )
    recipe = load_recipe(path)
    described = recipe.config_for(InductionData(InductionSettings()))
    assert described.mechanisms["value_residual"]["mode"] == "sparse"
    assert (described.hidden_size, described.num_hidden_layers) == (64, 8)
