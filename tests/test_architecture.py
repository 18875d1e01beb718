"""Data flows one way: a module imports from its own row or a row above it, never from one below."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater.plugins.registry import REGISTRY

ROOT = Path(headwater.__file__).parent

# Modules that share a row do not import each other.
ORDER = (
    ("layout",),
    ("drawing", "errors", "plan", "precision", "process", "seeding", "shipped", "terminal", "workers"),
    ("deadline", "enlarging", "extras", "files", "kernels", "weights"),
    ("output_folder", "outputs", "outside", "settings", "written"),
    ("registry", "hardware", "hub"),
    ("planning", "remote_code"),
    ("config",),
    ("vision_config",),
    ("presets",),
    ("mechanisms",),
    ("nn",),
    ("models",),
    ("auto_classes",),
    ("doctor",),
    ("reading",),
    ("diagnostics", "growth", "retrofit", "cost"),
    ("paging", "price"),
    ("records",),
    ("data",),
    ("recipe",),
    ("training",),
    ("serving",),
    ("bench",),
    ("compare", "evaluate", "export", "generation", "inspect", "prediction", "priced", "testing", "verify"),
    ("titan_model",),
    ("titan",),
    ("report",),
    ("papers",),
    ("api",),
    ("cli",),
    ("__main__",),
)
RANK = {module: rank for rank, row in enumerate(ORDER) for module in row}

# The only places that know mechanisms by name: the table of them, and they themselves; presets, which are configs of
# named mechanisms; what is done to parameter tokens alone, or read from the papers' own checkpoints; and the equations
# that tests hold them against.
KNOW_MECHANISMS = (
    "registry.py",
    "mechanisms/",
    "presets.py",
    "growth/pairs.py",
    "conversion/parameter_tokens.py",
    "conversion/foreign.py",
    "testing/naive.py",
)

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
OWN_FILES = [file for file in FILES if file != Path("__init__.py")]


def test_kernels_stand_together():
    """Autograd functions and PyTorch's private hooks have one home, with one guard."""
    for file in FILES:
        if file.parts[0] != "kernels":
            found = re.findall(r"autograd\.Function|torch\._C|forward_ad", (ROOT / file).read_text())
            assert not found, f"{file}: move {found} to kernels/, behind kernels.applies"


def test_one_place_prints():
    """Rich reads markup in whatever it is given; what terminal.py has in its place does not."""
    for file in FILES:
        if file != Path("terminal.py"):
            found = re.findall(
                r"rich\.(?:table|console|markup|panel)|from rich import .*print", (ROOT / file).read_text()
            )
            assert not found, f"{file}: take Table and Terminal of headwater.util.terminal for {found}"


def room(file: Path) -> str:
    """The first part of a module's name below the package: nn/block.py is in nn."""
    return file.parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def running(path: Path) -> list[ast.AST]:
    """Everything in a file, imports for type checkers included, but docstrings."""
    pending: list[ast.AST] = [parsed(path)]
    found = []
    while pending:
        node = pending.pop()
        found.append(node)
        for child in ast.iter_child_nodes(node):
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not docstring:
                pending.append(child)
    return found


def nodes(file: Path) -> list[ast.AST]:
    return running(ROOT / file)


def imports(file: Path) -> Iterator[str]:
    """Dotted names, below the package, of what a file imports from it; "" for the package itself."""
    package = file.parent.parts
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["headwater", *package[: len(package) - node.level + 1]] if node.level else []
            module = above + (node.module.split(".") if node.module else [])
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        for first, *rest in names:
            if first == "headwater" and rest != ["__version__"]:
                yield ".".join(rest) if rest and rest[0] in RANK else ""


def test_every_module_has_its_row():
    assert {room(file) for file in OWN_FILES} <= RANK.keys()


def test_the_map_in_the_documentation_has_every_module_in_this_order():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    rows = [line[:28].replace("/", "").split() for line in page.split("```")[1].splitlines() if line]
    drawn = [module for row in rows for module in row]
    assert sorted(drawn) == sorted(RANK.keys() - {"__main__"})
    ranks = [RANK[module] for module in drawn]
    # The top of the map is the bottom of ORDER.
    assert ranks == sorted(ranks, reverse=True)


def test_imports_point_one_way():
    for file in OWN_FILES:
        for name in imports(file):
            # The package itself imports the models.
            imported = name.split(".")[0] or "models"
            assert imported == room(file) or RANK[imported] < RANK[room(file)], f"{file} imports {name or 'headwater'}"


def mentions(file: Path) -> Iterator[str]:
    """Where a file knows a mechanism: its module, its class, or its name in a text that is no docstring."""
    modules = {path.partition(":")[0].rpartition(".")[2] for path in REGISTRY.values()}
    classes = {path.partition(":")[2] for path in REGISTRY.values()}
    said = re.compile(rf"\b({'|'.join(modules | classes | set(REGISTRY))})\b", re.IGNORECASE)
    for name in imports(file):
        if name.split(".")[0] == "mechanisms" and (modules | classes | {"*"}) & set(name.split(".")[1:]):
            yield f"imports {name}"
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and said.search(node.value):
            yield f"{node.lineno} says {node.value!r}"
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in classes or (name in modules and isinstance(node, ast.Attribute)):
            yield f"{node.lineno} uses {name}"


def test_mechanisms_are_known_by_the_registry_alone():
    files = [file for file in FILES if not file.as_posix().startswith(KNOW_MECHANISMS)]
    assert files
    assert not {str(file): found for file in files if (found := list(mentions(file)))}


@pytest.mark.parametrize(
    "line",
    [
        "from headwater.mechanisms import Pattention",
        "from headwater.mechanisms import *",
        "from headwater.mechanisms.pattention import Pattention as P",
        "from headwater import mechanisms\nmechanisms.Pattention(1, 2, 3)",
        "from headwater.mechanisms import kv_shift",
        "import headwater.mechanisms.kv_shift",
        "label = f'one feed-forward Pattention of {size}'",
        "print('pattention')",
    ],
)
def test_a_mechanism_that_is_known_by_name_is_seen(tmp_path, monkeypatch, line):
    (tmp_path / "bench.py").write_text(f"{line}\n")
    monkeypatch.setattr("test_architecture.ROOT", tmp_path)
    assert list(mentions(Path("bench.py")))


def test_an_arrow_that_points_back_is_seen(tmp_path, monkeypatch):
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "block.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from headwater.models.stack import Stack\n"
        "else:\n"
        "    from headwater.config import text as config\n"
        "def late():\n"
        "    from ..training.loop import train\n"
        "    import headwater.mechanisms.base\n"
        "    from . import norm\n"
        "    from headwater import HeadwaterConfig\n"
    )
    monkeypatch.setattr("test_architecture.ROOT", tmp_path)
    seen = set(imports(Path("nn/block.py")))
    assert seen == {"models.stack.Stack", "config", "training.loop.train", "mechanisms.base", "nn.norm", ""}


def declared(file: Path) -> Iterator[str]:
    """The classes and the names of types that a file defines for others to see."""
    for node in parsed(ROOT / file).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        # Constants are in capitals.
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_a_class_has_a_name_of_its_own():
    """`Source` means one thing, whichever file one reads."""
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for name in declared(file):
            homes.setdefault(name, []).append(str(file))
    assert not {name: files for name, files in homes.items() if len(files) > 1}
