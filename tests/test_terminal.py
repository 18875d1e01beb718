"""What commands print fits the terminal: nothing is wider, nothing is broken inside a word, and nothing is lost."""

import fcntl
import functools
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from headwater_lab.util.terminal import Prose, Table, Terminal, lined
from test_report import BASE, GOOD, saved, three

SENTENCE = (
    "At most 5 % of tables call any of several identical arms better or worse (Holm); the difference is +0.567 "
    "[+0.552, +0.583], 0.411 ± 0.006 before and 39.42 M after. See `headwater reproduce --list` for the others, "
    "Model.from_pretrained('a b', trust=True), or the file '/home/me/my runs/report.html'."
)
WHOLE = [
    "5 %", "[+0.552, +0.583]", "0.411 ± 0.006", "39.42 M", "`headwater reproduce --list`",
    "Model.from_pretrained('a b', trust=True)", "'/home/me/my runs/report.html'",
]  # fmt: skip
ARMS = ("1 layer + KV shift", "value residual", "an arm with a long name, for its settings")


def printed(width, *things, is_terminal=True):
    console = Terminal(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 33, 40, 80, 120])
def test_sentences_wrap_as_by_the_naive_rule(width):
    plain = re.sub(r"[`'\[\]±]|\d \S{1,3}\b|\d %|\w\([^)]*\)", "", SENTENCE)
    naive = textwrap.wrap(" ".join(plain.split()), width, break_long_words=False, break_on_hyphens=False)
    assert printed(width, " ".join(plain.split())).splitlines() == naive


@pytest.mark.parametrize("width", [1, 20, 40, 80])
def test_what_is_copied_or_read_as_a_whole_stays_on_a_line(width):
    lines = printed(width, SENTENCE).splitlines()
    for text in WHOLE:
        assert sum(text in line for line in lines) == 1
    assert " ".join(lines) == SENTENCE
    assert all(len(line) <= max(width, *map(len, WHOLE)) + 1 for line in lines)  # 1: a full stop


def test_further_lines_of_indented_text_are_indented_more():
    assert printed(16, "  name: four words of text") == "  name: four\n    words of\n    text\n"
    assert printed(16, "a\n\n  b") == "a\n\n  b\n"


def test_in_files_and_pipes_sentences_are_one_line_each():
    assert printed(20, SENTENCE, is_terminal=False) == SENTENCE + "\n"


def make_table():
    rows = [
        [name, "0.411 ± 0.006", f"+0.56{number} [+0.552, +0.583]", "better", "61,632", ""]
        for number, name in enumerate(ARMS)
    ]
    names = ("", "accuracy ± sd", "minus 1 layer [98.33 %, Holm]", "verdict", "parameters", "empty column")
    return lined(*names, rows=rows, title="a title of five words", caption=SENTENCE)


@pytest.mark.parametrize("width", range(20, 160, 7))
def test_tables_keep_to_the_width_and_lose_nothing(width):
    shown = printed(width, make_table())
    widest = max(map(len, WHOLE)) + 1  # a comma
    assert max(map(len, shown.splitlines())) <= max(width, widest)
    joined = " ".join(shown.split())
    for name in ARMS:
        assert set(name.split()) <= set(joined.split())
    for text in ("0.411 ± 0.006", "[+0.552, +0.583]", "+0.562"):
        assert text in shown
    assert ("verdict: better" in shown) == (width < 55)  # stacked
    assert "empty column:" not in shown


def test_headers_wrap_before_cells_do():
    table = lined("", "a header of many words", rows=[["name", "1,234 of 5,678 parts"]])
    assert printed(30, table).splitlines()[-2].split() == ["name", "1,234", "of", "5,678", "parts"]
    longer = printed(30, lined("", "header", rows=[["name", "1,234 of 5,678 parts of 9,000"]]))
    assert ["name", "1,234", "of", "5,678", "parts"] in [line.split() for line in longer.splitlines()]


