"""The commands that run these tests run what they say."""

import re
from pathlib import Path

import pytest

from conftest import wants_slow

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("expression", "slow"), [("not slow", False), ("slow", True), ("slow or not slow", True), ("", True)]
)
def test_cells_are_left_out_only_where_slow_tests_are(expression, slow):
    assert wants_slow(expression) is slow


def test_make_test_all_runs_slow_tests_and_make_test_does_not():
    recipes = dict(re.findall(r"^(test[a-z-]*): .*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (options,) = re.findall(r'-m "(.*?)"', recipes["test-all"])
    assert wants_slow(options)
    assert "-m" not in recipes["test"].split("pytest")[-1]
    assert not wants_slow(re.search(r"addopts = .*-m '(.*?)'", (ROOT / "pyproject.toml").read_text())[1])
