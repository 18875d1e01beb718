"""The list of deliberate mistakes fits the code: each can be made, in one place, and its tests are there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "mutations"


def module(name):
    spec = importlib.util.spec_from_file_location(f"mutations_{name}", FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


MISTAKES = module("mistakes").MISTAKES
PACKAGE = ROOT / "src" / "headwater"
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py")
    if not path.is_relative_to(PACKAGE / "testing")
}
# Its tests are the contract's, in the package.
INHERITED = (PACKAGE / "testing" / "contract.py").read_text(encoding="utf-8")


def test_there_are_enough_and_each_has_a_name():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 60


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_can_be_made_and_its_tests_are_there(mistake):
    found = [path for path, text in SOURCES.items() for _ in range(text.count(mistake.old))]
    assert len(found) == 1, f"'old' stands {len(found)} times in the package: {mistake.old!r}"
    changed = SOURCES[found[0]].replace(mistake.old, mistake.new)
    assert changed != SOURCES[found[0]]
    compile(changed, str(found[0]), "exec")
    assert mistake.tests
    for test in mistake.tests:
        file, *names = test.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        if names[0:1] == ["TestEveryMechanism"]:
            text += INHERITED
        for depth, name in enumerate(names):  # a method is named with its class
            assert re.search(rf"^{'    ' * depth}(def|class) {name}\b", text, re.MULTILINE), test
