"""The process that `gpu_queue.bench_gpu` starts for a phase.

The phases of `gpu` need only torch and transformers, so those of `gpu_quality` are imported only for themselves.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

from headwater_lab.bench import gpu
from headwater_lab.bench.gpu_queue import NEEDS
from headwater_lab.util.workers import die_with_parent


def run_phase(name: str, report: str, device: str, deadline: str, inputs: str, parent: str) -> None:
    """Run a phase. deadline: by `time.time`; inputs: JSON; parent: the caller's process id."""
    die_with_parent(int(parent))  # it may have been killed during the imports
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    phase = gpu.Phase(name, Path(report), device, float(deadline) - time.time())
    if name in NEEDS:
        from headwater_lab.api import gpu_quality

        gpu_quality.MEASUREMENTS[name](phase, json.loads(inputs))
    else:
        gpu.MEASUREMENTS[name](phase)


if __name__ == "__main__":
    run_phase(*sys.argv[1:])
