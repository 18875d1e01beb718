"""Processes that are to start together: one that dies on the way, and environments that no launcher has made."""

import os
import signal
import time

import pytest
import yaml

import processes
from headwater.errors import HeadwaterError
from headwater.recipe import Training
from headwater.training.parallel import LAUNCHED, placed

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "LOCAL_RANK": "0",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.fixture
def environment(monkeypatch):
    def put(values):
        for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "MASTER_PORT", *LAUNCHED):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_what_launchers_say_is_believed(environment):
    environment(TORCHRUN)
    assert placed(Training()) == (2, 2)
    environment({"LOCAL_RANK": "1", "MASTER_PORT": "12345"})
    assert placed(Training(devices=2)) == (2, 1)
    environment({"LOCAL_RANK": "0", "RANK": "of nothing here"})
    assert placed(Training()) == (1, 1)


@pytest.mark.parametrize(
    ("devices", "values", "message"),
    [(1, TORCHRUN | {name: value}, name) for name in LAUNCHED for value in ("", "x", "-1", "1.0", "٣")]
    + [(1, {key: value for key, value in TORCHRUN.items() if key != name}, name) for name in LAUNCHED]
    + [
        (1, {"TORCHELASTIC_RUN_ID": "x"}, "missing"),
        (1, TORCHRUN | {"WORLD_SIZE": "3"}, "WORLD_SIZE=3"),
        (1, TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (1, TORCHRUN | {"RANK": "4"}, "RANK=4"),
        (1, TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        (1, {"LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        (1, {"LOCAL_RANK": "zero"}, "'zero'"),
        (2, {"LOCAL_RANK": "0"}, "MASTER_PORT"),
    ],
)
def test_odd_environments_are_one_sentence(environment, devices, values, message):
    environment(values)
    with pytest.raises(HeadwaterError, match=message):
        placed(Training(devices=devices))


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


@pytest.mark.parametrize("code", [0, 3])
def test_a_second_process_that_dies_as_it_starts_is_one_sentence(command, tmp_path, code):
    process = start(command, tmp_path, f"os._exit({code})")
    _, said = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "Traceback" not in said
    assert f"Process 1 of this run has ended (exit code {code})" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_while_it_waits_for_others_a_process_can_be_stopped(command, tmp_path, number):
    """And the others go with it."""
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
    os.kill(int(pid.read_text()), signal.SIGCONT)
    _, said = process.communicate(timeout=240)  # until nobody has its stderr any more
    assert "Traceback" not in said
