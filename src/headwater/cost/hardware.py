"""Figures of devices: accelerators by their data sheets, and this machine by measurement."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from headwater.util.errors import HeadwaterError, nearest, shown
from headwater.util.precision import Precision


@dataclass(frozen=True)
class Hardware:
    """One device.

    flops: matmul FLOP/s in bf16, dense, accumulated in fp32. flops_fp32: the same in fp32, without TF32. memory: bytes.
    bandwidth: memory bandwidth in bytes/s. source: the origin of the figures. driver: a pattern for the names that the
    driver gives this device; variants with other figures do not match. flops_fp64: None if unknown.
    """

    name: str
    flops: float
    flops_fp32: float
    memory: float
    bandwidth: float
    source: str
    driver: str = ""
    flops_fp64: float | None = None

    def peak(self, precision: Precision) -> float:
        """FLOP/s of matmuls in a precision. Raises `HeadwaterError` if it is unknown."""
        flops = {torch.float32: self.flops_fp32, torch.float64: self.flops_fp64}.get(precision.compute, self.flops)
        if flops is None:
            raise HeadwaterError(f"The peak of {self.name} in {precision} is unknown; choose another precision.")
        return flops


# bf16 TFLOP/s, fp32 TFLOP/s, GB, GB/s, and fp64 TFLOP/s where matrix units have it. Where a sheet prints sparse tensor
# figures ("with sparsity"), half of them.
KNOWN = {
    name: Hardware(name, half * 1e12, full * 1e12, size * 1e9, rate * 1e9, source, driver, double and double * 1e12)
    for name, half, full, size, rate, double, source, driver in (
        ("A100-40", 312, 19.5, 40, 1555, 19.5, "NVIDIA A100 data sheet, SXM 40 GB", r"A100-(SXM4|PCIE)-40GB"),
        ("A100-80", 312, 19.5, 80, 2039, 19.5, "NVIDIA A100 data sheet, SXM 80 GB", r"A100-SXM4-80GB"),
        ("A100-PCIe", 312, 19.5, 80, 1935, 19.5, "NVIDIA A100 data sheet, PCIe 80 GB", r"A100 80GB PCIe"),
        ("H100", 989.4, 66.9, 80, 3350, 66.9, "NVIDIA H100 data sheet, SXM", r"H100( 80GB HBM3)?"),
        ("H100-PCIe", 756.5, 51.2, 80, 2000, 51.2, "NVIDIA H100 data sheet, PCIe", r"H100 PCIe"),
        ("H100-NVL", 835.5, 60, 94, 3900, 60, "NVIDIA H100 NVL data sheet, one of the pair", r"H100 NVL"),
        ("H200", 989.4, 66.9, 141, 4800, 66.9, "NVIDIA H200 data sheet, SXM", r"H200"),
        ("B200", 2250, 75, 180, 8000, 37, "NVIDIA HGX B200 data sheet, an eighth of the board", r"B200"),
        ("L40S", 362, 91.6, 48, 864, None, "NVIDIA L40S data sheet", r"L40S"),
        ("RTX-4090", 165.2, 82.6, 24, 1008, None, "NVIDIA Ada GPU architecture, appendix A", r"RTX 4090"),
        ("MI300X", 1307.4, 163.4, 192, 5300, 163.4, "AMD Instinct MI300X data sheet", r"MI300X( VF)?"),
    )
}
THIS = "this"


def hardware(name: str | Hardware) -> Hardware:
    """Look up a device by name, in any case; "this" is measured. Raises `HeadwaterError` for an unknown name."""
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise HeadwaterError(f"hardware must be the name of a device, such as 'H100', not {shown(name)}.")
    if name.lower() == THIS:
        return measure()
    if (device := {label.lower(): device for label, device in KNOWN.items()}.get(name.lower())) is not None:
        return device
    raise HeadwaterError(f"There is no hardware named {name!r}; {nearest(name.upper(), [*KNOWN, THIS])}")


def measure() -> Hardware:
    """Measure this machine, in about 3 s: its first CUDA device, or all CPU threads that PyTorch is set to.

    The best of repeated square matmuls and of copies, which read and write every byte once. Memory is the device's, or
    the machine's. Other work on the machine lowers the figures.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    length = 2**32 if cuda else 2**28  # long reads: short ones come from a GPU's cache
    source, target = (torch.ones(length, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * length / best(lambda: target.copy_(source), device)
    threads = torch.get_num_threads()
    cpu_name = f"this machine, {threads} CPU thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_properties(device).name if cuda else cpu_name
    half, full, double = (matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    return Hardware(name, half, full, memory_of(device), bandwidth, "measured", flops_fp64=double)


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sheet_of(driver: str) -> Hardware | None:
    """The data sheet of a device by its driver's name, e.g. "NVIDIA A100-SXM4-80GB"; None if unknown."""
    name = re.sub(r"^(NVIDIA|AMD)( GeForce| Instinct)? ", "", driver)
    return next((device for device in KNOWN.values() if device.driver and re.fullmatch(device.driver, name)), None)


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