def test_columns_that_do_not_fit_follow_below():
    rows = [["a name", *(f"{row}.{column}234" for column in range(6))] for row in range(2)]
    shown = printed(40, lined("", *(f"column-{i}" for i in range(6)), rows=rows)).splitlines()
    assert [line.split() for line in shown if "column" in line] == [
        ["column-0", "column-1", "column-2"],
        ["column-3", "column-4", "column-5"],
    ]
    assert [line.split()[2:] for line in shown if "name" in line] == [
        ["0.0234", "0.1234", "0.2234"],
        ["1.0234", "1.1234", "1.2234"],
        ["0.3234", "0.4234", "0.5234"],
        ["1.3234", "1.4234", "1.5234"],
    ]


def test_a_table_fits_every_console_that_prints_it():
    table = make_table()
    wide, narrow = printed(200, table), printed(60, table)
    assert printed(200, table) == wide != narrow == printed(60, table)


def test_stacked_rows_keep_the_sections_of_a_table():
    table = Table()
    for name in ("", "first", "second"):
        table.add_column(name)
    table.add_row(Prose("section", "bold"))
    table.add_row("  row", "a long value", "another long value")
    assert printed(24, table) == "section\n  row\n    first: a long value\n    second: another long\n      value\n\n"


# A process that runs several commands, since starting one for each would take seconds.
WALK = """
import sys
from headwater_lab.cli import main
for line in sys.argv[1].split(";"):
    print("$", line, flush=True)
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as stop:
        print("exit code", stop.code, flush=True)
"""
COMMANDS = (
    "plan gpt2-124m tokenformer-124m headwater-base --hardware H100 --tokens 300B;list tasks;list mechanisms;"
    "reproduce --list kv-shifting;"
    "report {folder};runs {folder};reproduce kv-shifting/theorems --out {folder}/reproduce;"
    "train no-such-recipe;train shakespeare trainng.steps=3 data.sorce=x;compare shakespeare;plan --nothing"
)


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """Run COMMANDS on a pseudo-terminal of this width."""
    records = three("base", BASE) + [one for name in ARMS for one in three(name, GOOD)]
    folder = saved(tmp_path_factory.mktemp("runs"), records)

    @functools.cache
    def run(width, term="xterm"):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        with subprocess.Popen(
            [sys.executable, "-c", WALK, COMMANDS.format(folder=folder)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment | {"TERM": term},
        ) as process:  # fmt: skip
            os.close(theirs)
            content = b""
            while chunk := read_chunk(ours):
                content += chunk
            os.close(ours)
        assert process.returncode == 0
        return content.decode().replace("\r\n", "\n")

    return run


def read_chunk(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux: the other side is closed
        return b""


def list_words(text):
    """List the words, and the column names of stacked rows as the words that they consist of."""
    return {word.rstrip(":") for word in text.split() if not re.fullmatch("[─━]+", word)}


@pytest.mark.parametrize(("width", "term"), [(80, "dumb"), (40, "xterm"), (200, "xterm")])
def test_commands_keep_to_the_terminal(walk, width, term):
    content, unlimited = (re.sub(r"\x1b\[[\d;]*m", "", text) for text in (walk(width, term), walk(5000)))
    assert "\x1b" not in content
    assert content.count("\nexit code 2\n") == 4
    for line in content.splitlines():
        if len(line) > width and not line.startswith("$"):
            assert len(list(Prose(line.strip()).break_lines(0))) == 1, line  # a path or a command
    assert list_words(content) <= list_words(unlimited)
    assert list_words(unlimited) - list_words(content) <= {"name", "run", "table", "verdict"}  # of the first columns
    assert ("\x1b" in walk(width, term)) == (term != "dumb")


@pytest.mark.parametrize("width", ["40", "72"])
@pytest.mark.parametrize("command", [("convert",), ("bench", "gpu"), ("data", "tokenizer"), ()], ids=" ".join)
def test_help_cuts_nothing_on_a_narrow_terminal(run, monkeypatch, command, width):
    texts = []
    for columns in ("200", width):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= int(columns)
        texts.append("".join(re.findall(r"[^\s│─╭╮╰╯]", out)))
    for name in re.findall(r"--[a-z-]+|\[default:.*?\]", texts[0]):
        assert texts[0].count(name) == texts[1].count(name), name
    assert "<bool>" not in texts[0]  # a flag takes no value
