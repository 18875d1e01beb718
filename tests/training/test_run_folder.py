"""What a run may touch: its own folder, and in it what is its own; and what it leaves where the disk is full."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from trials import PowerCut, cut_at

import processes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.training.checkpoints import (
    find_damage,
    list_checkpoints,
    load_model,
    optimizer_tensors,
    read_history,
    read_optimizer_state,
    restore_run,
)
from headwater_lab.training.loop import train
from headwater_lab.training.records import Notice, read_record
from headwater_lab.training.run_folder import MARK
from headwater_lab.training.saving import Saver
from headwater_lab.training.stages import train_stages


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def project(tmp_path):
    """Somebody's folder, with names in it that a run has too."""
    folder = tmp_path / "proj"
    for name in ("start", "tensorboard", "checkpoints/step-000100", "checkpoints/.writing-x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("mine")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / ".lock").touch()
    return folder


class TestForeignFolders:
    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("broken", [False, True])
    def test_a_folder_that_is_no_runs_is_refused_and_stays_as_it_is(self, recipe, project, resume, broken):
        before = contents(project)
        made = recipe(data={"source": "no/such/folder"}) if broken else recipe()
        with pytest.raises(HeadwaterError, match="not a run's"):
            train(made, project, resume=resume)
        assert contents(project) == before

    @pytest.mark.parametrize("record", ["", "[]", "{}", '{"name": "other tool", "status": "finished"}'])
    def test_somebodys_record_does_not_make_it_one(self, recipe, project, record):
        (project / "record.json").write_text(record)
        before = contents(project)
        with pytest.raises(HeadwaterError, match="not a run's"):
            train(recipe(), project)
        assert contents(project) == before

    def test_stages_are_refused_there_too(self, recipe, project):
        before = contents(project)
        made = recipe(stages=[{"name": "on", "training": {"steps": 2}}])
        with pytest.raises(HeadwaterError, match="not a run's"):
            train_stages(made, project)
        assert contents(project) == before

    @pytest.mark.parametrize("resume", [False, True])
    def test_a_way_over_a_folder_that_is_not_there_yet_leads_to_the_same(self, recipe, project, resume):
        before = contents(project)
        with pytest.raises(HeadwaterError, match="not a run's"):
            train(recipe(), project.parent / "new" / ".." / project.name, resume=resume)
        assert contents(project) == before

    def test_the_present_folder_is_one_like_any(self, recipe, project, monkeypatch):
        monkeypatch.chdir(project)
        before = contents(project)
        with pytest.raises(HeadwaterError, match="not a run's"):
            train(recipe(), Path("."))
        assert contents(project) == before

    def test_what_is_no_folder_is_refused(self, recipe, tmp_path):
        (tmp_path / "file").write_text("mine")
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "nowhere").symlink_to("absent")
        for name in ("file", "loop", "nowhere"):
            with pytest.raises(HeadwaterError, match=r"is not a folder|cannot be"):
                train(recipe(), tmp_path / name)
        assert (tmp_path / "file").read_text() == "mine"

    def test_an_empty_one_is_taken_also_behind_a_link(self, recipe, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to("empty")
        train(recipe(training={"steps": 2}), tmp_path / "link")
        assert list_checkpoints(tmp_path / "empty")


class TestOwnFolders:
    @pytest.mark.parametrize("stages", [[], [{"name": "on", "training": {"steps": 2}}]])
    def test_a_copy_without_hidden_files_continues(self, recipe, tmp_path, stages):
        made = recipe(stages=stages, reporting={"save_every": 2})
        begin = functools.partial(train_stages, made) if stages else functools.partial(train, made)
        with pytest.raises(PowerCut):
            begin(tmp_path / "run", on_event=cut_at(3))
        shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
        assert begin(tmp_path / "copy", resume=True).curve == begin(tmp_path / "run", resume=True).curve

    @pytest.mark.slow
    def test_a_refused_run_removes_nothing_of_the_one_before(self, recipe, tmp_path):
        logged = {"tensorboard": True, "log_every": 1}
        with pytest.raises(PowerCut):
            train(recipe(reporting=logged), tmp_path / "run", on_event=cut_at(3))  # no checkpoint yet
        before = {name: content for name, content in contents(tmp_path / "run").items() if name != MARK}
        assert "metrics.jsonl" in before
        assert any(name.startswith("tensorboard/") for name in before)
        for made in (
            recipe(data={"source": str(tmp_path / "absent")}),
            recipe(start={"checkpoint": str(tmp_path / "absent")}),
            recipe(reporting={"wandb": "project"}),
        ):
            with pytest.raises(HeadwaterError):
                train(made, tmp_path / "run")
            after = {name: content for name, content in contents(tmp_path / "run").items() if name != MARK}
            assert after == before
        train(recipe(), tmp_path / "run")

    @pytest.mark.slow
    def test_a_grown_start_is_made_beside_the_old_one_until_the_run_begins(self, recipe, tmp_path):
        pairs = {"mechanisms": {"pattention": {}}}
        train(recipe(model=pairs, training={"steps": 2}), tmp_path / "source")
        start = {"checkpoint": str(tmp_path / "source"), "grow": {"attention_pairs": 40}}
        made = recipe(model=pairs, start=start, training={"steps": 2})
        with pytest.raises(PowerCut):
            train(made, tmp_path / "run", on_event=cut_at(1))
        (tmp_path / "run" / "start" / "old").write_text("old")
        other = recipe(model=pairs, start=start | {"grow": {"attention_pairs": 3}})
        with pytest.raises(HeadwaterError):
            train(other, tmp_path / "run")
        assert (tmp_path / "run" / "start" / "old").exists()
        assert not (tmp_path / "run" / ".start").exists()
        train(made, tmp_path / "run")
        assert not (tmp_path / "run" / "start" / "old").exists()
        assert read_history(tmp_path / "run" / "start")[-1].details["attention_pairs"] == 40

    @pytest.mark.slow
    def test_a_finished_run_that_was_killed_before_it_tidied_up_does_so_later(self, recipe, tmp_path, monkeypatch):
        every = {"save_every": 2, "keep_checkpoints": 1}
        with monkeypatch.context() as patched:
            patched.setattr("headwater_lab.training.loop.prune_checkpoints", lambda *arguments: None)
            train(recipe(reporting=every), tmp_path / "run")
        assert len(list_checkpoints(tmp_path / "run")) == 6
        train(recipe(reporting=every), tmp_path / "run", resume=True)
        assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000012"]


class TestStrays:
    STRAYS = ("zzz.safetensors", "model.safetensors.index.json", "adapter_config.json", "added_tokens.json", "x.bin")

    @pytest.fixture(scope="class")
    def cut(self, tmp_path_factory):
        from headwater_lab.recipe.recipe import parse

        folder = tmp_path_factory.mktemp("strays")
        (folder / "corpus").mkdir()
        for i in range(25):
            (folder / "corpus" / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
        values = {
            "data": {"kind": "text", "source": str(folder / "corpus"), "context": 32},
            "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            "training": {"steps": 4, "batch_size": 4, "threads": 1},
            "reporting": {"tensorboard": False, "save_every": 2},
        }
        made = parse(values, "test")
        with pytest.raises(PowerCut):
            train(made, folder / "run", on_event=cut_at(3))
        return made, folder / "run"

    def test_without_sums_too_only_named_files_are_read(self, cut, tmp_path):
        newest = list_checkpoints(cut[1])[-1]
        shutil.copytree(newest, tmp_path / "model")
        (tmp_path / "model" / "SHA256SUMS").unlink()
        before, state = load_model(newest).state_dict(), read_optimizer_state(newest)
        for name in ("aaa.safetensors", "zzz.safetensors"):
            zeros = {key: torch.zeros_like(tensor) for key, tensor in (before | state).items()}
            save_file(zeros, tmp_path / "model" / name)
        after = load_model(tmp_path / "model").state_dict()
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
        after = read_optimizer_state(tmp_path / "model")
        assert state
        assert all(torch.equal(tensor, after[key]) for key, tensor in state.items())

    def test_names_in_the_sums_stay_in_the_folder(self, cut, tmp_path):
        shutil.copytree(list_checkpoints(cut[1])[-1], tmp_path / "model")
        (tmp_path / "outside").write_text("x")
        with (tmp_path / "model" / "SHA256SUMS").open("a") as sums:
            sums.write(f"{'0' * 64}  ../outside\n")
        assert "incomplete" in (find_damage(tmp_path / "model") or "")


def optimizers_of_pytorch():
    optim = torch.optim
    for kind in (optim.Adafactor, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD):
        yield kind, {}
    for kind in (optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD):
        yield kind, {}
    yield optim.SGD, {"momentum": 0.9}
    yield optim.Adam, {"amsgrad": True}
    yield optim.AdamW, {"fused": True}
    yield optim.RMSprop, {"centered": True, "momentum": 0.9}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), optimizers_of_pytorch(), ids=str)
