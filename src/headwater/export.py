"""Export: a checkpoint folder that plain transformers loads, with `trust_remote_code=True` and without headwater."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from headwater.errors import HeadwaterError
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.registry import resolve
from headwater.remote_code import AUTO_MAP, EXPORTED, PACKAGE, auto_class_of, write_code
from headwater.retrofit import to_transformers

__all__ = ["export", "export_family", "write_code"]


def export(model: PreTrainedModel, folder: str | Path, materialise: bool = False) -> Path:
    """Save `model`'s weights, config and code in a new folder; returns its path.

    It loads with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, here or anywhere. The folder appears when it is
    complete. A tokenizer may be saved into it afterwards. materialise: for engines with a paged cache of their own (see
    `HeadwaterConfig.materialise`).

    Raises `HeadwaterError` if the folder has something in it already, if the model is not one of headwater's own
    classes, if one of its mechanisms stands outside the package, so that its code would be missing, or if it is to be
    materialised and such an engine cannot run it.
    """
    folder = Path(folder).absolute()
    if auto_class_of(type(model)) is None:
        ours = ", ".join(target.partition(":")[2] for target in EXPORTED.values() if ".models." in target)
        raise HeadwaterError(f"A {type(model).__name__} cannot be exported; give a model of one of these: {ours}.")
    for name in model.config.mechanisms:
        if not resolve(name).__module__.startswith(f"{PACKAGE}."):
            raise HeadwaterError(
                f"Mechanism {name!r} stands in {resolve(name).__module__}, outside headwater, and its code would be "
                "missing from the export; move it to headwater/mechanisms."
            )
    staging = _staging(folder)
    before = model.config  # later checkpoints of a training run stay as they were
    model.config = copy.deepcopy(before)
    model.config.auto_map = dict(AUTO_MAP)  # saving writes the code because of this
    try:
        if materialise:
            model.config.materialise = True
            model.config.check_paged()
        model.save_pretrained(staging)
        staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        model.config = before
    return folder


def export_family(model: HeadwaterForCausalLM, folder: str | Path, family: str) -> Path:
    """Save `model` as one of a family of transformers' own in a new folder; returns its path.

    Raises `HeadwaterError` if the folder has something in it already, and as `headwater.retrofit.to_transformers` does,
    for what the family cannot express.
    """
    folder = Path(folder).absolute()
    staging = _staging(folder)
    try:
        to_transformers(model, family).save_pretrained(staging)
        staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _staging(folder: Path) -> Path:
    """Where to write before renaming to `folder`. Raises `HeadwaterError` if that has something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadwaterError(f"{folder} exists already; remove it or export to another folder.")
    return folder.with_name(f".{folder.name}.{os.getpid()}")
