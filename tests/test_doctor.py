"""`headwater doctor`: facts for a bug report, also where something is broken."""

import re
import shlex
from importlib import metadata
from pathlib import Path

import torch
import transformers

import headwater
from headwater import kernels
from headwater.util import extras, versions
from headwater.util.versions import describe_untested
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
    missing = examine()["extras"]["wandb"]
    assert f"missing: no-such-module (`{extras.install_command('wandb')}`)" in missing


def test_a_clone_and_an_installed_package_have_different_commands(monkeypatch, tmp_path):
    clone = Path(__file__).parents[1]
    monkeypatch.chdir(clone)
    assert extras.install_command("compare") == "pip install -e '.[compare]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("compare") == f"pip install -e {shlex.quote(f'{clone}[compare]')}"
    monkeypatch.setattr(extras, "package_folder", lambda module: tmp_path / "site-packages" / "headwater")
    requirements = [
        "torch>=2", "datasets<6,>=4.0; extra == 'train'", "no-such-package[hf]>=1; extra == 'train'",
        "headwater[train]; extra == 'compare'", "no-such-fonts==0.5; extra == 'compare'",
    ]  # fmt: skip
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    assert extras.install_command("compare") == "pip install 'no-such-package[hf]' no-such-fonts==0.5"

    def find_no_metadata(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", find_no_metadata)
    monkeypatch.setitem(extras.MODULES, "wandb", ("json", "no_such_module"))
    assert extras.install_command("wandb") == "pip install json no-such-module"


def test_pages_install_extras_with_the_commands_that_errors_name(monkeypatch, tmp_path):
    clone = Path(__file__).parents[1]
    monkeypatch.chdir(clone)
    pages = " ".join(page.read_text() for page in (clone / "README.md", *(clone / "docs").rglob("*.md")))
    commands = re.findall(r"(pip install [^`\n]*'\.\[(\w+)\]')", pages)
    assert {extra for _, extra in commands} >= {"compare", "evaluate", "serve", "titan", "vllm"}
    assert all(command == extras.install_command(extra) for command, extra in commands)
    monkeypatch.setattr(extras, "package_folder", lambda module: tmp_path / "site-packages" / "headwater")
    monkeypatch.setattr(extras, "_is_installed", lambda package: False)
    assert all(f"else `{extras.install_command(extra)}`" in pages for extra in ("serve", "vllm"))


def test_versions_newer_than_the_tested_ones_are_named_once(run, monkeypatch):
    assert describe_untested() is None
    monkeypatch.setitem(versions.TESTED, "torch", "2.1")
    line = f"newer than what headwater was tested with: torch {metadata.version('torch')} (tested up to 2.1)"
    assert examine()["packages"]["untested"] == line
    assert run("list", "presets")[2].splitlines() == [line]
    monkeypatch.setenv("RANK", "1")
    assert run("list", "presets")[2] == ""


def test_it_works_where_other_commands_do_not(run, monkeypatch):
    monkeypatch.setattr(kernels, "_disabled", None)
    monkeypatch.setenv("HEADWATER_KERNELS", "nonsense")
    code, out, _ = run("doctor")
    assert code == 0
    assert "failed: HeadwaterError: The environment variable HEADWATER_KERNELS is 'nonsense'" in out
    assert "in an operation: 1" in out


def test_no_secret_is_shown(run, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cr3t")
    _, out, _ = run("doctor")
    assert "s3cr3t" not in out
