"""Resources of this machine: devices, threads, memory, a compiler."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import torch

from headwater.cost.hardware import best, memory_of
from headwater.util.errors import HeadwaterError, shown


def usable_device(name: str) -> str:
    """Return the name of a device if tensors on it have readable values. Raises `HeadwaterError` for any other."""
    try:
        torch.zeros(1, device=name).tolist()  # the device "meta" has shapes alone
    except Exception as error:  # each kind of device has its own
        raise HeadwaterError(
            f"PyTorch cannot use the device {shown(name)} here; leave out --device to use what is available."
        ) from error
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
        name = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
        group = Path("/sys/fs/cgroup") / name.lstrip("/")
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(usage["inactive_file"])  # which can be read again
        limit, current = (int((group / file).read_text()) for file in ("memory.max", "memory.current"))
        free.append(limit - current + files)
    return min(free)


def c_compiler() -> str | None:
    """Find the compiler with which Triton builds its launchers: $CC, else gcc, else clang. None: there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


def read_bandwidth(device: str = "cpu") -> float:
    """Measure the bytes/s at which the device's memory is read: the best of repeated long sums."""
    x = torch.ones(2**27 if torch.device(device).type == "cpu" else 2**30, device=device)
    return x.numel() * x.element_size() / best(lambda: float(x.sum()), x.device)
