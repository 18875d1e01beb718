"""Checkpoints are written while training continues, and hold the step they are of."""

import errno
import threading
import time

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file
from trials import PowerCut, same_end

from headwater.util.errors import HeadwaterError
from headwater_lab.training import saving
from headwater_lab.training.checkpoints import list_checkpoints, read_optimizer_state, step_of
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record

PATIENCE = 60.0


@pytest.fixture
def held(monkeypatch):
    """Each checkpoint is written once `held(step)` returns: in the thread that writes it."""
    original = saving.write_files

    def hold(wait):
        def write(folder, *args, **options):
            wait(int(folder.name.split("-")[2]))
            return original(folder, *args, **options)

        monkeypatch.setattr(saving, "write_files", write)

    return hold


class Clock:
    """The step that training has reached, for the thread to wait for."""

    def __init__(self, raising=None):
        self.changed, self.step, self.raising = threading.Condition(), 0, raising or {}

    def __call__(self, step, point):
        if point is None:
            with self.changed:
                self.step = step
                self.changed.notify_all()
            if step in self.raising:
                raise self.raising[step]

    def wait_for(self, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.step >= step, PATIENCE), f"step {step} was not taken meanwhile"


def test_a_shard_is_put_together_in_memory_one_file_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FILE_BYTES", 100)
    tensors = {f"optimizer.{name}": torch.randn(size) for name, size in (("a", 20), ("b", 10), ("c", 3), ("d", 40))}
    fabric = Fabric(accelerator="cpu", devices=1)
    saving.write_shards(fabric, tmp_path / "step-000001", tensors, lambda folder: [], str)
    files = sorted((tmp_path / "step-000001").glob("shard-*"))
    assert [sorted(load_file(file)) for file in files] == [
        [f"optimizer.{x}" for x in names] for names in ("a", "bc", "d")
    ]
    restored = read_optimizer_state(tmp_path / "step-000001")
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


def test_a_checkpoint_written_during_later_steps_is_of_its_own(recipe, tmp_path, held):
    made = recipe(training={"steps": 7}, reporting={"save_every": 3, "log_every": 1, "keep_checkpoints": 9})
    train(made, tmp_path / "alone")
    clock, seen = Clock(), []

    def wait(step):
        clock.wait_for(min(step + 2, 7))
        seen.append((step, [step_of(path) for path in list_checkpoints(tmp_path / "meanwhile")]))

    held(wait)
    train(made, tmp_path / "meanwhile", on_event=clock)
    assert seen == [(3, []), (6, [3]), (7, [3, 6])], "one at a time, and none is there before it is written"
    for one, other in zip(list_checkpoints(tmp_path / "alone"), list_checkpoints(tmp_path / "meanwhile"), strict=True):
        for file in ("model.safetensors", "training.safetensors"):
            x, y = load_file(one / file), load_file(other / file)
            assert x.keys() == y.keys()
            assert all(torch.equal(x[name], y[name]) for name in x), (one.name, file)
        for file in ("training.json", "history.json"):
            assert keep(one / file) == keep(other / file)
    same_end(tmp_path / "alone", tmp_path / "meanwhile")


def keep(file):
    """A file's lines but for the clock's and the run's name."""
    varying = ("seconds", "waited", "run_id")
    return [line for line in file.read_text().splitlines() if not any(word in line for word in varying)]


def full(step):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_an_error_of_the_thread_ends_training_soon(recipe, tmp_path, held):
    held(full)
    clock = Clock()
    made = recipe(training={"steps": 40}, reporting={"save_every": 20})
    with pytest.raises(HeadwaterError, match=r"checkpoint of step 20 could not be saved .*disk is full.*--resume"):
        train(made, tmp_path / "run", on_event=clock)
    assert clock.step < 40
    assert read_record(tmp_path / "run").status == "failed"
    assert not [*(tmp_path / "run").glob("checkpoints/*")]


def test_an_error_of_the_last_save_is_not_lost(recipe, tmp_path, held):
    held(full)
    with pytest.raises(HeadwaterError, match="checkpoint of step 2 could not be saved"):
        train(recipe(training={"steps": 2}), tmp_path / "run")


def test_a_run_that_fails_completes_its_checkpoint_first(recipe, finished, tmp_path, held):
    clock = Clock({5: PowerCut()})

    def late(step):
        clock.wait_for(5)
        time.sleep(0.3)  # training is over long before

    held(late)
    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "cut", on_event=clock)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "cut")] == [4]
    held(lambda step: None)
    train(recipe(), tmp_path / "cut", resume=True)
    finished(recipe(), tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "cut")


def test_a_run_that_fails_tells_of_its_checkpoint_too(recipe, tmp_path, held):
    clock = Clock({5: PowerCut()})

    def late(step):
        clock.wait_for(5)
        full(step)

    held(late)
    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "cut", on_event=clock)
    assert "checkpoint of step 4 could not be saved" in read_record(tmp_path / "cut").notices[-1].message


def test_an_end_at_once_leaves_no_part_of_a_checkpoint(recipe, tmp_path, held):
    clock = Clock({5: KeyboardInterrupt()})

    def late(step):
        clock.wait_for(5)
        time.sleep(0.3)

    held(late)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path / "cut", on_event=clock)
    assert not list((tmp_path / "cut" / "checkpoints").glob("*"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


@pytest.mark.slow
def test_without_memory_for_a_copy_training_waits(recipe, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "available_memory", lambda: 1e5)
    there = {}
    train(
        recipe(),
        tmp_path / "run",
        on_event=lambda step, point: there.setdefault(step, len(list_checkpoints(tmp_path / "run"))),
    )
    assert (there[4], there[5]) == (0, 1)
    finished(recipe(), tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "run")