def test_every_optimiser_goes_on_as_if_it_had_never_stopped(kind, options, tmp_path):
    from lightning_fabric import Fabric

    from conftest import config
    from headwater_lab.training.checkpoints import Progress

    def take(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

    fabric = Fabric(accelerator="cpu", devices=1)
    one = HeadwaterForCausalLM(config({"kv_shift": {}}))
    first = kind(one.parameters(), lr=1e-3, **options)
    assert kind is torch.optim.Adagrad or optimizer_tensors(one, [first]) == {}
    take(one, first, range(3))
    target = tmp_path / "checkpoints" / "step-000003"
    with Saver(fabric) as saver:
        saver.start_saving(target, Progress(step=3), one, None, optimizer_tensors(one, [first]))
        saver.finish_saving()
    other = HeadwaterForCausalLM(config({"kv_shift": {}}))
    again = kind(other.parameters(), lr=1e-3, **options)
    restore_run(target, other, [again], {}, distributed=False)
    for model, optimizer in ((one, first), (other, again)):
        take(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def full_for_tensorboard():
    """As a disk that is full for TensorBoard alone: its files are on /dev/full."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self, data):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(data)

    RecordWriter.write = full


class TestFullDisks:
    def test_tensorboard_that_cannot_write_does_not_end_the_run(self, recipe, tmp_path):
        made = recipe(reporting={"tensorboard": True, "log_every": 1, "save_every": None, "evaluate_every": None})
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(made.model_dump(mode="json")))
        code, _, err = processes.run("train", file, "--out", tmp_path / "run", before=full_for_tensorboard)
        assert code == 0, err
        assert "Traceback" not in err
        record = read_record(tmp_path / "run")
        assert record.status == "finished"
        assert sum("TensorBoard" in notice.message for notice in record.notices) == 1
        assert isinstance(record.notices[0], Notice)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("limit", [9_000, 60_000])
    def test_no_room_for_a_tokenizer_or_the_weights_leaves_nothing(self, recipe, finished, tmp_path, limit):
        finished(recipe(training={"steps": 2}), tmp_path / "run")
        before = functools.partial(processes.small_files, limit)
        code, _, err = processes.run("export", tmp_path / "run", "--out", tmp_path / "exported", before=before)
        assert code == 2
        assert "could not be written: the disk is full" in err
        assert "Traceback" not in err
        assert not [name for name in os.listdir(tmp_path) if "exported" in name]

    @pytest.mark.slow
    def test_no_room_for_a_checkpoint_is_a_sentence_and_the_record_tells(self, recipe, tmp_path):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe().model_dump(mode="json")))
        before = functools.partial(processes.small_files, 15_000)
        code, _, err = processes.run("train", file, "--out", tmp_path / "run", before=before)
        assert code == 2
        assert "Traceback" not in err
        assert "could not be saved" in err
        assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] in ("failed", "stopped")
        assert not list((tmp_path / "run").glob("checkpoints/*"))
