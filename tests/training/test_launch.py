"""Processes that are to start together: one that dies on the way, and environments that no launcher has made."""

import os
import re
import signal
import time

import pytest
import torch
import yaml

import processes
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.training_section import Training
from headwater_lab.training.loop import train
from headwater_lab.training.processes import count_processes

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "LOCAL_RANK": "0",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}


def test_torchruns_numbers_take_precedence(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert count_processes(Training(devices=2)) == (2, 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert count_processes(Training()) == (2, 2)


SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_JOB_NAME": "x",
}  # fmt: skip


def test_a_first_node_names_what_it_waits_for(recipe, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        yaml.safe_dump(recipe(training={"nodes": 2, "device": "cpu", "batch_size": 4}).model_dump(mode="json"))
    )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    process = processes.Command("train", file, "--out", tmp_path / "run", env=os.environ | SLURM | address)
    deadline = time.monotonic() + 120
    while "minutes" not in process.output()[1]:
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    waiting = "node 0: waiting for all 2 processes of this run at 127.0.0.1:29519, for at most 30 minutes"
    assert text.splitlines() == [waiting]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 4, "device": "cpu"}, "Slurm has SLURM_NTASKS=2, .*; use srun --nodes=1 --ntasks-per-node=4, or"),
        ({"nodes": 2, "device": "mps"}, "training.devices=1 needs 1 mps device, and PyTorch finds 0"),
    ],
)
def test_processes_that_cannot_be_are_one_sentence(recipe, tmp_path, monkeypatch, settings, message):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(HeadwaterError, match=message) as error:
        train(recipe(training={"batch_size": 4} | settings), tmp_path / "run")
    assert not re.search("Fabric|Lightning|Accelerator", str(error.value))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_leaves_the_environment_as_it_was(recipe, tmp_path, monkeypatch, strategy):
    """With LOCAL_RANK, the next run of two processes would wait for a second one that nobody starts."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    train(recipe(training={"strategy": strategy, "device": "cpu"}), tmp_path / "run")
    assert dict(os.environ) == before


@pytest.fixture
def command(recipe, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(recipe(training={"devices": 2, "device": "cpu"}).model_dump(mode="json")))
    return "train", file, "--out", tmp_path / "run"


def start(command, folder, second):
    """The command, of which the second process runs a line of Python before anything else."""
    (folder / "early").mkdir()
    (folder / "early" / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('LOCAL_RANK') == '1':\n {second}\n"
    )
    places = os.pathsep.join(filter(None, (str(folder / "early"), os.environ.get("PYTHONPATH"))))
    return processes.Command(*command, env=os.environ | {"PYTHONPATH": places})


def test_a_second_process_that_dies_as_it_starts_ends_the_first(command, tmp_path):
    process = start(command, tmp_path, "os._exit(3)")
    _, text = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "Traceback" not in text
    assert "terminated with code 3" in text


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_while_it_waits_for_others_a_process_can_be_stopped(command, tmp_path, number):
    process = start(command, tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
    deadline = time.monotonic() + 240
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(pid.read_text()), signal.SIGSTOP)  # it never comes
    time.sleep(1)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode == -number
    os.kill(int(pid.read_text()), signal.SIGKILL)
    _, text = process.communicate(timeout=240)  # until nobody has its stderr any more
    assert "Traceback" not in text
