"""Checkpoints: a Hugging Face folder with what training needs to resume.

    runs/NAME/checkpoints/step-000400/
      config.json, model.safetensors, generation_config.json, tokenizer files    load them with from_pretrained
      training.safetensors    optimizer state by parameter name, running sums; with training.ema_decay the trained
                              weights, since model.safetensors has their average
      training.json           the run's progress: step, rows, tokens, …, recipe
      history.json            what was done to the model: trained, grown, … (records.Event)
      SHA256SUMS              of all these files; `sha256sum -c SHA256SUMS` checks them too
    runs/NAME/
      config.json, model.safetensors, tokenizer files, …    the newest checkpoint's model (`publish_model`)

A run whose parameters are sharded (FSDP) writes shard-*.safetensors instead of the two large files, one per process, in
the safetensors format of torch.distributed.checkpoint: any number of processes can resume from them, and `headwater
export` merges them into one model. Nothing is pickled in either format.

A checkpoint is written under a temporary name and renamed, so one with its final name is complete; see `Saver` for how
a run does so. One that no run has written (`write_model`: grown, retrofitted, …) has no training.json; a run can start
from it, but not resume it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.futures import Future as TorchFuture
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from headwater.models.load import (
    CONFIG,
    SHARDS,
    WEIGHTS,
    build_model,
    check_finite,
    check_regular,
    model_type,
    read_config,
    read_json,
    read_object,
    read_weights,
    reading,
    weight_files,
)
from headwater.models.remote_code import add_code
from headwater.models.weights import check_kinds, map_unwrapped_names
from headwater.util.errors import HeadwaterError
from headwater.util.files import (
    STAGING,
    explain_absence,
    explain_disk_errors,
    flush_path,
    read_bytes,
    replace_file,
    sha256_of,
    stage_folder,
)
from headwater_lab.optimization.tensors import local
from headwater_lab.training.optimizers import Average
from headwater_lab.training.processes import first, gathered, recorded, together
from headwater_lab.training.records import RECORD, Event, read_record
from headwater_lab.util.machine import available_memory
from headwater_lab.util.model_kinds import MODEL_TYPES, AnyModel, model_class

if TYPE_CHECKING:  # reading needs none of the trainer's packages
    from lightning_fabric import Fabric

FORMAT_VERSION = 2
# What the names of tensors begin with that are the state of a run, not weights.
OF_RUN = "optimizer.", "running.", "trained."
TENSORS, FACTS, HISTORY, SUMS = "training.safetensors", "training.json", "history.json", "SHA256SUMS"
_REMOVING, _DAMAGED = ".removing-", "damaged-"
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
FOLDER, STAGES = "checkpoints", "stages"
_NAME = re.compile(r"step-(\d+)", re.ASCII)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run it names. Raises `HeadwaterError` if nothing is there."""
    if not path.is_dir():
        raise HeadwaterError(f"{explain_absence(path, 'checkpoint folder')}; name a checkpoint's folder, or a run's.")
    if whole := checkpoints(path):
        return whole[-1]
    has_model = (path / "config.json").exists()
    if has_model and not (path / STAGES).is_dir():
        return path
    if (path / RECORD).is_file():
        record = read_record(path)
        if record.stages:
            last = path / record.stages[-1].folder
            if path.resolve() not in last.resolve().parents:
                raise HeadwaterError(f"The {RECORD} of {str(path)!r} names a stage outside of it: {str(last)!r}.")
            return newest_checkpoint(last)
        if has_model:
            return path
        why = "it diverged" if record.status == "diverged" else f"its status is {record.status!r}"
        raise HeadwaterError(f"The run {str(path)!r} has no checkpoint: {why}.")
    return path


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """A run's progress.

    rows: how many rows of the data's fixed order were used. order: a hash of all these rows in their order.
    seconds: spent in training steps; waited: of these, for data. skipped: steps whose loss or gradient was not finite;
    skipped_last: how many of them were the most recent ones. result: the deciding metric, if evaluated at this step.
    kept: the state of mechanisms that act before each step, by the module's name. data: facts that reveal whether the
    data have changed. run_id: the run's name in Weights & Biases.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    order: str = ""
    seconds: float = 0.0
    waited: float = 0.0
    skipped: int = 0
    skipped_last: int = 0
    result: float | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    run_id: str = ""
    format_version: int = FORMAT_VERSION


def newest_whole(run: Path, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose checksums match; None if there are no checkpoints.

    Newer ones, which are damaged, are renamed to damaged-…, with a warning. Raises `HeadwaterError` if all are damaged,
    or for a checkpoint of another format. Nothing is renamed then.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(run)):
        if (problem := damage(path)) is not None:
            damaged.append((path, problem))
            continue
        read_progress(path)
        for newer, problem in damaged:
            aside = newer.with_name(_DAMAGED + newer.name)
            shutil.rmtree(aside, ignore_errors=True)  # an earlier damaged one of the same step
            newer.rename(aside)
            notice(f"The checkpoint {newer.name} is damaged ({problem}); using the one before it.")
        return path
    if damaged:
        newest, problem = damaged[0]
        raise HeadwaterError(
            f"Every checkpoint in {str(run / FOLDER)!r} is damaged ({newest.name}: {problem}); start a new run with "
            "another --out."
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are unchanged."""
    try:
        lines = read_bytes(path / SUMS).decode("utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        return f"its {SUMS} cannot be read"
    if "config.json" not in sums or any(Path(name).name != name for name in sums):
        return f"its {SUMS} is incomplete"
    for name in sums:
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        with ThreadPoolExecutor(8) as pool:
            actual = pool.map(sha256_of, [path / name for name in sums])
            changed = [name for name, digest in zip(sums, actual, strict=True) if digest != sums[name]]
    except OSError as error:
        return f"its files cannot be read: {error.strerror}"
    return f"{changed[0]} has changed since it was written" if changed else None


def check(path: Path) -> None:
    """Raise `HeadwaterError` if a checkpoint has checksums and they do not match."""
    if not os.path.lexists(path / SUMS):
        return
    if (problem := damage(path)) is not None:
        raise HeadwaterError(f"The checkpoint {str(path)!r} is damaged: {problem}; use the one before it.")


def write_model(
    target: Path,
    model: AnyModel,
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None = None,
    history: Sequence[Event] = (),
    state: dict[str, Tensor] | None = None,
) -> Path:
    """Write a model that is not a run's to a new folder, atomically; returns the folder.

    state: optimizer state by name, for a run that begins with the model and keeps it.
    Raises `HeadwaterError` if the folder is not empty or the disk is full; nothing is left behind.
    """
    target = Path(target)
    weights = model_tensors(model)
    with stage_folder(target) as folder:
        write_parts(folder, model, tokenizer, history, weights, state)
        write_sums(folder, sums_of(folder, [path.name for path in folder.iterdir()]))
    return target


def write_parts(
    folder: Path,
    model: AnyModel,
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None,
    history: Sequence[Event],
    weights: Mapping[str, Tensor] | None,
    state: Mapping[str, Tensor] | None,
) -> None:
    """Everything in a checkpoint except a run's progress.

    weights: by their names in the model; None if the processes write them with the state.
    """
    if weights is not None:
        model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=2**60)  # one file
    else:
        add_code(model.config, folder)
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if state:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / TENSORS)
    (folder / HISTORY).write_text(json.dumps([event.model_dump() for event in history], indent=1))


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Sync these files to the disk; returns their checksums."""
    sums = {}
    for name in names:
        sums[name] = sha256_of(folder / name)
        flush_path(folder / name)
    return sums


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def prune(run: Path, keep: int, lower_is_better: bool) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the best result."""
    whole = checkpoints(run)
    results = {}
    for path in whole:
        with suppress(HeadwaterError):  # damaged, which `newest_whole` reports
            if (result := read_progress(path).result) is not None:
                results[path] = result
    best = (min if lower_is_better else max)(results, key=results.__getitem__, default=None)
    for old in whole[:-keep]:
        if old != best:
            remove(old)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint atomically, so that no part of it is ever taken for one."""
    gone = checkpoint.with_name(_REMOVING + checkpoint.name)
    if gone.exists():  # left by a killed process
        shutil.rmtree(gone)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def tidy(run: Path) -> None:
    """Remove what a killed run was writing or removing in its folder and among its checkpoints."""
    for leftover in run.glob(f"{STAGING}*"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)
    for kind in (STAGING, _REMOVING):
        for leftover in (run / FOLDER).glob(f"{kind}step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def model_tensors(model: AnyModel) -> dict[str, Tensor]:
    """Parameters and buffers by their names in model.safetensors; tied ones once."""
    every = model.state_dict()
    own = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers() if name in every]
    return {name: every[name] for name in own + buffers}


def optimizer_tensors(
    model: AnyModel, optimizers: Sequence[torch.optim.Optimizer], fill: bool = False
) -> dict[str, Tensor]:
    """The optimizers' state by parameter name. Single numbers are [1]: the sharded format has no 0-d tensors.

    fill: before the first step, create state of the right shapes to read into. PyTorch does so by taking a step, so
    the parameters must then be read too. Raises `HeadwaterError` for state that is not a tensor.
    """
    if not fill and not any(optimizer.state for optimizer in optimizers):
        return {}
    tensors = {}
    every: dict[str, Any] = get_optimizer_state_dict(model, list(optimizers))["state"] if optimizers else {}  # type: ignore[assignment]
    for parameter, state in every.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}.{key}"] = value.reshape(1) if value.ndim == 0 else value
            elif value is not None:
                raise HeadwaterError(
                    f"The optimizer's {key!r} is not a tensor and cannot be saved; use another optimizer."
                )
    return tensors


def load_model(path: Path) -> AnyModel:
    """The model of a checkpoint, every tensor checked; eval mode.

    Raises `HeadwaterError` if this is not a headwater model, if the weights do not match its config, or if they are not
    finite.
    """
    kind = model_type(path)
    if kind not in (None, *MODEL_TYPES):
        raise HeadwaterError(f"{str(path)!r} is a {kind} checkpoint; convert it with `headwater retrofit`.")
    config, files = read_config(path), weight_files(path)
    in_shards = files[0].match(SHARDS)
    tensors = _unsharded(path, lambda name: not name.startswith(OF_RUN)) if in_shards else read_weights(files)
    model, found = build_model(model_class(config), config, tensors, path)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(one if isinstance(one, str) else one[0]) for one in found.get(kind) or ())
        if names:
            raise HeadwaterError(
                f"The weights in {str(path)!r} do not match its config.json: {len(names)} {kind.replace('_', ' ')}, "
                f"{names[0]} first; use an intact checkpoint."
            )
    check_finite(model_tensors(model), repr(str(path)))
    return model


def read_progress(path: Path) -> Progress:
    """The progress of the run of checkpoint `path`. Raises `HeadwaterError` for a foreign or newer format."""
    try:
        facts = read_object(path / FACTS)
        version = facts["format_version"]
        if version == FORMAT_VERSION:
            return Progress(**facts)
    except (HeadwaterError, ValidationError, KeyError) as error:
        raise HeadwaterError(f"{str(path)!r} cannot be resumed: its {FACTS} is missing or damaged.") from error
    raise HeadwaterError(
        f"{str(path)!r} has training format {version}, and this headwater reads {FORMAT_VERSION}; "
        "use the version that wrote it."
    )


def restore(
    path: Path,
    model: AnyModel,
    optimizers: Sequence[torch.optim.Optimizer],
    running: dict[str, Tensor],
    distributed: bool,
    average: Average | None = None,
) -> None:
    """Restore parameters, optimizer state and running sums, however many processes wrote them.

    distributed: whether the parameters are sharded; then all processes call it together. average: filled too.
    Raises `HeadwaterError` if a tensor is missing, unknown, or of another shape.
    """
    stepped = any(name.startswith("optimizer.") for name in _stored(path))  # none before the first step not skipped
    targets = optimizer_tensors(model, optimizers, fill=stepped)
    targets |= {f"running.{name}": tensor.view(1) for name, tensor in running.items()}
    if average is not None:
        targets |= average.state
    _read_model(path, model, targets, distributed)
    if average is not None:
        average.swap()  # the file of the model has the average


def begin_with(path: Path, model: AnyModel, optimizers: Sequence[torch.optim.Optimizer], distributed: bool) -> None:
    """Copy a checkpoint's tensors into a fresh model, and its optimizer state into `optimizers`, if given.

    Raises `HeadwaterError` as `restore` does, and if there is no such state.
    """
    stored = _stored(path)
    if optimizers and not any(name.startswith("optimizer.") for name in stored):
        raise HeadwaterError(f"{str(path)!r} holds no optimizer state to keep; leave out start.optimizer_state=keep.")
    state = optimizer_tensors(model, optimizers, fill=True)
    if state.keys() - stored.keys():
        # What growth made anew has been stepped 0 times: its averages are the zeros they were filled with.
        counts = [f"optimizer.{name}.step" for name, _ in model.named_parameters()]
        steps = {name: torch.zeros(1) for name in counts if name in stored}
        _read(path, steps, distributed)
        new = tuple(name.removesuffix("step") for name, count in steps.items() if not count.any())
        state = {name: tensor for name, tensor in state.items() if name in stored or not name.startswith(new)}
    if state.keys() - stored.keys():
        raise HeadwaterError(
            f"{str(path)!r} holds the state of another optimizer, or of part of the model; train with the same "
            "training.optimizer, or leave out start.optimizer_state=keep."
        )
    _read_model(path, model, state, distributed)


def _read_model(path: Path, model: AnyModel, state: dict[str, Tensor], distributed: bool) -> None:
    """Fill the model and `state` in place. The files may have the names that wrappers have changed.

    Raises `HeadwaterError` unless the files hold the model's weights and no others, of the same kind, and for values
    that no run has written: training would seem to diverge.
    """
    stored = {name: known for name, known in _stored(path).items() if not name.startswith(OF_RUN)}
    own, where, weights = model.state_dict(), repr(str(path)), model_tensors(model)
    plain = map_unwrapped_names(stored, where, own)
    if unknown := sorted(name for name, bare in plain.items() if bare not in own):
        raise HeadwaterError(
            f"The weights in {where} do not match its config.json: {len(unknown)} have no place in the model, "
            f"{unknown[0]} first; use an intact checkpoint with its own config."
        )
    check_kinds({plain[name]: known.properties.dtype for name, known in stored.items()}, where, model)
    names = {bare: name for name, bare in plain.items()}
    _read(path, {names.get(name, name): tensor for name, tensor in weights.items()} | state, distributed)
    for name, tensor in (weights | state).items():
        if not name.startswith("running.") and (problem := _find_problem(name, local(tensor))) is not None:
            what = "optimizer state" if name.startswith("optimizer.") else "weights"
            raise HeadwaterError(
                f"The {what} in {str(path)!r} cannot be used: {problem} in {name.removeprefix('optimizer.')!r}; "
                "remove this checkpoint to continue from an earlier one, or start from an intact one."
            )


def _find_problem(name: str, value: Tensor) -> str | None:
    """Why no run has written these values."""
    if not value.is_floating_point():
        return None
    if name.endswith(".exp_avg_sq") and bool((value < 0).any()):
        return "a mean of squares is negative"
    return None if bool(value.isfinite().all()) else "it contains NaN or infinity"


def history_of(path: Path) -> list[Event]:
    """What was done to the model of checkpoint `path`; empty if not recorded. Raises `HeadwaterError`."""
    if not os.path.lexists(path / HISTORY):
        return []
    events = read_json(path / HISTORY)
    with reading(f"The {HISTORY} of {str(path)!r}", "use another checkpoint"):
        return TypeAdapter(list[Event]).validate_python(events)


def optimizer_state(path: Path) -> dict[str, Tensor]:
    """The optimizer state in a checkpoint, unsharded, by name; empty if there is none."""
    return _unsharded(path, lambda name: name.startswith("optimizer."))


def _unsharded(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names are wanted."""
    tensors = {
        name: torch.empty(known.size, dtype=known.properties.dtype)
        for name, known in _stored(path).items()
        if wanted(name)
    }
    if tensors:
        _read(path, tensors, distributed=False)
    return tensors


