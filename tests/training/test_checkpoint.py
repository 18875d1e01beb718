"""Checkpoints: whole or not at all, and never silently wrong."""

import errno
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trials import PowerCut, cut_at, same_end

from headwater.util.errors import HeadwaterError
from headwater.util.files import sha256_of
from headwater_lab.training import saving as module
from headwater_lab.training.checkpoints import (
    find_damage,
    find_newest_intact,
    list_checkpoints,
    load_model,
    read_progress,
)
from headwater_lab.training.loop import train
from headwater_lab.training.records import Notice, read_record

FILES = ["model.safetensors", "training.safetensors", "training.json", "config.json", "tokenizer.json", "SHA256SUMS"]


def flip(file):
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spoil", [flip, cut_off, lambda file: file.unlink()], ids=["flip", "cut", "delete"])
def test_a_damaged_file_is_seen(whole_run, tmp_path, name, spoil):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(list_checkpoints(whole_run)[-1], checkpoint)
    assert find_damage(checkpoint) is None
    spoil(checkpoint / name)
    found = find_damage(checkpoint)
    assert found is not None
    assert name in found or name == "SHA256SUMS"  # whose lines are about the others


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One finished run for all that only look at it."""
    from headwater_lab.recipe.recipe import parse

    folder = tmp_path_factory.mktemp("whole")
    for i in range(25):
        (folder / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
    values = {
        "data": {"kind": "text", "source": str(folder), "context": 32},
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "training": {"steps": 2, "batch_size": 4, "threads": 1},
        "reporting": {"tensorboard": False},
    }
    train(parse(values, "test"), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_going_on_from_the_one_before_a_damaged_one_ends_the_same(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "cut", on_event=cut_at(9))
    newest = list_checkpoints(tmp_path / "cut")[-1]
    assert newest.name == "step-000008"
    flip(newest / "model.safetensors")
    messages = []
    train(recipe(), tmp_path / "cut", resume=True, on_event=lambda step, point: messages.append(point))
    notices = [point.message for point in messages if isinstance(point, Notice)]
    assert len(notices) == 1
    assert "step-000008 is damaged (model.safetensors has changed" in notices[0]
    same_end(tmp_path / "whole", tmp_path / "cut")
    assert [n.message for n in read_record(tmp_path / "cut").notices] == notices
    assert (newest.parent / "damaged-step-000008").is_dir()


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again_silently(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    for checkpoint in list_checkpoints(tmp_path / "run"):
        (checkpoint / "training.json").unlink()
    with pytest.raises(HeadwaterError, match=r"Every checkpoint .* is damaged"):
        train(recipe(), tmp_path / "run", resume=True)


def test_checkpoints_that_are_all_damaged_stay_as_they_are(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    for checkpoint in list_checkpoints(run):
        (checkpoint / "training.json").unlink()
    there = sorted(run.rglob("*"))
    for _ in range(2):  # the second time as the first: none was put aside, so the run is not a new one
        with pytest.raises(HeadwaterError, match=r"Every checkpoint .* is damaged .*training.json is missing"):
            find_newest_intact(run, pytest.fail)
    assert sorted(run.rglob("*")) == there


def test_checksums_are_those_of_sha256sum(whole_run):
    import subprocess

    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=list_checkpoints(whole_run)[-1], check=True)


def resum(checkpoint):
    """Write checksums that fit, as whoever made the files on purpose would."""
    names = [line.split("  ")[1] for line in (checkpoint / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{sha256_of(checkpoint / name)}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def test_foreign_training_state_is_refused(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    save_file({"optimizer.something.else": torch.zeros(3)}, newest / "training.safetensors")
    resum(newest)
    with pytest.raises(HeadwaterError, match=r"lacks .* tensors of this run"):
        train(recipe(training={"steps": 14}), tmp_path / "run", resume=True)


def test_training_state_that_lacks_a_parameter_is_refused(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    tensors = load_file(newest / "training.safetensors")
    del tensors["optimizer.model.layers.1.mlp.up_proj.weight.exp_avg"]
    save_file(tensors, newest / "training.safetensors")
    resum(newest)
    with pytest.raises(HeadwaterError, match=r"lacks 1 tensors of this run, optimizer\.model\.layers\.1\.mlp\.up_proj"):
        train(recipe(training={"steps": 14}), tmp_path / "run", resume=True)


def test_training_state_of_another_shape_is_refused(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    tensors = load_file(newest / "training.safetensors")
    tensors["optimizer.lm_head.weight.exp_avg"] = torch.zeros(3, 5)
    save_file(tensors, newest / "training.safetensors")
    resum(newest)
    with pytest.raises(HeadwaterError, match="tensors whose shapes differ from this run's"):
        train(recipe(training={"steps": 14}), tmp_path / "run", resume=True)


def test_another_format_is_refused_in_words(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    for checkpoint in list_checkpoints(tmp_path / "run"):
        facts = checkpoint / "training.json"
        facts.write_text(facts.read_text().replace('"format_version": 2', '"format_version": 99'))
        resum(checkpoint)
    with pytest.raises(HeadwaterError, match="training format 99, and this headwater reads 2"):
        train(recipe(), tmp_path / "run", resume=True)


def test_foreign_weights_are_refused(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    save_file({"something.else": torch.zeros(3)}, newest / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadwaterError, match="do not match its config"):
        load_model(newest)


def test_weights_of_another_shape_are_refused(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "a")
    train(recipe(model={"hidden_size": 32}), tmp_path / "b")
    a, b = (list_checkpoints(tmp_path / name)[-1] for name in "ab")
    (a / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes())
    with pytest.raises(HeadwaterError, match=r"damaged|do not match its config"):
        load_model(a)


@pytest.mark.slow
def test_a_failed_save_leaves_the_one_before_whole(recipe, finished, tmp_path, monkeypatch):
    original = module.save_file

    def full_disk(tensors, path):
        if "step-000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(module, "save_file", full_disk)
    with pytest.raises(HeadwaterError, match=r"the disk is full; the one of step 4 is intact\..*--resume"):
        train(recipe(), tmp_path / "cut")
    monkeypatch.undo()
    assert [c.name for c in list_checkpoints(tmp_path / "cut")] == ["step-000004"]
    assert not list((tmp_path / "cut" / "checkpoints").glob(".writing-*"))
    train(recipe(), tmp_path / "cut", resume=True)
    finished(recipe(), tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "cut")


def test_the_newest_and_the_best_are_kept(recipe, tmp_path, monkeypatch):
    every = {"save_every": 2, "evaluate_every": 2, "keep_checkpoints": 2}
    train(recipe(reporting=every), tmp_path / "falling")
    assert [c.name for c in list_checkpoints(tmp_path / "falling")] == ["step-000010", "step-000012"]
    results = iter([5.0, 3.0, 4.0, 4.5, 4.0, 6.0])
    from headwater_lab.data.base import Evaluation
    from headwater_lab.data.language import LanguageData

    monkeypatch.setattr(
        LanguageData, "evaluate", lambda self, logits, share: Evaluation({"bits_per_byte": next(results)})
    )
    train(recipe(reporting=every), tmp_path / "rising")
    assert [c.name for c in list_checkpoints(tmp_path / "rising")] == ["step-000004", "step-000010", "step-000012"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_checkpoint_comes_back(recipe, tmp_path, optimizer, tied):
    made = recipe(training={"optimizer": optimizer}, model={"tie_word_embeddings": tied})
    train(made, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(5))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


ESTIMATES = """
import torch


