"""Write checkpoints: a run's while it trains (`Saver`), and models that no run has trained (`write_model`)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from headwater.models.load import CONFIG, SHARDS, WEIGHTS, read_object
from headwater.models.remote_code import add_code
from headwater.util.errors import HeadwaterError
from headwater.util.files import STAGING, explain_disk_errors, flush_path, replace_file, sha256_of, stage_folder
from headwater_lab.training.checkpoints import (
    FACTS,
    FOLDER,
    HISTORY,
    SUMS,
    TENSORS,
    Progress,
    list_checkpoints,
    list_weights,
    read_progress,
    step_of,
)
from headwater_lab.training.processes import fail_together, gather_values, record_event, run_in_first
from headwater_lab.training.records import Event
from headwater_lab.util.machine import available_memory
from headwater_lab.util.model_kinds import MODEL_TYPES, AnyModel

if TYPE_CHECKING:  # reading a checkpoint does not need the trainer's packages
    from lightning_fabric import Fabric

# Prepares a model's inputs, and is saved with it.
Preparer: TypeAlias = PreTrainedTokenizerBase | BaseImageProcessor
_REMOVING = ".removing-"
# Bytes in each file of a shard, besides a larger tensor.
FILE_BYTES = 2**30


def write_model(
    target: Path,
    model: AnyModel,
    preparer: Preparer | None = None,
    history: Sequence[Event] = (),
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model that is not a run's to a new folder, atomically; returns the folder.

    state: optimizer state by name, for a run that begins with the model and keeps it.
    Raises `HeadwaterError` if the folder is not empty or the disk is full; nothing is left behind.
    """
    target = Path(target)
    weights = list_weights(model)
    with stage_folder(target) as folder:
        write_sums(folder, sync_files(folder, write_files(folder, model, preparer, history, weights, state)))
    return target


def write_files(
    folder: Path,
    model: AnyModel,
    preparer: Preparer | None,
    history: Sequence[Event],
    weights: Mapping[str, Tensor] | None,
    state: Mapping[str, Tensor] | None,
    progress: Progress | None = None,
) -> list[str]:
    """Write all files of a checkpoint but shards and checksums; returns their names.

    weights: by their names in the model; None if the processes write them with the state.
    """
    if weights is not None:
        model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=2**60)  # forces a single file
    else:
        add_code(model.config, folder)
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    if preparer is not None:
        # Several chat templates in one file instead of in a folder of their own: checkpoints have no folders.
        several = isinstance(getattr(preparer, "chat_template", None), dict)
        preparer.save_pretrained(folder, **({"save_jinja_files": False} if several else {}))
    if state:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / TENSORS)
    (folder / HISTORY).write_text(json.dumps([event.model_dump() for event in history], indent=1))
    if progress is not None:
        (folder / FACTS).write_text(json.dumps(asdict(progress), indent=1))
    return [file.name for file in folder.iterdir() if not file.match(SHARDS)]


