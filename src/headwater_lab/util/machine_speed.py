"""Speed of this machine by measurement, and devices by name."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from headwater.cost.hardware import KNOWN, Hardware, sheet_of
from headwater.util.errors import HeadwaterError, nearest, shown
from headwater.util.precision import Precision
from headwater_lab.util.machine import memory_of

THIS = "this"


def find_hardware(name: str | Hardware) -> Hardware:
    """Look up a device by name, in any case; "this" is measured. Raises `HeadwaterError` for an unknown name."""
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise HeadwaterError(f"hardware must be the name of a device, such as 'H100', not {shown(name)}.")
    if name.lower() == THIS:
        return measure_machine()
    if (device := {label.lower(): device for label, device in KNOWN.items()}.get(name.lower())) is not None:
        return device
    raise HeadwaterError(f"There is no hardware named {name!r}; {nearest(name.upper(), [*KNOWN, THIS])}")


def measure_machine() -> Hardware:
    """Measure this machine, in about 3 s: its first CUDA device, or all CPU threads that PyTorch is set to.

    The best of repeated square matmuls and of copies. Other work on the machine lowers the figures.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    bandwidth = copy_bandwidth(device)
    threads = torch.get_num_threads()
    cpu_name = f"this machine, {threads} CPU thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_properties(device).name if cuda else cpu_name
    half, full, double = (matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    return Hardware(name, half, full, memory_of(device), bandwidth, "measured", flops_fp64=double)


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes/s of the best of repeated copies, which read and write every byte once."""
    length = 2**32 if device.type == "cuda" else 2**28  # long enough to exceed a GPU's cache
    source, target = (torch.ones(length, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * length / best(lambda: target.copy_(source), device)


def peak_of(device: torch.device, precision: Precision) -> float:
    """FLOP/s of matmuls on a device in a precision: by its data sheet if known, otherwise measured in half a second.

    A CPU is measured with the threads PyTorch is set to.
    """
    if device.type == "cuda" and (sheet := sheet_of(torch.cuda.get_device_properties(device).name)) is not None:
        with suppress(HeadwaterError):
            return sheet.peak(precision)
    return matmul_flops(device, precision.compute)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set inside whether matmuls of fp32 on a GPU may round their inputs to TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def matmul_flops(device: torch.device, dtype: torch.dtype, rounded: bool = False) -> float:
    """FLOP/s of the best of repeated square matmuls. rounded: fp32 in TF32 where the device has it."""
    size = 8192 if device.type == "cuda" else 1024
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=draw) for _ in range(2))
    out = torch.empty_like(a)
    with tf32(rounded) if dtype == torch.float32 else nullcontext():
        return 2 * size**3 / best(lambda: torch.mm(a, b, out=out), device)


def best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run, after a warm-up run; half a second of runs, at least two."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < 0.5:
        times.append(_seconds_on_gpu(run, device) if device.type == "cuda" else seconds(run))
    return min(times[1:])


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _seconds_on_gpu(run: Callable[[], object], device: torch.device) -> float:
    """Seconds by the GPU's clock, of a run queued behind another, so that the time of its launch is not part of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def read_bandwidth(device: str) -> float:
    """Measure the bytes/s at which the device's memory is read: the best of repeated long sums."""
    x = torch.ones(2**27 if torch.device(device).type == "cpu" else 2**30, device=device)
    return x.numel() * x.element_size() / best(lambda: float(x.sum()), x.device)
