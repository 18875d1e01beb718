"""`headwater plan` and `headwater list` as a user meets them."""

import json

import pytest
import yaml

import headwater_lab as lab
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.config.presets import PRESETS, preset
from headwater.cost.counts import forward_flops, parameters, prefill_flops
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater_lab.data.tokenizer import byte_tokenizer


@pytest.fixture
def estimates(run):
    def call(*arguments):
        code, out, err = run("plan", *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def recipe(path, **changes):
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {"name": "tiny", "data": {"kind": "text", "source": "nowhere.txt", "context": 32}, "model": model}
    path.write_text(yaml.safe_dump(values | changes))
    return path


def test_presets_side_by_side(run):
    code, out, _ = run("plan", "gpt2-124m", "gpt2-124m-sla", "--hardware", "H100", "--tokens", "300B", "--devices", 8)
    assert code == 0
    for text in ("124.5 M", "×0.812", "days for 300 B tokens at MFU 0.4", "largest batch", "8 × H100", "NVIDIA H100"):
        assert text in out


def test_prompts_are_estimated_where_layers_run_for_their_last_token_alone(run, estimates):
    options = {"kv_source": {"keys": "last", "values": "last"}}
    half = preset("resformer-82m-vanilla", mechanisms=options, num_hidden_layers=4)
    maps = f"mechanisms={json.dumps(options)}"
    shape = ("num_hidden_layers=4", "--context", 256, "--batch", 2)
    (mapped,), (plain,) = estimates("resformer-82m-vanilla", maps, *shape), estimates("resformer-82m-vanilla", *shape)
    assert (mapped["last_token_layers"], plain["last_token_layers"]) == (2, 0)
    assert mapped["at"][0]["prefill"] == 2 * prefill_flops(half, 256)
    tables = [run("plan", "resformer-82m-vanilla", *added, *shape)[1] for added in ([maps], [])]
    assert ["FLOPs of a prompt, batch 2" in table for table in tables] == [True, False]


def test_json_has_every_context(estimates):
    (one,) = estimates("resformer-82m", "--context", 512, "--context", 2048, "--batch", 4, "--precision", "32-true")
    assert one["total_parameters"] == sum(parameters(preset("resformer-82m")).values())
    assert [at["context"] for at in one["at"]] == [512, 2048]
    assert one["at"][1]["cache_bytes"] == 4 * one["at"][0]["cache_bytes"]
    assert one["hardware"] is None


def test_a_recipe_gives_a_column_for_each_arm(estimates, tmp_path):
    arms = {"plain": {}, "shifted": {"model": {"mechanisms": {"kv_shift": {}}}}}
    path = recipe(tmp_path / "r.yaml", compare={"arms": arms, "baseline": "plain"})
    plain, shifted = estimates(path)
    assert (plain["name"], shifted["name"]) == ("plain", "shifted")
    assert shifted["total_parameters"] - plain["total_parameters"] == 2 * 2 * 2 * 2
    assert plain["shape"]["vocab_size"] == 257
    assert plain["at"][0]["context"] == 32
    assert estimates(path, "model.hidden_size=32") == estimates(path, "hidden_size=32") != [plain, shifted]


def test_the_data_of_a_recipe_is_not_read(estimates, run, tmp_path):
    data = {"kind": "text", "source": "nowhere.txt", "tokenizer": "no/such", "context": 32}
    path = recipe(tmp_path / "r.yaml", data=data)
    code, _, err = run("plan", path)
    assert code == 2
    assert "--vocab-size" in err
    (one,) = estimates(path, "--vocab-size", 500)
    assert one["shape"]["vocab_size"] == 500
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")  # one on this machine is
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    for name in ("tokenizer", "tokenizer/tokenizer.json"):
        (one,) = estimates(recipe(tmp_path / "t.yaml", data=data | {"tokenizer": str(tmp_path / name)}))
        assert one["shape"]["vocab_size"] == 257
    induction = recipe(tmp_path / "i.yaml", data={"kind": "induction", "vocab_size": 40, "length": 20})
    (one,) = estimates(induction)
    assert (one["shape"]["vocab_size"], one["at"][0]["context"]) == (40, 20)


TRAINED = {
    "steps": 50,
    "batch_size": 12,
    "gradient_accumulation_steps": 2,
    "devices": 3,
    "precision": "64-true",
    "gradient_checkpointing": True,
    "loss_chunk_tokens": 20,
}


def test_a_recipe_is_estimated_as_it_trains(estimates, run, tmp_path):
    """Unless options or overrides say otherwise."""
    path = recipe(tmp_path / "r.yaml", training=TRAINED)
    device = ("--hardware", "H100")
    (own,) = estimates(path, *device)
    assert (own["batch"], own["devices"], own["precision"], own["tokens"]) == (4, 3, "64-true", 50 * 12 * 2 * 32)
    assert (own["gradient_checkpointing"], own["loss_chunk_tokens"], own["masked"]) == (True, 20, [32])
    at, state = own["at"][0], sum(own["state_bytes"].values())
    assert at["step_bytes"] == state + at["activation_bytes_checkpointed"]
    changed = estimates(path, *device, "--batch", 5, "--devices", 2, "--precision", "bf16-true", "--tokens", "1k")[0]
    assert [changed[name] for name in ("batch", "devices", "precision", "tokens")] == [5, 2, "bf16-true", 1000]
    assert not changed["masked"], "a GPU computes them document by document in half precision"
    other = ("training.loss_chunk_tokens=null", "training.gradient_checkpointing=false", "training.batch_size=6")
    (other,) = estimates(path, *device, *other)
    assert (other["batch"], other["loss_chunk_tokens"], other["gradient_checkpointing"]) == (2, None, False)
    assert other["at"][0]["step_bytes"] == state + other["at"][0]["activation_bytes"]
    code, out, _ = run("plan", path)
    assert code == 0
    for text in ("as trained", "logits of 20 tokens at once", "a mask for packed rows", "gradient checkpointing"):
        assert text in " ".join(out.split())
    code, _, err = run("plan", path, "training.nonsense=1")
    assert (code, "nonsense" in err) == (2, True)


def test_arms_and_stages_are_estimated_as_they_train(estimates, run, tmp_path):
    arms = {"plain": {}, "chunked": {"training": {"loss_chunk_tokens": 8}}}
    made = estimates(path := recipe(tmp_path / "r.yaml", compare={"arms": arms, "baseline": "plain"}))
    note = " ".join(run("plan", path)[1].split())
    assert "Trained with a mask for packed rows: chunked, plain." in note
    assert "Trained with logits of 8 tokens at once: chunked." in note
    plain, chunked = sorted(made, key=lambda one: one["name"], reverse=True)
    assert (plain["loss_chunk_tokens"], chunked["loss_chunk_tokens"]) == (None, 8)
    assert chunked["at"][0]["activation_bytes"] < plain["at"][0]["activation_bytes"]
    stages = [{"name": "late", "training": {"gradient_checkpointing": True, "steps": 7}}]
    first, late = estimates(recipe(tmp_path / "s.yaml", stages=stages))
    assert (first["gradient_checkpointing"], late["gradient_checkpointing"]) == (False, True)
    assert late["tokens"] != first["tokens"]
    assert late["tokens"] % 7 == 0


def test_a_teacher_is_priced(estimates, run, tmp_path):
    """Without `teacher`, the model that the run starts from, or that the previous stage made, is the teacher."""
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32)
    large = HeadwaterConfig(vocab_size=257, **sizes)
    HeadwaterForCausalLM(large).save_pretrained(tmp_path / "large")
    forward, weights = sum(forward_flops(large, 32).values()), 4 * sum(parameters(large).values())
    (plain,) = estimates(recipe(tmp_path / "plain.yaml"))
    distilled = {"distillation": {"teacher": str(tmp_path / "large")}}
    (taught,) = estimates(path := recipe(tmp_path / "taught.yaml", training=distilled))
    assert taught["at"][0]["training"] == plain["at"][0]["training"] + forward
    (overridden,) = estimates(tmp_path / "plain.yaml", f"training.distillation.teacher={tmp_path / 'large'}")
    assert overridden["at"] == taught["at"]
    assert taught["state_bytes"] == plain["state_bytes"] | {"teacher": weights}
    assert taught["at"][0]["step_bytes"] > plain["at"][0]["step_bytes"] + weights
    assert "Trained with a teacher, whose forward pass is in the FLOPs" in " ".join(run("plan", path)[1].split())
    compare = {"baseline": "plain", "arms": {"plain": {}, "taught": {"training": distilled}}, "seeds": [0]}
    runs = lab.plan(recipe(tmp_path / "two.yaml", compare=compare, training={"steps": 5})).runs["tiny"]
    tokens = runs[-1].units // 2
    assert runs[-1].flops == pytest.approx(tokens * (2 * plain["at"][0]["training"] + forward))
    start = {"start": {"checkpoint": str(tmp_path / "large")}, "training": {"distillation": {}}, "model": {}}
    (started,) = estimates(recipe(tmp_path / "started.yaml", **start))
    assert started["at"][0]["training"] == pytest.approx(4 * forward)
    grown = {"grow": {"hidden_size": 32, "num_attention_heads": 4, "method": "exact"}}
    stages = [{"name": "grown"} | grown, {"name": "late", "training": {"distillation": {}}}]
    _, deeper, late = estimates(recipe(tmp_path / "stages.yaml", stages=stages))
    assert late["at"][0]["training"] == pytest.approx(4 / 3 * deeper["at"][0]["training"])


