"""How many CPU threads a run uses beside other processes."""

import math
import os
import time

import pytest
import torch
from trials import train_until

from headwater_lab.training import journal, loop
from headwater_lab.training.loop import TrainingRun, train
from headwater_lab.training.processes import connect_processes
from headwater_lab.training.records import read_record
from headwater_lab.util import machine

CHOSEN = {"training": {"threads": None}}


@pytest.fixture
def two_threads(monkeypatch):
    """PyTorch has two threads, and the user has not set their number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(loop, "cores", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def set_free_cores(monkeypatch, count):
    monkeypatch.setattr(machine, "free_cores", lambda: count)


def messages(record):
    return [notice.message for notice in record.notices]


def test_a_run_leaves_busy_cores_to_others(recipe, tmp_path, two_threads, monkeypatch):
    set_free_cores(monkeypatch, 1)
    record = train(recipe(**CHOSEN), tmp_path / "run")
    assert record.environment.threads == 1
    assert "Training uses 1 of 2 CPU threads, because other processes keep the other cores busy" in messages(record)[0]
    assert torch.get_num_threads() == 2  # of the caller


def test_an_idle_machine_a_number_in_the_recipe_and_one_in_the_environment(recipe, tmp_path, two_threads, monkeypatch):
    set_free_cores(monkeypatch, 2)
    record = train(recipe(**CHOSEN), tmp_path / "idle")
    assert record.environment.threads == 2
    assert not any("Training uses" in message for message in messages(record))
    set_free_cores(monkeypatch, 1)
    assert train(recipe(training={"threads": 2}), tmp_path / "recipe").environment.threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert train(recipe(**CHOSEN), tmp_path / "environment").environment.threads == 2


def test_a_resumed_run_computes_with_as_many_as_before(recipe, tmp_path, two_threads, monkeypatch):
    set_free_cores(monkeypatch, 1)
    train_until(3, recipe(**CHOSEN), tmp_path / "run")
    set_free_cores(monkeypatch, 2)
    assert train(recipe(**CHOSEN), tmp_path / "run", resume=True).environment.threads == 1
    assert read_record(tmp_path / "run").status == "finished"


def test_a_run_that_others_slow_down_is_warned_once(recipe, tmp_path, monkeypatch):
    waited = 0.0

    def wait_from_step_3(run, *arguments):
        nonlocal waited
        if run.progress.step >= 3:
            time.sleep(0.6)
            waited += 0.4
        return run_backward(run, *arguments)

    run_backward = TrainingRun.run_backward
    monkeypatch.setattr(TrainingRun, "run_backward", wait_from_step_3)
    monkeypatch.setattr(journal, "read_cpu_wait", lambda: waited)
    record = train(recipe(training={"steps": 5}, reporting={"log_every": 1}), tmp_path / "run")
    (text,) = (text for text in messages(record) if "times slower, because other processes use its CPU cores" in text)
    assert text.endswith("It has 1 thread: stop the other processes.")  # it cannot have fewer
    monkeypatch.setattr(journal, "read_cpu_wait", lambda: 0.0)  # as slow, but nothing waits for a core
    assert not messages(train(recipe(training={"steps": 5}, reporting={"log_every": 1}), tmp_path / "alone"))


@pytest.mark.parametrize(("pause", "warnings"), [(600.0, 1), (0.0, 2)])
def test_a_run_whose_speed_varies_is_not_warned_at_each_change(recipe, tmp_path, monkeypatch, pause, warnings):
    rates, moments, warn = iter([9.0, 9.0, 1.0, 9.0, 1.0]), iter(range(99)), journal.Journal.warn_of_busy_cores
    monkeypatch.setattr(journal.Journal, "warn_of_busy_cores", lambda self, rate, step: warn(self, next(rates), step))
    monkeypatch.setattr(journal, "read_cpu_wait", lambda: 100.0 * next(moments))
    monkeypatch.setattr(journal, "LONG_ENOUGH", 0.0)
    monkeypatch.setattr(journal, "START_SECONDS", math.inf)
    monkeypatch.setattr(journal, "PAUSE", pause)
    record = train(recipe(training={"steps": 5}, reporting={"log_every": 1}), tmp_path / "run")
    assert sum("9 times slower" in text for text in messages(record)) == warnings


def test_a_run_that_is_slow_from_its_start_is_warned_once(recipe, tmp_path, monkeypatch):
    moments = iter(range(99))
    monkeypatch.setattr(journal, "START_SECONDS", 0.0)
    monkeypatch.setattr(journal, "read_cpu_wait", lambda: 100.0 * next(moments))
    record = train(recipe(training={"steps": 4}, reporting={"log_every": 1}), tmp_path / "run")
    assert sum("slow from its start" in text for text in messages(record)) == 1
    monkeypatch.setattr(journal, "START_SECONDS", 9.0)  # too short to judge
    assert not messages(train(recipe(training={"steps": 4}, reporting={"log_every": 1}), tmp_path / "short"))


def test_processes_of_a_run_divide_their_cores(recipe, tmp_path, two_threads, monkeypatch):
    """As with a torchrun for each node, and two nodes on one machine."""
    set_free_cores(monkeypatch, 2)
    monkeypatch.setattr(loop, "gather_values", lambda fabric, name: [name, name, ("elsewhere", name[1])])
    record = train(recipe(**CHOSEN), tmp_path / "run")
    assert record.environment.threads == 1
    assert not any("Training uses" in message for message in messages(record))


def test_idle_cores_are_counted():
    assert 1 <= machine.free_cores(0.05) <= machine.cores()
    assert machine.read_cpu_wait() >= 0


def test_fabrics_number_of_threads_does_not_pass_for_the_users(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    with connect_processes(recipe(training={"strategy": "ddp"}), tmp_path):
        assert torch.distributed.is_initialized()
        assert "OMP_NUM_THREADS" not in os.environ