def sync_files(folder: Path, names: Iterable[str], leaving: threading.Event | None = None) -> dict[str, str]:
    """Sync these files to the disk; returns their checksums. leaving: raise `SystemExit` when it is set."""
    sums = {}
    for name in names:
        if leaving is not None and leaving.is_set():
            raise SystemExit
        sums[name] = sha256_of(folder / name)
        flush_path(folder / name)
    return sums


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums of a checkpoint's files by their names."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def prune_checkpoints(run: Path, keep: int, lower_is_better: bool, branch_step: int | None) -> None:
    """Remove all checkpoints but the newest `keep`, the one with the best result, and the one of `branch_step`."""
    paths = list_checkpoints(run)
    results = {}
    for path in paths:
        with suppress(HeadwaterError):  # `find_newest_intact` reports damaged ones
            if (result := read_progress(path).result) is not None:
                results[path] = result
    best = (min if lower_is_better else max)(results, key=results.__getitem__, default=None)
    for path in paths[:-keep]:
        if path == best or step_of(path) == branch_step:
            continue
        doomed = path.with_name(_REMOVING + path.name)  # renamed first, so that no part of it passes for a checkpoint
        if doomed.exists():  # left by a killed process
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(run: Path) -> None:
    """Remove what a killed run was writing or removing in its folder and its checkpoints."""
    for leftover in run.glob(f"{STAGING}*"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)
    for prefix in (STAGING, _REMOVING):
        for leftover in (run / FOLDER).glob(f"{prefix}step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


class Saver:
    """A writer of checkpoints while training continues. All processes call its methods together.

    A save copies everything to host memory; a thread of the first process then writes, hashes, syncs and renames it,
    while further steps run. Only one checkpoint is in progress at a time: the next save waits for it, and so do the end
    of training and a stop. Errors are raised by the training thread, in all processes.

    If the parameters are sharded, each process writes its own part, and all wait until the checkpoint is complete.

    As a context manager it ends with the thread. A checkpoint in progress is completed first, unless an exception ends
    the process at once, but other processes are not waited for. failure: what went wrong with it then.
    """

    def __init__(self, fabric: Fabric, sharded: bool = False) -> None:
        self.fabric, self.sharded = fabric, sharded
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.host: dict[str, Tensor] = {}  # reused, because allocating memory takes longer than copying
        self.leaving = threading.Event()
        self.failure: BaseException | None = None
        self.saving = False
        """Whether a checkpoint is on its way, the same in all processes."""
        self.work: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether this process's thread has ended a checkpoint that `finish_saving` has not been called for."""
        return self.work is not None and self.work.done()

    def start_saving(
        self,
        target: Path,
        progress: Progress,
        model: AnyModel,
        preparer: Preparer | None,
        state: Mapping[str, Tensor],
        *,
        history: Sequence[Event] = (),
        then: Callable[[], None] = lambda: None,
        copy: bool = True,
    ) -> None:
        """Begin a checkpoint at `target`, unless it exists; the previous one is finished first.

        state: what training needs in addition to the model, by name. history: the model's history, including this run.
        then: called in the first process at the end. copy: whether the tensors may change before `finish_saving`.
        Without the memory for a copy, this waits until all is written.
        Raises `HeadwaterError` if the disk is full; nothing is lost.
        """
        self.finish_saving()
        if run_in_first(self.fabric, target.exists):  # save each step only once
            return
        weights = list_weights(model)
        tensors = weights | dict(state)
        write = partial(write_files, model=model, preparer=preparer, history=history, progress=replace(progress))
        explain = partial(describe_failure, target, progress.step)
        if self.sharded:
            write_shards(self.fabric, target, tensors, partial(write, weights=None, state=None), explain)
            run_in_first(self.fabric, then)
            return
        self.saving = True
        if self.fabric.global_rank > 0:
            return
        copies = copy and self.has_memory(tensors)
        arrival = self.copy_to_host(tensors) if copies else None

        def write_checkpoint() -> None:
            with stage_folder(target, explain) as folder:
                if arrival is not None:
                    arrival.synchronize()
                names = write(folder, weights={name: tensors.pop(name) for name in weights}, state=tensors)
                write_sums(folder, sync_files(folder, names, self.leaving))
            then()

        self.work = self.thread.submit(write_checkpoint)
        if not copies:
            wait([self.work])

    def finish_saving(self) -> None:
        """Wait until the checkpoint on its way is complete, if there is one. Raises what went wrong in any process."""
        if self.saving:
            work, self.saving, self.work = self.work, False, None
            with fail_together(self.fabric):
                if work is not None:
                    work.result()

    def has_memory(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether this machine has the memory for copies of these tensors."""
        fresh = sum(tensor.nbytes for name, tensor in tensors.items() if name not in self.host)
        if any(tensor.is_cuda for tensor in tensors.values()):
            fresh *= 2  # page-locked memory is allocated in powers of two
        return fresh <= available_memory()

    def copy_to_host(self, tensors: dict[str, Tensor]) -> torch.cuda.Event | None:
        """Replace tensors by copies on the host; returns the event after which copies of a GPU's have arrived.

        Nothing waits for a GPU: it copies before it takes the next step.
        """
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        for name, tensor in tensors.items():
            if name not in self.host:
                self.host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[name] = self.host[name].copy_(tensor.detach(), non_blocking=True)
        return record_event(on_gpu)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.leaving.set()
        self.thread.shutdown()
        if self.work is not None and not isinstance(self.work.exception(), SystemExit):
            self.failure = self.work.exception()


def write_shards(
    fabric: Fabric,
    target: Path,
    tensors: dict[str, Tensor],
    write_rest: Callable[[Path], list[str]],
    explain: Callable[[str], str],
) -> None:
    """Write a checkpoint whose tensors are sharded. All processes call it together.

    write_rest: called by the first process with the folder; writes all other files and returns their names.
    """
    with ExitStack() as stack:  # the first process makes the folder, and renames or removes it; all write into it
        folder = run_in_first(fabric, lambda: stack.enter_context(stage_folder(target, explain)))
        with fail_together(fabric), explain_disk_errors(explain):
            try:
                # PyTorch puts each file together in memory before it writes it.
                ends = accumulate(tensor.nbytes for tensor in tensors.values())
                files = {
                    name: 1 + end // (FILE_BYTES * fabric.world_size) for name, end in zip(tensors, ends, strict=True)
                }
                dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), files, save_distributed=True))
            except CheckpointException as error:  # every process raises its own error
                if (failure := error.failures.get(fabric.global_rank)) is not None:
                    raise failure[0] from error
            names = write_rest(folder) if fabric.global_rank == 0 else []
            shards = folder.glob(f"shard-{fabric.global_rank + 1:05d}-*")
            sums = sync_files(folder, [*(shard.name for shard in shards), *names])
        by_name = {name: digest for of_process in gather_values(fabric, sums) for name, digest in of_process.items()}
        if fabric.global_rank == 0:
            stack.callback(write_sums, folder, by_name)
        run_in_first(fabric, stack.close)


def describe_failure(target: Path, step: int, problem: str) -> str:
    """Write the sentence for a checkpoint that could not be written."""
    intact = list_checkpoints(target.parents[1])
    previous = f"the one of step {step_of(intact[-1])} is intact" if intact else "there is none before it"
    return (
        f"The checkpoint of step {step} could not be saved to {str(target.parent)!r}: {problem}; {previous}. "
        "Free some space and continue with --resume."
    )


def publish_model(checkpoint: Path, folder: Path) -> None:
    """Put a checkpoint's model at the top of a run's folder, where `from_pretrained` loads it by the run's name.

    The weights are a hard link, which takes no space, or else a copy. All else is copied: programs write small files in
    place, which would change the checkpoint too. Each file is replaced at once. transformers cannot read the shards of
    processes: then there is no model at the top. Raises `HeadwaterError` if it cannot be written.
    """
    if any(checkpoint.glob(SHARDS)):
        withdraw_model(folder)
        return
    with explain_disk_errors(lambda problem: f"The model cannot be written to {str(folder)!r}: {problem}."):
        for file in sorted(checkpoint.iterdir(), key=lambda file: (file.name != WEIGHTS, file.name)):
            target, is_weights = folder / file.name, file.name == WEIGHTS
            if file.name in (TENSORS, FACTS, SUMS) or not file.is_file():
                continue
            if is_weights and target.is_file() and os.path.samefile(file, target):
                continue
            with replace_file(target) as temporary:
                (link_or_copy if is_weights else shutil.copyfile)(file, temporary)


def link_or_copy(file: Path, target: Path) -> None:
    """Make a hard link to a file that nobody changes in place, or a copy where the file system has no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def withdraw_model(folder: Path) -> None:
    """Remove the model at the top of a run's folder, if there is one."""
    with explain_disk_errors(lambda problem: f"The model in {str(folder)!r} cannot be removed: {problem}."):
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink(missing_ok=True)


def how_to_load(folder: Path) -> str:
    """Write a sentence that says how transformers loads the model in a folder."""
    if not (folder / CONFIG).is_file():
        return (
            "Each process has written its part of the weights, which transformers does not read: "
            f"`headwater export {shlex.quote(str(folder))} --out NEW` writes a folder that it loads."
        )
    content = read_object(folder / CONFIG)
    of_images = any("ImageClassification" in str(name) for name in content.get("architectures") or ())
    loader = "AutoModelForImageClassification" if of_images else "AutoModelForCausalLM"
    if "auto_map" in content:  # the model is saved with its code
        return f"{loader}.from_pretrained({str(folder)!r}, trust_remote_code=True) loads it."
    after_import = " after import headwater" if content.get("model_type") in MODEL_TYPES else ""
    return f"{loader}.from_pretrained({str(folder)!r}) loads it{after_import}."