@pytest.mark.parametrize(
    ("training", "data", "masked"),
    [
        ({}, {}, True),  # fp32
        ({"precision": "bf16-mixed"}, {}, False),
        ({"precision": "bf16-mixed", "attn_implementation": "sdpa"}, {}, True),
        ({"attn_implementation": "flex_attention"}, {}, False),
        ({"precision": "bf16-mixed", "device": "cpu"}, {}, True),  # short rows
        ({"precision": "bf16-mixed", "device": "cpu"}, {"context": 1024}, False),
        ({}, {"row_layout": "contiguous"}, False),
    ],
)
def test_packed_rows_have_a_mask_where_attention_takes_one(training, data, masked, estimates, tmp_path):
    data = {"kind": "text", "source": "nowhere.txt", "context": 32} | data
    (one,) = estimates(recipe(tmp_path / "r.yaml", training=training, data=data))
    assert one["masked"] == [one["at"][0]["context"]] * masked


def test_every_context_has_the_mask_of_its_own_kernel_and_the_tokens_of_the_recipe(estimates, run, tmp_path):
    training = {"precision": "bf16-mixed", "device": "cpu", "steps": 10, "batch_size": 4}
    path = recipe(tmp_path / "r.yaml", training=training)
    (both,) = estimates(path, "--context", 32, "--context", 1024, "--hardware", "H100")
    assert (both["masked"], both["tokens"]) == ([32], 10 * 4 * 32)
    for at in both["at"]:
        (single,) = estimates(path, "--context", at["context"], "--hardware", "H100")
        assert (single["at"], single["tokens"]) == ([at], both["tokens"])
    note = " ".join(run("plan", path, "--context", 32, "--context", 1024)[1].split())
    assert "Trained with a mask for packed rows of 32 tokens: tiny." in note


