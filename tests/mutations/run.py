"""Makes the mistakes of `mistakes.py` one at a time in a copy of the repository, and runs the tests named for each.

    python tests/mutations/run.py [WORD …] [--files FILE …] [--jobs N]

Words and files choose: only mistakes with one of the words in their names, or that one of the files must notice.

A mistake is caught where a test then fails, and all the tests must pass without one. Exit code 1 where a mistake is
MISSED, or its text does not occur exactly once in the package.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "recipes", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
# A mistake may make a test wait for ever, which is noticed too.
SECONDS = 600
# Imported once, in a process of which those that run the tests are copies: of headwater they import what is mistaken.
PRELOADED = [
    "pytest", "torch", "scipy.stats", "datasets", "lightning_fabric", "pydantic", "typer",
    "transformers.modeling_utils", "transformers.generation", "transformers.cache_utils", "transformers.masking_utils",
]  # fmt: skip


def place_of(mistake: Mistake, root: Path) -> Path | None:
    """The file in which a mistake can be made; None where its text does not occur exactly once in the package."""
    package = root / "src" / "headwater"
    # The references that tests compare with are right by definition.
    files = sorted(path for path in package.rglob("*.py") if not path.is_relative_to(package / "testing"))
    found = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(mistake.old))]
    return found[0] if len(found) == 1 else None


def copy_of_repository(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(root: Path, tests: tuple[str, ...], log: Path) -> None:
    """In a process of its own, which ends with pytest's exit code."""
    os.setsid()
    for number, target in ((1, log), (2, log)):
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "HEADWATER_SPARSE": "1"}
    sys.path[:0] = [str(root / "src")]
    sys.dont_write_bytecode = False
    import pytest

    options = ["-x", "-p", "no:cacheprovider", "-m", "not slow", "--basetemp", str(log.with_suffix(".tmp"))]
    sys.exit(int(pytest.main([*options, *tests])))


def end_of(root: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    """pytest's exit code, None where it took too long, and the end of its output."""
    log = root.with_suffix(".log")
    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("forkserver").Process(target=run_tests, args=(root, tests, log))
    process.start()
    process.join(SECONDS)
    ended = process.exitcode
    with suppress(ProcessLookupError):  # and what it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    shutil.rmtree(log.with_suffix(".tmp"), ignore_errors=True)
    return ended, log.read_text(encoding="utf-8", errors="replace")[-2000:]


_later = itertools.count(int(time.time()) + 1)


def write(path: Path, text: str) -> None:
    """With a time of its own, by which Python tells whether compiled code is of this text."""
    path.write_text(text, encoding="utf-8")
    moment = next(_later)
    os.utime(path, (moment, moment))


def attempt(mistake: Mistake, root: Path) -> str:
    place = place_of(mistake, root)
    if place is None:
        return "MISSED: its text must occur exactly once in the package"
    right = place.read_text(encoding="utf-8")
    write(place, right.replace(mistake.old, mistake.new))
    try:
        code, said = end_of(root, mistake.tests)
    finally:
        write(place, right)
    if code == 1:
        return "caught"
    if code is None:
        return f"caught, by no end within {SECONDS} s"
    return "MISSED" if code == 0 else f"MISSED: pytest ended with {code}, and no test has failed\n{said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--files", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen = [
        one
        for one in MISTAKES
        if not (given.words or given.files)
        or any(word in one.name for word in given.words)
        or any(test.startswith(file) for test in one.tests for file in given.files)
    ]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headwater-mutations-") as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copies.put(copy_of_repository(Path(temporary) / str(number)))

        def work(mistake: Mistake | None) -> bool:
            root, begun = copies.get(), time.monotonic()
            try:
                if mistake is None:
                    name = "no mistake at all"
                    code, said = end_of(root, tuple(dict.fromkeys(test for one in chosen for test in one.tests)))
                    result = "passed" if code == 0 else f"MISSED: the tests fail without a mistake\n{said}"
                else:
                    name, result = mistake.name, attempt(mistake, root)
            finally:
                copies.put(root)
            print(f"{time.monotonic() - begun:5.0f} s  {name}: {result}", flush=True)
            return not result.startswith("MISSED")

        with ThreadPoolExecutor(given.jobs) as pool:
            missed = [*pool.map(work, [*chosen, None])].count(False)
    print(f"{len(chosen)} mistakes, {missed} missed, {(time.monotonic() - started) / 60:.0f} minutes")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
