"""Recipes: typed fields, overrides, and what is said when something is wrong."""

import hashlib
import json
import os
import re
from itertools import chain
from pathlib import Path

import pytest

from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import DATA
from headwater_lab.data.synthetic.induction import InductionData, InductionSettings
from headwater_lab.recipe.overrides import apply_overrides, parse_override
from headwater_lab.recipe.recipe import IDENTITY_VERSION, Recipe, find_data_class, list_sections, parse
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.recipe.synonyms import ANSWERS, SYNONYMS

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\ndata: {kind: text, source: x}\ntraining: {steps: 5}\n")
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    recipe = load_recipe(path)
    data = InductionData(InductionSettings())
    recipe.config_for(data)
    for arm in recipe.compare.arms if recipe.compare else ():
        recipe.arm(arm, 0).config_for(data)


def test_null_leaves_out_the_sizes_of_a_comparison():
    recipe = load_recipe(RECIPES[0].parents[1] / "recommended" / "test.yaml", ["compare.sizes=null"])
    assert recipe.compare.sizes == {}


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


def test_the_shares_of_a_mixture_are_one_value():
    values = {"data": {"source": {"web": 0.6, "code": 0.4}, "context": 8}}

    def override(text):
        return apply_overrides(values, [(text, *parse_override(text))])["data"]

    assert override("data.source={code: 1.0}") == {"source": {"code": 1.0}, "context": 8}
    assert override("data.source.web=0.1") == {"source": {"web": 0.1, "code": 0.4}, "context": 8}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lerning_rate=1", r"training has no field 'lerning_rate'; did you mean 'learning_rate'\?"),
        ("trainig.steps=1", r"the recipe has no field 'trainig'; did you mean 'training'\?"),
        ("data.sorce=x", r"data has no field 'sorce'; did you mean 'source'\?"),
        ("model.hiden_size=3", r"model has no field 'hiden_size'; did you mean 'hidden_size'\?"),
        ("model.base=bert", "must be llama, gpt2, vit or a preset"),
        ("data.kind=txt", "data.kind must be one of: .*induction.*prepared.*text"),
        ("training.steps=many", "training.steps: .*integer.*'many'"),
        ("training.steps=0", "training.steps: .*greater than or equal to 1"),
        ("training.precision=fp8", "training.precision: .*bf16-mixed"),
        ("data.held_out=2", "data.held_out: .*less than 1"),
        ("training.steps", "not of the form"),
        ("compare.baseline=x", "the field 'compare.arms' is missing"),
        ("data.source=${nowhere}", "nowhere"),
        ("training.betas=[2,3]", "training.betas.*less than 1"),
        # What is written is what runs, or it is refused.
        ("training[steps]=1", "no field 'training.steps.'"),
        ("training.steps=???", r"training.steps: .*integer.*'\?\?\?'"),
        ("training.steps=010", "training.steps: .*integer.*'010'"),
        ("training.steps=0x10", "training.steps: .*integer.*'0x10'"),
        ("training.steps=1:30", "training.steps: .*integer.*'1:30'"),
        ("training.steps='5'", "training.steps: .*integer.*'5'"),
        ("training.steps=५", "training.steps: .*integer"),
        ("training.steps=5.5", "training.steps: .*integer.*5.5"),
        ("training.steps=99999999999", "training.steps: .*less than"),
        ("seed=True", "seed: .*integer.*True"),
        ("seed=-1", "seed: .*greater than"),
        ("seed=99999999999999999999", "64 bits"),
        ("compare={arms: {a: {}}, baseline: a, seeds: [true]}", "compare.seeds.0: .*integer"),
        ("training.weight_decay=.inf", "training.weight_decay: inf is not a finite number"),
        ("training.weight_decay=1e999", "training.weight_decay: inf is not a finite number"),
        ("training.weight_decay=1e300", "training.weight_decay: .*less than"),
        ("training.learning_rate=.nan", "training.learning_rate: nan is not a finite number"),
        ("model.rope_parameters={rope_theta: .inf}", "model.rope_parameters.rope_theta: inf"),
        ("compare={arms: {a: {training: {z_loss: .inf}}}, baseline: a}", "compare.arms.a.training.z_loss: inf"),
        ("reporting.tensorboard=yes", "reporting.tensorboard: .*boolean.*'yes'"),
        ("+training.steps=1", r"no field '\+training'"),
        ("~training.steps", "not of the form"),
        ("training..steps=1", "not of the form"),
        ("training.steps =1", "not of the form"),
        ("training.steps==1", "two = signs"),
        ("training.max_grad_norm=", "no value"),
        ("title=a #b", "comment"),
        ("title=a\nb", "second line"),
        ("title=[b]x[/b]", "not valid YAML"),
        ('title="${5"', "no interpolation"),
        ("training={}", "would change nothing"),
        ("data=x", "data.kind must be one of"),
        ("training={steps: 1, steps: 2}", "given twice"),
        ("model={null: 1}", "None is not text"),
        ("model={1: 1}", "1 is not text"),
        ("model=" + "[" * 5000, "nested deeper"),
        ("seed.x=1", "seed"),
        ("data.source.x=1", "'x'.*set all of data.source"),
        ("stages.0.training.steps=1", "no stages"),
        ("model={mechanisms: [kv_shift, kv_shift]}", "twice"),
        ("model.mechanisms=kv_shift", "model.mechanisms must map names"),
        ("model.mechanisms=1.5", "model.mechanisms must map names"),
    ],
)
def test_a_wrong_field_is_named_with_the_nearest_known_one(file, override, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        load_recipe(file, [override])
    assert "\n" not in str(error.value)


def test_the_last_of_two_overrides_of_a_field_counts_and_the_first_is_reported(file, capsys):
    overrides = ["training.steps=3", "training.batch_size=2", "training.steps=4"]
    assert load_recipe(file, overrides).training.steps == 4
    assert capsys.readouterr().err == "training.steps=3 has no effect, since training.steps=4 follows it.\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("name: x\n", "the field 'data' is missing"),
        ("data: {kind: text, source: x}\ncompare: {baseline: b, arms: {a: {}}}\n", "baseline 'b' is not an arm"),
        (
            "data: {kind: text, source: x}\ncompare: {baseline: a, arms: {a: {}, b: {}}, budget_arms: [a]}\n",
            "compare.budget_arms: 'a' is not an arm other than the baseline",
        ),
        (
            "data: {kind: text, source: x}\n"
            "compare: {baseline: a, arms: {a: {}, b: {}}, budget_arms: [b], match: flops}\n",
            "compare.match=flops would make all compare.budget_arms the same",
        ),
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


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["training.steps=3", "training.steps=4"], 4),
        (["training={steps: 3}", "training.steps=4"], 4),
        (["training.steps=4", "training={steps: 3}"], 3),
        (["training=null", "training.steps=4"], 4),
    ],
)
def test_the_last_override_of_a_field_counts(file, overrides, steps):
    recipe = load_recipe(file, [*overrides, "training.threads=4"])
    assert (recipe.training.steps, recipe.training.threads) == (steps, 4)


