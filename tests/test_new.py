"""`headwater new mechanism` writes a package that keeps the contract."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headwater
from headwater.mechanisms.capabilities import CAPABILITIES
from headwater.util.errors import HeadwaterError
from headwater.verification.ways import WAYS
from headwater_lab.cli.new import new_mechanism
from references import run_check

# Models are kept by the name of their mechanism, so each form has a name of its own.
SMALLEST, WHOLE = "value_mixing", "whole_mixing"


@pytest.fixture(params=[SMALLEST, WHOLE])
def package(request, tmp_path, monkeypatch):
    """A new package; `WHOLE`: with the comments taken off the capabilities."""
    folder = tmp_path / request.param
    new_mechanism(request.param, out=folder)
    if request.param == WHOLE:
        file = folder / f"{WHOLE}.py"
        smallest, heading, capabilities = file.read_text().partition("has all.\n")
        file.write_text(smallest + heading + capabilities.replace("\n    # ", "\n    "))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(folder / "tests")
    yield folder
    for name in (request.param, f"test_{request.param}"):
        sys.modules.pop(name, None)


def test_its_files_fit_together(package):
    assert sorted(path.relative_to(package).as_posix() for path in package.rglob("*.*")) == [
        "README.md",
        "pyproject.toml",
        f"tests/test_{package.name}.py",
        f"{package.name}.py",
    ]
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["headwater.mechanisms"][package.name].partition(":")
    assert getattr(importlib.import_module(module), name).registered_name() == f"{module}:{name}"
    for path in package.rglob("*.*"):
        assert path.suffix == ".pyc" or "@" not in path.read_text().replace("@class", "")


def test_the_smallest_mechanism_has_25_lines_and_no_capabilities(tmp_path):
    new_mechanism("value_mixing", out=tmp_path / "new")
    text = (tmp_path / "new" / "value_mixing.py").read_text()
    body = text[text.index("\nclass ") : text.index("    # Capabilities")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25


def class_of(name, prefix=""):
    module = importlib.import_module(prefix + name)
    return getattr(module, (prefix + name).title().replace("_", ""))


def test_its_capabilities_are_found(package):
    kind = class_of(package.name)
    found = {capability.__name__ for capability in CAPABILITIES if isinstance(kind, capability)}
    everything = {
        "AddsToTrainedModel",
        "SplitsOverProcesses",
        "DescribesAxes",
        "GrowsOptions",
        "ShowsScalars",
    }
    assert found == (everything if package.name == WHOLE else set())


@pytest.mark.slow
def test_it_keeps_the_contract(package):
    """A few of its own tests, in this process; the slow test below runs all."""
    suite = class_of(package.name, "test_")()
    case = suite.cases()[1].values[0]
    for check in (
        suite.test_forward_equals_naive,
        suite.test_packed_documents_equal_separate,
        suite.test_parameters_are_counted,
        suite.test_starts_are_drawn_by_name,
        suite.test_every_parameter_gets_a_gradient,
        suite.test_branching_rows,
        suite.test_saved_is_what_autograd_keeps,
        suite.test_identity_changes_nothing,
        suite.test_heads_and_tokens_are_computed_alone,
    ):
        run_check(check, case)
    for way in WAYS:
        run_check(suite.test_cached_equals_uncached, case, way=way)


@pytest.mark.slow
def test_all_of_its_tests_pass(package):
    environment = os.environ | {"PYTHONPATH": str(Path(headwater.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["kv_shift", "Value", "1st", "class", "a-b", "torch", "é", ""])
def test_names_that_would_not_work_are_refused(name, tmp_path):
    with pytest.raises(HeadwaterError):
        new_mechanism(name, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_says_where(run, tmp_path):
    code, out, _ = run("new", "mechanism", "mine", "--out", tmp_path / "mine")
    assert code == 0
    assert "written to" in out
    code, _, err = run("new", "mechanism", "mine", "--out", tmp_path / "mine")
    assert code == 2
    assert "already exists" in err
