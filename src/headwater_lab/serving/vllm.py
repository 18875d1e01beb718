"""vLLM's server with a headwater checkpoint."""

import os
import sys
from argparse import ArgumentError, ArgumentParser
from pathlib import Path

import torch

from headwater.engines.pages import check_servable
from headwater.models.load import read_config
from headwater.util.errors import HeadwaterError
from headwater_lab.util.machine import available_memory


def serve_with_vllm(name: str, source: Path, options: list[str]) -> None:
    """Run `vllm serve`, with the settings of a checkpoint on this machine unless they are set explicitly."""
    config = read_config(source)
    check_servable(config)
    names = {option.partition("=")[0].replace("_", "-") for option in options if option.startswith("-")}
    if "--config" in names:
        raise HeadwaterError(
            "With --engine vllm, options override those of a file; pass vLLM's as options, not --config."
        )
    added = ["--served-model-name", name] * ("--served-model-name" not in names)
    if not torch.cuda.is_available():
        # By default vLLM rounds fp32 models to bf16, and reserves nearly all memory.
        dtype = str(config.dtype).rpartition(".")[2]
        added += ["--dtype", dtype] * ("--dtype" not in names and dtype != "None")
        added += ["--enforce-eager"] * (not names & {"--enforce-eager", "--no-enforce-eager"})
        free = int(available_memory() / 4 / _count_processes(options) // 2**30)  # reserved by each of vLLM's processes
        # The variable would override both, and vLLM also takes shortened options.
        sizes = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
        if not any(size.startswith(option) for size in sizes for option in names):
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, free)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the checkpoint is here
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the plugin has not been tested with the new runner
    # `vllm serve` looks up the version of the package vllm, which fails if the installed package is vllm-cpu.
    from vllm.entrypoints.launchers.api_server.entry import main as vllm_server

    sys.argv = ["vllm", "--model", str(source), *added, *options]
    try:
        vllm_server()
    except ValueError as error:  # pydantic wraps the plugin's errors about vLLM's options
        for detail in getattr(error, "errors", list)():
            if isinstance(cause := detail.get("ctx", {}).get("error"), HeadwaterError):
                raise cause from None
        raise


def _count_processes(options: list[str]) -> int:
    """Count the processes requested from vLLM on this machine. An invalid number is left for vLLM to refuse."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--data_parallel_size", "-dp", type=int, default=1)
    parser.add_argument("--data-parallel-size-local", "--data_parallel_size_local", "-dpl", type=int)
    try:
        parsed, _ = parser.parse_known_args(options)
    except ArgumentError:
        return 1
    copies = parsed.data_parallel_size_local or parsed.data_parallel_size
    return max(1, parsed.tensor_parallel_size) * max(1, copies)
