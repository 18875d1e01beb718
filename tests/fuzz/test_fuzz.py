"""Whatever is typed, written into a recipe or wrong with a file: a result or a sentence, and nothing lost.

Every case is a function of a seed and its number. One that fails is printed with what makes it again:
`case("overrides", 17)`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path

import generator
import pytest
from generator import Case
from world import make_world

from headwater_lab.cli import main
from headwater_lab.training.checkpoints import SUMS

SEED = os.environ.get("HEADWATER_FUZZ_SEED", "0")
SECONDS = 60
# What a case may take on top: sizes that this machine just could allocate are refused as those that nobody can.
MEMORY = 10**9
KINDS = ("command_lines", "overrides", "fields", "recipe_files", "damaged_files")


@pytest.fixture(scope="session", name="world")
def _world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


class Hung(BaseException):
    pass


def case(kind: str, number: int, world) -> Case:
    draw = random.Random(f"{SEED}:{kind}:{number}")
    more = {"recipe_files": [world.recipes], "damaged_files": [world.paths]}.get(kind, [])
    return getattr(generator, kind)(draw, *more)


def run(argv: list[str]) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command line in this process; the code is None where an exception came out."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", newline="") for _ in range(2)]
    before, code = (sys.argv, sys.stdin), None
    sys.argv, sys.stdin = ["headwater", *argv], io.TextIOWrapper(io.BytesIO(b""), "utf-8")
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except Exception:
            sys.stderr.write(traceback.format_exc())
    sys.argv, sys.stdin = before
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
        stream.detach()
    return code, *texts


def wrong(world, one: Case, folder: Path) -> str | None:
    """What is wrong with how a command line ends; None where nothing is."""
    for name, content in one.files.items():
        (folder / name).write_bytes(content)
    if one.damage is not None:
        kind, name, content, sums = one.damage
        shutil.copytree(world.paths[kind], folder / "copy")
        target = folder / "copy" / name
        target.unlink()
        if content is not None:
            target.write_bytes(content)
        for file in [] if sums else (folder / "copy").rglob(SUMS):
            file.unlink()
    before = world.digest()

    def ring(*_):
        raise Hung

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # stuck where no signal reaches
    here = os.getcwd()
    os.chdir(folder)
    try:
        code, _, err = run([_argument(world, word, folder) for word in one.arguments])
    except Hung:
        return f"hangs: {''.join(traceback.format_exc().splitlines()[-12:])}"
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        os.chdir(here)
    if code is None or "Traceback" in err:
        return f"traceback: {err[-1500:]}"
    if code not in (0, 2):
        return f"exit code {code}: {err[-300:]}"
    if world.digest() != before:
        return f"files that are not its own have changed (exit code {code})"
    if code == 0:
        if one.refused and "--help" not in one.arguments:
            return "exit code 0, and what was written was not read"
        return None
    messages = [line for line in err.splitlines() if line.startswith("headwater: ")]
    if len(messages) != 1 and "╭─ Error" not in err and not err.startswith("Error: "):
        return f"{len(messages)} sentences: {err[-300:]}"
    if messages and len(messages[0]) > 10_000:
        return f"a sentence of {len(messages[0])} characters: {messages[0][:300]}"
    return None


def _argument(world, word: str, folder: Path) -> str:
    field, at, place = word.partition("@")
    if at and (not field or field.endswith("=")):
        name, *rest = place.split("/")
        return f"{field}{world.paths[name].joinpath(*rest)}" if name in world.paths else word
    return word.replace("{out}", str(folder / "new"))


def check(world, kind: str, numbers: range, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, hard))
    failed = []
    try:
        for number in numbers:
            folder = tmp_path / str(number)
            folder.mkdir()
            one = case(kind, number, world)
            if why := wrong(world, one, folder):
                failed.append(f"case({kind!r}, {number}): {one.arguments!r:.300} {str(one.damage)[:200]}\n    {why}")
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not failed, f"{len(failed)} of {len(numbers)}\n" + "\n".join(failed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_or_a_sentence(world, kind, tmp_path):
    check(world, kind, range(8), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 11))
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_or_a_sentence_many_times(world, kind, part, tmp_path):
    check(world, kind, range(part * 200, part * 200 + 200), tmp_path)


@pytest.mark.slow
def test_what_measures_too(world, tmp_path):
    check(world, "measuring", range(60), tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", generator.COMMANDS)
@pytest.mark.slow
def test_the_command_lines_that_are_changed_work(world, name, tmp_path):
    code, _, err = _plain(world, generator.COMMANDS[name], tmp_path)
    if name != "export family":  # no such family
        assert code == 0, err


def _plain(world, line, folder):
    here = os.getcwd()
    os.chdir(folder)
    try:
        return run([_argument(world, word, folder) for word in line])
    finally:
        os.chdir(here)
