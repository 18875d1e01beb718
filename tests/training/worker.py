"""What each of several processes does in test_parallel.py: train run after run."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import _dynamo
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule

from headwater.models.compiling import compile_model
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.recipe import parse
from headwater_lab.training import start
from headwater_lab.training.loop import TrainingRun, train
from headwater_lab.util.endings import Interrupted

seeds: list[int] = []
# Before each forward pass, how many parameters have a gradient that is whole in this process.
unsharded: list[int] = []
losses = TrainingRun.compute_losses


def looked_before(self, batch, counted):
    unsharded.append(0)
    for module in self.model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            whole = getattr(parameter, "_unsharded_param", None)
            kept = parameter.unsharded_accumulated_grad, None if whole is None else whole.grad
            unsharded[-1] += any(grad is not None for grad in kept)
    return losses(self, batch, counted)


write_data = HuggingFaceStorageWriter.write_data


def full_at(step: int | None):
    """`write_data`, as on a machine, the second process's, whose disk is full at this step."""

    def writes(self, *args):
        if dist.get_rank() == 1 and f"step-{step:06d}" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_data(self, *args)

    return write_data if step is None else writes


manual_seed = torch.manual_seed


def seeded(seed: int):
    seeds.append(seed)
    return manual_seed(seed)


def main(file: Path) -> None:
    """file: a list of jobs. The environment is as torchrun makes it."""
    torch.manual_seed = seeded
    start.compile_model = partial(compile_model, backend="aot_eager")  # without a C++ compiler, which takes minutes
    TrainingRun.compute_losses = looked_before
    dist.init_process_group("gloo")  # once: processes that part and meet again may meet their former selves
    for job in json.loads(file.read_text()):

        def cut(step, point, job=job):
            if point is None and step == job.get("signal_at"):
                os.kill(os.getpid(), job["signal"])

        HuggingFaceStorageWriter.write_data = full_at(job.get("full_at"))
        seeds.clear()
        _dynamo.reset()
        counters.clear()
        unsharded.clear()
        try:
            train(parse(job["recipe"], "test"), Path(job["out"]), resume=job.get("resume", False), on_event=cut)
        except (HeadwaterError, Interrupted) as error:
            Path(job["out"] + ".said").write_text(str(error))
        except SystemExit:  # the others, when the first has said it
            pass
        graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        Path(f"{job['out']}.graphs-{dist.get_rank()}").write_text(json.dumps(graphs))
        Path(f"{job['out']}.seeds-{dist.get_rank()}").write_text(json.dumps(seeds))
        Path(f"{job['out']}.unsharded-{dist.get_rank()}").write_text(json.dumps(unsharded))
    dist.destroy_process_group()
