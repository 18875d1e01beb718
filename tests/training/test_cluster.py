"""The batch script of docs/cluster.md, with stand-ins for Slurm's commands and two processes on CPUs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from headwater_lab.training.records import read_record

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""
SRUN = """#!/bin/bash
test "$1 $2" = "--cpus-per-task 2" || exit 9
"${@:3}" &
trap 'kill -TERM $!' TERM
wait $!
wait $!
"""


@pytest.mark.slow
def test_a_stopped_job_is_requeued_and_finishes(recipe, tmp_path):
    (script,) = re.findall(r"```bash\n(#!.*?)```", PAGE.read_text(), re.DOTALL)
    script = script.replace("--nproc-per-node 8", "--nproc-per-node 2").replace("29500", "29537")
    (tmp_path / "job.sh").write_text(script)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = recipe(training={"steps": 3000, "device": "cpu", "batch_size": 4}, reporting={"save_every": 1000})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    slurm = {"SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])

    def start():
        with (tmp_path / "log").open("ab") as log:
            environment = os.environ | slurm | {"PATH": path, "TMPDIR": str(tmp_path)}
            return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=log, stderr=log)

    job, deadline = start(), time.monotonic() + 120
    while not re.search(r"step [1-9]", (tmp_path / "log").read_text()):
        assert job.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    (stopped,) = re.findall(r"Stopped after step (\d+), which is saved", (tmp_path / "log").read_text())
    assert start().wait(timeout=300) == 0
    assert f"step {stopped}/3000" in (tmp_path / "log").read_text()
    assert read_record(tmp_path / "runs" / "mine").status == "finished"
