"""Comparisons that are killed leave nothing behind, and the same command ends as if they had not been."""

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from saved import SHIFT, Here, tiny

import headwater_lab.util.workers
import processes
from headwater_lab.comparison import pool
from headwater_lab.comparison.pool import run_trials
from headwater_lab.comparison.trials import list_trials
from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.records import read_record
from headwater_lab.training.run_folder import METRICS, is_running

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc to see processes in")
MARK = "HEADWATER_TEST_MARK"
KILLERS = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]


class Comparison:
    """A command, how it is started, and what is known of its processes and files."""

    def __init__(self, folder, steps=600, every=5):
        self.recipe = tiny(
            {"arms": {"base": {}, "shift": SHIFT}, "seeds": [0]},
            training={"steps": steps, "warmup_steps": 20},
            reporting={"log_every": every, "save_every": 8 * every},
        )
        self.out, self.temporary, self.mark = folder / "out", folder / "temporary", secrets.token_hex(8)
        self.temporary.mkdir()
        (folder / "r.yaml").write_text(yaml.safe_dump(self.recipe.model_dump(mode="json")))
        self.command = ["compare", folder / "r.yaml", "--workers", 2, "--out", self.out]
        self.trials = list_trials(self.recipe, self.out)

    def start(self):
        """With workers that are processes of their own, as in a command."""
        environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)}
        return processes.Command(*self.command, env=environment, new_session=True)

    def points(self):
        logs = [trial.folder / METRICS for trial in self.trials]
        return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())

    def kill(self, number, more=None):
        """Kill the parent alone, once its workers exist or, with `more`, have logged so many points more.

        Whether it came in time.
        """
        process, before = self.start(), self.points()
        while not processes.workers_of(process.pid) if more is None else self.points() < before + more:
            if process.poll() is not None:
                return False
            time.sleep(0.01)
        time.sleep(random.random() * 0.05)  # anywhere in a step, or in writing a checkpoint
        process.send_signal(number)
        _, stderr = process.communicate(timeout=90)  # which also waits for all that have its stderr
        assert "Traceback" not in stderr
        assert process.returncode == (130 if number == signal.SIGTERM else -number)
        self.nothing_left()
        return True

    def nothing_left(self):
        deadline = time.monotonic() + 30
        # A process that is ending has no environment to be known by, and for a moment still holds its files.
        while (left := self.processes()) or any(is_running(trial.folder) for trial in self.trials):
            assert time.monotonic() < deadline, f"processes live on: {[(p / 'cmdline').read_text() for p in left]}"
            time.sleep(0.05)
        assert list(self.temporary.iterdir()) == []

    def processes(self):
        return [place for place in Path("/proc").glob("[0-9]*") if self.is_ours(place)]

    def is_ours(self, place):
        try:
            return f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes()
        except OSError:
            return False

    def ends_as_one_left_alone(self, folder):
        with pytest.MonkeyPatch.context() as patch:
            here = Here()  # what the command would do, without workers of its own
            patch.setattr(pool, "_run_pool", lambda jobs, *_: {job.folder: here.run(job) for job in jobs})
            assert all(outcome.error is None for outcome in run_trials(self.trials))
        for trial, whole in zip(self.trials, list_trials(self.recipe, folder), strict=True):
            Here().run(whole.jobs[0])
            one, other = read_record(trial.folder), read_record(whole.folder)
            assert (one.status, one.curve, one.held_out) == ("finished", other.curve, other.held_out)
            assert (one.data_order, one.tokens, one.identity) == (other.data_order, other.tokens, other.identity)
            x, y = list_checkpoints(trial.folder)[-1], list_checkpoints(whole.folder)[-1]
            for file in x.glob("*.safetensors"):
                a, b = load_file(file), load_file(y / file.name)
                assert a.keys() == b.keys()
                assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "number",
    [KILLERS[0], *(pytest.param(number, marks=pytest.mark.slow) for number in KILLERS[1:])],
    ids=lambda number: number.name,
)
@pytest.mark.slow
def test_a_killed_comparison_leaves_nothing_and_goes_on(tmp_path, number):
    comparison = Comparison(tmp_path, steps=80, every=2)
    assert comparison.kill(number, more=random.Random(number.name).randint(5, 20))
    comparison.ends_as_one_left_alone(tmp_path / "whole")


@pytest.mark.slow
def test_killed_while_its_workers_start(tmp_path):
    comparison = Comparison(tmp_path)
    assert comparison.kill(signal.SIGKILL)


def test_a_worker_whose_parent_ends_before_it_says_anything_ends_without_a_word():
    script = Path(headwater_lab.util.workers.__file__)
    ended = subprocess.run([sys.executable, "-P", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    comparison, draw, done = Comparison(tmp_path), random.Random(0), 0
    for _ in range(20):
        # About 480 points in all.
        done += comparison.kill(draw.choice(KILLERS), draw.choice([None, draw.randint(1, 40)]))
    assert done >= 10
    comparison.ends_as_one_left_alone(tmp_path / "whole")
