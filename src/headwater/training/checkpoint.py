"""Checkpoints: a Hugging Face folder with what training needs to go on beside it.

    step-000400/
      config.json, model.safetensors, generation_config.json, tokenizer files    load them with from_pretrained
      training.safetensors    optimiser state by parameter name, running sums
      training.json           where the run stands: step, rows, tokens, …, recipe
      history.json            what was done to the model so far: trained, grown, … (records.Event)
      SHA256SUMS              of all these files; `sha256sum -c SHA256SUMS` checks them too

A run whose parameters are split over processes (FSDP) writes shard-*.safetensors in place of the two large files, one a
process, in the safetensors form of torch.distributed.checkpoint: any number of processes can go on from them, and
`headwater export` makes one model of them. Nothing is pickled in either form.

A checkpoint is written beside its place and renamed, so that one that has its name is whole. One that no run has
written (`write_model`: grown, retrofitted, …) has no training.json; a run can begin with it, and none go on from it.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric import Fabric
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers import PreTrainedTokenizerBase

from headwater.config import HeadwaterConfig
from headwater.errors import HeadwaterError
from headwater.files import flush, sha256_of
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.records import RECORD, Event, read_record
from headwater.training.parallel import agreed, gathered

FORMAT_VERSION = 2
FOLDER = "checkpoints"
TENSORS, FACTS, HISTORY, SUMS = "training.safetensors", "training.json", "history.json", "SHA256SUMS"
_NAME = re.compile(r"step-(\d+)$")
_BESIDE, _REMOVING, _DAMAGED = ".writing-", ".removing-", "damaged-"

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


@dataclass
class Progress:
    """Where a run stands.

    rows: the data's position, rows of its fixed order that were used. order: a hash of all these rows in their order.
    seconds: in training steps; waited: of these, for data. skipped: steps whose loss or gradient was not finite, and
    how many of them came last without another between. result: the deciding measure, if it was taken at this step.
    tau: of a run that anneals it, where each map's τ began and where it goes.
    data: facts about the data, by which a change of them is seen. run_id: what Weights & Biases knows the run by.
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
    tau: dict[str, tuple[float, float]] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    run_id: str = ""
    format_version: int = FORMAT_VERSION


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if _NAME.search(path.name) and path.is_dir()]
    return sorted(found, key=_step)