def test_all_wrong_names_are_told_at_once_with_the_right_ones(tmp_path):
    """Names of nanoGPT, litgpt, transformers and its Trainer among them, wherever they belong."""
    path = tmp_path / "r.yaml"
    path.write_text(
        "data: {kind: text, source: x, block_size: 32}\n"
        "model: {n_layer: 2, n_head: 2, n_embd: 16, dropout: 0.1, seq_len: 8, hidden_size: wide}\n"
        "training: {max_iters: 4, lr: 0.001, batch: many, betas: [2, 3], eval_interval: 5}\n"
        "grad_clip: 1\n"
    )
    with pytest.raises(HeadwaterError) as error:
        load_recipe(path)
    first, *lines = str(error.value).splitlines()
    assert first == f"{path}: 13 mistakes:"
    assert [line.strip() for line in lines] == [
        "model has no field 'n_layer'; did you mean 'num_hidden_layers'?",
        "model has no field 'n_head'; did you mean 'num_attention_heads'?",
        "model has no field 'n_embd'; did you mean 'hidden_size'?",
        "model has no field 'dropout'; it has embedding_dropout, attention_dropout and residual_dropout",
        "model has no field 'seq_len'; did you mean 'data.context'?",
        "model.hidden_size: expected int, got str (value: 'wide')",
        "data has no field 'block_size'; did you mean 'context'?",
        "training.betas.0: input should be less than 1, not 2.",
        "training has no field 'max_iters'; did you mean 'steps'?",
        "training has no field 'lr'; did you mean 'learning_rate'?",
        "training has no field 'batch'; did you mean 'batch_size'?",
        "training has no field 'eval_interval'; did you mean 'reporting.evaluate_every'?",
        "the recipe has no field 'grad_clip'; did you mean 'training.max_grad_norm'?",
    ]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.context=8", "training has no field 'context'; did you mean 'data.context'?"),
        ("steps=8", "the recipe has no field 'steps'; did you mean 'training.steps'?"),
        ("model.bias=false", "model has no field 'bias'; it has qkv_bias, output_bias and mlp_bias"),
        ("start={checkpoint: x, grow: {n_layer: 4}}", "start.grow has no field 'n_layer'; did you mean"),
        ("min_lr=1e-4", "no field 'min_lr'; training.min_learning_rate_ratio is its share of training.learning_rate."),
        ("out_dir=out", "the recipe has no field 'out_dir'; --out names the run's folder."),
        ("data.num_workers=2", "data has no field 'num_workers'; known names: context, held_out"),
    ],
)
def test_a_name_of_another_section_or_program_is_a_hint(file, override, hint):
    with pytest.raises(HeadwaterError) as error:
        load_recipe(file, [override])
    assert hint in str(error.value)


