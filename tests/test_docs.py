"""What the documentation shows runs, what it links to is there, and its tables have the fields that the code has."""

import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

import headwater
import headwater_lab
from headwater import mechanisms
from headwater.integrations import torchtitan as titan_model
from headwater.util.layout import PACKAGES
from headwater_lab.api import comparing, planning, reproducing, training
from headwater_lab.cli import app
from headwater_lab.data.base import DATA
from headwater_lab.data.images import Augmentation
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.start_section import Growth, Start, TrainingStage
from headwater_lab.recipe.training_section import Reporting, Training
from headwater_lab.training import records

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes" / "README.md",
]
SNIPPETS = [
    pytest.param(page, code, marks=[pytest.mark.slow] if page.stem == "verify" else [])
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if "import" in code and page.parent.name != "tutorials"  # those build on the commands above them
]


@pytest.mark.parametrize(("page", "code"), SNIPPETS, ids=lambda value: getattr(value, "stem", ""))
def test_python_snippets_run(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {})


def test_there_are_snippets_to_run():
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_inside_the_repository_lead_somewhere(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or file.suffix != ".md" or heading in headings(file), f"{target}#{heading}"


@functools.cache
def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_what_to_edit_is_there():
    """The files in the table of docs/architecture.md, and the names that are edited in them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = page.split("| to add or change |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        for part in re.split(r"[|;]", row):
            quoted = re.findall(r"`([^` ]+)`", part)
            files = [name for name in quoted if re.search(r"[/.]", name)]
            for file in files:
                pattern = re.sub(r"\b(NAME|PAPER|TABLE)\b", "*", file)
                found = list(ROOT.glob(pattern if file.endswith(".md") else f"src/*/{pattern}"))
                assert found, f"{file}: {row}"
                for name in set(quoted) - set(files):
                    assert any(re.search(rf"\b{name}\b", one.read_text()) for one in found), f"{name}: {row}"


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in site, page


API = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
# Groups of entry points, which are no modules.
GROUPS = {"headwater.data", "headwater.families", "headwater.optimizers", "headwater.schedules"}


def promised(page: str) -> set[str]:
    """Names of headwater that a page has its readers use, in full.

    What its Python imports; what it writes in full; and what the same paragraph names of the same package.
    """
    found = set()
    for module, several, one in re.findall(r"^from (headwater[\w.]*) import (?:\(([^)]*)\)|(.*))", page, re.MULTILINE):
        found |= {f"{module}.{name}" for name in re.findall(r"(?:^|,)\s*(\w+)", several or one)}
    for paragraph in page.split("\n\n"):
        here = set(re.findall(r"(?<![\w./-])headwater(?:_lab)?(?:\.[A-Za-z]\w*)+", paragraph))
        found |= here
        for package in {name.rpartition(".")[0] for name in here} - PACKAGES:
            public = getattr(resolved(package), "__all__", ())
            found |= {f"{package}.{name}" for name in re.findall(r"`(\w+)", paragraph) if name in public}
    return found


def resolved(name: str) -> Any:
    """What a name of headwater stands for; a name in a class stands for the class. None if there is nothing."""
    top, *parts = name.split(".")
    found: Any = importlib.import_module(top)
    for part in parts:
        if isinstance(found, type):
            return found if hasattr(found, part) else None
        if isinstance(found, ModuleType):
            with suppress(ModuleNotFoundError):
                found = importlib.import_module(f"{found.__name__}.{part}")
                continue
        found = getattr(found, part, None)
    return found


def undocumented(names: set[str]) -> set[str]:
    """Of names, those that docs/api.md has neither as they are nor by the place where they are defined."""
    missing = set()
    for name in names - GROUPS:
        found = resolved(name)
        assert found is not None, f"there is no {name}"
        if isinstance(found, ModuleType):
            continue
        assert found.__doc__, name
        defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
        if not {name, defined} & set(API):
            missing.add(name)
    return missing


@pytest.mark.parametrize(
    "module",
    [headwater, mechanisms, titan_model, headwater_lab, comparing, planning, reproducing, training],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_documented(module):
    names = getattr(module, "__all__", None) or [
        name for name, one in vars(module).items() if isinstance(one, type) and one.__module__ == module.__name__
    ]
    assert not undocumented({f"{module.__name__}.{name}" for name in names if name != "__version__"})


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "api"], ids=lambda page: page.stem)
def test_names_that_pages_tell_to_use_are_documented(page):
    assert not undocumented(promised(page.read_text()))


def test_what_the_api_page_lists_is_there_once():
    assert len(set(API)) == len(API)
    for name in API:
        assert resolved(name) is not None, name


def test_names_are_read_from_imports_and_sentences():
    page = """from headwater.mechanisms import KV, Mechanism
from headwater.kernels import (
    can_fuse,
    disable_kernels,
)

`headwater.growth.grow(model)` and `merge(base, …)`, not `widow`.

`headwater train`, `src/headwater.py`, `shrink(…)`
"""
    names = {
        "mechanisms.KV",
        "mechanisms.Mechanism",
        "kernels.can_fuse",
        "kernels.disable_kernels",
        "growth.grow",
        "growth.merge",
    }
    assert promised(page) == {f"headwater.{name}" for name in names | {"mechanisms", "kernels"}}
    assert undocumented({"headwater.growth.grow", "headwater.growth.importance"}) == {"headwater.growth.importance"}


def test_snippets_of_code_quoted_from_a_file_are_in_that_file():
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    quoted = re.findall(r"```python\n# (\S+\.py)\n(.*?)\n```", page, re.DOTALL)
    assert quoted
    for name, code in quoted:
        source = (ROOT / "src" / "headwater" / name).read_text()
        for line in code.splitlines():
            assert line.strip() in source, line


def test_no_placeholder_is_left():
    for page in PAGES:
        assert "@@" not in page.read_text(), page


def sections(page: str) -> dict[str, str]:
    """The text under each heading, and under each line that begins with `kind: NAME`, by NAME."""
    _, *parts = re.split(r"^(?:## `?([^`\n]+)`?|`kind: (\w+)`.*)$", page, flags=re.MULTILINE)
    return {heading or kind: text for heading, kind, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def rows(text: str) -> Iterator[tuple[list[str], str]]:
    """Of each row of the tables in a text: the names in the first cell, and the second cell."""
    for first, second in re.findall(r"^\| (`.*?) \| ?(.*?) ?\|", text, flags=re.MULTILINE):
        yield re.findall(r"`(\w+)`", first), second


FIELDS = sections((ROOT / "docs" / "recipes.md").read_text())
OF_DATA = {name: (DATA.resolve(name),) for name in DATA.own}
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "Top level": (Recipe,),
    "augmentation": (Augmentation,),
    "training": (Training,),
    "reporting": (Reporting,),
    "start": (Start, Growth),
    "stages": (TrainingStage,),
    "compare": (Compare,),
    **OF_DATA,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_each_section_of_a_recipe_is_documented_with_its_defaults_and_nothing_else(name):
    outer, *inner = SECTIONS[name]
    for model in (outer, *inner):
        for field in model.model_fields:
            assert f"`{field}`" in FIELDS[name], f"{name}: {field} is not in docs/recipes.md"
    for names, default in rows(FIELDS[name]):
        for field in names:
            assert field in outer.model_fields, f"{name}: docs/recipes.md has a field {field!r}, the code has none"
        if len(names) == 1 and names != ["kind"]:
            field = outer.model_fields[names[0]]
            assert (default == "required") == field.is_required(), names
            if isinstance(field.default, bool):
                assert default == str(field.default).lower(), names
            elif isinstance(field.default, str):
                assert default == field.default, names
            elif isinstance(field.default, int | float):
                assert float(default.replace(" ", "")) == field.default, names


def test_every_field_of_a_record_is_documented_and_nothing_else():
    page = (ROOT / "docs" / "records.md").read_text()
    parts = [part for part in vars(records).values() if isinstance(part, type) and issubclass(part, BaseModel)]
    for part in parts:
        for field in part.model_fields:
            assert f"`{field}`" in page, f"{part.__name__}.{field} is not in docs/records.md"
    for names, _ in rows(page):
        assert set(names) <= records.RunRecord.model_fields.keys()
    for model, field in ((records.RunRecord, "status"), (records.Experiment, "phase")):
        for value in get_args(model.model_fields[field].annotation):
            assert f"`{value}`" in page, value


def commands(page: str) -> Iterator[str]:
    """Each command line of headwater in a page's code, whole."""
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\?\n\s+(?=\[?--)|\\\n\s*", " ", block).splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    for line in [*lines, *(" ".join(span.split()) for span in spans)]:
        if found := re.match(r"(?:\$ )?(?:\w+ .*-m )?headwater ([a-z].*)", line.strip()):
            yield " ".join(found.group(1).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)  # a changelog names commands that are gone
def test_commands_and_their_options_are_there(page):
    root = typer.main.get_command(app)
    for line in commands(page.read_text()):
        command, words = root, line.split()
        while (below := getattr(command, "commands", {})) and words and re.fullmatch(r"[a-z]+", words[0]):
            assert words[0] in below, f"headwater {line}"
            command = below[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if not command.context_settings.get("ignore_unknown_options"):  # `serve` hands them on
            assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words))) <= known | {"--help"}, f"headwater {line}"


