"""Save checkpoints while training continues.

A save copies everything to host memory; a thread then writes, hashes, syncs and renames it, while further steps run.
There is one checkpoint on its way at a time: the next save waits for it, and so do the end of training and a stop.
Errors are raised by the training thread, in all processes.

If the parameters are sharded, each process writes its own part. Threads never communicate: in each step the processes
tell each other whether their threads are done (`Saver.ready`), and once all are, the training threads exchange the
checksums and the first process's thread completes the checkpoint (`Saver.advance`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.futures import Future as TorchFuture
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from headwater.cost.hardware import available_memory
from headwater.models.kinds import AnyModel
from headwater.util.files import explaining, staged
from headwater_lab.training.checkpoint import (
    FACTS,
    Progress,
    model_tensors,
    size_of,
    sums_of,
    write_parts,
    write_sums,
)
from headwater_lab.training.parallel import first, gathered, together
from headwater_lab.training.places import checkpoints, step_of
from headwater_lab.training.records import Event


class Saver:
    """Writes one checkpoint at a time in another thread. All processes call its methods together.

    As a context it ends with the thread: a checkpoint on its way is completed first, if an exception does not end the
    process at once, but other processes are not waited for. failure: what went wrong with it then.
    """

    def __init__(self, fabric: Fabric, sharded: bool = False, neighbors: int = 1) -> None:
        """sharded: each process writes its own part. neighbors: how many processes of this machine copy theirs."""
        self.fabric, self.sharded, self.neighbors = fabric, sharded, neighbors
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.host: dict[str, Tensor] = {}  # kept, because fresh memory costs more than the copy
        self.leaving = threading.Event()
        self.failure: BaseException | None = None
        self.phase = 0
        """How many pieces of work the threads were given, the same in all processes."""
        self.saving = False
        """Whether a checkpoint is on its way, the same in all processes."""
        self.work: Future[dict[str, str]] | None = None
        self.complete: Callable[[Mapping[str, str]], dict[str, str]] | None = None
        self.staged = ExitStack()

    @property
    def ready(self) -> bool:
        """Whether this process's thread is idle."""
        return self.work is None or self.work.done()

    def start(
        self,
        target: Path,
        progress: Progress,
        model: AnyModel,
        tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None,
        state: Mapping[str, Tensor],
        *,
        history: Sequence[Event] = (),
        then: Callable[[], None] | None = None,
        copy: bool = True,
    ) -> None:
        """Begin a checkpoint at `target`, unless it exists; the one before is finished first.

        state: what training needs besides the model, by name. history: what was done to the model, including this run.
        then: called in the first process at the end. copy: whether the tensors may change before `finish`. Without the
        memory for a copy, this waits until all is written.
        Raises `HeadwaterError` if the disk is full; nothing is lost.
        """
        self.finish()
        fabric, rank = self.fabric, self.fabric.global_rank
        if first(fabric, target.exists):  # each step is saved once
            return
        tensors = model_tensors(model) | dict(state)
        facts = json.dumps(asdict(progress), indent=1)
        explain = partial(not_saved, target, progress.step)
        with ExitStack() as undo:
            # The first process makes the folder, and renames or removes it; all write into it.
            undo.push(self.staged)
            folder = first(fabric, lambda: self.staged.enter_context(staged(target, size_of(tensors), explain)))
            shard = Shard(folder) if self.sharded else None
            if shard is not None:
                with together(fabric), explaining(explain):
                    shard.plan(tensors)
                tensors = shard.tensors
            elif rank > 0:
                tensors = {}
            fits = not copy or all(gathered(fabric, self.fits(tensors)))
            arrived = self.copied(tensors) if copy and fits else None
            names = model_tensors(model).keys()

            def part() -> dict[str, str]:
                """Write this process's files; returns their checksums."""
                with explaining(explain):
                    if arrived is not None:
                        arrived.synchronize()
                    if shard is not None:
                        shard.write(tensors)
                    if rank == 0:
                        self.check()
                        weights = {name: tensor for name, tensor in tensors.items() if name in names}
                        rest = {name: tensor for name, tensor in tensors.items() if name not in names}
                        whole = (None, None) if self.sharded else (weights, rest)
                        write_parts(folder, model, tokenizer, history, *whole)
                        (folder / FACTS).write_text(facts)
                    sums: dict[str, str] = {}
                    for name in written_by(rank, fabric.world_size, folder):
                        self.check()
                        sums |= sums_of(folder, [name])
                    return sums

            def complete(sums: Mapping[str, str]) -> dict[str, str]:
                with self.staged:
                    self.check()
                    write_sums(folder, sums)
                if then is not None:
                    then()
                return {}

            def alone() -> dict[str, str]:
                with self.staged:
                    sums = part()
                    return complete(sums)

            undo.pop_all()
        self.saving, self.complete = True, complete if self.sharded else None
        self.submit(part if self.sharded else None if rank > 0 else alone)
        if not fits:
            self.finish()

    def submit(self, work: Callable[[], dict[str, str]] | None) -> None:
        self.phase += 1
        self.work = None if work is None else self.thread.submit(work)

    def advance(self) -> None:
        """Wait for the threads and give them what comes next. Raises what went wrong in any process."""
        if not self.saving:
            return
        self.saving, complete = False, self.complete
        with ExitStack() as undo:
            undo.push(self.staged)
            with together(self.fabric):
                own = {} if self.work is None else self.work.result()
            if complete is not None:
                sums = {name: digest for part in gathered(self.fabric, own) for name, digest in part.items()}
            undo.pop_all()
        if complete is not None:
            self.saving, self.complete = True, None
            self.submit(partial(complete, sums) if self.fabric.global_rank == 0 else None)

    def finish(self) -> None:
        """Wait until the checkpoint on its way is complete, if there is one. Raises as `advance`."""
        while self.saving:
            self.advance()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether this machine has the memory for its processes' copies of what they write."""
        fresh = size_of({name: tensor for name, tensor in tensors.items() if not self.has_room(name, tensor)})
        if any(tensor.is_cuda for tensor in tensors.values()):
            fresh *= 2  # page-locked memory is allocated in powers of two
        return fresh * self.neighbors <= available_memory()

    def has_room(self, name: str, tensor: Tensor) -> bool:
        there = self.host.get(name)
        return there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype)

    def copied(self, tensors: dict[str, Tensor]) -> torch.cuda.Event | None:
        """Replace tensors by copies on the host; returns the event after which the copies of a GPU's are there.

        Nothing waits for a GPU: it copies before it takes the next step.
        """
        on_gpu = False
        for name, tensor in tensors.items():
            if not self.has_room(name, tensor):
                self.host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[name] = self.host[name].copy_(tensor.detach(), non_blocking=True)
            on_gpu = on_gpu or tensor.is_cuda
        if not on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def check(self) -> None:
        """Give up in the middle if the process is to end at once."""
        if self.leaving.is_set():
            raise Left

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.leaving.set()
        self.thread.shutdown()
        if self.saving:
            if self.work is not None and not isinstance(self.work.exception(), Left):
                self.failure = self.work.exception()
            with suppress(Left), self.staged:  # remove what is not complete
                raise Left