class Estimates(torch.optim.SGD):
    \"\"\"Keeps a number for each parameter, and one for each group, on which the step's length depends.\"\"\"

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = 1.1 * group.get("d", 0.1)
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                parameter.data -= group["lr"] * group["d"] * self.state[parameter]["count"] * parameter.grad


def in_groups(groups, *, learning_rate):
    for group in groups:
        group["lr"] = (10 if group["name"] == "embeddings" else 1) * learning_rate
    return Estimates(groups, lr=learning_rate)
"""


def test_numbers_that_an_optimizer_keeps_come_back(recipe, tmp_path, monkeypatch):
    (tmp_path / "estimates.py").write_text(ESTIMATES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWATER_TRUST", "estimates")
    made = recipe(training={"optimizer": "estimates:in_groups", "learning_rate": 0.01})
    train(made, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(5))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")
    assert read_progress(list_checkpoints(tmp_path / "cut")[-1]).optimizer["0.0.d"] == pytest.approx(0.1 * 1.1**12)
    kept = {"start": {"checkpoint": str(tmp_path / "whole"), "optimizer_state": "keep"}}
    with pytest.raises(HeadwaterError, match="keeps 'd' for a group of parameters"):
        train(recipe(training={"optimizer": "estimates:in_groups"}, **kept), tmp_path / "next")


@pytest.mark.slow
def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(recipe, tmp_path, monkeypatch):
    """Old checkpoints go at once, and what is left of one does not stand in the way of the next."""
    original = shutil.rmtree

    def cut(path, *args, **kwargs):
        if "removing" in str(path):
            (path / "training.json").unlink()
            raise PowerCut
        return original(path, *args, **kwargs)

    every = {"save_every": 2, "keep_checkpoints": 1}
    monkeypatch.setattr(module.shutil, "rmtree", cut)
    with pytest.raises(PowerCut):
        train(recipe(reporting=every), tmp_path / "cut")
    monkeypatch.undo()
    assert all(find_damage(checkpoint) is None for checkpoint in list_checkpoints(tmp_path / "cut"))
    train(recipe(reporting=every), tmp_path / "cut", resume=True)
    train(recipe(reporting=every), tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-000012"]


def test_a_run_does_not_go_on_with_other_code(recipe, tmp_path, monkeypatch):
    module = tmp_path / "sinking.py"
    module.write_text("def fall(progress):\n    return 1 - progress\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWATER_TRUST", "sinking")
    made = recipe(training={"schedule": "sinking:fall"})
    with pytest.raises(PowerCut):
        train(made, tmp_path / "run", on_event=cut_at(9))
    before = module.read_text()
    module.write_text(before.replace("progress\n", "progress**2\n"))
    with pytest.raises(HeadwaterError, match="sinking:fall has changed since this run was started; restore it"):
        train(made, tmp_path / "run", resume=True)
    module.write_text(before)
    train(made, tmp_path / "run", resume=True)


def test_a_run_does_not_go_on_with_other_data(recipe, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    made = recipe(data={"source": str(tmp_path / "corpus")})
    with pytest.raises(PowerCut):
        train(made, tmp_path / "run", on_event=cut_at(9))
    file = tmp_path / "corpus" / "3.txt"
    before = file.read_text()
    file.write_text(before.replace("says", "sang"))
    with pytest.raises(HeadwaterError, match=r"The data have changed since this run was started \(sha256"):
        train(made, tmp_path / "run", resume=True)
    file.write_text(before)
    train(made, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_damage_of_the_same_step_again_is_passed_over_again(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "run", on_event=cut_at(9))
    for _ in range(2):
        flip(list_checkpoints(tmp_path / "run")[-1] / "training.safetensors")
        with pytest.raises(PowerCut):
            train(recipe(), tmp_path / "run", resume=True, on_event=cut_at(9))
        assert list_checkpoints(tmp_path / "run")[-1].name == "step-000008"
    train(recipe(), tmp_path / "run", resume=True)
    same_end(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("command", [["export", "{}", "--out", "{}-exported"], ["generate", "{}", "a prompt"]])
def test_damaged_weights_are_neither_exported_nor_run(recipe, finished, tmp_path, run, command):
    finished(recipe(training={"steps": 2}), tmp_path / "run")
    flip(list_checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    code, _, err = run(*(word.format(tmp_path / "run") for word in command))
    assert code == 2
    assert "is damaged: model.safetensors has changed since it was written" in err


@pytest.mark.slow
def test_a_data_file_that_goes_away_costs_no_step(recipe, finished, tmp_path, monkeypatch):
    from headwater_lab.data.rows import Rows

    original = Rows.batches

    def gone(self, *args):
        for index, batch in enumerate(original(self, *args)):
            if index == 14:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", "train-00000.tokens")
            yield batch

    made = recipe(training={"gradient_accumulation_steps": 2})
    finished(made, tmp_path / "whole")
    monkeypatch.setattr(Rows, "batches", gone)
    with pytest.raises(HeadwaterError, match=r"data cannot be read: .*train-00000.tokens\); step 7 is saved"):
        train(made, tmp_path / "cut")
    monkeypatch.undo()
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")
