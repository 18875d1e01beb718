"""Names: few that say nothing of what they name, functions that are a verb and a noun, files that can be told apart."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if "templates" not in path.parts]

VAGUE = frozenset(
    re.findall(
        r"\w+",
        """
        one found given made kept own other others there here said asked held known place places what how who whole part
        parts more rest both each every first last now before after at of by theirs ours mine shown named left wanted
        used read taken passed seen told counted
        """,
    )
)
MOST_VAGUE = 0.01
MOST_SINGLE_WORDS = 0.32
MOST_REPEATED_FILE_NAMES = 8


def list_bindings(tree: ast.AST) -> Iterator[str]:
    """Variables, arguments, and attributes that are set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def list_functions(tree: ast.AST) -> Iterator[str]:
    """Names of functions and methods, without those that Python gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            yield node.name


def share_of_vague(trees: list[ast.AST]) -> float:
    names = [name for tree in trees for name in list_bindings(tree)]
    return sum(name in VAGUE for name in names) / len(names)


def share_of_single_words(trees: list[ast.AST]) -> float:
    names = [name for tree in trees for name in list_functions(tree)]
    return sum("_" not in name.strip("_") for name in names) / len(names)


TREES: list[ast.AST] = [ast.parse(path.read_text()) for path in FILES]


def test_names_say_what_they_name():
    assert share_of_vague(TREES) <= MOST_VAGUE


def test_functions_are_named_by_a_verb_and_a_noun():
    assert share_of_single_words(TREES) <= MOST_SINGLE_WORDS


def test_files_can_be_told_apart_by_name():
    names = Counter(path.stem for path in FILES if path.stem != "__init__")
    assert len(repeated := [name for name, count in names.items() if count > 1]) <= MOST_REPEATED_FILE_NAMES, repeated


def test_shares_are_counted():
    tree = ast.parse("def load(path, one):\n    found = one\n    self.kept, row = found, 1\ndef read_rows(x): pass")
    assert share_of_vague([tree]) == 3 / 6
    assert share_of_single_words([tree]) == 1 / 2
