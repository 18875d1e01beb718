"""Runs that begin with a trained model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.growth import pairs_of
from headwater.growth.parameter_tokens import list_pattentions
from headwater.mechanisms import Pattention
from headwater.models.load import read_config
from headwater_lab import grow
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.evaluation.candidates import find_candidates
from headwater_lab.serving.generation import load_for_generation
from headwater_lab.training.checkpoints import newest_checkpoint, read_history, read_optimizer_state
from headwater_lab.training.loop import TrainingRun, train
from headwater_lab.training.records import read_record
from headwater_lab.training.saving import write_model
from headwater_lab.training.start import prepare_start, read_beginning
from headwater_lab.util.endings import Interrupted

PAIRS = {"mechanisms": {"pattention": {"attention_pairs": 5, "ffn_pairs": 9}}, "residual_dropout": 0.0}
TO = {"attention_pairs": 12, "ffn_pairs": 20}


@pytest.fixture
def pairs_recipe(recipe):
    """A recipe of a model with parameter tokens."""

    def make(**changes):
        made = recipe(**({"reporting": {"evaluate_every": 3}} | changes))
        return made.model_copy(update={"model": {k: v for k, v in made.model.items() if k != "mechanisms"} | PAIRS})

    return make


@pytest.fixture
def base(pairs_recipe, finished, tmp_path):
    """A trained run."""
    finished(pairs_recipe(), tmp_path / "base")
    return tmp_path / "base"


def start(base, **more) -> dict:
    return {"start": {"checkpoint": str(base)} | more}


def weights(run) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(run) / "model.safetensors")


@pytest.mark.slow
def test_a_grown_model_begins_where_the_small_one_ended_and_trains_on(base, pairs_recipe, tmp_path):
    before = read_record(base)
    record = train(pairs_recipe(**start(base, grow=TO)), tmp_path / "grown")
    first = record.held_out[0]
    assert (first.step, first.tokens, first.flops) == (0, 0, 0)
    assert first.metrics == pytest.approx(before.held_out[-1].metrics, rel=1e-5)
    assert record.result < before.result
    assert record.parameters > before.parameters
    assert (record.origin.tokens, record.origin.flops) == (before.tokens, before.flops)
    assert record.total_flops == before.flops + record.flops
    assert record.flops == record.held_out[-1].flops == record.curve[-1].flops
    assert [event.kind for event in read_history(newest_checkpoint(tmp_path / "grown"))] == [
        "trained",
        "grown",
        "trained",
    ]


@pytest.mark.slow
def test_a_grown_folder_is_the_same_start_as_growing_in_the_recipe(base, pairs_recipe, run, tmp_path):
    code, out, _ = run("grow", base, "attention_pairs=12", "ffn_pairs=20", "--out", tmp_path / "folder")
    assert code == 0
    assert "loss" in out
    one = train(pairs_recipe(**start(base, grow=TO)), tmp_path / "one")
    two = train(pairs_recipe(**start(tmp_path / "folder")), tmp_path / "two")
    assert [point.loss for point in one.curve] == [point.loss for point in two.curve]
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert one.origin.history == two.origin.history


@pytest.mark.slow
def test_rows_go_on_behind_those_the_model_has_seen(base, pairs_recipe, tmp_path):
    long = train(pairs_recipe(training={"steps": 24}), tmp_path / "long")
    assert long.status == "finished"
    again = pairs_recipe(**start(base))
    run = json.loads((newest_checkpoint(base) / "training.json").read_text())
    train(again, tmp_path / "more")
    after = json.loads((newest_checkpoint(tmp_path / "more") / "training.json").read_text())
    whole = json.loads((newest_checkpoint(tmp_path / "long") / "training.json").read_text())
    assert after["rows"] == whole["rows"] == 2 * run["rows"]
    assert "after them" in read_record(tmp_path / "more").notices[0].message
    train(pairs_recipe(seed=1, **start(base)), tmp_path / "other")
    assert json.loads((newest_checkpoint(tmp_path / "other") / "training.json").read_text())["rows"] == run["rows"]
    assert not read_record(tmp_path / "other").notices


@pytest.mark.parametrize("kept", [True, False])
def test_optimiser_state_goes_on_for_old_rows_and_is_fresh_for_new_ones(
    base, pairs_recipe, kept, tmp_path, monkeypatch
):
    old = read_optimizer_state(newest_checkpoint(base))
    seen = {}
    monkeypatch.setattr(TrainingRun, "take_steps", lambda self, stop: seen.update(state_of(self)))
    recipe = pairs_recipe(**start(base, grow=TO, optimizer_state="keep" if kept else "fresh"))
    train(recipe, tmp_path / "grown")
    if not kept:
        assert seen == {}
        return
    assert seen.keys() == old.keys()
    for name, tensor in seen.items():
        if tensor.shape == old[name].shape:
            assert torch.equal(tensor, old[name]), name
        else:
            assert torch.equal(tensor[: len(old[name])], old[name]), name
            fresh = tensor[len(old[name]) :]
            # Adam's count of steps is the whole tensor's: no squares at all would let new rows start with leaps.
            expected = float(old[name].mean()) if name.endswith("exp_avg_sq") else 0.0
            assert torch.allclose(fresh, torch.full_like(fresh, expected)), name


def state_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    from headwater_lab.training.checkpoints import optimizer_tensors

    return {name: tensor.clone() for name, tensor in optimizer_tensors(run.model, run.optimizers).items()}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("what", ["warmup", "half", "long"])
def test_tau_goes_to_the_default_of_its_pairs_step_by_step(base, pairs_recipe, what, tmp_path, monkeypatch):
    warmup = {"warmup": 2, "half": 0, "long": 99}[what]
    length = {"warmup": 2, "half": 6, "long": 11}[what]
    seen: list[list[float]] = []
    original = TrainingRun.compute_losses

    def losses(self, *args):
        seen.append([float(module.scale.tau) for *_, module in list_pattentions(self.model)])
        return original(self, *args)

    monkeypatch.setattr(TrainingRun, "compute_losses", losses)
    train(
        pairs_recipe(training={"warmup_steps": warmup, "gradient_accumulation_steps": 2}, **start(base, grow=TO)),
        tmp_path / "grown",
    )
    taus = seen[::2]  # two forward passes a step
    assert len(taus) == 12
    for step, values in enumerate(taus):
        done = min(1, step / length)
        for value, (was, now) in zip(values, ([(5, 12)] * 4 + [(9, 20)]) * 2, strict=True):
            assert value == pytest.approx(was**0.5 + done * (now**0.5 - was**0.5), rel=1e-6)
    assert weights(tmp_path / "grown")["model.layers.0.mlp.scale.tau"].item() == pytest.approx(20**0.5)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("grow_settings", "more", "ends"),
    [
        ({}, {"tau": "keep"}, 5),
        ({"freeze": True}, {}, 5),
        ({"tau": "recompute"}, {}, 12),
        ({"freeze": True}, {"tau": "anneal"}, 12),
    ],
)
def test_tau_stays_where_it_is_to_stay(base, pairs_recipe, grow_settings, more, ends, tmp_path):
    train(pairs_recipe(**start(base, grow=TO | grow_settings, **more)), tmp_path / "grown")
    tau = weights(tmp_path / "grown")["model.layers.0.self_attn.q_proj.scale.tau"].item()
    assert tau == pytest.approx(ends**0.5)


@pytest.mark.slow
def test_what_comes_between_growth_and_training_does_not_stop_it(base, pairs_recipe, run, tmp_path):
    assert run("grow", base, "attention_pairs=12", "--out", tmp_path / "grown")[0] == 0
    assert run("retrofit", tmp_path / "grown", "--mechanism", "neutreno", "--out", tmp_path / "more")[0] == 0
    record = train(pairs_recipe(**start(tmp_path / "more")), tmp_path / "run")
    assert weights(tmp_path / "run")["model.layers.0.self_attn.q_proj.scale.tau"].item() == pytest.approx(12**0.5)
    assert any("τ of 8 maps is annealed to √n" in notice.message for notice in record.notices)


@pytest.mark.slow
def test_a_start_that_was_left_behind_is_made_again(base, pairs_recipe, tmp_path):
    diverges = {"learning_rate": 1e30, "warmup_steps": 0, "max_skipped_steps": 1}
    with pytest.raises(HeadwaterError, match="diverged"):
        train(pairs_recipe(training=diverges, **start(base, grow=TO)), tmp_path / "run")
    assert (tmp_path / "run" / "start").is_dir()
    record = train(pairs_recipe(**start(base, grow={"attention_pairs": 30})), tmp_path / "run")
    saved = json.loads((newest_checkpoint(tmp_path / "run") / "config.json").read_text())
    assert saved["mechanisms"]["pattention"]["attention_pairs"] == 30
    assert record.origin.history[-1].details["attention_pairs"] == 30


@pytest.mark.slow
def test_thawing_leaves_the_optimisers_state_behind(base, pairs_recipe, run, tmp_path):
    train(pairs_recipe(**start(base, grow=TO | {"freeze": True})), tmp_path / "frozen")
    assert run("grow", tmp_path / "frozen", "ffn_pairs=40", "--out", tmp_path / "free")[0] == 0
    with pytest.raises(HeadwaterError, match="no optimizer state"):
        train(pairs_recipe(**start(tmp_path / "free", optimizer_state="keep")), tmp_path / "x")


@pytest.mark.slow
def test_a_model_that_was_not_grown_keeps_its_tau(base, pairs_recipe, tmp_path):
    model = HeadwaterForCausalLM.from_pretrained(newest_checkpoint(base))
    for *_, module in list_pattentions(model):
        module.scale.set_tau(3.5)
    write_model(tmp_path / "other", model, None, read_history(newest_checkpoint(base)))
    train(pairs_recipe(**start(tmp_path / "other")), tmp_path / "more")
    assert weights(tmp_path / "more")["model.layers.1.mlp.scale.tau"].item() == 3.5


@pytest.mark.slow
def test_a_grown_run_is_the_same_after_an_interruption_and_without_its_source(base, pairs_recipe, tmp_path):
    recipe = pairs_recipe(training={"warmup_steps": 8}, **start(base, grow=TO))
    whole = train(recipe, tmp_path / "whole")

    def stop_at_five(step, point):
        if step == 5 and point is None:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut", on_event=stop_at_five)
    shutil.rmtree(base)
    shutil.rmtree(tmp_path / "cut" / "start")
    cut = train(recipe, tmp_path / "cut", resume=True)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [point.model_dump() for point in cut.curve] == [point.model_dump() for point in whole.curve]
    assert [point.model_dump() for point in cut.held_out] == [point.model_dump() for point in whole.held_out]
    assert cut.origin == whole.origin


@pytest.mark.slow
def test_frozen_pairs_stay_to_the_last_bit_under_decay(base, pairs_recipe, tmp_path):
    record = train(
        pairs_recipe(training={"weight_decay": 0.5}, **start(base, grow=TO | {"freeze": True})), tmp_path / "f"
    )
    before, after = weights(base), weights(tmp_path / "f")
    for name, tensor in before.items():
        new = name.replace(".key", ".frozen_key").replace(".value", ".frozen_value")
        assert torch.equal(after[new], tensor), name
    assert record.curve[-1].gradient_norm > 0
    assert record.held_out[-1].metrics["loss"] != record.held_out[0].metrics["loss"]
    plain = grow(HeadwaterForCausalLM.from_pretrained(newest_checkpoint(tmp_path / "f")))
    assert pairs_of(plain)["query"] == 12


@pytest.mark.slow
def test_a_model_in_half_precision_is_begun_with(base, pairs_recipe, tmp_path):
    model = HeadwaterForCausalLM.from_pretrained(newest_checkpoint(base), dtype=torch.bfloat16)
    write_model(tmp_path / "half", model)
    record = train(pairs_recipe(**start(tmp_path / "half")), tmp_path / "more")
    assert weights(tmp_path / "more")["model.layers.0.mlp.key"].dtype == torch.float32
    assert record.held_out[0].metrics["loss"] == pytest.approx(read_record(base).held_out[-1].metrics["loss"], rel=0.02)
    assert record.origin.tokens == 0, "it has no history"


@pytest.mark.slow
def test_dropout_is_the_recipes_and_the_rest_the_checkpoints(base, recipe, tmp_path):
    made = recipe(**start(base))  # says other mechanisms, and dropout
    record = train(made.model_copy(update={"model": made.model | {"hidden_size": 99}}), tmp_path / "more")
    saved = json.loads((newest_checkpoint(tmp_path / "more") / "config.json").read_text())
    assert saved["residual_dropout"] == 0.1
    assert saved["hidden_size"] == 16
    assert "hidden_size is 16 there, not 99" in record.notices[0].message


class TestRefusals:
    def test_a_tokenizer_of_others(self, base, pairs_recipe, tmp_path):
        word_tokenizer(tmp_path / "tokenizer", 300)
        with pytest.raises(HeadwaterError, match=r"257.*258|tokenizer"):
            train(pairs_recipe(data={"tokenizer": str(tmp_path / "tokenizer")}, **start(base)), tmp_path / "x")

    def test_a_damaged_start_and_one_that_is_not_there(self, base, pairs_recipe, tmp_path):
        file = newest_checkpoint(base) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        for more in ({}, {"grow": TO}):
            with pytest.raises(HeadwaterError, match="damaged"):
                train(pairs_recipe(**start(base, **more)), tmp_path / "x")
        with pytest.raises(HeadwaterError, match="no checkpoint folder"):
            train(pairs_recipe(**start(tmp_path / "nothing")), tmp_path / "x")

    def test_optimiser_state_where_there_is_none(self, base, pairs_recipe, tmp_path):
        write_model(tmp_path / "bare", HeadwaterForCausalLM.from_pretrained(newest_checkpoint(base)))
        with pytest.raises(HeadwaterError, match="no optimizer state"):
            train(pairs_recipe(**start(tmp_path / "bare", optimizer_state="keep")), tmp_path / "x")

    def test_the_state_of_another_optimiser(self, base, pairs_recipe, tmp_path):
        with pytest.raises(HeadwaterError, match="another optimizer"):
            train(pairs_recipe(training={"optimizer": "muon"}, **start(base, optimizer_state="keep")), tmp_path / "x")

    def test_a_checkpoint_of_transformers_without_weights(self, pairs_recipe, tmp_path):
        (tmp_path / "llama").mkdir()
        (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(HeadwaterError, match="has no weights"):
            train(pairs_recipe(**start(tmp_path / "llama", grow=TO)), tmp_path / "x")

    @pytest.mark.slow
    def test_another_growth_on_resumption(self, base, pairs_recipe, tmp_path):
        train(pairs_recipe(**start(base, grow=TO)), tmp_path / "grown")
        with pytest.raises(HeadwaterError, match="start"):
            train(pairs_recipe(**start(base, grow=TO | {"ffn_pairs": 30})), tmp_path / "grown", resume=True)

    def test_a_scale_where_no_parameter_tokens_are(self, recipe, finished, tmp_path):
        finished(recipe(), tmp_path / "linear")
        with pytest.raises(HeadwaterError, match="which this model does not have"):
            train(recipe(**start(tmp_path / "linear", tau="anneal")), tmp_path / "x")

    def test_growing_and_converting_at_once(self, base, recipe):
        with pytest.raises(HeadwaterError, match="one at a time"):
            recipe(**start(base, grow=TO, convert={"num_key_value_heads": 1}))


def test_annealing_ends_where_it_goes_and_goes_nowhere_for_a_model_at_home(base):
    model = HeadwaterForCausalLM.from_pretrained(newest_checkpoint(base))
    assert not ways_of(model)
    ways = ways_of(grow(model, 12))
    assert len(ways) == 8, "the feed-forwards did not grow"
    for module, way in ways.items():
        module.anneal(way, 7.0)
    assert [float(module.scale.tau) for module in ways] == pytest.approx([12**0.5] * 8)


def ways_of(model) -> dict:
    return {
        module: way for module in model.modules() if isinstance(module, Pattention) and (way := module.find_tau_path())
    }


def word_tokenizer(folder, words=30, added=()) -> PreTrainedTokenizerFast:
    """A tokenizer of numbers as words, saved in a folder."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(words)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0", eos_token="0")
    made.add_tokens(list(added), special_tokens=True)
    made.save_pretrained(folder)
    return made


