"""Python code in processes that have imported a few libraries, and nothing of headwater.

They are forks, so that libraries are imported once, which takes seconds. In a run with xdist they are forks of the
process that runs the tests, as it was when it had imported no more. Otherwise a process is started for each call.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# What has been imported, each after those above. The second is most of what transformers' models need.
STAGES = {
    "torch": ["torch"],
    "compiler": ["torch._dynamo", "torch.distributed.tensor", "torch.export"],
    "models": ["transformers.modeling_utils", "transformers.generation"],
}
# Of each stage: where to write calls to a process that has imported it, and where to read its answers.
_servers: dict[str, tuple[IO[Any], IO[Any]]] = {}


def begin() -> None:
    """Fork this process at each stage, before it imports anything else."""
    for stage, libraries in STAGES.items():
        _import(libraries)
        (calls, write), (read, answers) = os.pipe(), os.pipe()
        fork(lambda: _serve(sys.stdin, sys.stdout), {0: calls, 1: answers})
        os.close(calls)
        os.close(answers)
        _servers[stage] = os.fdopen(write, "w"), os.fdopen(read)


def apart(codes: Sequence[str], stage: str = "torch") -> list[tuple[int, str, str]]:
    """Run pieces of Python, each in a process of its own: (exit code, stdout, stderr)."""
    with tempfile.TemporaryDirectory(prefix="headwater-test-") as folder:
        call = json.dumps([list(codes), folder, dict(os.environ), os.getcwd()]) + "\n"
        if stage in _servers:
            calls, answers = _servers[stage]
            calls.write(call)
            calls.flush()
            answer = answers.readline()
        else:
            done = subprocess.run([sys.executable, __file__, stage], input=call, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            answer = done.stdout
        texts = [
            [Path(folder, f"{number}.{name}").read_text(errors="replace") for name in ("out", "err")]
            for number in range(len(codes))
        ]
    return [(code, *both) for code, both in zip(json.loads(answer), texts, strict=True)]


def fork(run: Callable[[], object], descriptors: dict[int, int], kept: Sequence[int] = ()) -> int:
    """Fork a process that runs a function and ends.

    descriptors: what its standard streams are. kept: what else it holds open of all that this process has open.
    """
    gc.collect()
    gc.freeze()  # or the collector would write to, and so copy, all of the memory that both share
    if pid := os.fork():
        return pid
    try:
        for number, descriptor in descriptors.items():
            os.dup2(descriptor, number)
        below = 2
        for number in sorted({*kept, os.sysconf("SC_OPEN_MAX")}):
            os.closerange(below + 1, number)
            below = number
        _stand_alone()
        run()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _import(libraries: Sequence[str]) -> None:
    for library in libraries:
        importlib.import_module(library)


def _stand_alone() -> None:
    """Forget pytest: its streams, that it collects no garbage, and that it looks at all modules that are imported."""
    _streams()
    gc.enable()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]


def _streams() -> None:
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, "w" if number else "r", closefd=False) for number in range(3)
    )


def _serve(calls: IO[str], answers: IO[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when nobody can call any more
    for call in calls:
        codes, folder, environment, place = json.loads(call)
        ended = []
        for number, code in enumerate(codes):
            if not (pid := os.fork()):
                _run(code, f"{folder}/{number}", environment, place)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        answers.write(json.dumps(ended) + "\n")
        answers.flush()


def _run(code: str, files: str, environment: dict[str, str], place: str) -> NoReturn:
    for stream, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    _streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    sys.argv = ["apart"]
    ended = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as stop:
        ended = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        ended = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)


if __name__ == "__main__":
    for _stage, _libraries in STAGES.items():
        _import(_libraries)
        if _stage == sys.argv[1]:
            break
    _serve(sys.stdin, sys.stdout)
