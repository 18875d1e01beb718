"""One process or several: Lightning Fabric starts and connects them; this module handles what they must agree on.

    single    one device
    ddp       each process has the whole model; gradients are averaged
    fsdp      FSDP2 (torch.distributed.fsdp.fully_shard): each process keeps its share of every parameter

`torchrun`, SLURM and other launchers that Fabric knows are recognized by their environment variables; otherwise Fabric
starts the other processes of this machine with the command line of the first one, and ends all if any one ends.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.nn.block import Block
from headwater.util.errors import HeadwaterError, first_line
from headwater.util.precision import Precision
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.training_section import Training
from headwater_lab.util.model_kinds import AnyModel
from headwater_lab.util.process import handle_signals
from headwater_lab.util.terminal import counted
from headwater_lab.util.workers import die_with_parent

if TYPE_CHECKING:  # reading a checkpoint needs none of the trainer's packages
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import Strategy

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def connect_processes(recipe: Recipe, run: Path) -> Iterator[Fabric]:
    """Run `make_fabric`; disconnect the processes at the end, unless they were connected before."""
    was_connected = dist.is_initialized()
    try:
        yield make_fabric(recipe, run)
    finally:
        # Some backends abort when Python exits while they are connected.
        if dist.is_initialized() and not was_connected:
            dist.destroy_process_group()


def make_fabric(recipe: Recipe, run: Path) -> Fabric:
    """Start and connect the recipe's processes. Raises `HeadwaterError` if that is impossible."""
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import TensorBoardLogger

    _quiet_fabric()
    training, reporting = recipe.training, recipe.reporting
    to_files = reporting.tensorboard or reporting.wandb is not None
    devices, nodes = count_processes(training)
    world = devices * nodes
    if training.batch_size % world:
        raise HeadwaterError(
            f"training.batch_size={training.batch_size} rows cannot be divided among {world} processes; make it a "
            f"multiple of {world}."
        )
    if world > 1 or training.strategy != "auto":
        _check_launcher(devices, nodes)
    _check_devices(training.device, devices)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent()
    try:
        fabric = Fabric(
            accelerator=training.device,
            strategy=choose_strategy(training, world),
            devices=devices,
            num_nodes=nodes,
            # `build_model` and `autocast_forward` set the precision. Fabric would copy all logits to fp32 for no use.
            precision="32-true",
            loggers=[TensorBoardLogger(run, name="tensorboard", version="")] if to_files else [],
        )
        # While the process waits for others in C++, Python runs no handlers, so signals end it at once.
        with handle_signals(signal.SIG_DFL), _restored_environment():
            if nodes > 1:
                _tell_waiting(fabric, training)
            fabric.launch()
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise HeadwaterError(
            f"The {world} processes of this run did not connect within "
            f"training.timeout_minutes={training.timeout_minutes:g} minutes: "
            f"{first_line(error).rstrip('.')}; start the same command on all {nodes} nodes, with the same MASTER_ADDR "
            "and MASTER_PORT."
        ) from error
    except (RuntimeError, ValueError) as error:
        raise HeadwaterError(
            f"The run's processes, {world} in all, cannot be started: {' '.join(str(error).split())}"
        ) from error
    return fabric


