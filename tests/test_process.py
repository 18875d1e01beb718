"""The command line as a process: interrupts at any moment, streams that are closed or cannot show a letter."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# In a script of the command's name; this imports none of the large packages.
BEGIN = """
import os, signal, sys
import headwater_lab
"""
posix = pytest.mark.skipif(os.name != "posix", reason="a shell and signals are needed")


@pytest.fixture(autouse=True)
def buffered(monkeypatch):
    """So that output is written at the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def script(tmp_path):
    def run(action, shell="", name="headwater", **environment):
        """Run Python as the command line does, in a shell that adds to the command: (exit code, stdout, stderr)."""
        file = tmp_path / name
        file.write_text(BEGIN + textwrap.dedent(action))
        command = f"'{sys.executable}' '{file}' {shell}"
        done = subprocess.run(command, shell=True, capture_output=True, timeout=60, env=os.environ | environment)
        return done.returncode, done.stdout, done.stderr

    return run


@posix
def test_closed_streams_are_empty_ones(script, tmp_path):
    action = f"""
    with open({str(tmp_path / "opened")!r}, "w") as file:
        print("lost"), print("lost", file=sys.stderr)
        file.write(f"{{sys.stdin.read()!r}} {{file.fileno() > 2}}")
    """
    assert script(action, "<&- >&- 2>&-") == (0, b"", b"")
    assert (tmp_path / "opened").read_text() == "'' True"


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "C"],
)
def test_any_text_is_printed(script, environment):
    code, out, err = script(r"print('\xe9\ud800'), print('\xe9\ud800', file=sys.stderr)", **environment)
    assert (code, out.strip(), err.strip()) == (0, rb"\xe9\ud800", rb"\xe9\ud800")
    assert script("print(sys.stdin.read() == chr(233))", f"< {os.devnull}", **environment)[1].strip() == b"False"
    assert script("print(sys.stdin.encoding)", **environment)[1].strip() == b"utf-8"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_sentence(script):
    code, _, err = script("print('x')", "> /dev/full")
    assert code == 2
    assert b"could not be written" in err
    assert b"Traceback" not in err


@pytest.fixture
def unread():
    """The end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@posix
def test_readers_that_go_away(tmp_path, unread):
    """Of the output: the end, without a word. Of what is said beside it: no reason to end."""
    file = tmp_path / "headwater"
    file.write_text(BEGIN + "print('x', file=sys.stderr if len(sys.argv) > 1 else sys.stdout)\nprint('done')")
    done = subprocess.run([sys.executable, file], stdout=unread, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")
    done = subprocess.run([sys.executable, file, "x"], stdout=subprocess.PIPE, stderr=unread, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, b"done")


@posix
def test_a_working_directory_that_is_gone_is_one_sentence(tmp_path):
    file, gone = tmp_path / "headwater", tmp_path / "gone"
    file.write_text(BEGIN)
    gone.mkdir()
    done = subprocess.run(
        f"cd '{gone}' && rmdir '{gone}' && '{sys.executable}' '{file}'", shell=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert b"working directory no longer exists" in done.stderr
    assert b"Traceback" not in done.stderr


@posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "when",
    [
        "import typer",
        pytest.param("import torch", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
    ],
)
def test_signals_end_the_command_without_a_word(tmp_path, name, when):
    """As its libraries are imported, and as Python ends."""
    kill = f"os.kill(os.getpid(), signal.{name})"
    at_exit = f"import atexit; atexit.register(lambda: {kill})" if when == "exit" else ""
    finder = f"""
import os, signal, sys
class Finder:
    def find_spec(self, module, *_):
        if module == {when.removeprefix("import ")!r}:
            {kill}
sys.meta_path.insert(0, Finder())
{at_exit}
"""
    (tmp_path / "sitecustomize.py").write_text(finder)
    places = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "headwater_lab", "list", "presets"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # At the exit all is done, and it ends as it was about to.
    assert (done.returncode, bool(done.stdout)) == ((0, True) if at_exit else (130, False))
    assert done.stderr == b""


def test_a_program_that_uses_the_library_is_left_alone(script):
    action = "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, type(sys.stderr).__name__)"
    assert script(action, name="mine.py")[1].split() == [b"True", b"TextIOWrapper"]
    assert script(action)[1].split() == [b"False", b"_Aside"]