@pytest.mark.parametrize("model", ["gpt2-124m", "recipe"])
def test_a_batch_is_divided_among_the_devices_of_the_option_too(model, estimates, run, tmp_path):
    model = recipe(tmp_path / "r.yaml") if model == "recipe" else model
    assert estimates(model, "--devices", 8)[0]["batch"] == (1 if model == "gpt2-124m" else 2)
    batch = "training.batch_size=64"
    (option,) = estimates(model, batch, "--hardware", "H100", "--devices", 8)
    assert [option] == estimates(model, batch, "--hardware", "H100", "training.devices=8")
    assert (option["batch"], estimates(model, batch, "--devices", 8, "--batch", 64)[0]["batch"]) == (8, 64)
    code, _, err = run("plan", model, "--devices", 0)
    assert (code, "devices must be a whole number, at least 1" in err) == (2, True)


def test_no_ceiling_of_generation_for_more_sequences_than_memory_holds(estimates, run):
    arguments = ("gpt2-124m", "--hardware", "H100", "--context", 1024)
    most = estimates(*arguments)[0]["at"][0]["limits"]["most_sequences"]
    ceilings = [estimates(*arguments, "--batch", most + more)[0]["at"][0]["limits"] for more in (0, 1)]
    assert [ceiling["generation_ceiling"] is None for ceiling in ceilings] == [False, True]
    tables = [" ".join(run("plan", *arguments, "--batch", most + more)[1].split()) for more in (0, 1)]
    reason = f"No generation ceiling where memory holds fewer than {most + 1:,} sequences."
    assert [reason in table for table in tables] == ["generation ceiling, tokens/s" not in table for table in tables]
    assert reason in tables[1]
    # A model without a ceiling beside one that has it: no factor is printed.
    models = "gpt2-124m", "kv-shifting-19b-vanilla"
    _, table, _ = run("plan", *models, "--hardware", "RTX-4090", "--context", 1024, "--batch", 4)
    (row,) = [line for line in table.splitlines() if "generation ceiling, tokens/s" in line]
    assert "×" not in row


