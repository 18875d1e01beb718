"""`headwater new mechanism` writes a package that keeps the contract."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headwater
from headwater.util.errors import HeadwaterError
from headwater_lab.cli.new import write_mechanism


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = write_mechanism("value_mixing", tmp_path / "new")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(folder / "tests")
    yield folder
    for name in ("value_mixing", "test_value_mixing"):
        sys.modules.pop(name, None)


def test_its_files_fit_together(package):
    assert sorted(path.relative_to(package).as_posix() for path in package.rglob("*.*")) == [
        "README.md",
        "pyproject.toml",
        "tests/test_value_mixing.py",
        "value_mixing.py",
    ]
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["headwater.mechanisms"]["value_mixing"].partition(":")
    assert getattr(importlib.import_module(module), name).registered_name() == "value_mixing:ValueMixing"
    for path in package.rglob("*.*"):
        assert path.suffix == ".pyc" or "@" not in path.read_text().replace("@strict", "").replace("@data", "").replace(
            "@class", ""
        )


@pytest.mark.slow
def test_it_keeps_the_contract(package):
    """A few of its own tests, in this process; the slow test below runs all."""
    suite = importlib.import_module("test_value_mixing").TestValueMixing()
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
        check(case)
    suite.test_cached_equals_uncached(case, [5, 1, 6, 5])


@pytest.mark.slow
def test_all_of_its_tests_pass(package):
    environment = os.environ | {"PYTHONPATH": str(Path(headwater.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["kv_shift", "Value", "1st", "class", "a-b", "torch", "é", ""])
def test_names_that_would_not_work_are_refused(name, tmp_path):
    with pytest.raises(HeadwaterError):
        write_mechanism(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_says_where(run, tmp_path):
    code, out, _ = run("new", "mechanism", "mine", "--out", tmp_path / "mine")
    assert code == 0
    assert "written to" in out
    code, _, err = run("new", "mechanism", "mine", "--out", tmp_path / "mine")
    assert code == 2
    assert "already exists" in err