def newest_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run it names. Raises `HeadwaterError` if nothing is there."""
    if not path.is_dir():
        raise HeadwaterError(f"There is no checkpoint folder {str(path)!r}.")
    whole = checkpoints(path)
    if not whole and (path / RECORD).is_file() and not (path / "config.json").exists():
        record = read_record(path)
        if record.stages:
            return newest_checkpoint(path / record.stages[-1].folder)
        why = "it diverged" if record.status == "diverged" else f"its status is {record.status!r}"
        raise HeadwaterError(f"The run {str(path)!r} has left no checkpoint: {why}.")
    return whole[-1] if whole else path


def newest_whole(run: Path, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose checksums are right; None if there is none at all.

    Damaged ones are renamed to damaged-…, with a notice. Raises `HeadwaterError` if all are damaged, or for a
    checkpoint of another format.
    """
    found = checkpoints(run)
    for path in reversed(found):
        problem = damage(path)
        if problem is None:
            read_progress(path)
            return path
        aside = path.with_name(_DAMAGED + path.name)
        shutil.rmtree(aside, ignore_errors=True)  # an earlier one of the same step
        path.rename(aside)
        notice(f"The checkpoint {path.name} is damaged ({problem}); going back to the one before it.")
    if found:
        raise HeadwaterError(
            f"Every checkpoint in {str(run / FOLDER)!r} is damaged; start a new run with another --out."
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are as they were written."""
    try:
        lines = (path / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        return f"its {SUMS} cannot be read"
    if "config.json" not in sums:
        return f"its {SUMS} is cut short"
    for name in sums:
        if not (path / name).is_file():
            return f"{name} is missing"
    with ThreadPoolExecutor(8) as pool:
        for (name, expected), actual in zip(
            sums.items(), pool.map(sha256_of, [path / name for name in sums]), strict=True
        ):
            if actual != expected:
                return f"{name} has changed since it was written"
    return None


def save_checkpoint(
    target: Path,
    progress: Progress,
    model: HeadwaterForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Tensor],
    fabric: Fabric,
    *,
    history: Sequence[Event] = (),
    sharded: bool = False,
    add: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint to `target`, unless it is there. All processes call it together.

    state: what training needs besides the model, by name. history: what was done to the model, this run included.
    sharded: each process writes its own part.
    add: called in every process with the folder, to put more into it.
    Raises `HeadwaterError` if there is no room, with nothing lost.
    """
    beside = target.with_name(_BESIDE + target.name)
    is_first = fabric.global_rank == 0
    if agreed(fabric, target.exists):  # a step is saved once
        return
    weights = model_tensors(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (weights | state).values())

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _check_room(beside, size)

    def write_whole() -> None:
        model.save_pretrained(beside)
        _save_tensors(state, beside / TENSORS)

    def write_rest() -> None:
        if sharded:
            model.config.save_pretrained(beside)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        (beside / FACTS).write_text(json.dumps(asdict(progress), indent=1))
        _write_history(beside, history)

    def seal() -> dict[str, str]:
        """Checksums of what this process wrote, all of it on the disk."""
        names = [path.name for path in beside.iterdir() if _writer(path.name, fabric.world_size) == fabric.global_rank]
        return _sums(beside, names)

    def explained(do: Callable[[], Any]) -> Callable[[], Any]:
        """`do`, with what a disk can do wrong as a sentence."""

        def tried() -> Any:
            try:
                return do()
            except (OSError, SafetensorError, CheckpointException) as error:
                if is_first:
                    shutil.rmtree(beside, ignore_errors=True)
                raise HeadwaterError(_not_saved(error, target, progress.step)) from error

        return tried

    agreed(fabric, explained(begin))
    if sharded:
        writer = HuggingFaceStorageWriter(str(beside), save_distributed=True)
        agreed(fabric, explained(lambda: dcp.save(dict(weights | state), storage_writer=writer)), everywhere=True)
    else:
        agreed(fabric, explained(write_whole))
    agreed(fabric, explained(write_rest))
    if add is not None:
        agreed(fabric, explained(lambda: add(beside)), everywhere=True)
    parts = gathered(fabric, agreed(fabric, explained(seal), everywhere=True))
    sums = {name: digest for part in parts for name, digest in part.items()}
    agreed(fabric, explained(lambda: _finish(beside, target, sums)))


def write_model(
    target: Path,
    model: HeadwaterForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None = None,
    history: Sequence[Event] = (),
    state: dict[str, Tensor] | None = None,
) -> Path:
    """Write a model that no run has made to a new folder, beside and renamed; returns the folder.

    state: optimiser state by name, for a run that begins with the model and keeps it.
    Raises `HeadwaterError` if the folder has something in it, and if there is no room, with nothing left behind.
    """
    target = Path(target)
    check_free(target)
    beside = target.absolute().with_name(f"{_BESIDE}{target.absolute().name}")
    tensors = model_tensors(model) | (state or {})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _check_room(beside, size)
        model.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        if state:
            _save_tensors(state, beside / TENSORS)
        _write_history(beside, history)
        _finish(beside, target.absolute(), _sums(beside, [path.name for path in beside.iterdir()]))
    except (OSError, SafetensorError) as error:
        raise HeadwaterError(f"{str(target)!r} could not be written: {_why(error)}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def check_free(target: Path) -> None:
    """Raise `HeadwaterError` if a folder that is to be made has something in it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HeadwaterError(f"{str(target)!r} exists already; remove it, or choose another --out.")


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(errno.ENOSPC, f"it needs {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free on that disk")


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _write_history(folder: Path, history: Sequence[Event]) -> None:
    (folder / HISTORY).write_text(json.dumps([event.model_dump() for event in history], indent=1))


def _sums(folder: Path, names: list[str]) -> dict[str, str]:
    """Checksums of these files, which are brought to the disk."""
    with ThreadPoolExecutor(8) as pool:
        sums = dict(zip(names, pool.map(sha256_of, [folder / name for name in names]), strict=True))
    for name in names:
        flush(folder / name)
    return sums


def _finish(beside: Path, target: Path, sums: dict[str, str]) -> None:
    """Write the checksums, and put the folder in its place."""
    (beside / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    flush(beside / SUMS)
    flush(beside)
    beside.rename(target)
    flush(target.parent)


def _why(error: BaseException) -> str:
    """What a disk did wrong."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "o space left" in str(error)
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    why = "the disk is full" if full else reason
    if full and "MB are free" in reason:
        why += f": {reason}"
    return why


def _not_saved(error: BaseException, target: Path, step: int) -> str:
    whole = checkpoints(target.parents[1])
    last = f"the one of step {_step(whole[-1])} is whole" if whole else "there is none before it"
    return (
        f"The checkpoint of step {step} could not be saved to {str(target.parent)!r}: {_why(error)}; {last}. "
        "Make room and go on with --resume."
    )


def prune(run: Path, keep: int, lower_is_better: bool) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the best result."""
    whole = checkpoints(run)
    results = {}
    for path in whole:
        with suppress(HeadwaterError):  # damaged, which is for `newest_whole` to say
            if (result := read_progress(path).result) is not None:
                results[path] = result
    choose = min if lower_is_better else max
    best = choose(results, key=lambda path: results[path]) if results else None
    for old in whole[:-keep]:
        if old != best:
            remove(old)


def remove(checkpoint: Path) -> None:
    """At once, so that no half of it is ever taken for a checkpoint."""
    gone = checkpoint.with_name(_REMOVING + checkpoint.name)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def tidy(run: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for kind in (_BESIDE, _REMOVING):
        for leftover in run.glob(f"*/{kind}*"):
            shutil.rmtree(leftover)


def model_tensors(model: HeadwaterForCausalLM) -> dict[str, Tensor]:
    """Parameters and buffers by their names in model.safetensors: tied ones once."""
    every = model.state_dict()
    own = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers() if name in every]
    return {name: every[name] for name in own + buffers}


def optimizer_tensors(model: HeadwaterForCausalLM, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' state by parameter name. Single numbers are [1]: the sharded form has no tensors without axes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{key}": value.reshape(1) if value.ndim == 0 else value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def check(path: Path) -> None:
    """Raise `HeadwaterError` if a checkpoint has checksums and its files do not fit them."""
    if (path / SUMS).exists() and (problem := damage(path)) is not None:
        raise HeadwaterError(f"The checkpoint {str(path)!r} is damaged: {problem}; take the one before it.")


def load_model(path: Path, **kwargs: Any) -> HeadwaterForCausalLM:
    """The model of a checkpoint, every tensor checked. Raises `HeadwaterError` if the weights are not this model's.

    kwargs: as for `from_pretrained`; only for a checkpoint that is not sharded.
    """
    if not (path / "config.json").is_file():
        raise HeadwaterError(f"{str(path)!r} is not a checkpoint: it has no config.json.")
    if any(path.glob("shard-*.safetensors")):
        model = HeadwaterForCausalLM(HeadwaterConfig.from_pretrained(path))
        stored = _stored(path)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(stored.get(name, parameter.dtype))
        _read(path, model_tensors(model), distributed=False)
        return model
    try:
        model, info = HeadwaterForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise HeadwaterError(f"The checkpoint {str(path)!r} is damaged or not headwater's: {first}") from error
    wrong = {
        kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    for kind, names in wrong.items():
        if names:
            raise HeadwaterError(
                f"The weights in {str(path)!r} are not those of its config.json: {len(names)} "
                f"{kind.replace('_', ' ')}, {names[0]} first."
            )
    return model


def read_progress(path: Path) -> Progress:
    """Where the run of checkpoint `path` stood. Raises `HeadwaterError` for a foreign or newer format."""
    try:
        facts = json.loads((path / FACTS).read_text())
        version = facts["format_version"]
        if version == FORMAT_VERSION:
            return Progress(**facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwaterError(f"{str(path)!r} cannot be resumed: its {FACTS} is missing or damaged.") from error
    raise HeadwaterError(
        f"{str(path)!r} has training format {version}, and this headwater reads {FORMAT_VERSION}; "
        "use the version that wrote it."
    )


def restore(
    path: Path,
    model: HeadwaterForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    running: dict[str, Tensor],
    distributed: bool,
) -> None:
    """Put parameters, optimiser state and running sums back in place, however many processes wrote them.

    distributed: whether the parameters are split over processes, which then all call it together.
    Raises `HeadwaterError` if a tensor is missing, one too many, or of another shape.
    """
    if any(name.startswith("optimizer.") for name in _stored(path)):  # none before the first step not skipped
        _fill_state(optimizers)
    targets = model_tensors(model) | {f"running.{name}": tensor.view(1) for name, tensor in running.items()}
    _read(path, targets | optimizer_tensors(model, optimizers), distributed)


def begin_with(
    path: Path, model: HeadwaterForCausalLM, optimizers: Sequence[torch.optim.Optimizer], distributed: bool
) -> None:
    """Give a fresh model the tensors of a checkpoint, and `optimizers`, if there are any, the state that lies there.

    Raises `HeadwaterError` as `restore` does, and where there is no such state.
    """
    if optimizers and not any(name.startswith("optimizer.") for name in _stored(path)):
        raise HeadwaterError(f"{str(path)!r} holds no optimiser state to keep; leave out start.optimizer=kept.")
    _fill_state(optimizers)
    if optimizer_tensors(model, optimizers).keys() - _stored(path).keys():
        raise HeadwaterError(
            f"{str(path)!r} holds the state of another optimiser, or of a part of the model; train with the same "
            "training.optimizer, or leave out start.optimizer=kept."
        )
    _read(path, model_tensors(model) | optimizer_tensors(model, optimizers), distributed)


def _fill_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """State of the right shapes for every parameter, to be read into."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = _empty_state(optimizer, parameter, bool(group.get("fused")))


def history_of(path: Path) -> list[Event]:
    """What was done to the model of checkpoint `path`; empty where nobody kept it."""
    try:
        return [Event(**event) for event in json.loads((path / HISTORY).read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise HeadwaterError(f"The {HISTORY} of {str(path)!r} cannot be read; take another checkpoint.") from error


def optimizer_state(path: Path) -> dict[str, Tensor]:
    """The optimiser's state in a checkpoint, whole, by name; empty where there is none."""
    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(known.size, dtype=known.properties.dtype)  # type: ignore[union-attr]
        for name, known in metadata.items()
        if name.startswith("optimizer.")
    }
    if found:
        _read(path, found, distributed=False)
    return found


def _empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor, fused: bool) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    device = parameter.device if fused else "cpu"
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=device)} | moments


