"""Checkpoints of torchtitan's trainer: its names of a model's parts, and the export to a folder of headwater's."""

from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headwater.config.text import HeadwaterConfig
from headwater.conversion.export import export as export_model
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError, sentence

# torchtitan's names of a model's parts, and ours.
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "embed_positions": "model.embed_positions",
    "layers": "model.layers",
    "mechanisms": "model.mechanisms",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"


def ours_of(name: str) -> str:
    """Our name of a parameter or module that torchtitan knows as `name`."""
    head, dot, tail = name.partition(".")
    return NAMES[head] + dot + tail


def theirs_of(name: str) -> str:
    """The inverse of `ours_of`."""
    for titan_name, headwater_name in NAMES.items():
        if name == headwater_name or name.startswith(f"{headwater_name}."):
            return titan_name + name.removeprefix(headwater_name)
    raise KeyError(name)


def export(checkpoint: str | Path, config: HeadwaterConfig, folder: str | Path) -> Path:
    """Turn a checkpoint of torchtitan's trainer (…/checkpoint/step-N) into one of headwater's; returns its path.

    It is read in one process, whatever it was trained on, and without torchtitan. The new folder loads with
    `from_pretrained`, here and, with `trust_remote_code=True`, without headwater. Raises `HeadwaterError` if the
    checkpoint cannot be read, belongs to another model, or the folder is not empty.
    """
    checkpoint = Path(checkpoint)
    if not (checkpoint / ".metadata").is_file():
        raise HeadwaterError(
            f"{str(checkpoint)!r} is not a checkpoint of torchtitan's trainer; pass a folder named step-N."
        )
    model = HeadwaterForCausalLM(config)
    state = {theirs_of(name): tensor for name, tensor in model.state_dict().items()}
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name in (*state, *(name for name in saved if name.partition(".")[0] in NAMES)):
        stored, expected = getattr(saved.get(name), "size", None), getattr(state.get(name), "shape", None)
        if stored != expected:
            if expected is None:
                difference = "has no place in this one"
            else:
                difference = "is missing" if stored is None else f"is {list(stored)} instead of {list(expected)}"
            raise HeadwaterError(
                f"{str(checkpoint)!r} belongs to another model: {name} {difference}; pass the config of that model."
            )
    if config.tie_word_embeddings:
        state[HEAD] = state[HEAD].clone()  # apart from the embedding, to compare what the checkpoint has of both
    try:
        with torch.no_grad():
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)  # into the model's own tensors
    except (CheckpointException, RuntimeError, OSError) as error:
        raise HeadwaterError(f"{str(checkpoint)!r} cannot be read: {sentence(error)}") from error
    if config.tie_word_embeddings and not torch.equal(state[HEAD], state[EMBEDDING]):
        raise HeadwaterError(
            f"{str(checkpoint)!r} belongs to another model: its output head is not tied to its embedding; pass a "
            "config with tie_word_embeddings=False."
        )
    return export_model(model, Path(folder))