TABLES = {"value_embedding": {"tables": 2}, "ngram_memory": {"rows": 40}}


@pytest.fixture
def model_of_words(recipe, tmp_path):
    """A saved model of thirty words, and a function that gives what a run on another tokenizer begins with."""
    tokenizer, device = word_tokenizer(tmp_path / "words"), torch.device("cpu")

    def made(folder, **more):
        again = recipe(
            data={"tokenizer": str(folder)}, model={"mechanisms": TABLES}, **start(tmp_path / "model", **more)
        )
        data = again.data.build()
        path = prepare_start(again.start, tmp_path / "run", data, device)
        return read_beginning(again, path, data)

    first = recipe(data={"tokenizer": str(tmp_path / "words")}, model={"mechanisms": TABLES})
    model = HeadwaterForCausalLM(first.config_for(first.data.build())).eval()
    write_model(tmp_path / "model", model, tokenizer, [])
    return model, made


def test_a_run_with_more_tokens_begins_with_a_larger_model(model_of_words, tmp_path):
    model, begun = model_of_words
    word_tokenizer(tmp_path / "more", added=["<|user|>", "<|end|>"])
    beginning = begun(tmp_path / "more")
    larger, ids = HeadwaterForCausalLM.from_pretrained(beginning.path).eval(), torch.arange(12)[None]
    assert (model.config.vocab_size, larger.config.vocab_size, beginning.config.vocab_size) == (30, 32, 32)
    with torch.no_grad():
        assert torch.equal(larger(ids).logits[..., :30], model(ids).logits)
        assert larger(torch.tensor([[30, 31]])).logits.shape == (1, 2, 32)
    assert beginning.notices == ["The model was fitted to the data: vocab_size 32 instead of 30."]
    again = HeadwaterForCausalLM.from_pretrained(begun(tmp_path / "more").path)
    assert all(torch.equal(a, b) for a, b in zip(larger.parameters(), again.parameters(), strict=True))


