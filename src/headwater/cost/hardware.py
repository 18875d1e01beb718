"""Figures of accelerators, from their data sheets."""

import re
from dataclasses import dataclass

import torch

from headwater.util.errors import HeadwaterError
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


# bf16 TFLOP/s, fp32 TFLOP/s, GB, GB/s, and fp64 TFLOP/s where matrix units support it. Figures that a data sheet
# gives only with sparsity are halved.
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


def sheet_of(driver: str) -> Hardware | None:
    """The data sheet of a device by its driver's name, e.g. "NVIDIA A100-SXM4-80GB"; None if unknown."""
    name = re.sub(r"^(NVIDIA|AMD)( GeForce| Instinct)? ", "", driver)
    return next((device for device in KNOWN.values() if device.driver and re.fullmatch(device.driver, name)), None)