def test_synonyms_name_fields_that_exist():
    sections = list_sections(find_data_class({"kind": "text"}))
    known = {f"{section}.{field}" for section, fields in sections.items() for field in fields} | {"data.workers"}
    for section, field in SYNONYMS.values():
        for each in re.split(", | and ", field):
            assert f"{section}.{each}" in known
    assert not {name for name, (section, _) in SYNONYMS.items() if name in sections[section]}
    assert not ANSWERS.keys() & {*SYNONYMS, *chain(*sections.values())}
    for name in re.findall(r"[a-z]+\.[a-z_]+", " ".join(ANSWERS.values())):
        assert name in known


def test_another_kind_of_data_takes_what_it_knows_of_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: {kind: text, source: x, context: 32, tokenizer: bytes, held_out: 0.2}\n")
    prepared = load_recipe(path, ["data.kind=prepared", "data.source=y"]).data
    assert (prepared.kind, prepared.source, prepared.context) == ("prepared", "y", 32)
    assert load_recipe(path, ["data={kind: induction, length: 8}"]).data == InductionSettings(length=8)
    with pytest.raises(HeadwaterError, match="data has no field 'tokenizer'"):
        load_recipe(path, ["data.kind=prepared", "data.source=y", "data.tokenizer=bytes"])
    with pytest.raises(HeadwaterError, match=r"data\.kind must be one of"):
        load_recipe(path, ["data.kind=nothing"])