def test_tokens_under_other_ids_are_no_addition(model_of_words, tmp_path):
    _, begun = model_of_words
    assert begun(tmp_path / "words").path == tmp_path / "model"
    for words in (29, 31):
        word_tokenizer(tmp_path / "other", words, added=["<|user|>"])
        if words == 29:
            with pytest.raises(HeadwaterError, match=r"is not the one .* was trained with, nor one that adds tokens"):
                begun(tmp_path / "other")
        else:
            assert begun(tmp_path / "other").config.vocab_size == 32


def test_a_longer_context_and_other_frequencies_go_into_the_model(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "base")
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    longer = recipe(data={"context": 64}, model={"rope_parameters": rope}, **start(tmp_path / "base"))
    record = train(longer, tmp_path / "longer")
    config = read_config(newest_checkpoint(tmp_path / "longer"))
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (64, 50_000.0)
    assert not [notice for notice in record.notices if "ignored" in notice.message]


def test_a_kept_state_comes_with_the_weights_it_is_of(recipe, finished, tmp_path, monkeypatch):
    """Not with their average, which is the checkpoint's model."""
    finished(recipe(training={"ema_decay": 0.9}), tmp_path / "base")
    state = load_file(newest_checkpoint(tmp_path / "base") / "training.safetensors")
    seen = {}

    def look(self, stop):
        seen.update({name: parameter.detach().clone() for name, parameter in self.model.named_parameters()})

    monkeypatch.setattr(TrainingRun, "take_steps", look)
    train(recipe(**start(tmp_path / "base", optimizer_state="keep")), tmp_path / "next")
    assert seen
    for name, tensor in seen.items():
        assert torch.equal(tensor, state[f"trained.{name}"]), name