def test_commands_are_read_from_blocks_and_sentences():
    page = "`headwater compare A\n--out b`\n```\n$ headwater train \\\n  r.yaml\n    [--arm x]\nheadwater: no.\n```\n"
    assert list(commands(page)) == ["train r.yaml [--arm x]", "compare A --out b"]


def test_why_each_dependency_is_there_is_said():
    extras = PROJECT["optional-dependencies"]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\|(?: `(\w+)`)? \| (.*?) ?\| ", page, flags=re.MULTILINE)
    table = {(extra, name) for extra, names in rows for name in names.split(", ") if name}

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=]", one)[0] for one in requirements}

    assert {("", name) for name in names(PROJECT["dependencies"])} == {one for one in table if not one[0]}
    for extra in ("train", "report"):
        assert names(extras[extra]) == {name for of, name in table if of == extra}
    for name in (names(extras["dev"]) | extras.keys()) - {"headwater", "dev"}:
        assert re.search(rf"\b{name}\b", page), name


def test_the_floor_that_is_tested_is_the_one_that_is_promised():
    """And every command of the workflows is one of the Makefile."""
    lines = (ROOT / "tests" / "floor.txt").read_text().splitlines()
    floors = dict(line.removesuffix(".*").split("==") for line in lines if not line.startswith("#"))
    promised = dict(line.split(",")[0].split(">=") for line in PROJECT["dependencies"])
    assert floors == {name: promised[name] for name in ("torch", "transformers")}
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml")) if (ROOT / ".github").exists() else []
    ran = {
        command for file in workflows for command in re.findall(r"run: make ([\w-]+)$", file.read_text(), re.MULTILINE)
    }
    assert ran <= set(rules)
    assert not workflows or {"check", "test-all", "test-floor"} <= ran