def _reader(path: Path) -> HuggingFaceStorageReader:
    """Reads only a checkpoint's own tensor files, no others in its folder."""
    check_regular(path)
    files = [file for file in (*weight_files(path), path / TENSORS) if os.path.lexists(file)]
    reader = HuggingFaceStorageReader(str(path))
    reader.fs.ls = lambda _: [str(file) for file in files]  # type: ignore[method-assign, assignment]
    return reader


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors' metadata in a checkpoint. Raises `HeadwaterError` if its files cannot be read or are incomplete."""
    with reading(f"The tensors in {str(path)!r}", "use an intact checkpoint"):
        known: dict[str, Any] = _reader(path).read_metadata().state_dict_metadata
        for name, tensor in known.items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise HeadwaterError(f"{str(path)!r} lacks a part of {name!r}; use an intact checkpoint.")
    return known


def _read(path: Path, targets: dict[str, Tensor], distributed: bool) -> None:
    """Fill `targets` in place. Raises `HeadwaterError` unless the files hold these tensors."""
    stored = _stored(path)
    missing = sorted(targets.keys() - stored.keys())
    if missing:
        raise HeadwaterError(f"{str(path)!r} lacks {len(missing)} tensors of this run, {missing[0]} first.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant so
            dcp.load(targets, storage_reader=_reader(path), no_dist=not distributed)
    except (CheckpointException, SafetensorError, OSError, ValueError, AssertionError, RuntimeError) as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        differ = "size" in last.lower() or "shape" in last.lower()
        what = "holds tensors whose shapes differ from this run's" if differ else "cannot be read"
        raise HeadwaterError(f"{str(path)!r} {what}: {last}") from error


class Saver:
    """Saves checkpoints while training continues. All processes call its methods together.

    A save copies everything to host memory; a thread of the first process then writes, hashes, syncs and renames it,
    while further steps run. There is one checkpoint on its way at a time: the next save waits for it, and so do the end
    of training and a stop. Errors are raised by the training thread, in all processes.

    If the parameters are sharded, each process writes its own part, and all wait until the checkpoint is complete.

    As a context it ends with the thread: a checkpoint on its way is completed first, if an exception does not end the
    process at once, but other processes are not waited for. failure: what went wrong with it then.
    """

    def __init__(self, fabric: Fabric, sharded: bool = False) -> None:
        self.fabric, self.sharded = fabric, sharded
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.host: dict[str, Tensor] = {}  # kept, because fresh memory costs more than the copy
        self.leaving = threading.Event()
        self.failure: BaseException | None = None
        self.saving = False
        """Whether a checkpoint is on its way, the same in all processes."""
        self.work: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether this process's thread has ended a checkpoint that `finish` has not been called for."""
        return self.work is not None and self.work.done()

    def start(
        self,
        target: Path,
        progress: Progress,
        model: AnyModel,
        tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None,
        state: Mapping[str, Tensor],
        *,
        history: Sequence[Event] = (),
        then: Callable[[], None] = lambda: None,
        copy: bool = True,
    ) -> None:
        """Begin a checkpoint at `target`, unless it exists; the one before is finished first.

        state: what training needs besides the model, by name. history: what was done to the model, including this run.
        then: called in the first process at the end. copy: whether the tensors may change before `finish`. Without the
        memory for a copy, this waits until all is written.
        Raises `HeadwaterError` if the disk is full; nothing is lost.
        """
        self.finish()
        if first(self.fabric, target.exists):  # each step is saved once
            return
        weights = model_tensors(model)
        tensors = weights | dict(state)
        facts = json.dumps(asdict(progress), indent=1)
        explain = partial(not_saved, target, progress.step)

        def write(folder: Path, weights: dict[str, Tensor] | None, state: dict[str, Tensor]) -> list[str]:
            """Write all but shards; returns the files' names."""
            self.check()
            write_parts(folder, model, tokenizer, history, weights, state)
            (folder / FACTS).write_text(facts)
            return [file.name for file in folder.iterdir() if not file.match(SHARDS)]

        if self.sharded:
            write_shards(self.fabric, target, tensors, lambda folder: write(folder, None, {}), explain)
            first(self.fabric, then)
            return
        self.saving = True
        if self.fabric.global_rank > 0:
            return
        copies = copy and self.fits(tensors)
        arrived = self.copied(tensors) if copies else None

        def work() -> None:
            with stage_folder(target, explain) as folder:
                if arrived is not None:
                    arrived.synchronize()
                sums: dict[str, str] = {}
                for name in write(folder, {name: tensors.pop(name) for name in weights}, tensors):
                    self.check()
                    sums |= sums_of(folder, [name])
                self.check()
                write_sums(folder, sums)
            then()

        self.work = self.thread.submit(work)
        if not copies:
            wait([self.work])

    def finish(self) -> None:
        """Wait until the checkpoint on its way is complete, if there is one. Raises what went wrong in any process."""
        if self.saving:
            work, self.saving, self.work = self.work, False, None
            with together(self.fabric):
                if work is not None:
                    work.result()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether this machine has the memory for copies of these tensors."""
        fresh = size_of({name: tensor for name, tensor in tensors.items() if not self.has_room(name, tensor)})
        if any(tensor.is_cuda for tensor in tensors.values()):
            fresh *= 2  # page-locked memory is allocated in powers of two
        return fresh <= available_memory()

    def has_room(self, name: str, tensor: Tensor) -> bool:
        there = self.host.get(name)
        return there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype)

    def copied(self, tensors: dict[str, Tensor]) -> torch.cuda.Event | None:
        """Replace tensors by copies on the host; returns the event after which the copies of a GPU's are there.

        Nothing waits for a GPU: it copies before it takes the next step.
        """
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        for name, tensor in tensors.items():
            if not self.has_room(name, tensor):
                self.host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[name] = self.host[name].copy_(tensor.detach(), non_blocking=True)
        return recorded(on_gpu)

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
        if self.work is not None and not isinstance(self.work.exception(), Left):
            self.failure = self.work.exception()


class Left(BaseException):
    """The process ends before a checkpoint is complete."""


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
        folder = first(fabric, lambda: stack.enter_context(stage_folder(target, explain)))
        shard = Shard(str(folder), save_distributed=True)
        with together(fabric), explain_disk_errors(explain):
            try:
                dcp.save(tensors, storage_writer=shard)
            except CheckpointException as error:  # of any process: each raises its own
                if (own := error.failures.get(fabric.global_rank)) is not None:
                    raise own[0] from error
            names = write_rest(folder) if fabric.global_rank == 0 else []
            sums = sums_of(folder, [*shard.names, *names])
        every = {name: digest for part in gathered(fabric, sums) for name, digest in part.items()}
        if fabric.global_rank == 0:
            stack.callback(write_sums, folder, every)
        first(fabric, stack.close)


class Shard(HuggingFaceStorageWriter):
    """This process's part of sharded tensors, in a file of torch.distributed.checkpoint's safetensors format.

    PyTorch plans who writes what. Its own writer would put the whole file together in memory.
    """

    names: Sequence[str] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, Any] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            tensors[item.index.fqn] = part.detach().cpu().contiguous()
            offsets[item.index.fqn] = {"saved_offsets": [*item.tensor_data.chunk.offsets]}
        if tensors:
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(tensors, Path(self.path) / name, metadata)
            self.names = [name]
        written: TorchFuture = TorchFuture()
        written.set_result([])
        return written


def not_saved(target: Path, step: int, problem: str) -> str:
    """The sentence for a checkpoint that could not be written."""
    whole = checkpoints(target.parents[1])
    last = f"the one of step {step_of(whole[-1])} is intact" if whole else "there is none before it"
    return (
        f"The checkpoint of step {step} could not be saved to {str(target.parent)!r}: {problem}; {last}. "
        "Free some space and continue with --resume."
    )


def publish_model(checkpoint: Path, folder: Path) -> None:
    """Put a checkpoint's model at the top of a run's folder, where `from_pretrained` loads it by the run's name.

    The weights are a hard link, which takes no space, or else a copy. All else is copied: programs write small files in
    place, which would change the checkpoint too. Each file is replaced at once. transformers cannot read weights in a
    file per process: then there is no model at the top. Raises `HeadwaterError` if it cannot be written.
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
            with replace_file(target) as beside:
                (_link if is_weights else shutil.copyfile)(file, beside)


def withdraw_model(folder: Path) -> None:
    """Remove the model at the top of a run's folder, if there is one."""
    with explain_disk_errors(lambda problem: f"The model in {str(folder)!r} cannot be removed: {problem}."):
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink(missing_ok=True)


def how_to_load(folder: Path) -> str:
    """A sentence that says how transformers loads the model in a folder."""
    if not (folder / CONFIG).is_file():
        return (
            "Each process has written its part of the weights, which transformers does not read: "
            f"`headwater export {shlex.quote(str(folder))} --out NEW` writes a folder that it loads."
        )
    content = read_object(folder / CONFIG)
    of_images = any("ImageClassification" in str(name) for name in content.get("architectures") or ())
    kind = "AutoModelForImageClassification" if of_images else "AutoModelForCausalLM"
    if "auto_map" in content:  # its code is in the folder
        return f"{kind}.from_pretrained({str(folder)!r}, trust_remote_code=True) loads it."
    after = " after import headwater" if content.get("model_type") in MODEL_TYPES else ""
    return f"{kind}.from_pretrained({str(folder)!r}) loads it{after}."


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