def _stored(path: Path) -> dict[str, torch.dtype]:
    """Names and dtypes of the tensors in a checkpoint. Raises `HeadwaterError` if its files cannot be read."""
    try:
        known = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise HeadwaterError(f"The tensors in {str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    return {name: metadata.properties.dtype for name, metadata in known.items()}  # type: ignore[union-attr]


def _read(path: Path, targets: dict[str, Tensor], distributed: bool) -> None:
    """Fill `targets` in place. Raises `HeadwaterError` unless the files hold these tensors."""
    stored = _stored(path)
    missing = sorted(targets.keys() - stored.keys())
    if missing:
        raise HeadwaterError(f"{str(path)!r} lacks {len(missing)} tensors of this run, {missing[0]} first.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant so
            dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=not distributed)
    except (CheckpointException, SafetensorError, OSError, ValueError, AssertionError, RuntimeError) as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise HeadwaterError(f"{str(path)!r} holds tensors of other shapes than this run's: {last}") from error


def _writer(name: str, world: int) -> int:
    """Which process wrote a file of a checkpoint: shards and batches have its number, the rest is the first's."""
    shard, batch = re.match(r"shard-(\d+)", name), re.match(r"batch-(\d+)", name)
    rank = int(shard[1]) - 1 if shard else int(batch[1]) if batch else 0
    return rank if rank < world else 0


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
