"""The measured figures on a page: its `headwater bench …` commands, run again, and their output written into it.

A block of the page is a command, a line that says on what and when it ran, and what it printed:

    ```
    $ headwater bench forms
    # AMD EPYC (family 25, model 17), 2 threads; torch 2.11.0, headwater 0.1.0 at 1234567; 2026-11-22, 60 s
    …
    ```

A block without the second line has never been run. A command may have one block for each CPU.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

import headwater
from headwater.errors import HeadwaterError, shown
from headwater.files import absence
from headwater.layout import RUN
from headwater.outputs import write_document
from headwater.reading import reading

# The Python code that is given the words after `headwater bench`.
BENCH = [*RUN, "bench"]
_BLOCK = re.compile(r"^```\n\$ headwater bench (.+)\n(?:# (.+)\n)?((?:(?!```|\$ ).*\n)*)```$", re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """command: without `headwater bench`. made: on what and when it ran, or "". printed: its output."""

    command: str
    made: str
    printed: str

    def __str__(self) -> str:
        made = f"# {self.made}\n" if self.made else ""
        return f"```\n$ headwater bench {self.command}\n{made}{self.printed}```"

    @property
    def cpu(self) -> str:
        """The processor's name, without the number of threads; "" if it never ran."""
        return re.sub(r", \d+ threads?$", "", self.made.partition("; ")[0])


def blocks(page: str) -> list[Measured]:
    """The blocks of a page, in order."""
    return [Measured(*(part or "" for part in found.groups())) for found in _BLOCK.finditer(page)]


def with_block(page: str, new: Measured) -> str:
    """The page with `new` in place of its command's block from the same CPU, or of one never run; else after them."""
    same = [block for block in blocks(page) if block.command == new.command]
    if not same:
        raise HeadwaterError(f"The page no longer has the command {shown('headwater bench ' + new.command)}.")
    for old in same:
        if old.cpu in ("", new.cpu):
            return page.replace(str(old), str(new), 1)
    return page.replace(str(same[-1]), f"{same[-1]}\n\n{new}", 1)


def bench_page(
    page: Path, *, cpu: str, only: Iterable[str] = (), tell: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Run the page's commands one after the other, each in its own process, and write each output at once.

    A command whose block was made on this CPU, by this version of PyTorch and of the package, is not run again: an
    interrupted run continues where it was. With changes that are not committed, all are.

    cpu: the name of the processor, and the number of threads. only: run only commands that contain one of these texts,
    whenever they ran. Returns the commands that failed; their blocks stay. Raises `HeadwaterError` for a page that
    cannot be read or has no such command.
    """
    text = _text(page)
    commands = list(dict.fromkeys(block.command for block in blocks(text)))
    chosen = [command for command in commands if not only or any(part in command for part in only)]
    if not chosen:
        what = f"containing {' or '.join(map(shown, only))}" if only else "in a code block"
        raise HeadwaterError(f"{str(page)!r} has no command '$ headwater bench …' {what}.")
    words = {command: _words(command) for command in chosen}
    code, committed = _code()
    here = f"{cpu}; torch {torch.__version__}, headwater {code}; "
    failed = []
    for command in chosen:
        made = [block.made for block in blocks(text) if block.command == command]
        if not only and committed and any(line.startswith(here) for line in made):
            tell(f"headwater bench {command}: as measured")
            continue
        tell(f"headwater bench {command}")
        printed, how = _run(words[command])
        if printed is None:
            failed.append(f"headwater bench {command}")
            continue
        tell(how)
        new = Measured(command, f"{here}{date.today()}, {how}", printed)
        write_document(page, with_block(_text(page), new))  # read again: someone may be editing it
    return failed


def _text(page: Path) -> str:
    if not page.is_file():
        raise HeadwaterError(f"{absence(page, 'file')}; name a page, such as docs/speed.md.")
    with reading(repr(str(page)), "use a UTF-8 text file"):
        return page.read_text(encoding="utf-8")


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise HeadwaterError(f"{shown('headwater bench ' + command)} is not a command: {error}.") from None
    if "page" in words[:1]:
        raise HeadwaterError("A page cannot run `headwater bench page`; remove that command from it.")
    return words


def _run(words: list[str]) -> tuple[str | None, str]:
    """What a benchmark prints, None if it fails; and how long it took, with what else the machine did."""
    cores, started, own = _cores(), time.monotonic(), os.times()
    ran = subprocess.run([sys.executable, *BENCH, *words], stdout=subprocess.PIPE, encoding="utf-8")
    how, now, used = f"{time.monotonic() - started:.0f} s", _cores(), os.times()
    if cores is not None and now is not None and now[1] > cores[1]:
        spent = used.children_user + used.children_system - own.children_user - own.children_system
        others = max(0.0, now[0] - cores[0] - spent) / (now[1] - cores[1])
        how += f", other work {others:.0%} of the cores' time"
    lines = [line.rstrip() for line in ran.stdout.strip().splitlines()]
    return ("".join(f"{line}\n" for line in lines) if ran.returncode == 0 else None), how


def _cores() -> tuple[float, float] | None:
    """Seconds since the machine started that its cores have worked, and that have passed, all cores together."""
    with suppress(OSError, ValueError):
        user, nice, system, idle, waiting, *others = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        worked = user + nice + system + sum(others)
        tick = os.sysconf("SC_CLK_TCK")
        return worked / tick, (worked + idle + waiting) / tick
    return None


def _code() -> tuple[str, bool]:
    """The version of the package, in a clone with the last commit that changed it; and whether that is all of it."""
    folder = Path(headwater.__file__).parent

    def git(*words: str) -> str:
        with suppress(OSError):
            return subprocess.run(["git", *words, "--", "."], cwd=folder, capture_output=True, text=True).stdout.strip()
        return ""

    version, commit = headwater.__version__, git("log", "-1", "--format=%h")
    if not commit:
        return version, True
    changed = bool(git("status", "--porcelain"))
    return f"{version} at {commit}" + (" with changes" if changed else ""), not changed
