"""Choice by timing: on a CPU, PyTorch's own form runs unless another was clearly faster on this machine.

What is fast on one processor may be slow on another. So while `generate` runs (`measured`), the first use of an
operation (such as a linear layer of some shape, dtype and number of rows) times its forms in turn, which takes about a
tenth of a second. The times are stored for later processes in $XDG_CACHE_HOME/headwater/kernels or
~/.cache/headwater/kernels, in one file per processor, version of PyTorch and number of threads. If a file is damaged or
cannot be written, the timing is repeated. HEADWATER_KERNELS=plain switches this off, with all kernels.

Forms round differently, so bits would depend on the clock. Therefore only generation uses the choice: training, its
evaluations and `headwater evaluate` use PyTorch's own forms, here called plain.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.autograd import forward_ad

from headwater.kernels import PLAIN, off

T = TypeVar("T")
# Another form is chosen if it takes less than this share of plain PyTorch's time.
CLEAR = 0.9
# How often each form is timed: `ROUNDS` times, or `FEWEST` if the operation's timing has taken `LIMIT` seconds.
ROUNDS, FEWEST, LIMIT = 7, 5, 0.1
# A timing is discarded as disturbed by other work if its median exceeds this multiple of its minimum.
STEADY = 1.5
# fp32 numbers read before each run (64 MB) to flush the cache: a decoding model reads its weights from memory.
FLUSH = 2**24


@dataclass(frozen=True)
class Timed:
    """The shortest time of each form of an operation, in seconds, none if other work disturbed the timing.

    `best` is the form to run; without times plain PyTorch.
    """

    seconds: Mapping[str, float]

    @cached_property
    def best(self) -> str:
        fastest = min(self.seconds, key=self.seconds.__getitem__, default=PLAIN)
        return fastest if fastest != PLAIN and self.seconds[fastest] < CLEAR * self.seconds[PLAIN] else PLAIN


# (threads, operation) -> the times measured by this process or read from the file.
_known: dict[tuple[int, tuple[Any, ...]], Timed] = {}
_one_at_a_time = threading.Lock()
# The choices of the generation that is running. None: none is running; False: choosing is forbidden.
_generation: ContextVar[dict[Any, Any] | Literal[False] | None] = ContextVar("generation", default=None)


@contextmanager
def having(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, in this thread, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def measured() -> AbstractContextManager[None]:
    """Inside, in this thread, forms that were measured to be faster than plain PyTorch may run.

    They do not run under traces, functorch, forward-mode autograd, dispatch modes such as counters of operations, and
    `torch.use_deterministic_algorithms`.
    Raises `HeadwaterError` for an unknown value of HEADWATER_KERNELS.
    """
    forbidden = (
        off()
        or _generation.get() is False
        or torch.are_deterministic_algorithms_enabled()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
    return having(_generation, False if forbidden else {})


def unmeasured() -> AbstractContextManager[None]:
    """Inside, in this thread, nothing depends on a timing, not even generation."""
    return having(_generation, False)


def remembered() -> dict[Any, Any] | None:
    """The choices of the generation that is running, to look up and extend; None: run plain PyTorch."""
    if torch.compiler.is_compiling():
        return None
    memory = _generation.get()
    if memory is None or memory is False or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    return memory


def timed(operation: tuple[Any, ...], forms: Callable[[], Mapping[str, Callable[[], object]]]) -> Timed:
    """The times of an operation's forms on this machine, measured now if they are not known.

    operation: its name and everything its time depends on. forms: returns functions by name, one of them "plain".
    """
    threads = torch.get_num_threads()
    if (times := _known.get((threads, operation))) is not None:
        return times
    with _one_at_a_time:
        name = " ".join(str(part).removeprefix("torch.") for part in operation)
        file, functions = _file(threads), forms()
        seconds = {} if file is None else _read(file).get(name, {})
        if seconds.keys() != functions.keys():
            seconds = _time(functions)
            if seconds and file is not None:
                _store(file, {"cpu": cpu(), "torch": torch.__version__, "threads": threads}, name, seconds)
        return _known.setdefault((threads, operation), Timed(seconds))


def bucket(count: int, base: int = 2) -> int:
    """The next power of `base`: counts that share a timing."""
    power = 1
    while power < count:
        power *= base
    return power


def _time(forms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each form; empty if other work on the machine disturbed the timing."""
    begun = time.perf_counter()
    for run in forms.values():  # the first run warms up
        run()
    others = torch.ones(FLUSH)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(ROUNDS):
        if turn >= FEWEST and time.perf_counter() - begun > LIMIT:
            break
        for name, run in forms.items():
            others.sum()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    steady = all(statistics.median(each) <= STEADY * min(each) for each in times.values())
    return {name: min(each) for name, each in times.items()} if steady else {}


def _file(threads: int) -> Path | None:
    """The file of this machine's timings with so many threads; None if there is no cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # there is no home folder
        folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
        digest = hashlib.sha256(json.dumps([*_machine(), threads]).encode()).hexdigest()
        return folder / "headwater" / "kernels" / f"{digest[:16]}.json"
    return None


def _read(file: Path) -> dict[str, dict[str, float]]:
    """operation -> form -> seconds; empty if the file cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        stored = json.loads(file.read_text(encoding="utf-8"))["seconds"].items()
        return {
            name: forms for name, forms in stored if all(type(s) is float and 0 < s < math.inf for s in forms.values())
        }
    return {}


def _store(file: Path, about: Mapping[str, Any], name: str, seconds: Mapping[str, float]) -> None:
    """Add a timing to the file, which begins with what it is about, atomically."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=file.parent, prefix=".")
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:
                json.dump({**about, "seconds": _read(file) | {name: seconds}}, stream, indent=1)
            os.replace(beside, file)
        finally:
            Path(beside).unlink(missing_ok=True)


@lru_cache
def _processor() -> dict[str, str]:
    """Linux's facts about the first core; empty elsewhere."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu() -> str:
    """The processor's name, with family and model where known: names alone may be generic."""
    facts = _processor()
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name


def _machine() -> list[str]:
    """Everything except threads that timings may depend on."""
    facts = [_processor().get(fact, "") for fact in ("stepping", "flags", "CPU implementer", "CPU part", "Features")]
    limits = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")]
    return [cpu(), torch.__version__, torch.backends.cpu.get_cpu_capability(), *facts, *limits]