def test_a_teacher_whose_ids_mean_other_tokens_is_refused(recipe, tmp_path):
    made = recipe(training={"distillation": {"teacher": str(tmp_path / "teacher")}, "loss_chunk_tokens": None})
    config = made.config_for(made.data.build())
    words = word_tokenizer(tmp_path / "words", config.vocab_size)
    write_model(tmp_path / "teacher", HeadwaterForCausalLM(config), words, [])
    with pytest.raises(HeadwaterError, match=r"is not the one .*teacher' was trained with"):
        train(made, tmp_path / "run")


def test_a_model_from_elsewhere_keeps_how_it_begins_and_ends_texts(recipe, tmp_path, capsys):
    """Stop tokens may stand only in generation_config.json; texts begin with its tokenizer's begin-of-text token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes))
    settings = dict(eos_token_id=[256, 97], do_sample=True, temperature=0.3, repetition_penalty=1.5)
    llama.generation_config = GenerationConfig(**settings)
    for saved in (llama, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    data = {"tokenizer": str(tmp_path / "llama")}
    for steps in (2, 4):
        begun = recipe(model={}, data=data, training={"steps": steps}, **start(tmp_path / "llama"))
        train(begun, tmp_path / "run", resume=True)
    model, tokenizer = load_for_generation(tmp_path / "run")
    text = "generation_config.json sets repetition_penalty, temperature, which is not followed here."
    assert text in capsys.readouterr().err
    settings = json.loads((newest_checkpoint(tmp_path / "run") / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["do_sample"], settings["temperature"]) == ([256, 97], True, 0.3)
    original, trained = find_candidates([str(tmp_path / "llama"), str(tmp_path / "run")])
    assert tokenizer("a").input_ids == [97]
    assert trained.begin == original.begin == 257
    assert model.generation_config.eos_token_id == [256, 97]
