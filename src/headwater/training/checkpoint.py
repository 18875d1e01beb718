"""Checkpoints: a Hugging Face folder with what training needs to go on beside it.

    step-000400/
      config.json, model.safetensors, generation_config.json, tokenizer files    load them with from_pretrained
      training.safetensors    optimiser state by parameter name, random-number state, running sums
      training.json           format_version, step, rows, tokens, seconds, recipe

A checkpoint is written beside its place and renamed, so that one that has its name is whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import HeadwaterError
from headwater.models.causal_lm import HeadwaterForCausalLM

FORMAT_VERSION = 1
FOLDER = "checkpoints"
TENSORS, FACTS = "training.safetensors", "training.json"
_NAME = re.compile(r"step-(\d+)$")
_BESIDE = ".writing-"


@dataclass
class Progress:
    """Where a run stands. `rows` is the data's position: rows of its fixed order that were used."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if _NAME.search(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save_checkpoint(
    run: Path,
    progress: Progress,
    model: HeadwaterForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: torch.optim.Optimizer,
    running: dict[str, Tensor],
    keep: int,
) -> Path:
    """Save, then remove all but the newest `keep`. Raises `HeadwaterError` if the disk is full, with nothing lost."""
    target = run / FOLDER / f"step-{progress.step:06d}"
    if target.exists():  # a step is saved once; what is there is whole
        return target
    beside = target.with_name(_BESIDE + target.name)
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        model.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        tensors = optimizer_tensors(model, optimizer) | random_state()
        tensors |= {f"running.{name}": tensor for name, tensor in running.items()}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, beside / TENSORS)
        (beside / FACTS).write_text(json.dumps(asdict(progress), indent=1))
        for file in beside.iterdir():
            _flush(file)
        beside.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "o space left" in str(
            error
        )
        why = "the disk is full" if full else str(error).splitlines()[0]
        whole = checkpoints(run)
        last = f"the one of step {_step(whole[-1])} is whole" if whole else "there is none before it"
        raise HeadwaterError(
            f"The checkpoint of step {progress.step} could not be saved to {str(target.parent)!r}: {why}; {last}. "
            "Make room and go on with --resume."
        ) from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return target


def load_model(path: Path, **kwargs: Any) -> HeadwaterForCausalLM:
    """The model of a checkpoint, every tensor checked. Raises `HeadwaterError` if the weights are not this model's."""
    if not (path / "config.json").is_file():
        raise HeadwaterError(f"{str(path)!r} is not a checkpoint: it has no config.json.")
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


def restore(path: Path, model: HeadwaterForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Put optimiser and random-number state back; returns the running sums. Raises `HeadwaterError` if damaged."""
    try:
        tensors = load_file(path / TENSORS)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            state = {key: tensors[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            if state["exp_avg"].shape != parameter.shape or state["exp_avg_sq"].shape != parameter.shape:
                raise KeyError(name)
            moved = {key: tensor.to(parameter.device) for key, tensor in state.items() if key != "step"}
            optimizer.state[parameter] = {"step": state["step"], **moved}
        torch.set_rng_state(tensors["random.cpu"])
    except (SafetensorError, OSError, KeyError) as error:
        raise HeadwaterError(
            f"{str(path)!r} cannot be resumed: its {TENSORS} is missing, damaged or foreign."
        ) from error
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return {name.removeprefix("running."): t for name, t in tensors.items() if name.startswith("running.")}


def optimizer_tensors(model: HeadwaterForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def random_state() -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk, so that the rename is not there before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
