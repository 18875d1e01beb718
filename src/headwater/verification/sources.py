"""Models to verify, by the name of a folder or of a repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headwater.models.load import check_layers, weight_files
from headwater.models.weights import check_files
from headwater.util.errors import HeadwaterError, first_line
from headwater.util.hub import check_reachable


def open_model(source: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model in fp32 with its weights, ready to verify.

    source: a folder, or organization/name on the hub. trust_remote_code: whether code that comes with it may run.
    Raises `HeadwaterError` if there is none, or if it cannot be read.
    """
    if not Path(source).is_dir():
        check_reachable("model", source)
    elif not (Path(source) / "config.json").is_file():
        raise HeadwaterError(f"{source!r} is not a model: it has no config.json.")
    else:
        check_layers(Path(source))
    try:
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=trust_remote_code, dtype=torch.float32)
    except HeadwaterError:
        raise
    except Exception as error:  # whatever the model's own code raises
        if "trust_remote_code" in str(error):
            raise HeadwaterError(f"{source!r} needs its own code, which runs only with --trust-remote-code.") from error
        raise HeadwaterError(f"{source!r} cannot be read as a causal language model: {first_line(error)}") from error
    if Path(source).is_dir():
        check_files(weight_files(Path(source), pickled=True), repr(source), model)
    model.config.return_dict = True
    return model.eval()