def test_a_model_without_a_recipe_takes_training_too(estimates):
    one, other = estimates("gpt2-124m", "resformer-82m", "training.loss_chunk_tokens=1024")
    assert (one["loss_chunk_tokens"], other["loss_chunk_tokens"]) == (1024, 1024)
    assert (one["batch"], one["precision"], one["tokens"], one["masked"]) == (1, "bf16-mixed", None, [])
    assert estimates("gpt2-124m", "training.precision=32-true")[0]["precision"] == "32-true"


def test_configs_and_checkpoints(estimates, tmp_path):
    config = HeadwaterConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mechanisms={"svformer": {}}
    )
    HeadwaterForCausalLM(config).save_pretrained(tmp_path / "model")
    found = estimates(tmp_path / "model", tmp_path / "model" / "config.json")
    assert [one["name"] for one in found] == ["model", "model (2)"]
    assert found[0]["total_parameters"] == sum(parameters(config).values())
    assert found[0]["shape"]["mechanisms"] == ["svformer"]


@pytest.mark.slow  # `test_estimate.py` measures it too
def test_this_machine_can_be_the_hardware(estimates):
    (one,) = estimates("resformer-82m", "--hardware", "this")
    assert one["at"][0]["limits"]["training_ceiling"] > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gpt2-124"], "did you mean 'gpt2-124m'"),
        (["nowhere.json"], "no file"),
        (["nowhere.yaml"], "no recipe"),
        (["gpt2-124m", "--hardware", "H100x"], "did you mean 'H100'"),
        (["gpt2-124m", "--tokens", "many"], "--tokens"),
        (["gpt2-124m", "--precision", "fp8"], "precision"),
        (["gpt2-124m", "--mfu", "2"], "mfu"),
    ],
)
def test_mistakes_get_one_sentence(run, arguments, word):
    code, _, err = run("plan", *arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("headwater: ")
    assert word in line


def test_a_schedule_from_a_checkpoint_that_is_missing_is_not_estimated_as_another_model(run, tmp_path):
    stages = [{"name": "whole", "finish_conversion": True}]
    path = recipe(
        tmp_path / "r.yaml", start={"checkpoint": "missing", "convert": {"num_key_value_heads": 1}}, stages=stages
    )
    code, _, err = run("plan", path)
    assert (code, "begins with the checkpoint 'missing', which does not exist" in err) == (2, True)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "llama"}', '{"model_type": "headwater", "hidden_size": 7}']
)
def test_a_file_that_is_no_config_gets_one_sentence(run, tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    code, _, err = run("plan", path)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("headwater: ")


@pytest.mark.slow
def test_presets_are_listed(run):
    code, out, _ = run("list", "presets")
    assert code == 0
    assert all(name in out for name in PRESETS)
    code, out, _ = run("list", "presets", "--json")
    listed = json.loads(out)
    assert [one["name"] for one in listed] == list(PRESETS)
    assert listed[0]["parameters"] == sum(parameters(preset(listed[0]["name"])).values())
    origins = {one["name"]: one["reads"] for one in listed}
    assert origins["gpt2-124m"] == []
    assert origins["resformer-82m-query"] == ["a tensor of the first layer (by default its values), mixed in"]


def test_everything_is_listed(run):
    code, out, _ = run("list", "--json")
    assert code == 0
    listed = json.loads(out)
    assert list(listed) == ["recipes", "presets", "mechanisms", "tasks"]
    assert {one["name"] for one in listed["mechanisms"]} >= set(MECHANISMS.built_in)
    assert all(one["description"] for one in listed["mechanisms"])
    code, out, _ = run("list", "mechanisms")
    assert code == 0
    assert all(name in out for name in MECHANISMS.built_in)
    assert run("list", "optimizers")[0] == 2


def test_every_mechanism_says_what_attention_reads_through_it():
    for name in MECHANISMS.built_in:
        mechanism = resolve(name)
        assert mechanism.source not in ("", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2-124m", "--context", 2048], "beyond the 1024 learned positions"),
        (["gpt2-124m", "hiden_size=3"], "no field 'hiden_size'; did you mean 'hidden_size'?"),
        (["hidden_size=64"], "Name at least one"),
        (["gpt2-124m", "hidden_act=nonsense"], "no activation named 'nonsense'"),
        (["."], "has no config.json"),
        (["gpt2-124m", "compare.seeds=[1]"], "compare.seeds has no effect on an estimate"),
    ],
)
def test_more_that_is_refused(run, arguments, message):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_an_override_that_another_replaces_is_told_once(run, tmp_path):
    path = recipe(tmp_path / "r.yaml")  # its text does not exist, so nothing is trained
    twice = ("training.batch_size=3", "training.batch_size=2")
    for command in (("plan", path, *twice, "--vocab-size", 300), ("train", path, *twice, "--out", tmp_path / "run")):
        assert run(*command)[2].count("batch_size=3 has no effect, since") == 1


