"""What the documentation shows runs, what it links to is there, and its tables have the fields that the code has."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from pydantic import BaseModel

import headwater
from headwater import api, mechanisms, records
from headwater.cli import app
from headwater.recipe import (
    AnyData,
    Compare,
    Growth,
    Halving,
    Recipe,
    Reporting,
    Start,
    Training,
    TrainingStage,
    Widening,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes" / "README.md",
]
SNIPPETS = [
    (page, code)
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
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in site, page


@pytest.mark.parametrize("module", [headwater, mechanisms], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module):
    page = (ROOT / "docs" / "api.md").read_text()
    for name in set(module.__all__) - {"__version__"}:
        found = getattr(module, name)
        found = getattr(api, name, found)  # some are modules that can be called
        assert found.__doc__, name
        assert f"::: {found.__module__}.{name}\n" in page, f"{name} is not in docs/api.md"


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SLOW = {"compare", "mechanism", "train"}  # they start workers, check every way of decoding, or train more than once


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW), id=page.stem) for page in TUTORIALS]
)
def test_the_files_and_commands_of_a_tutorial_work_in_turn(page, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    ran = 0
    for kind, title, text in re.findall(r'```(\w*)(?: title="(.*?)")?\n(.*?)```', page.read_text(), re.DOTALL):
        if title:
            Path(title).write_text(text)
        elif kind == "python":
            exec(compile(text, str(page), "exec"), {})
        for line in re.findall(r"^\$ headwater (.*)$", text, re.MULTILINE):
            code, _, err = run(*shlex.split(line))
            assert code == 0, f"{line}: {err}"
            ran += 1
    assert ran


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
DATA = {get_args(kind.model_fields["kind"].annotation)[0]: (kind,) for kind in get_args(get_args(AnyData)[0])}
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "Top level": (Recipe,),
    "training": (Training,),
    "reporting": (Reporting,),
    "start": (Start, Growth, Widening),
    "stages": (TrainingStage,),
    "compare": (Compare, Halving),
    **DATA,
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
    for model, field in ((records.RunRecord, "status"), (records.Experiment, "part")):
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
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