def _quiet_fabric() -> None:
    """Turn off Fabric's messages except which process has failed, which it logs before it ends the others.

    Importing Fabric sets the levels again.
    """
    for name in ("lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    # The oldest supported PyTorch lacks the replacement for this argument.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    warnings.filterwarnings("ignore", message="The `srun` command is available")


def _check_launcher(devices: int, nodes: int) -> None:
    """Raise `HeadwaterError` if the run's processes are neither started by a launcher nor can be started here."""
    from lightning_fabric.plugins.environments import SLURMEnvironment

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if SLURMEnvironment.detect():
        numbers = {"SLURM_NTASKS": devices * nodes, "SLURM_NTASKS_PER_NODE": devices, "SLURM_NNODES": nodes}
        settings = {name: os.environ.get(name, "1" if devices * nodes == 1 else "") for name in numbers}
        if wrong := [f"{name}={settings[name]}" for name, number in numbers.items() if settings[name] != str(number)]:
            raise HeadwaterError(
                f"Slurm has {', '.join(wrong)}, which does not fit training.devices={devices} and "
                f"training.nodes={nodes}; use srun --nodes={nodes} --ntasks-per-node={devices}, or torchrun."
            )
    elif nodes > 1:
        raise HeadwaterError(f"Start the {nodes} nodes of this run with torchrun or srun, or set training.nodes=1.")


def _check_devices(kind: str, count: int) -> None:
    """Raise `HeadwaterError` if this machine has fewer devices of a kind than there are processes for them."""
    available = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind == "auto":
        kind = next((name for name in available if available[name]), "cpu")
    if available.get(kind, count) < count:
        number = available[kind]
        advice = f"set training.devices={number}" if number else "set training.device=cpu"
        raise HeadwaterError(
            f"training.devices={count} needs {counted(count, f'{kind} device')}, and PyTorch finds {number}; {advice}."
        )


def _tell_waiting(fabric: Fabric, training: Training) -> None:
    """Print, once on each machine, what the run waits for."""
    cluster = getattr(fabric.strategy, "cluster_environment", None)
    if cluster is not None and cluster.local_rank() == 0:
        print(
            f"node {cluster.node_rank()}: waiting for all {fabric.world_size} processes of this run at "
            f"{cluster.main_address}:{cluster.main_port}, for at most {training.timeout_minutes} minutes",
            file=sys.stderr,
            flush=True,
        )


def autocast_forward(device: torch.device, training: Training) -> torch.autocast:
    """Set the autocast of a forward pass. FSDP casts to bf16 itself when it gathers the parameters."""
    return training.precision.autocast(device.type, enabled=not is_sharded(training))


def count_processes(training: Training) -> tuple[int, int]:
    """Count the processes on this machine, and the machines: torchrun's, or else the recipe's."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return training.devices, training.nodes
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    return processes, int(os.environ["WORLD_SIZE"]) // processes


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Remove the environment variables that Fabric sets while it starts processes.

    If LOCAL_RANK stayed, the next run in this process would wait for others that nobody starts. Its OMP_NUM_THREADS
    assumes that the run has the machine to itself.
    """
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def is_sharded(training: Training) -> bool:
    """Whether the parameters are split over the processes."""
    return training.strategy == "fsdp"


def choose_strategy(training: Training, world: int) -> Strategy | str:
    """Choose Fabric's strategy. FSDP2 shards the model over the processes."""
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    timeout = timedelta(minutes=training.timeout_minutes)
    if is_sharded(training):
        shard = partial(shard_model, precision=training.precision)
        return ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1, timeout=timeout)
    if world == 1 and training.strategy != "ddp":
        return "auto"
    # Buffers are constants, and gradients need not be held twice.
    return DDPStrategy(timeout=timeout, broadcast_buffers=False, gradient_as_bucket_view=True)


def shard_model(model: AnyModel, mesh: DeviceMesh, precision: Precision) -> AnyModel:
    """Shard the parameters over the processes, one block at a time. Scalars stay unsharded, in fp32, in each process.

    FSDP2 needs one dtype for the parameters it gathers together, and would round scalars with the rest;
    `add_up_scalars` averages their gradients. The model arrives on the meta device and is initialized here, one
    parameter at a time, so no process ever holds more of it than its shard.
    """
    mesh = mesh["data_parallel"]
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.is_mixed else None,
        reduce_dtype=torch.promote_types(precision.weights, torch.float32),
        cast_forward_inputs=False,
    )
    unsharded = set(list_scalars(model))
    # Blocks return views of their results, which are not changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=unsharded)
    model.to_empty(device=f"cuda:{torch.cuda.current_device()}" if mesh.device_type == "cuda" else "cpu")
    initialized: set[nn.Parameter] = set()
    for module in model.modules():
        parameters = set(module.parameters(recurse=False))
        if not parameters or not parameters <= initialized:  # skip a tied table that its first owner has initialized
            model._init_weights(module)
        initialized |= parameters
    return model


