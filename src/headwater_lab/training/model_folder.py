"""The model at the top of a run's folder: transformers' `from_pretrained` loads the run by its name.

runs/NAME/
  config.json, model.safetensors, tokenizer files, …    those of the newest checkpoint, without its training state

The weights are hard links to the checkpoint's, which take no space; where there are no links, they are copied. All else
is copied: programs write small files in place, which would change the checkpoint too. A new checkpoint replaces file
by file, each at once. Weights in several files have the step in their names, and the index is replaced after them, so
that no reader mixes two steps.

Checkpoints whose weights are in a file per process have nothing here, because transformers cannot read them.
"""

from __future__ import annotations

import filecmp
import json
import os
import shlex
import shutil
from pathlib import Path

from headwater.models.kinds import MODEL_TYPES
from headwater.models.load import CONFIG, SHARDS, WEIGHTS, read_object, weight_files
from headwater.util.files import explaining, replace_text, replacing
from headwater_lab.training.checkpoint import FACTS, SUMS, TENSORS

INDEX = f"{WEIGHTS}.index.json"
# Weights in several files, by step.
PARTS = f"step-*-{Path(WEIGHTS).stem}-*.safetensors"


def publish_model(checkpoint: Path, folder: Path) -> None:
    """Put the model of a checkpoint at the top of a run's folder. Raises `HeadwaterError` if it cannot be written."""
    if any(checkpoint.glob(SHARDS)):
        withdraw_model(folder)
        return
    with explaining(lambda problem: f"The model cannot be written to {str(folder)!r}: {problem}."):
        weights = weight_files(checkpoint)
        single = weights == [checkpoint / WEIGHTS]
        names = {file.name: file.name if single else f"{checkpoint.name}-{file.name}" for file in weights}
        for file in weights:
            _link(file, folder / names[file.name])
        for file in sorted(checkpoint.iterdir()):
            if file.name not in (*names, TENSORS, FACTS, SUMS, INDEX) and file.is_file():
                _copy(file, folder / file.name)
        if not single:
            index = read_object(checkpoint / INDEX)
            index["weight_map"] = {tensor: names[name] for tensor, name in index["weight_map"].items()}
            replace_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        _remove_weights(folder, but={*names.values(), *(() if single else (INDEX,))})


def withdraw_model(folder: Path) -> None:
    """Remove the model at the top of a run's folder, if there is one."""
    with explaining(lambda problem: f"The model in {str(folder)!r} cannot be removed: {problem}."):
        (folder / CONFIG).unlink(missing_ok=True)
        _remove_weights(folder, but=set())


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
    if target.exists() and os.path.samefile(file, target):
        return
    with replacing(target) as beside:
        try:
            os.link(file, beside)
        except OSError:
            shutil.copyfile(file, beside)


def _copy(file: Path, target: Path) -> None:
    if not (target.is_file() and filecmp.cmp(file, target, shallow=False)):
        with replacing(target) as beside:
            shutil.copyfile(file, beside)


def _remove_weights(folder: Path, but: set[str]) -> None:
    for file in (folder / WEIGHTS, folder / INDEX, *folder.glob(PARTS)):
        if file.name not in but:
            file.unlink(missing_ok=True)
