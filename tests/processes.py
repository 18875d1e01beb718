"""The command line in processes of their own that start within milliseconds.

Each is a fork of one process that has imported everything already, where one that starts anew would spend seconds on
imports. What it then runs is the command as it is: it has streams, signals and limits of its own. What happens before
the imports are done cannot be tested so.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import importlib
import importlib.util
import multiprocessing
import multiprocessing.reduction
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import apart
import headwater_lab.training.journal
import headwater_lab.util.workers

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once; the commands import what else they need.
PRELOADED = [
    "headwater_lab.cli", "headwater_lab.training.loop", "headwater_lab.training.trained_models",
    "headwater.conversion.export", "headwater_lab.comparison.running",
]  # fmt: skip
CONTEXT.set_forkserver_preload(PRELOADED)


def begin() -> None:
    """Start the process of which the others are forks: a fork of this one, so that it need not import all anew."""
    for name in PRELOADED:
        importlib.import_module(name)
    ignore_busy_cores()
    resource_tracker.ensure_running()

    def spawn(path: object, arguments: list[str], kept: Sequence[int]) -> int:
        return apart.fork(lambda: exec(arguments[-1], {}), {}, kept)  # what `python -c` would run

    start, forkserver.util.spawnv_passfds = forkserver.util.spawnv_passfds, spawn
    try:
        forkserver.ensure_running()
    finally:
        forkserver.util.spawnv_passfds = start


def ignore_busy_cores() -> None:
    """From now on no run warns of busy cores: tests that count warnings run beside others."""
    headwater_lab.training.journal.read_cpu_wait = lambda: 0.0


class Command:
    """A running command; what it prints is kept in files. With the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        new_session: bool = False,
        call: Callable[..., None] | None = None,
    ) -> None:
        """Start it.

        env: in the place of this process's environment. before: called in the process, before the command; of a
        module. call: what is run in the place of the command line, with the arguments.
        """
        self.folder = tempfile.TemporaryDirectory(prefix="headwater-test-")
        self.files = [Path(self.folder.name) / name for name in ("out", "err")]
        environment = dict(os.environ if env is None else env)
        words = list(arguments) if call else list(map(str, arguments))
        self.process = CONTEXT.Process(
            target=_run, args=(words, self.files, environment, before, new_session, call or _command)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 120) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(f"the command has not ended within {timeout} s: {self.output()}")
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def output(self) -> tuple[str, str]:
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in self.files)
        return out, err

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """(stdout, stderr), when it and whoever else holds these has ended."""
        deadline = time.monotonic() + timeout
        self.wait(timeout)
        while any(_is_open(file) for file in self.files):
            assert time.monotonic() < deadline, "a process outlives the command"
            time.sleep(0.1)
        return self.output()


def run(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """Run a command to its end: (exit code, stdout, stderr). options: those of `Command`."""
    command = Command(*arguments, **options)
    out, err = command.communicate()
    return command.returncode, out, err


class Forked:
    """Stands in for `subprocess.Popen` where `headwater_lab.util.workers` starts a worker: it forks one."""

    started: list[Forked] = []

    def __init__(self, command: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        calls, answers = os.pipe(), os.pipe()
        # With its standard error the worker holds that of its parent open.
        ends = [_Descriptor(number) for number in (calls[0], answers[1], 2)]
        self.process = CONTEXT.Process(target=_work, args=(ends, dict(env)))
        self.process.start()
        os.close(calls[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(calls[1], "wb"), os.fdopen(answers[0], "rb")
        self.pid: int = self.process.pid
        self.returncode: int | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        self.started.append(self)

    def _listen(self) -> None:
        self.process.join()
        self.returncode = self.process.exitcode
        self.ended.set()

    def wait(self, timeout: float | None = None) -> int | None:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGKILL)


def fork_workers() -> None:
    """From now on the workers of this process are forks. In a `Command` that would start another process to fork."""
    headwater_lab.util.workers.subprocess = types.SimpleNamespace(
        Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


class _Descriptor:
    """A file descriptor that goes to the new process with the arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _arrived, (multiprocessing.reduction.DupFd(self.number),)


def _arrived(descriptor: Any) -> int:
    return descriptor.detach()


def _work(ends: list[int], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 0
    try:
        headwater_lab.util.workers.main()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _run(
    arguments: list[Any],
    files: list[Path],
    environment: dict[str, str],
    before: Callable[[], None] | None,
    new_session: bool,
    call: Callable[..., None],
) -> None:
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # also where the tests were started deaf to them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if before is not None:
        before()
    try:
        call(*arguments)
    finally:
        sys.stdout.flush()


def _command(*arguments: str) -> None:
    import headwater_lab.cli
    from headwater_lab.util.process import set_up

    sys.argv = ["headwater", *arguments]
    # What `python -m headwater_lab` has: by it the first of several processes starts the others.
    sys.modules["__main__"] = importlib.util.module_from_spec(importlib.util.find_spec("headwater_lab.__main__"))
    set_up()  # as the import does in a process that is the command line
    try:
        headwater_lab.cli.main()
    finally:
        atexit._run_exitfuncs()


def _is_open(file: Path) -> bool:
    """Whether a process has a file open; as far as /proc tells."""
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # unlike a Path's it bears with processes that end meanwhile
        try:
            if os.path.samefile(link, file):
                return True
        except OSError:
            continue
    return False


def workers_of(parent: int) -> list[int]:
    """The worker processes that a process has started, from the moment on that they exist."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, command = (place / "stat").read_text(), (place / "cmdline").read_text()
            if state.rpartition(")")[2].split()[1] == str(parent) and "workers.py" in command:
                found.append(int(place.name))
    return found


def small_files(limit: int) -> None:
    """What comes before a command on a disk that has room for `limit` bytes in a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
