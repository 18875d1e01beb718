"""What a reader can rely on in every file. Which packages import which: import-linter, in `make lint`."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater.plugins.mechanisms import MECHANISMS

TOP = Path(__file__).parents[1]
# Both packages lie here.
ROOT = Path(headwater.__file__).parents[1]

# The only places that know mechanisms by name: the table of them, and they themselves; presets, which are configs of
# named mechanisms; what is done to parameter tokens alone, or read from the papers' own checkpoints; and the equations
# that tests hold them against.
KNOW_MECHANISMS = (
    "headwater/plugins/mechanisms.py",
    "headwater/mechanisms/",
    "headwater/config/presets.py",
    "headwater/growth/parameter_tokens.py",
    "headwater/conversion/foreign.py",
    "headwater/conversion/latent.py",
    "headwater/testing/naive.py",
)

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def test_kernels_stand_together():
    """Autograd functions and PyTorch's private hooks have one home, with one guard."""
    for file in FILES:
        if file.parts[:2] != ("headwater", "kernels"):
            found = re.findall(r"autograd\.Function|torch\._C|forward_ad", (ROOT / file).read_text())
            assert not found, f"{file}: move {found} to kernels/, behind kernels.can_fuse"


def test_one_place_prints():
    """Rich reads markup in whatever it is given; what util/terminal.py has in its place does not."""
    for file in FILES:
        if file != Path("headwater_lab/util/terminal.py"):
            found = re.findall(
                r"rich\.(?:table|console|markup|panel)|from rich import .*print", (ROOT / file).read_text()
            )
            assert not found, f"{file}: take Table and Terminal of headwater_lab.util.terminal for {found}"


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
    """Dotted names, below the package, of what a file imports from the library."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("headwater.") for name in names if name.startswith("headwater."))


def contracts() -> dict[str, list[list[str]]]:
    """The floors of each package, the uppermost first, as import-linter checks them."""
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]
    layered = [contract for contract in settings["contracts"] if "containers" in contract]
    return {each["containers"][0]: [layer.split(" | ") for layer in each["layers"]] for each in layered}


def test_the_map_in_the_documentation_has_the_floors_of_the_contracts():
    page = (TOP / "docs" / "architecture.md").read_text()
    floors: dict[str, list[list[str]]] = {}
    for line in page.split("```")[1].splitlines():
        if line and not line.startswith(" "):
            package = line.split("/")[0].removeprefix("src/")
            floors[package] = []
        elif line.strip():
            floors[package].append(re.split(r"/?\s+", line[:54].strip().rstrip("/")))
    assert floors == contracts()


def test_what_to_edit_is_there():
    """The files in the table of docs/architecture.md, and the names that are edited in them."""
    page = (TOP / "docs" / "architecture.md").read_text()
    rows = page.split("| to add or change |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        for part in re.split(r"[|;]", row):
            quoted = re.findall(r"`([^` ]+)`", part)
            names = {name for name in quoted if not re.search(r"[/.]", name)}
            for file in set(quoted) - names:
                paths = list(ROOT.glob(f"*/{re.sub('NAME|PAPER|TABLE', '*', file)}"))
                assert paths, f"{file}: {row}"
                texts = [path.read_text() for path in paths]
                assert all(any(re.search(rf"\b{name}\b", text) for text in texts) for name in names), row


def mentions(file: Path) -> Iterator[str]:
    """Where a file knows a mechanism: its module, its class, or its name in a text that is no docstring."""
    modules = {path.partition(":")[0].rpartition(".")[2] for path in MECHANISMS.built_in.values()}
    classes = {path.partition(":")[2] for path in MECHANISMS.built_in.values()}
    match = re.compile(rf"\b({'|'.join(modules | classes | set(MECHANISMS.built_in))})\b", re.IGNORECASE)
    for name in imports(file):
        if name.split(".")[0] == "mechanisms" and (modules | classes | {"*"}) & set(name.split(".")[1:]):
            yield f"imports {name}"
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and match.search(node.value):
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


# The most branches of a function, and those that have more: name → complexity, for the library and the laboratory.
MOST_BRANCHES = 15
COMPLEX = tomllib.loads((TOP / "tests" / "complex_functions.toml").read_text())
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert, ast.match_case)


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity, counting what ruff's C901 leaves out: operands, comprehensions and inner functions."""
    total = 1
    for node in ast.walk(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All functions in a tree, by qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            if not isinstance(child, ast.ClassDef):
                yield name, child
        yield from functions(child, name)


def complex_functions(package: str) -> dict[str, int]:
    return {
        f"{file}:{name}": branches
        for file in FILES
        if file.parts[0] == package and "templates" not in file.parts
        for name, function in functions(parsed(ROOT / file))
        if (branches := complexity(function)) > MOST_BRANCHES
    }


@pytest.mark.parametrize(("part", "package"), [("library", "headwater"), ("laboratory", "headwater_lab")])
def test_complex_functions_only_become_fewer_and_simpler(part, package):
    measured, listed = complex_functions(package), COMPLEX[part]
    worse = {name: branches for name, branches in measured.items() if branches > listed.get(name, MOST_BRANCHES)}
    assert not worse, f"split these into functions of at most {MOST_BRANCHES} branches"
    settled = sorted(listed.keys() - measured.keys())
    assert not settled, "these are simple now, or gone: delete them from tests/complex_functions.toml"


def test_complexity_counts_operands_comprehensions_and_inner_functions():
    source = """
def outer(x):
    assert x
    def inner(y):
        return [a for a in y if a and not x] if y else None
    for z in x:
        try:
            while z or x:
                pass
        except ValueError:
            match z:
                case 1:
                    pass
"""
    counts = {name: complexity(function) for name, function in functions(ast.parse(source))}
    assert counts == {"outer": 11, "outer.inner": 5}
