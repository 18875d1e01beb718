"""Resources of this machine: devices, threads, memory, a compiler."""

import ctypes
import os
import platform
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import parameters
from headwater.util.errors import HeadwaterError, shown


def cores() -> int:
    """CPU cores this process may use, within its container's limit of CPU time (Linux)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError, LookupError):
        quota, period = (int(number) for number in _read_group_file("cpu.max").split())
        usable = min(usable, max(1, quota // period))
    return usable


def name_cores() -> tuple[str, tuple[int, ...]]:
    """Name this machine and the cores that this process may use. Processes with the same name share them."""
    return platform.node(), tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def free_cores(seconds: float = 0.3) -> int:
    """Count the usable cores that other processes leave idle during `seconds`; at least 1. Without Linux, all."""
    try:
        before = _read_idle_seconds()
        time.sleep(seconds)
        idle = (_read_idle_seconds() - before) / seconds
    except (OSError, ValueError, LookupError):
        return cores()
    return max(1, min(cores(), round(idle)))


def _read_idle_seconds() -> float:
    """Read how long the cores this process may use have been idle since the machine started, summed."""
    names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return sum(int(row[4]) + int(row[5]) for row in rows if row[0] in names) / os.sysconf("SC_CLK_TCK")


def read_cpu_wait() -> float:
    """Read the seconds that this process's threads were ready to run but had no core, summed. Without Linux, 0."""
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, LookupError):  # the thread may just have ended
            waited += int(path.read_text().split()[1])
    return waited / 1e9


def choose_threads(sharing: int) -> int:
    """Choose how many threads PyTorch computes with on a CPU: its own number, or fewer if other processes are busy.

    sharing: how many processes, with this one, call this at the same time to divide the cores.

    Threads of one operation wait for each other. If one has no core, all wait, and a step can take ten times as long.
    A number that the user has set in the environment stays.
    """
    threads = torch.get_num_threads()
    if threads == 1 or {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return threads
    return min(threads, max(1, free_cores() // sharing))


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` for a model that this machine cannot hold in fp32, before it is built."""
    count = sum(parameters(config).values())
    memory = memory_of(torch.device("cpu"))
    if count * 4 > memory:
        raise HeadwaterError(
            f"The model would have {count:,} parameters, {count * 4 / 1e9:,.0f} GB, but this machine has "
            f"{memory / 1e9:,.0f} GB of memory; choose a smaller model."
        )


def usable_device(name: str) -> str:
    """Return the name of a device if tensors on it have readable values. Raises `HeadwaterError` for any other."""
    try:
        torch.zeros(1, device=name).tolist()  # fails on the device "meta", whose tensors have no values
    except Exception as error:  # each kind of device raises errors of its own
        raise HeadwaterError(f"PyTorch cannot use the device {shown(name)} here; leave out --device.") from error
    return name


def set_threads(count: int) -> None:
    """Let PyTorch compute with `count` CPU threads. Raises `HeadwaterError` if so many cannot be started.

    The libraries below PyTorch end the process if a thread cannot be started, so this is tried first.
    """
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count - 1):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise HeadwaterError(
            f"Only {len(started) + 1} of {count} threads can be started here; set training.threads lower, or raise the "
            "limit (ulimit -u)."
        ) from error
    finally:
        done.set()
        for thread in started:
            thread.join()
    torch.set_num_threads(count)


def available_memory() -> float:
    """Count the bytes of memory that this process could still take, within its container's limit (Linux).

    Elsewhere all of the machine's memory.
    """
    free = [memory_of(torch.device("cpu"))]
    with suppress(OSError, ValueError, LookupError):
        memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(int(memory["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError, LookupError):
        usage = dict(line.split() for line in _read_group_file("memory.stat").splitlines())
        files = int(usage["inactive_file"])  # the page cache can be dropped
        limit, current = (int(_read_group_file(file)) for file in ("memory.max", "memory.current"))
        free.append(limit - current + files)
    return min(free)


def _read_group_file(name: str) -> str:
    """Read a file of this process's control group."""
    group = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
    return (Path("/sys/fs/cgroup") / group.lstrip("/") / name).read_text()


def c_compiler() -> str | None:
    """Find the compiler with which Triton builds its launchers: $CC, else gcc, else clang. None: there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


# Bytes of freed memory that a process keeps, and at most of its program: Python, PyTorch and the data's tables.
KEPT_BYTES, PROGRAM_BYTES = 2**31 - 1, 10**9


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees, up to `KEPT_BYTES`, where the C library is glibc.

    By default glibc gives it back at the end of a training step, and the next step's page faults take up to 4 % of its
    time. Settings of the user in the environment stay.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Set both: setting one stops glibc from adapting the other, which would stay at its small default.
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum: what is larger is always given back
        mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD
