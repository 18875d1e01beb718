"""`headwater bench page`: the commands of a page run, their output stands in it, and what was measured stays."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headwater.bench import page as pages
from headwater.bench.page import Measured, bench_page, blocks, with_block
from headwater.errors import HeadwaterError

ROOT = Path(__file__).parents[2]
SPEED = ROOT / "docs" / "speed.md"
GPU = SPEED.with_name("gpu.md")
TINY = "forms --context 8 --batch-size 1 --heads 1 --pairs 2 --precision 32-true"
CPU = "A CPU, 1 thread"


def page_of(*commands: str) -> str:
    return "# Speed\n\n" + "".join(f"About it.\n\n```\n$ headwater bench {command}\n```\n\n" for command in commands)


@pytest.fixture
def page(tmp_path) -> Path:
    return tmp_path / "speed.md"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A program in place of the benchmarks that prints its words and how often it ran; what it was told to run."""
    ran = tmp_path / "ran"
    (tmp_path / "bench.py").write_text(
        f"import sys\nopen({str(ran)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"print('table of', *sys.argv[1:], len(open({str(ran)!r}).readlines()))\nsys.exit('fails' in sys.argv)\n"
    )
    monkeypatch.setattr(pages, "BENCH", [str(tmp_path / "bench.py")])
    monkeypatch.setattr(pages, "_code", lambda: ("1.0 at abc", True))
    return lambda: ran.read_text().splitlines() if ran.exists() else []


@pytest.mark.slow
def test_the_command_runs_benchmarks_and_says_on_what(run, page):
    page.write_text(page_of(TINY))
    code, _, err = run("bench", "page", page)
    assert code == 0, err
    (block,) = blocks(page.read_text())
    assert "plain, ms" in block.printed
    assert "RMSNorm" in block.printed
    assert re.search(r", 1 thread; torch \d.*, headwater \d.*; \d{4}-\d\d-\d\d, \d+ s", block.made)
    assert block.cpu
    assert block.cpu in block.printed
    assert page.read_text().replace(str(block), "") == page_of(TINY).replace(str(Measured(TINY, "", "")), "")


def test_what_is_measured_is_not_measured_again(page, commands):
    page.write_text(page_of("one", "two --x 'a b'"))
    assert bench_page(page, cpu=CPU) == []
    assert commands() == ["one", "two --x a b"]
    before = page.read_text()
    bench_page(page, cpu=CPU)
    assert page.read_text() == before
    assert len(commands()) == 2
    bench_page(page, cpu=CPU, only=["tw"])
    assert commands()[2:] == ["two --x a b"]
    assert "table of two --x a b 3" in page.read_text()


@pytest.mark.parametrize(
    "other", [{"cpu": "A CPU, 2 threads"}, {"code": ("1.1 at abc", True)}, {"code": ("1.0 at abc", False)}]
)
def test_other_code_and_other_threads_are_measured_again(page, commands, monkeypatch, other):
    page.write_text(page_of("one"))
    bench_page(page, cpu=CPU)
    monkeypatch.setattr(pages, "_code", lambda: other.get("code", ("1.0 at abc", True)))
    bench_page(page, cpu=other.get("cpu", CPU))
    assert commands() == ["one", "one"]
    assert [block.printed for block in blocks(page.read_text())] == ["table of one 2\n"]


def test_each_cpu_has_a_block(page, commands):
    page.write_text(page_of("one", "two"))
    bench_page(page, cpu=CPU)
    bench_page(page, cpu="Another, 1 thread", only=["one"])
    bench_page(page, cpu=CPU, only=["one"])
    found = [(block.command, block.cpu, block.printed) for block in blocks(page.read_text())]
    assert found == [
        ("one", "A CPU", "table of one 4\n"),
        ("one", "Another", "table of one 3\n"),
        ("two", "A CPU", "table of two 2\n"),
    ]


def test_a_command_that_fails_leaves_its_block_and_the_rest_runs(page, commands, run):
    page.write_text(page_of("one", "fails", "two"))
    code, _, err = run("bench", "page", page)
    assert code == 2
    assert "headwater bench fails" in err
    assert [block.printed for block in blocks(page.read_text())] == ["table of one 1\n", "", "table of two 3\n"]


def test_an_interrupted_run_goes_on_where_it_was(page, commands, monkeypatch):
    page.write_text(page_of("one", "two"))
    run = subprocess.run

    def interrupt(words, **given):
        if words[-1] == "two":
            raise KeyboardInterrupt
        return run(words, **given)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench_page(page, cpu=CPU)
    bench_page(page, cpu=CPU)
    assert commands() == ["one", "two"]


def test_text_that_is_written_meanwhile_stays(page, commands):
    page.write_text(page_of("one"))
    bench_page(page, cpu=CPU, tell=lambda line: page.write_text(page_of("one") + "New.\n"))
    assert page.read_text().endswith("New.\n")
    assert "table of one" in page.read_text()
    with pytest.raises(HeadwaterError, match="no longer"):
        with_block(page.read_text(), Measured("two", "made", ""))


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (None, [], "no file"),
        ("```\n$ headwater train x.yaml\n```\n", [], "headwater bench"),
        (page_of("one"), ["--only", "two"], "'two'"),
        (page_of("one 'two"), [], "quotation"),
        (page_of("one", "page docs/speed.md"), [], "page"),
    ],
)
def test_a_page_without_benchmarks_is_refused(page, commands, run, text, words, said):
    if text is not None:
        page.write_text(text)
    code, _, err = run("bench", "page", page, *words)
    assert (code, commands()) == (2, [])
    assert said in err


def test_the_code_is_named_by_the_commit_that_changed_it(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(pages.headwater, "__file__", str(package / "__init__.py"))
    assert pages._code() == (pages.headwater.__version__, True)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init")
    (package / "a.py").write_text("a")
    git("add", ".")
    git("commit", "-m", "a")
    commit = git("rev-parse", "--short", "HEAD").strip()
    (tmp_path / "speed.md").write_text("figures")
    git("add", ".")
    git("commit", "-m", "figures")
    assert pages._code() == (f"{pages.headwater.__version__} at {commit}", True)
    (package / "a.py").write_text("b")
    name, committed = pages._code()
    assert commit in name
    assert name != f"{pages.headwater.__version__} at {commit}"
    assert not committed


def test_the_page_of_speed_is_read_whole_and_says_of_each_figure_where_it_is_from():
    text = SPEED.read_text()
    assert text.count("$ headwater bench") == len(blocks(text))  # or the command would pass over it
    for block in blocks(text):
        assert bool(block.printed) == bool(block.made)
        assert re.fullmatch(r"|.+, \d threads?; .*headwater \d.*; 20\d\d-\d\d.*", block.made)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path not in (SPEED, GPU))],
    ids=lambda path: path.stem,
)
def test_no_other_page_has_figures_of_speed(page):
    """They would go stale there unseen; those of a GPU say their day. What a run prints is no measurement."""
    assert not re.findall(r"headwater bench (?!gpu|verdicts|prices)(?:.*\n){1,8}[|┏].*", page.read_text())
    assert not re.findall(r"\bratio, median|\d ?[mµ]s\b", page.read_text())
