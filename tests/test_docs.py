"""What the documentation shows runs, and what it links to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes" / "README.md",
]
SNIPPETS = [
    (page, code)
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if "import" in code
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
