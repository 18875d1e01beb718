"""Choice by timing: on a CPU, PyTorch's own form runs unless another was clearly faster on this machine.

What is fast on one processor may be slow on another. So while `generate` runs (`allow_autotuning`), the first use of an
operation (such as a linear layer of some shape, dtype and number of rows) times its forms in turn, which takes about a
tenth of a second. What was fastest is stored for later processes in $XDG_CACHE_HOME/headwater/kernels or
~/.cache/headwater/kernels, in one file per processor, version of PyTorch and number of threads. Without it the timing
is repeated.

Forms round differently, so bits would depend on the clock. Therefore only generation uses the choice: training, its
evaluations and `headwater evaluate` use PyTorch's own forms, here called plain.
"""

import hashlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headwater.kernels import PLAIN, can_autotune
from headwater.util.processor import describe_cpu, read_processor

# Choose another form only if it takes less than this share of plain PyTorch's time.
CLEAR = 0.9
# How often each form is timed: `ROUNDS` times, or `FEWEST` if the operation's timing has taken `LIMIT` seconds.
ROUNDS, FEWEST, LIMIT = 7, 5, 0.1
# A timing is discarded as disturbed by other work if its median exceeds this multiple of its minimum.
STEADY = 1.5
# fp32 numbers read before each run (64 MB) to flush the cache: a decoding model reads its weights from memory.
FLUSH = 2**24


@dataclass
class Choices:
    """The forms that a generation runs, keyed by what distinguishes its operations.

    packs: linear layers whose weights are packed; None if no weight may be.
    """

    forms: dict[Any, Any] = field(default_factory=dict)
    packs: dict[Any, Any] | None = None


# The fastest form by threads and operation, as measured by this process or read from the file.
_fastest: dict[tuple[int, tuple[Any, ...]], str] = {}
_timing = threading.Lock()
# The choices of the generation running in this thread. None: no generation is running. False: choosing is forbidden.
_choices: ContextVar[Choices | bool | None] = ContextVar("choices", default=None)


@contextmanager
def allow_autotuning(pack_weights: bool = False) -> Iterator[None]:
    """Let forms run inside, in this thread, that were measured to be faster than plain PyTorch.

    pack_weights: bfloat16 linear layers may keep a second copy of their weights until the end (`kernels.fused_linear`).
    Raises `HeadwaterError` for an unknown value of HEADWATER_KERNELS.
    """
    allowed = can_autotune() and _choices.get() is not False
    with _set_choices(allowed and Choices(packs={} if pack_weights else None)):
        yield


@contextmanager
def _set_choices(choices: Choices | bool) -> Iterator[None]:
    token = _choices.set(choices)
    try:
        yield
    finally:
        _choices.reset(token)


def forbid_autotuning() -> AbstractContextManager[None]:
    """Make everything inside, in this thread, independent of timings, even generation."""
    return _set_choices(False)


def get_choices() -> Choices | None:
    """The choices of the generation that is running, to look up and extend; None: run plain PyTorch."""
    if torch.compiler.is_compiling():
        return None
    choices = _choices.get()
    if not isinstance(choices, Choices) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    return choices


def find_fastest(operation: tuple[Any, ...], forms: Callable[[], Mapping[str, Callable[[], object]]]) -> str:
    """Find the name of an operation's fastest form on this machine, measured now if unknown.

    operation: its name and everything its time depends on. forms: returns functions by name, one of them "plain".
    """
    threads = torch.get_num_threads()
    if (fastest := _fastest.get((threads, operation))) is not None:
        return fastest
    with _timing:
        name = " ".join(str(fact).removeprefix("torch.") for fact in operation)
        file, functions = _get_file(threads), forms()
        fastest = None if file is None else _read_file(file).get(name)
        if fastest not in [*functions]:
            seconds = _time_forms(functions)
            fastest = min(seconds, key=seconds.__getitem__, default=PLAIN)
            if seconds and seconds[fastest] >= CLEAR * seconds[PLAIN]:
                fastest = PLAIN
            if seconds and file is not None:
                about = {"cpu": describe_cpu(), "torch": torch.__version__, "threads": threads}
                with suppress(OSError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with TemporaryDirectory(dir=file.parent) as folder:  # readers see the old file or the new one
                        fresh = Path(folder, file.name)
                        fresh.write_text(json.dumps(about | {"fastest": _read_file(file) | {name: fastest}}, indent=1))
                        fresh.replace(file)
        return _fastest.setdefault((threads, operation), fastest)


def round_up(count: int) -> int:
    """Round up to a power of 2: counts that round alike share a timing."""
    return 1 << (count - 1).bit_length()


def _time_forms(forms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each form, in seconds; empty if other work on the machine disturbed the timing."""
    begun = time.perf_counter()
    for run in forms.values():  # the first run warms up
        run()
    flush = torch.ones(FLUSH)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(ROUNDS):
        if turn >= FEWEST and time.perf_counter() - begun > LIMIT:
            break
        for name, run in forms.items():
            flush.sum()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    steady = all(statistics.median(seconds) <= STEADY * min(seconds) for seconds in times.values())
    return {name: min(seconds) for name, seconds in times.items()} if steady else {}


def _get_file(threads: int) -> Path | None:
    """Find the file of this machine's timings with this many threads; None if there is no cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # there is no home folder
        folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
        # Everything that timings may depend on.
        facts = [describe_cpu(), torch.__version__, torch.backends.cpu.get_cpu_capability(), threads]
        facts += [
            read_processor().get(name) for name in ("stepping", "flags", "CPU implementer", "CPU part", "Features")
        ]
        facts += map(os.environ.get, ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"))
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return folder / "headwater" / "kernels" / f"{digest[:16]}.json"
    return None


def _read_file(file: Path) -> dict[str, str]:
    """operation -> its fastest form; empty if the file cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        return dict(json.loads(file.read_text(encoding="utf-8"))["fastest"])
    return {}