def test_fields_can_be_changed(estimates):
    (one,) = estimates("gpt2-124m-sla", "max_position_embeddings=16384", "mechanisms={skip_layer: {heads: 6}}")
    made = preset("gpt2-124m-sla", max_position_embeddings=16384, mechanisms={"skip_layer": {"heads": 6}})
    assert one["at"][0]["context"] == 16384
    assert sum(one["parameters"].values()) == sum(parameters(made).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "foo"], "cannot use the device 'foo'"),
        (["--device", "cpu:x"], "cannot use the device"),
        (["--memory", "--device", "meta"], "leave out --device"),
        (["--precision", "fp8"], "'fp8' is not one of"),
        (["nosuch"], "no mechanism named 'nosuch'"),
        (["kv_shift={broken"], "not valid YAML"),
    ],
)
def test_bench_mechanisms_refuses(run, arguments, message):
    code, _, err = run("bench", "mechanisms", *arguments)
    assert code == 2
    assert message in err


def test_bench_mechanisms(run):
    shape = ["--layers", 1, "--width", 64, "--context", 16, "--batch-size", 1, "--pairs", 2, "--precision", "32-true"]
    code, out, _ = run("bench", "mechanisms", "kv_shift", 'pattention={"ffn_pairs": 32}', *shape)
    assert code == 0
    assert "kv_shift" in out
    assert 'pattention={"ffn_pairs": 32}' in out
    code, out, _ = run("bench", "mechanisms", "pattention", "--memory", *shape)
    assert code == 0
    assert "MB kept" in out


def test_the_runs_of_a_comparison_are_estimated_with_what_branches_save(run, tmp_path):
    """Budgets of 1, 2 and 4 with decays of 2/15 cost 4 + 3·2/15 = 4.4 of 7, for each arm, seed and rate."""
    arms = {"plain": {}, "shifted": {"model": {"mechanisms": {"kv_shift": {}}}}}
    sizes = {f"{times}x": {"training": {"steps": 150 * times}} for times in (4, 1, 2)}
    compare = {"baseline": "plain", "arms": arms, "sizes": sizes, "learning_rates": [0.1, 0.2]}
    training = {"schedule": "wsd", "decay_fraction": 2 / 15, "batch_size": 2}
    path = recipe(tmp_path / "tiny.yaml", training=training, compare=compare)
    plan = lab.plan(path, vocab_size=300, hardware="H100", mfu=0.5)
    costs = {cost.name: cost for cost in plan.runs["tiny"]}
    assert [*costs] == ["tuning", "1x", "2x", "4x", "all"]
    assert [cost.runs for cost in costs.values()] == [4, 6, 6, 6, 22]
    per_step = 2 * 32 * sum(3 * sum(forward_flops(find_arm_config(arm), 32).values()) for arm in arms.values())
    assert costs["1x"].flops == costs["1x"].alone == pytest.approx(3 * 150 * per_step)
    assert costs["4x"].flops == pytest.approx(3 * (600 - 260) * per_step)
    sizes_alone = [costs[name].alone for name in sizes]
    assert sum(costs[name].flops for name in sizes) / sum(sizes_alone) == pytest.approx(4.4 / 7)
    assert costs["tuning"].alone == costs["tuning"].flops == pytest.approx(2 * 150 * per_step)
    assert costs["all"].hours == pytest.approx(costs["all"].flops / 66.9e12 / 0.5 / 3600)
    code, out, _ = run("plan", path, "--vocab-size", 300)
    assert code == 0
    assert "All runs of tiny" in out
    fewer = lab.plan(path, overrides=["compare.seeds=[1]", "data.context=16"], vocab_size=300).runs["tiny"]
    assert [cost.runs for cost in fewer] == [4, 2, 2, 2, 10]
    assert fewer[1].flops < costs["1x"].flops / 6
    alone = recipe(tmp_path / "cosine.yaml", compare=compare)
    assert all(cost.saving == 0 for cost in lab.plan(alone, vocab_size=300).runs["tiny"])
    assert lab.plan("gpt2-124m").runs == {}


def find_arm_config(arm):
    mechanisms = {"kv_shift": {}} if arm == "shifted" else {}
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    return HeadwaterConfig(vocab_size=300, mechanisms=mechanisms, **model)
