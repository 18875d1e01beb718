"""What the documentation shows runs, and what it links to is there. The reference is made from code."""

import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from headwater_lab.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
# What the build adds: pages from outside docs/, and those without a file.
ADDED = re.compile(r"(index|contributing|changelog|results/.*)\.md")
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


def list_site() -> set[str]:
    """The pages in the navigation of the site."""
    text = (ROOT / "mkdocs.yml").read_text()
    navigation = yaml.safe_load(text[text.index("\nnav:") :])["nav"]

    def walk(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry if isinstance(entry, list) else entry.values():
                yield from walk(inner)

    return set(walk(navigation))


def test_the_site_has_every_page_and_no_other():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages == {page for page in list_site() if not ADDED.fullmatch(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        if file.exists():
            assert not heading or file.suffix != ".md" or heading in list_headings(file), f"{target}#{heading}"
        else:
            assert file.is_relative_to(DOCS), target
            assert file.relative_to(DOCS).as_posix() in list_site(), target


@functools.cache
def list_headings(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub makes them, and those that the build gives it."""
    text = page.read_text()
    if page.parent == DOCS / "reference":
        text += build_reference()[page.name]
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    anchors = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
    for of_attribute, of_code in re.findall(r"\{ #(\S+) \}|^::: (\S+)", text, re.MULTILINE):
        anchors.add(of_attribute or of_code)
    return anchors


@functools.cache
def build_reference() -> dict[str, str]:
    """The generated part of each page of the reference, by the name of its file."""
    script = "import json, reference as r; print(json.dumps({p.split('/')[1]: r.build_page(p) for p in r.PAGES}))"
    result = subprocess.run([sys.executable, "-c", script], cwd=DOCS / "build", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


def test_the_reference_explains_what_it_lists():
    pages = build_reference()
    assert pages.keys() == {page.name for page in (DOCS / "reference").glob("*.md")}
    for name in ("recipe.md", "data.md", "tasks.md", "config.md"):
        rows = re.findall(r"^\| `(\w+)`\{.*\| (.*) \|$", pages[name], re.MULTILINE)
        assert len(rows) > 10
        assert [field for field, meaning in rows if not meaning.strip()] == [], name
    assert "\n| `--out`" in pages["commands.md"]


def test_code_quoted_from_a_file_is_in_that_file():
    for page in PAGES:
        for name, code in re.findall(r"```python\n# (\w+/\S+\.py)\n(.*?)\n```", page.read_text(), re.DOTALL):
            source = (ROOT / "src" / "headwater" / name).read_text()
            for line in code.splitlines():
                assert line.strip() in source, line


def list_commands(page: str) -> Iterator[str]:
    """Each command line of headwater in a page's code, whole."""
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\?\n\s+(?=\[?--)|\\\n\s*", " ", block).splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    for line in [*lines, *(" ".join(span.split()) for span in spans)]:
        if match := re.match(r"(?:\$ )?(?:\w+ .*-m )?headwater ([a-z].*)", line.strip()):
            yield " ".join(match.group(1).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_their_options_are_there(page):
    root = typer.main.get_command(app)
    for line in list_commands(page.read_text()):
        command, words = root, line.split()
        while (below := getattr(command, "commands", {})) and words and re.fullmatch(r"[a-z]+", words[0]):
            assert words[0] in below, f"headwater {line}"
            command = below[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if not command.context_settings.get("ignore_unknown_options"):  # `serve` hands them on
            assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words))) <= known | {"--help"}, f"headwater {line}"


def test_commands_are_read_from_blocks_and_sentences():
    page = "`headwater compare A\n--out b`\n```\n$ headwater train \\\n  r.yaml\n    [--arm x]\nheadwater: no.\n```\n"
    assert list(list_commands(page)) == ["train r.yaml [--arm x]", "compare A --out b"]


def test_why_each_dependency_is_there_is_said():
    extras = PROJECT["optional-dependencies"]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\|(?: `(\w+)`)? \| (.*?) ?\| ", page, flags=re.MULTILINE)
    table = {(extra, name) for extra, names in rows for name in names.split(", ") if name}

    def list_names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}

    assert {("", name) for name in list_names(PROJECT["dependencies"])} == {row for row in table if not row[0]}
    for extra in ("train", "report"):
        assert list_names(extras[extra]) == {name for of, name in table if of == extra}
    for name in (list_names(extras["dev"]) | extras.keys()) - {"headwater", "dev"}:
        assert re.search(rf"\b{name}\b", page), name


def test_the_floor_that_is_tested_is_the_one_that_is_promised():
    """And every command of the workflows is one of the Makefile."""
    lines = (ROOT / "tests" / "floor.txt").read_text().splitlines()
    floors = dict(line.removesuffix(".*").split("==") for line in lines if not line.startswith("#"))
    promised = dict(line.split(",")[0].split(">=") for line in PROJECT["dependencies"])
    assert floors == {name: promised[name] for name in ("torch", "transformers", "typer")}
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml")) if (ROOT / ".github").exists() else []
    ran = {
        command for file in workflows for command in re.findall(r"run: make ([\w-]+)$", file.read_text(), re.MULTILINE)
    }
    assert ran <= set(rules)
    assert not workflows or {"check", "test-all", "test-floor"} <= ran