def reshard_model(model: nn.Module) -> None:
    """Free the gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def list_scalars(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that are neither cast nor sharded."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, KeepsPrecision)
        for parameter in module.parameters(recurse=False)
    ]


def add_up_scalars(parameters: Sequence[nn.Parameter], world: int) -> None:
    """Average the gradients that FSDP does not handle over the processes, all in one message."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, mean in zip(grads, (flat / world).split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def sum_processes(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, on its own device and in its dtype."""
    if fabric.world_size == 1:
        return tensor
    summed = tensor.to(fabric.device)
    dist.all_reduce(summed)
    return summed.to(tensor.device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def record_event(on_gpu: bool) -> torch.cuda.Event | None:
    """Record the event after which a GPU has done all that was queued so far; None if nothing is on a GPU."""
    if not on_gpu:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Reading:
    """Copy a small tensor to the host, starting now and waiting when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.detach()
        if tensor.is_cuda:
            self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        self.arrival = record_event(tensor.is_cuda)

    def read_values(self) -> list:
        """Read the numbers; wait for the device if they have not arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.copy.tolist()


@contextmanager
def fail_together(fabric: Fabric) -> Iterator[list[Any]]:
    """Do work in each process that all must finish: an error in one ends all.

    Yields a list, which in the end holds what the first process has put into its own. The first process raises
    `HeadwaterError` with the message of the first one that failed; the others end silently. The processes must not
    communicate inside.
    """
    results: list[Any] = []
    error: Exception | None = None
    if fabric.world_size == 1:
        yield results
        return
    try:
        yield results
    except Exception as raised:
        error = raised
    outcomes = gather_values(fabric, (None if error is None else str(error) or type(error).__name__, results))
    results[:] = outcomes[0][1]
    failed = [f"Process {rank}: {message}" for rank, (message, _) in enumerate(outcomes) if message is not None]
    if failed and fabric.global_rank > 0:
        end_process(failed=True)
    if failed:
        raise error or HeadwaterError(failed[0])


def run_in_first(fabric: Fabric, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `do` in the first process, and return its result in all. An error ends all, as in `fail_together`."""
    with fail_together(fabric) as results:
        if fabric.global_rank == 0:
            results.append(do(*args, **kwargs))
    return results[0]


def gather_values(fabric: Fabric, value: T) -> list[T]:
    """Gather the values of all processes, in each of them."""
    values: list[Any] = [value] * fabric.world_size
    if fabric.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def end_process(failed: bool) -> NoReturn:
    """End a process other than the first, after giving the first, which reports for all, time to do so.

    Under a launcher that watches every process, each one's exit code shows the failure; Fabric, which watches if there
    is no launcher, would end the first process before it has reported.
    """
    watched = any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"))
    if failed and watched:
        time.sleep(3)
    raise SystemExit(1 if failed and watched else 0)


def find_lost_process(fabric: Fabric, error: Exception) -> str | None:
    """Find PyTorch's message that another process of the run has ended or cannot be reached; None for other errors."""
    match = _LOST.search(str(error)) if fabric.world_size > 1 and isinstance(error, RuntimeError) else None
    return None if match is None else match.group()


_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|[^.\n]*[Tt]imed? ?out[^.\n]*|NCCL[^.\n]*error[^.\n]*"
)


def is_first() -> bool:
    """Whether this process reports for all: it has rank 0, or there are no others."""
    from lightning_fabric.utilities.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) in (0, None) and int(os.environ.get("LOCAL_RANK", 0)) == 0
