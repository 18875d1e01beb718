"""Reusable worker processes that end with their parent, however it ends.

Both sides are here: `Worker` starts one, and `main` is what it runs. This file runs as a script, so that a worker
watches its parent before it imports anything else, and the parent's script needs no `__main__` guard.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

# A worker's messages: {"ready": true} once it can be called; then for each call {"result": …} or
# {"error": [the exception's type, its message]}. None means that it has ended.
Answer = dict[str, Any] | None


class Worker:
    """A process that calls one function, in its main thread, with the arguments it receives.

    It reads calls from a pipe. If the pipe closes, its parent has ended, and it ends too. Ctrl-C in a terminal
    reaches only the parent, which decides what to do with its workers.
    """

    def __init__(
        self,
        function: str,
        on_answer: Callable[[Worker, Answer], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. function: "module:name"; its arguments and its result are JSON.

        on_answer: called, in a thread, with all its messages. environment: added to that of this process.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
        )
        threading.Thread(target=self._watch_process, args=[on_answer], daemon=True).start()
        self.call(path=list(map(str, sys.path)), function=function)

    def call(self, **arguments: Any) -> None:
        """Call the function; the result goes to `on_answer`."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and `on_answer` will be told
            self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self.process.stdin.flush()

    def _watch_process(self, on_answer: Callable[[Worker, Answer], None]) -> None:
        reader = threading.Thread(target=self._read_answers, args=[on_answer], daemon=True)
        reader.start()
        self.process.wait()
        reader.join(1)  # read its last answer, but do not wait for a child that holds the pipe open
        on_answer(self, None)

    def _read_answers(self, on_answer: Callable[[Worker, Answer], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # an incomplete line means that it was killed while writing
                on_answer(self, json.loads(line))

    @property
    def ending(self) -> str:
        """The exit code or signal, in words."""
        code = self.process.returncode
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def request_stop(self) -> None:
        """Ask the function to save its work; if it cannot, the worker ends."""
        with suppress(OSError):
            self.process.terminate()

    def close(self) -> None:
        """End the worker: cleanly if it waits for a call, at once if it works on one."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self, patience: float = 10.0) -> None:
        """End the worker, allowing this many seconds for a clean exit."""
        try:
            self.close()
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.process.kill()
            self.process.wait()


def show_one_gpu(number: int, gpus: int) -> dict[str, str]:
    """Make the environment of a process that sees only one of the GPUs that this one sees, if there are any."""
    if not gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[number % gpus]}


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends (Linux only).

    parent: its process id; ends this process if that parent has ended already, of which the kernel sends no signal.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent not in (None, os.getppid()):
            os._exit(1)


class _Calls:
    """The calls that come through a pipe. When the parent closes it, this process ends, even during a call.

    queue: the calls' arguments; None when no more will come.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self.pipe, self.queue = pipe, queue.SimpleQueue[dict[str, Any] | None]()
        self.open = 0
        self.lock = threading.Lock()
        threading.Thread(target=self._read_calls, daemon=True).start()

    def _read_calls(self) -> None:
        for line in self.pipe:
            with self.lock:
                self.open += 1
            self.queue.put(json.loads(line))
        if self.open:
            os._exit(1)
        self.queue.put(None)

    def end_call(self) -> None:
        """Note that the last call is about to be answered."""
        with self.lock:
            self.open -= 1


def main() -> None:
    """Serve calls, in the worker."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls = _Calls(os.fdopen(os.dup(0), "rb"))
    answers = os.fdopen(os.dup(1), "wb")
    # Libraries must read empty input, and must not print into the answers.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    with suppress(OSError):
        os.dup2(2, 1)

    def send_answer(answer: dict[str, Any]) -> None:
        calls.end_call()
        with suppress(BrokenPipeError):
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()

    setup = calls.queue.get()
    if setup is None:  # the parent ended before it said anything
        return
    sys.path[:] = setup["path"]
    module, _, name = setup["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    send_answer({"ready": True})
    while (arguments := calls.queue.get()) is not None:
        try:
            answer = {"result": function(**arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        send_answer(answer)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # stopped a second time
        sys.exit(130)
    # Skip the rest of Python's shutdown: tearing down PyTorch's modules takes a second, and nothing is left to save.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
