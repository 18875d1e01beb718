"""`headwater doctor`: facts for a bug report, also where something is broken."""

import json
import re

import torch
import transformers

import headwater
from headwater import kernels
from headwater.util import extras
from headwater_lab.api.diagnosis import examine


def test_versions_devices_and_threads_are_those_of_this_process():
    report = examine()
    assert report["headwater"]["version"] == headwater.__version__
    assert report["packages"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert report["packages"]["transformers"] == transformers.__version__
    assert report["threads"]["in an operation"] == str(torch.get_num_threads())
    assert re.fullmatch(r"\d+ usable of \d+", report["devices"]["cores"])
    assert set(report["extras"]) == set(extras.MODULES)
    assert not any("failed" in section for section in report.values())


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "wandb", ("json", "no_such_module"))
    assert "missing: no-such-module (pip install 'headwater[wandb]')" in examine()["extras"]["wandb"]


def test_it_works_where_other_commands_do_not(run, monkeypatch):
    monkeypatch.setattr(kernels, "_disabled", None)
    monkeypatch.setenv("HEADWATER_KERNELS", "nonsense")
    code, out, _ = run("doctor")
    assert code == 0
    assert "failed: HeadwaterError: The environment variable HEADWATER_KERNELS is 'nonsense'" in out
    assert "in an operation: 1" in out


def test_as_json(run):
    code, out, _ = run("doctor", "--json")
    assert code == 0
    assert json.loads(out)["headwater"]["version"] == headwater.__version__


def test_no_secret_is_shown(run, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cr3t")
    _, out, _ = run("doctor")
    assert "s3cr3t" not in out
