"""Facts about this installation and machine, for a bug report: `headwater doctor`."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from transformers import utils

import headwater
from headwater import kernels
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import first_line
from headwater.util.extras import MODULES, install_command
from headwater.util.layout import package_folder
from headwater.util.processor import describe_cpu
from headwater.util.versions import describe_untested
from headwater_lab.util.machine import available_memory, c_compiler, cores, memory_of

NamedFacts = Iterator[tuple[str, str]]

# Packages that are always installed and that results depend on.
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "pydantic", "typer")
# Package names that differ from module names.
PACKAGE_OF = {"PIL": "pillow", "sklearn": "scikit-learn"}
# Environment variables that change results, speed, or what is found. None of them holds a secret.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
    "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "PYTHONPATH", "PYTHONUTF8", "LANG", "LC_ALL",
)  # fmt: skip


def examine() -> dict[str, dict[str, str]]:
    """Collect facts by section and name: versions, devices, dtypes, kernels, threads, and what is missing.

    A section that fails contains the reason instead of its remaining facts: this must work where other commands do not.
    """
    sections = {
        "headwater": _find_installation,
        "packages": _list_packages,
        "extras": _list_extras,
        "devices": _list_devices,
        "dtypes": _list_dtypes,
        "kernels": _list_kernels,
        "threads": _list_threads,
        "environment": _list_environment,
    }
    report: dict[str, dict[str, str]] = {}
    for title, facts in sections.items():
        section = report[title] = {}
        try:
            for name, fact in facts():
                section[name] = fact
        except Exception as error:
            section["failed"] = f"{type(error).__name__}: {first_line(error)}"
    return report


def _find_installation() -> NamedFacts:
    yield "version", headwater.__version__
    yield "folder", str(package_folder(__name__))
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()


def _list_packages() -> NamedFacts:
    for package in PACKAGES:
        yield package, importlib.metadata.version(package)
    if untested := describe_untested():
        yield "untested", untested


def _list_extras() -> NamedFacts:
    """List the versions of each extra's packages, and what is missing."""
    for extra, modules in MODULES.items():
        versions = {PACKAGE_OF.get(module, module.replace("_", "-")): find_spec(module) for module in modules}
        installed = [f"{name} {_find_version(name)}" for name, spec in versions.items() if spec is not None]
        missing = [name for name, spec in versions.items() if spec is None]
        advice = [f"missing: {', '.join(missing)} (`{install_command(extra)}`)"] if missing else []
        yield extra, "; ".join([", ".join(installed), *advice] if installed else advice)


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the module is importable, but not from an installed package
        return "(version unknown)"


def _list_devices() -> NamedFacts:
    total = memory_of(torch.device("cpu"))
    yield "cpu", f"{describe_cpu()}, {torch.backends.cpu.get_cpu_capability()}"
    yield "cores", f"{cores()} usable of {os.cpu_count()}"
    yield "memory", f"{available_memory() / 1e9:.1f} GB available of {total / 1e9:.1f}"
    yield "PyTorch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip or "cpu"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, capability {gpu.major}.{gpu.minor}"
    if torch.backends.mps.is_available():
        yield "mps", "available"


def _list_dtypes() -> NamedFacts:
    has_tiles = torch.cpu._is_amx_tile_supported()
    is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    yield "bf16 on the cpu", "matrix units (AMX)" if has_tiles else "vector instructions" if is_fast else "emulated"
    if torch.cuda.is_available():
        yield "bf16 on the gpu", "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    yield "fp32 matmul precision", torch.get_float32_matmul_precision()


def _list_kernels() -> NamedFacts:
    yield kernels.VARIABLE, "plain" if kernels.are_disabled() else "measured"
    flash = {version: getattr(utils, f"is_flash_attn_{version}_available", bool)() for version in (2, 3, 4)}
    packages = [f"flash_attention_{version}" for version, is_there in flash.items() if is_there]
    yield "attention", ", ".join(["eager", "sdpa", "matmul", "varlen", "flex_attention", *packages])
    yield "triton", _find_version("triton") if find_spec("triton") else "missing"
    yield "C compiler", c_compiler() or "missing"
    yield "outside mechanisms", ", ".join(MECHANISMS.entry_points) or "none"


def _list_threads() -> NamedFacts:
    yield "in an operation", str(torch.get_num_threads())
    yield "between operations", str(torch.get_num_interop_threads())


def _list_environment() -> NamedFacts:
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