class Left(BaseException):
    """The process ends before a checkpoint is complete."""


class Shard(HuggingFaceStorageWriter):
    """This process's part of sharded tensors, in a file of torch.distributed.checkpoint's safetensors format.

    PyTorch plans who writes what. Its own writer would put the whole file together in memory, and keep other threads
    from running meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self.offsets: dict[str, Any] = {}
        self.name = ""

    def plan(self, tensors: dict[str, Tensor]) -> None:
        """Agree with the other processes on what this one writes: `tensors`."""
        try:
            dcp.save(dict(tensors), storage_writer=self)
        except CheckpointException as error:  # of one process or several
            raise next(iter(error.failures.values()))[0] from error

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture:
        self.name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        for item in plan.items:
            assert item.tensor_data is not None
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            self.tensors[item.index.fqn] = part.detach()
            self.offsets[item.index.fqn] = {"saved_offsets": [*item.tensor_data.chunk.offsets]}
        written: TorchFuture = TorchFuture()
        written.set_result([])
        return written

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        metadata = {"DCP_SHARDING_INFO": json.dumps(self.offsets), "DCP_VERSION": "1.0", "format": "pt"}
        if tensors:
            whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            save_file(whole, self.folder / self.name, metadata)


def written_by(rank: int, world: int, folder: Path) -> list[str]:
    """The names of a process's files in a checkpoint that all of them are writing."""
    # Hidden ones come and go: safetensors writes a file beside its place, and renames it.
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return [name for name in names if writer(name, world) == rank]


def writer(name: str, world: int) -> int:
    """The process that writes a checkpoint's file: shards have its number, the rest is from the first."""
    shard = re.match(r"shard-(\d+)", name)
    rank = int(shard[1]) - 1 if shard else 0
    return rank if rank < world else 0


def not_saved(target: Path, step: int, problem: str) -> str:
    """The sentence for a checkpoint that could not be written."""
    whole = checkpoints(target.parents[1])
    last = f"the one of step {step_of(whole[-1])} is intact" if whole else "there is none before it"
    return (
        f"The checkpoint of step {step} could not be saved to {str(target.parent)!r}: {problem}; {last}. "
        "Free some space and continue with --resume."
    )
