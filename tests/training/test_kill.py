"""Runs that are killed again and again end as one that was left alone, to the last bit."""

import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
import yaml
from safetensors.torch import load_file

from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.records import read_record

STEPS = 60
# Dropout, accumulation, checkpoints at places no epoch ends, and a shuffled order that is gone through several times.
CHANGES = {
    "training": {"steps": STEPS, "gradient_accumulation_steps": 2, "batch_size": 4},
    "reporting": {"log_every": 1, "save_every": 3, "evaluate_every": 7, "keep_checkpoints": 2},
}


@pytest.fixture
def command(recipe, tmp_path):
    """The command of a run in so many processes."""
    data = {"metric": "loss"}

    def make(out, **training):
        file = tmp_path / "recipe.yaml"
        made = recipe(data=data, training=CHANGES["training"] | training, reporting=CHANGES["reporting"])
        file.write_text(yaml.safe_dump(made.model_dump(mode="json")))
        return [sys.executable, "-m", "headwater_lab", "train", str(file), "--out", str(out), "--resume"]

    return make


def steps_done(run):
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b'"curve"') if log.exists() else 0


def start(command):
    """In a session of its own, so that all its processes can be killed together."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def kill_at(process, run, step, who):
    """SIGKILL once `step` points are logged; whether it came in time."""
    deadline = time.monotonic() + 120
    while steps_done(run) < step:
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read().decode()[-3000:]
            return False
        assert time.monotonic() < deadline
        time.sleep(0.003)
    time.sleep(random.random() * 0.02)  # anywhere in a step, or in writing a checkpoint
    if who == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif who == "first":
        process.kill()
    else:
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
    process.wait(60)
    assert process.returncode != 0
    return True


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


def same(a, b):
    x, y = list_checkpoints(a)[-1], list_checkpoints(b)[-1]
    for file in x.glob("*.safetensors"):
        one, other = load_file(file), load_file(y / file.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = read_record(a), read_record(b)
    assert one.curve == other.curve
    assert one.held_out == other.held_out
    assert (one.data_order, one.tokens) == (other.data_order, other.tokens)


def killed_often(command, tmp_path, kills, who="all", **training):
    to_the_end(command(tmp_path / "whole", **training))
    times = random.Random(f"{kills} {who} {training}")
    run, done = tmp_path / "cut", 0
    while done < kills:
        before = steps_done(run)
        # Somewhere in what is left, not too far, so that all kills find their place.
        step = before + times.randint(1, max(1, 2 * (STEPS - before) // (kills - done)))
        step = min(step, STEPS - (kills - done))
        if step <= before:
            break
        done += kill_at(start(command(run, **training)), run, step, who)
        if who != "all":
            wait_for_orphans(run)
    to_the_end(command(run, **training))
    same(tmp_path / "whole", run)
    return done


def to_the_end(command):
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


def wait_for_orphans(run):
    """Processes whose first is gone end by themselves."""
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", str(run)], capture_output=True).stdout:
        assert time.monotonic() < deadline, "a process outlived the others"
        time.sleep(0.2)


@pytest.mark.slow
def test_twenty_kills_in_one_process(command, tmp_path):
    assert killed_often(command, tmp_path, 20) >= 10


@pytest.mark.slow
def test_kills_of_a_branch(command, tmp_path):
    """From the copy of its trunk's checkpoint on; the other run is one of its own."""
    wsd = {"schedule": "wsd", "decay_fraction": 0.5}
    to_the_end(command(tmp_path / "trunk", steps=20, **wsd))
    trunk = ["--trunk", str(tmp_path / "trunk")]
    assert killed_often(lambda out: [*command(out, **wsd), *(trunk if out.name == "cut" else [])], tmp_path, 8) >= 4
    assert read_record(tmp_path / "cut").trunk.step == 10


@pytest.fixture
def of_images(tmp_path):
    """As `command`, on digits, with all that is random about images, and an average of the weights."""
    augmentation = dict(crop=[0.5, 1.0], rand_augment=[9.0, 0.5], erase=0.3, mixup=0.8, cutmix=1.0)
    augmentation = augmentation if find_spec("torchvision") else {}
    values = {
        "data": {"kind": "digits", "workers": 2, "held_out": 0.05, "augmentation": augmentation},
        "model": {
            "patch_size": 4,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "drop_path": 0.2,
        },
        "training": CHANGES["training"] | {"ema_decay": 0.95, "label_smoothing": 0.1, "threads": 1},
        "reporting": CHANGES["reporting"] | {"tensorboard": False},
    }

    def make(out, **training):
        file = tmp_path / "images.yaml"
        file.write_text(yaml.safe_dump(values | {"training": values["training"] | training}))
        return [sys.executable, "-m", "headwater_lab", "train", str(file), "--out", str(out), "--resume"]

    return make


@pytest.mark.slow
def test_twenty_kills_of_a_run_on_images(of_images, tmp_path):
    assert killed_often(of_images, tmp_path, 20) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kills_of_a_run_on_images_in_two_processes(of_images, tmp_path, strategy):
    assert killed_often(of_images, tmp_path, 3, strategy=strategy, devices=2) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("who", ["all", "first", "others"])
def test_kills_in_two_processes(command, tmp_path, strategy, who):
    assert killed_often(command, tmp_path, 3, who, strategy=strategy, devices=2) >= 2
