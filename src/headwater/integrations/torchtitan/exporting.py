"""torchtitan's checkpoints as headwater's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headwater.config.text import HeadwaterConfig
from headwater.conversion.export import export
from headwater.integrations.torchtitan.model import theirs_of
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError, sentence


def exported(checkpoint: Path, config: HeadwaterConfig, folder: Path) -> Path:
    """See `headwater.integrations.torchtitan.export`."""
    if not (checkpoint / ".metadata").is_file():
        raise HeadwaterError(f"{str(checkpoint)!r} is no checkpoint of torchtitan's trainer; give its folder step-N.")
    model = HeadwaterForCausalLM(config)
    state = {theirs_of(name): tensor for name, tensor in model.state_dict().items()}
    known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        stored = getattr(known.get(name), "size", None)
        if stored != tensor.shape:
            there = "is missing" if stored is None else f"is {list(stored)} instead of {list(tensor.shape)}"
            raise HeadwaterError(f"{str(checkpoint)!r} belongs to another model: {name} {there}; give its own config.")
    try:
        with torch.no_grad():
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)  # into the model's own tensors
    except (CheckpointException, RuntimeError, OSError) as error:
        raise HeadwaterError(f"{str(checkpoint)!r} cannot be read: {sentence(error)}") from error
    return export(model, folder)