def test_text_means_what_it_says(file):
    def title(text):
        return load_recipe(file, [f"title={text}"]).title

    for text in ("no", "on", "2024-01-01", "0x10", "1:30", "010", "a#b", "???", "!!set {a}", "=".join("ab")):
        assert title(text) == text
    assert title('"a #b"') == "a #b"
    assert load_recipe(file, ["training.steps=1e3"]).training.steps == 1000
    assert load_recipe(file, ["training.steps=1_000"]).training.steps == 1000
    assert load_recipe(file, ["training.betas=[0.8, 0.9]"]).training.betas == (0.8, 0.9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\nseed: 2\n", "line 3: the key 'seed' is given twice"),
        ("training: {steps: 1, steps: 2}\n", "given twice"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("title: !!set {a, b}\n", "tag"),
        ("title: !!python/object/apply:os.getcwd []\n", "tag"),
        ("title: !!int x\n", "'int'"),
        ("training:\n\tsteps: 1\n", "not valid YAML: line 3"),
        ("null: 1\n", "None is not text"),
        ("? [a]\n: 1\n", "is not text"),
        ("title: &a [*a]\n", "nested deeper"),
        ("title: " + "[" * 100_000, "nested deeper"),
        ("model: " + "{a: " * 60 + "1" + "}" * 60 + "\n", "nested deeper"),
        ("title: ${oc.env:HOME}\n", "no interpolation"),
        ("title: 'a\x07b'\n", "not valid YAML"),
        # Each list holds the one before nine times.
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            "more than 100,000 values",
        ),
    ],
)
def test_yaml_that_does_not_mean_what_it_says_is_refused(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_text("data: {kind: induction}\n" + content)
    with pytest.raises(HeadwaterError, match=message) as error:
        load_recipe(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_anchors_and_merges_are_read(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "data: {kind: induction}\ncompare:\n  baseline: a\n  arms:\n    a: &a {training: {steps: 3}}\n"
        "    b: {<<: *a, model: {num_hidden_layers: 4}}\n"
    )
    assert load_recipe(path).compare.arms["b"] == {"training": {"steps": 3}, "model": {"num_hidden_layers": 4}}


def test_only_files_of_a_sensible_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b" " * (2**20 + 1))
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, message in (("pipe", "regular file"), ("long", "at most"), ("bytes", "UTF-8"), (".", "a folder")):
        with pytest.raises(HeadwaterError, match=message):
            load_recipe(tmp_path / name)
    with pytest.raises(HeadwaterError, match="regular file"):
        load_recipe("/dev/zero")


def test_mechanisms_may_be_a_list_and_an_arm_cannot_take_them_away_by_an_empty_one():
    values = {
        "data": {"kind": "induction"},
        "model": {"mechanisms": ["kv_shift", {"value_residual": {"mode": "identity"}}]},
        "compare": {"baseline": "a", "arms": {"a": {}, "b": {"model": {"mechanisms": ["neutreno"]}}}},
    }
    recipe = parse(values, "test")
    assert recipe.model["mechanisms"] == {"kv_shift": {}, "value_residual": {"mode": "identity"}}
    assert list(recipe.arm("b", 0).model["mechanisms"]) == ["kv_shift", "value_residual", "neutreno"]
    with_none = values | {"compare": {"baseline": "a", "arms": {"a": {"model": {"mechanisms": None}}}}}
    assert parse(with_none, "test").arm("a", 0).model["mechanisms"] is None
    for empty in ({}, []):
        values["compare"]["arms"]["b"] = {"model": {"mechanisms": empty}}
        with pytest.raises(HeadwaterError, match="mechanisms: null"):
            parse(values, "test")


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(HeadwaterError, match="There is no recipe"):
        load_recipe(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "not divisible"),
        ({"mechanisms": {"kv_shft": {}}}, r"no mechanism named 'kv_shft'; did you mean 'kv_shift'\?"),
        ({"mechanisms": {"kv_shift": {"windw": 3}}}, "has no option 'windw'"),
        ({"hidden_size": "wide"}, r"model.hidden_size: expected int, got str \(value: 'wide'\)"),
        ({"mechanisms": {"value_residual": {"mode": "learnabl"}}}, "learnable"),
        ({"rope_parameters": {"rope_typ": "yarn"}}, r"no field 'rope_typ'; did you mean 'rope_type'\?"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be at most"),
        ({"num_hidden_layers": 4096, "num_attention_heads": 1024, "hidden_size": 4096}, "more than any"),
        ({"num_hidden_layers": True}, "expected int, got bool"),
        ({"vocab_size": 3}, "vocab_size 3 is smaller than"),
        ({"position": "learned", "max_position_embeddings": 8}, "max_position_embeddings 8 is smaller"),
    ],
)
def test_a_model_that_cannot_be_is_one_sentence(model, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        parse({"data": {"kind": "induction"}, "model": model}, "test").config_for(InductionData(InductionSettings()))
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


def test_a_changed_default_needs_another_version_of_the_identity():
    """If this fails, raise IDENTITY_VERSION, migrate results/*.jsonl, and pin both anew.

    A new field needs only the pin, if its default is what was done before.
    """
    schema = Recipe.model_json_schema()
    sections = schema["$defs"] | {"Recipe": schema}
    for kind in map(DATA.resolve, DATA.built_in):
        of_kind = kind.model_json_schema()
        sections |= of_kind.get("$defs", {}) | {kind.__name__: of_kind}
    decisive = {
        name: {field: facts["default"] for field, facts in section["properties"].items() if "default" in facts}
        for name, section in sections.items()
        if name not in ("Compare", "Ladder", "Reporting") and "properties" in section
    }
    content = json.dumps(decisive, sort_keys=True)
    assert (IDENTITY_VERSION, hashlib.sha256(content.encode()).hexdigest()[:16]) == (2, "dbd958227ef58d20")


def test_identity_follows_what_decides_the_result_and_nothing_else():
    def identity(**changes):
        return parse({"data": {"kind": "induction"}} | changes, "test").identity

    assert identity().startswith("2:")
    assert identity() == identity(name="other", title="t", reporting={"log_every": 3}, training={"timeout_minutes": 9})
    assert identity() == identity(data={"kind": "induction", "length": 32}, model={}, training={"steps": 1000})
    assert identity() != identity(seed=1)
    assert identity() != identity(training={"steps": 2})
    assert identity(data={"kind": "hop"}) != identity(data={"kind": "recall"}) != identity()
    first = {"mechanisms": {"kv_shift": {}, "value_residual": {}}}
    second = {"mechanisms": {"value_residual": {}, "kv_shift": {}}}
    assert identity(model=first) != identity(model=second)
    mixtures = [{"kind": "prepared", "source": source} for source in ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})]
    assert identity(data=mixtures[0]) != identity(data=mixtures[1])
    assert identity(data={"kind": "digits"}) == identity(data={"kind": "digits", "workers": 9})
    assert identity(start={"checkpoint": "x"}) != identity(start={"checkpoint": "y"})
    assert identity(start={"checkpoint": "x", "grow": {}}) != identity(start={"checkpoint": "x"})


def test_a_preset_may_be_the_base(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "data: {kind: induction}\nmodel: {base: resformer-82m-sparse, hidden_size: 64, intermediate_size: 96}\n"
    )
    recipe = load_recipe(path)
    described = recipe.config_for(InductionData(InductionSettings()))
    assert described.mechanisms["value_residual"]["mode"] == "sparse"
    assert (described.hidden_size, described.num_hidden_layers) == (64, 8)
