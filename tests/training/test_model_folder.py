"""The model at the top of a run's folder: transformers loads it, and it is always the newest checkpoint's."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trials import train_until

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.training.checkpoints import find_damage, list_checkpoints, load_model, newest_checkpoint
from headwater_lab.training.loop import train
from headwater_lab.training.saving import how_to_load, publish_model, write_model
from headwater_lab.training.stages import train_stages


def same(folder, other):
    a, b = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_loaded_by_its_name_also_where_it_was_moved(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints")
    newest = newest_checkpoint(tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "copy"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), load_model(newest).parameters(), strict=True))
        assert AutoTokenizer.from_pretrained(folder)("a").input_ids
    assert "training.safetensors" not in {path.name for path in (tmp_path / "run").iterdir()}
    assert f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}"[:-1] in how_to_load(tmp_path / "run")


def test_several_chat_templates_are_written(model, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}
    write_model(tmp_path / "model", model, tokenizer, [])
    assert find_damage(tmp_path / "model") is None
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == tokenizer.chat_template


def test_it_follows_the_newest_checkpoint_and_takes_no_space(recipe, tmp_path):
    made = recipe(reporting={"save_every": 2, "keep_checkpoints": 1})
    train_until(2, made, tmp_path / "run")
    first = (tmp_path / "run" / "model.safetensors").read_bytes()
    train_until(4, made, tmp_path / "run", resume=True)
    (newest,) = list_checkpoints(tmp_path / "run")[-1:]
    assert first != (tmp_path / "run" / "model.safetensors").read_bytes()
    assert (newest / "model.safetensors").samefile(tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "config.json").write_text("{}")  # as a program that saves in place
    assert find_damage(newest) is None


def test_of_stages_it_is_the_last_ones(recipe, tmp_path):
    made = recipe(training={"steps": 2}, stages=[{"name": "on", "training": {"steps": 1}}])
    train_stages(made, tmp_path / "run")
    assert same(tmp_path / "run", newest_checkpoint(tmp_path / "run"))
    assert newest_checkpoint(tmp_path / "run").parent.name == "checkpoints"
    with pytest.raises(HeadwaterError, match="already holds a run with stages"):
        train(recipe(), tmp_path / "run")


def test_stages_do_not_replace_a_run_without(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    before = (tmp_path / "run" / "record.json").read_bytes()
    with pytest.raises(HeadwaterError, match="already holds a run without stages"):
        train_stages(recipe(stages=[{"name": "on", "training": {"steps": 1}}]), tmp_path / "run")
    assert (tmp_path / "run" / "record.json").read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_without_its_checkpoints_is_not_overwritten(recipe, finished, tmp_path, resume):
    finished(recipe(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    kept_files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    with pytest.raises(HeadwaterError, match=r"holds a model without checkpoints/.* choose another --out"):
        train(recipe(), tmp_path / "run", resume=resume)
    assert all(path.read_bytes() == content for path, content in kept_files.items())


@pytest.fixture
def model(config=None):
    from headwater.config.text import HeadwaterConfig

    return HeadwaterForCausalLM(
        HeadwaterConfig(vocab_size=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16)
    )


def test_a_disk_without_links_has_a_copy(model, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", unsupported)
    (run := tmp_path / "run").mkdir()
    publish_model(write_model(tmp_path / "checkpoint", model), run)
    assert same(run, tmp_path / "checkpoint")


def test_weights_by_process_are_not_loaded_and_the_sentence_says_what_to_run(model, tmp_path):
    (run := tmp_path / "run").mkdir()
    publish_model(write_model(run / "checkpoints" / "step-000001", model), run)
    (parts := run / "checkpoints" / "step-000002").mkdir()
    (parts / "shard-00001-model-00001-of-00001.safetensors").touch()
    publish_model(parts, run)
    assert not (run / "model.safetensors").exists()
    assert "headwater export" in how_to_load(run)


def test_a_damaged_optimizer_state_is_not_taken_for_a_learning_rate(recipe, tmp_path):
    from safetensors.torch import save_file

    from headwater_lab.training.checkpoints import SUMS
    from headwater_lab.training.saving import sync_files, write_sums

    train_until(2, recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    state = load_file(newest / "training.safetensors")
    name = next(name for name in state if name.endswith("exp_avg_sq"))
    for wrong in (float("nan"), -1.0):
        state[name].view(-1)[0] = wrong
        save_file(state, newest / "training.safetensors")
        write_sums(newest, sync_files(newest, [path.name for path in newest.iterdir() if path.name != SUMS]))
        with pytest.raises(HeadwaterError, match=r"The optimizer state .* cannot be used"):
            train(recipe(), tmp_path / "run", resume=True)


def test_a_refused_run_leaves_no_folder(recipe, tmp_path):
    for made in (
        recipe(data={"source": str(tmp_path / "absent.txt")}),
        recipe(start={"checkpoint": str(tmp_path / "absent")}),
        recipe(stages=[{"name": "on", "training": {"steps": 1}}], data={"source": str(tmp_path / "absent.txt")}),
    ):
        with pytest.raises(HeadwaterError):
            train_stages(made, tmp_path / "a" / "run")
        assert not (tmp_path / "a").exists()
