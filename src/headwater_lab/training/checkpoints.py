"""Checkpoints: a Hugging Face folder with the state that training needs to resume.

    runs/NAME/checkpoints/step-000400/
      config.json, model.safetensors, generation_config.json, tokenizer files    load them with from_pretrained
      training.safetensors    optimizer state by parameter name, running sums; with training.ema_decay the trained
                              weights, since model.safetensors has their average
      training.json           the run's progress: step, rows, tokens, …, recipe
      history.json            what was done to the model: trained, grown, … (records.Event)
      SHA256SUMS              of all these files; `sha256sum -c SHA256SUMS` checks them too
    runs/NAME/
      config.json, model.safetensors, tokenizer files, …    the newest checkpoint's model (`saving.publish_model`)

A run whose parameters are sharded (FSDP) writes shard-*.safetensors instead of the two large files: each process its
own, of about 1 GB, in the safetensors format of torch.distributed.checkpoint. Any number of processes can resume from
them, and `headwater export` merges them into one model. Nothing is pickled in either format.

A checkpoint is written under a temporary name and renamed, so one with its final name is complete; see `saving.Saver`
for how a run does so. A checkpoint from outside a run (`saving.write_model`: grown, retrofitted, …) has no
training.json: a run can start from it, but not resume it.
"""

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from headwater.models.load import (
    CONFIG,
    SHARDS,
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
from headwater.models.weights import check_dtypes, map_unwrapped_names
from headwater.util.errors import HeadwaterError
from headwater.util.files import explain_absence, read_bytes, sha256_of
from headwater_lab.optimization.tensors import local_shard
from headwater_lab.training.optimizers import Average
from headwater_lab.training.records import RECORD, Event, read_record
from headwater_lab.util.model_kinds import MODEL_TYPES, AnyModel, model_class

FORMAT_VERSION = 2
# Prefixes of tensors that are a run's state and not weights.
OF_RUN = "optimizer.", "running.", "trained."
TENSORS, FACTS, HISTORY, SUMS = "training.safetensors", "training.json", "history.json", "SHA256SUMS"
_DAMAGED = "damaged-"
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
FOLDER, STAGES = "checkpoints", "stages"
_NAME = re.compile(r"step-(\d+)", re.ASCII)


def list_checkpoints(run: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""
    folders = [path for path in (run / FOLDER).glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(path: Path) -> Path:
    """Return `path` itself, or the newest checkpoint of the run it names. Raises `HeadwaterError` if there is none."""
    if not path.is_dir():
        raise HeadwaterError(f"{explain_absence(path, 'checkpoint folder')}; name a checkpoint's folder, or a run's.")
    if checkpoints := list_checkpoints(path):
        return checkpoints[-1]
    has_model = (path / CONFIG).exists()
    if (path / RECORD).is_file() and (not has_model or (path / STAGES).is_dir()):
        record = read_record(path)
        if record.stages:
            stage = path / record.stages[-1].folder
            if path.resolve() not in stage.resolve().parents:
                raise HeadwaterError(f"The {RECORD} of {str(path)!r} names a stage outside of it: {str(stage)!r}.")
            return newest_checkpoint(stage)
        if not has_model:
            reason = "it diverged" if record.status == "diverged" else f"its status is {record.status!r}"
            raise HeadwaterError(f"The run {str(path)!r} has no checkpoint: {reason}.")
    return path


def step_of(path: Path) -> int:
    """Read the step from the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


@dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """A run's progress.

    rows: the number of used rows in the data's fixed order. order: a hash of all these rows in their order.
    seconds: spent in training steps; waited: of these, for data. skipped: steps whose loss or gradient was not finite;
    skipped_last: the number of most recent steps that were skipped. result: the deciding metric, if evaluated at this
    step. kept: the state of mechanisms that act before each step, by the module's name. optimizer: what
    `read_group_numbers` returns. data: facts that reveal whether the data have changed. run_id: the run's name in
    Weights & Biases. threads: CPU threads of an operation. trunk: of a branch, the fields of `records.Trunk`.
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
    optimizer: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    run_id: str = ""
    threads: int = 0
    trunk: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION


def find_newest_intact(run: Path, notice: Callable[[str], None]) -> Path | None:
    """Find the newest checkpoint whose checksums match; None if there are no checkpoints.

    Newer ones, which are damaged, are renamed to damaged-…, with a warning. Raises `HeadwaterError` if all are damaged,
    or for a checkpoint of another format. Nothing is renamed then.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(run)):
        if (problem := find_damage(path)) is not None:
            damaged.append((path, problem))
            continue
        read_progress(path)
        for newer, problem in damaged:
            target = newer.with_name(_DAMAGED + newer.name)
            shutil.rmtree(target, ignore_errors=True)  # an earlier damaged one of the same step
            newer.rename(target)
            notice(f"The checkpoint {newer.name} is damaged ({problem}); using the one before it.")
        return path
    if damaged:
        newest, problem = damaged[0]
        raise HeadwaterError(
            f"Every checkpoint in {str(run / FOLDER)!r} is damaged ({newest.name}: {problem}); start a new run with "
            "another --out."
        )
    return None


def find_damage(path: Path) -> str | None:
    """Describe what is wrong with the files of a checkpoint; None if they are unchanged."""
    try:
        lines = read_bytes(path / SUMS).decode("utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        return f"its {SUMS} cannot be read"
    if CONFIG not in sums or any(Path(name).name != name for name in sums):
        return f"its {SUMS} is incomplete"
    for name in sums:
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        with ThreadPoolExecutor(8) as pool:
            digests = pool.map(sha256_of, [path / name for name in sums])
            changed = [name for name, digest in zip(sums, digests, strict=True) if digest != sums[name]]
    except OSError as error:
        return f"its files cannot be read: {error.strerror}"
    return f"{changed[0]} has changed since it was written" if changed else None


def check_sums(path: Path) -> None:
    """Raise `HeadwaterError` if a checkpoint has checksums and they do not match."""
    if os.path.lexists(path / SUMS) and (problem := find_damage(path)) is not None:
        raise HeadwaterError(f"The checkpoint {str(path)!r} is damaged: {problem}; use the one before it.")


def list_weights(model: AnyModel) -> dict[str, Tensor]:
    """List parameters and buffers by their names in model.safetensors; tied ones once."""
    state = model.state_dict()
    parameters = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers() if name in state]
    return {name: state[name] for name in parameters + buffers}


def optimizer_tensors(
    model: AnyModel, optimizers: Sequence[torch.optim.Optimizer], fill: bool = False
) -> dict[str, Tensor]:
    """List the optimizers' state by parameter name. Single numbers are [1]: the sharded format has no 0-d tensors.

    fill: before the first step, create state of the right shapes to read into. PyTorch does so by taking a step, so
    the parameters must then be read too. Raises `HeadwaterError` for state that is neither a tensor nor a number.
    """
    if not optimizers or not (fill or any(optimizer.state for optimizer in optimizers)):
        return {}
    tensors = {}
    states: dict[str, Any] = get_optimizer_state_dict(model, list(optimizers))["state"]  # type: ignore[assignment]
    for parameter, state in states.items():
        for key, value in state.items():
            if type(value) in (int, float):
                value = torch.tensor([value], dtype=torch.int64 if type(value) is int else torch.float64)
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}.{key}"] = value.reshape(1) if value.ndim == 0 else value
            elif value is not None:
                raise HeadwaterError(
                    f"The optimizer's {key!r} is a {type(value).__name__} and cannot be saved; use another optimizer."
                )
    return tensors


def _put_back_numbers(
    model: AnyModel, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Put the numbers among an optimizer's state, which `optimizer_tensors` lists as tensors, back where they were."""
    for optimizer in optimizers:
        for parameter_name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if type(value) in (int, float) and (name := f"optimizer.{parameter_name}.{key}") in tensors:
                    state[key] = type(value)(tensors[name].item())


def load_model(path: Path) -> AnyModel:
    """Load the model of a checkpoint, every tensor checked, in eval mode.

    Raises `HeadwaterError` if this is not a headwater model, if the weights do not match its config, or if they are not
    finite.
    """
    kind = model_type(path)
    if kind not in (None, *MODEL_TYPES):
        raise HeadwaterError(f"{str(path)!r} is a {kind} checkpoint; convert it with `headwater retrofit`.")
    config, files = read_config(path), weight_files(path)
    if files[0].match(SHARDS):
        tensors = _read_unsharded(path, lambda name: not name.startswith(OF_RUN))
    else:
        tensors = read_weights(files)
    model, info = build_model(model_class(config), config, tensors, path)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(entry if isinstance(entry, str) else entry[0]) for entry in info.get(problem) or ())
        if names:
            raise HeadwaterError(
                f"The weights in {str(path)!r} do not match its config.json: {len(names)} {problem.replace('_', ' ')}, "
                f"{names[0]} first; use an intact checkpoint."
            )
    check_finite(list_weights(model), repr(str(path)))
    return model


def read_progress(path: Path) -> Progress:
    """Read the progress of the run of checkpoint `path`. Raises `HeadwaterError` for a foreign or newer format."""
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


def restore_run(
    path: Path,
    model: AnyModel,
    optimizers: Sequence[torch.optim.Optimizer],
    running: dict[str, Tensor],
    distributed: bool,
    average: Average | None = None,
) -> None:
    """Restore parameters, optimizer state and running sums, however many processes wrote them.

    distributed: whether the parameters are sharded; then all processes call it together. average: also filled.
    Raises `HeadwaterError` if a tensor is missing, unknown, or of another shape.
    """
    # Optimizers have no state if every step so far was skipped.
    stepped = any(name.startswith("optimizer.") for name in _read_metadata(path))
    targets = optimizer_tensors(model, optimizers, fill=stepped)
    targets |= {f"running.{name}": tensor.view(1) for name, tensor in running.items()}
    if average is not None:
        targets |= average.state
    _read_model(path, model, targets, distributed)
    _put_back_numbers(model, optimizers, targets)
    if average is not None:
        average.swap()  # model.safetensors holds the average, so exchange it with the trained weights


def begin_with(path: Path, model: AnyModel, optimizers: Sequence[torch.optim.Optimizer], distributed: bool) -> None:
    """Copy a checkpoint's tensors into a fresh model, and its optimizer state into `optimizers`, if given.

    With that state come the weights that it is of, not their average.
    Raises `HeadwaterError` as `restore_run` does, and if there is no such state.
    """
    stored = _read_metadata(path)
    if optimizers:
        _check_kept(path, stored)
    state = optimizer_tensors(model, optimizers, fill=True)
    if state.keys() - stored.keys():
        # Parameters that growth added have been stepped 0 times. Their averages keep the zeros they were filled with.
        counts = [f"optimizer.{name}.step" for name, _ in model.named_parameters()]
        steps = {name: torch.zeros(1) for name in counts if name in stored}
        _fill_tensors(path, steps, distributed)
        new = tuple(name.removesuffix("step") for name, count in steps.items() if not count.any())
        state = {name: tensor for name, tensor in state.items() if name in stored or not name.startswith(new)}
    if state.keys() - stored.keys():
        raise HeadwaterError(
            f"{str(path)!r} holds the state of another optimizer, or of part of the model; train with the same "
            "training.optimizer, or leave out start.optimizer_state=keep."
        )
    _read_model(path, model, state, distributed)
    _put_back_numbers(model, optimizers, state)
    if optimizers:
        _fill_trained(path, model, stored, distributed)


def _check_kept(path: Path, stored: Iterable[str]) -> None:
    """Raise `HeadwaterError` if a checkpoint holds no optimizer state, or numbers that an optimizer has put into its
    groups, whose order may differ in another run. stored: the names of its tensors.
    """
    if not any(name.startswith("optimizer.") for name in stored):
        raise HeadwaterError(f"{str(path)!r} holds no optimizer state to keep; leave out start.optimizer_state=keep.")
    if (path / FACTS).is_file() and (numbers := read_progress(path).optimizer):
        raise HeadwaterError(
            f"The optimizer of {str(path)!r} keeps {next(iter(numbers)).split('.', 2)[2]!r} for a group of parameters, "
            "which another run cannot take over; leave out start.optimizer_state=keep."
        )


def _fill_trained(path: Path, model: AnyModel, stored: Container[str], distributed: bool) -> None:
    """Replace the average of the weights by the trained ones, if a checkpoint has both. stored: its tensors' names."""
    trained = {f"trained.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    _fill_tensors(path, {name: tensor for name, tensor in trained.items() if name in stored}, distributed)


def _read_model(path: Path, model: AnyModel, state: dict[str, Tensor], distributed: bool) -> None:
    """Fill the model and `state` in place. The files may have the names that wrappers have changed.

    Raises `HeadwaterError` unless the files hold the model's weights and no others, of the same kind, and for values
    that no run writes: training would seem to diverge.
    """
    stored = {name: tensor for name, tensor in _read_metadata(path).items() if not name.startswith(OF_RUN)}
    names, where, weights = model.state_dict().keys(), repr(str(path)), list_weights(model)
    plain = map_unwrapped_names(stored, where, names)
    if unknown := sorted(name for name, bare in plain.items() if bare not in names):
        raise HeadwaterError(
            f"The weights in {where} do not match its config.json: {len(unknown)} are not in the model, "
            f"{unknown[0]} first; use an intact checkpoint with its own config."
        )
    check_dtypes({plain[name]: tensor.properties.dtype for name, tensor in stored.items()}, where, model)
    wrapped = {bare: name for name, bare in plain.items()}
    _fill_tensors(path, {wrapped.get(name, name): tensor for name, tensor in weights.items()} | state, distributed)
    for name, tensor in (weights | state).items():
        if not name.startswith("running.") and (problem := _find_problem(name, local_shard(tensor))) is not None:
            kind = "optimizer state" if name.startswith("optimizer.") else "weights"
            raise HeadwaterError(
                f"The {kind} in {where} cannot be used: {problem} in {name.removeprefix('optimizer.')!r}; "
                "remove this checkpoint to continue from an earlier one, or start from an intact one."
            )


def _find_problem(name: str, value: Tensor) -> str | None:
    """Explain why no run can have written these values; None if one can."""
    if not value.is_floating_point():
        return None
    if name.endswith(".exp_avg_sq") and bool((value < 0).any()):
        return "a mean of squares is negative"
    return None if bool(value.isfinite().all()) else "it contains NaN or infinity"


def read_history(path: Path) -> list[Event]:
    """Read the history of the model in checkpoint `path`; empty if not recorded. Raises `HeadwaterError`."""
    if not os.path.lexists(path / HISTORY):
        return []
    events = read_json(path / HISTORY)
    with reading(f"The {HISTORY} of {str(path)!r}", "use another checkpoint"):
        return TypeAdapter(list[Event]).validate_python(events)


def is_from_elsewhere(history: Sequence[Event]) -> bool:
    """Whether a model with this history was trained elsewhere first; its tokenizer then decides how texts begin."""
    return bool(history) and history[0].kind == "retrofitted" and "source" in history[0].details


def read_optimizer_state(path: Path) -> dict[str, Tensor]:
    """Read the optimizer state in a checkpoint, unsharded, by name; empty if there is none."""
    return _read_unsharded(path, lambda name: name.startswith("optimizer."))


def _read_unsharded(path: Path, select: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names `select` accepts."""
    stored = {name: tensor for name, tensor in _read_metadata(path).items() if select(name)}
    tensors = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.items()}
    if tensors:
        _fill_tensors(path, tensors, distributed=False)
    return tensors


def _open_reader(path: Path) -> HuggingFaceStorageReader:
    """Open a checkpoint's own tensor files, and no others in its folder."""
    check_regular(path)
    files = [file for file in (*weight_files(path), path / TENSORS) if os.path.lexists(file)]
    reader = HuggingFaceStorageReader(str(path))
    reader.fs.ls = lambda _: [str(file) for file in files]  # type: ignore[method-assign, assignment]
    return reader


def _read_metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    """Read the shapes and types of a checkpoint's tensors. Raises `HeadwaterError` if any are damaged or incomplete."""
    with reading(f"The tensors in {str(path)!r}", "use an intact checkpoint"):
        tensors: dict[str, Any] = _open_reader(path).read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise HeadwaterError(f"{str(path)!r} lacks a part of {name!r}; use an intact checkpoint.")
    return tensors


def _fill_tensors(path: Path, targets: dict[str, Tensor], distributed: bool) -> None:
    """Fill `targets` in place. Raises `HeadwaterError` unless the files hold these tensors."""
    missing = sorted(targets.keys() - _read_metadata(path).keys())
    if missing:
        raise HeadwaterError(f"{str(path)!r} lacks {len(missing)} tensors of this run, {missing[0]} first.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: one process reads
            dcp.load(targets, storage_reader=_open_reader(path), no_dist=not distributed)
    except (CheckpointException, SafetensorError, OSError, ValueError, AssertionError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        differs = "size" in reason.lower() or "shape" in reason.lower()
        problem = "holds tensors whose shapes differ from this run's" if differs else "cannot be read"
        raise HeadwaterError(f"{str(path)!r} {problem}: {reason}") from error
