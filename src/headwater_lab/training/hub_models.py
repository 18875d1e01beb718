"""Models of any library, in a folder or on the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headwater.models.load import check_config, check_layers, weight_files
from headwater.models.weights import check_files
from headwater.util.errors import HeadwaterError, first_line
from headwater.util.hub import check_reachable


def check_source(source: str) -> None:
    """Raise `HeadwaterError` unless the source is a checkpoint's folder or the name of a model on the hub."""
    if not Path(source).is_dir():
        check_reachable("model", source)
    else:
        check_config(Path(source))
        check_layers(Path(source))


@contextmanager
def explaining_code(source: str, problem: str) -> Iterator[None]:
    """Turn errors of a model's own code, or of forbidding it, into one sentence."""
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise HeadwaterError(f"{source!r} needs its own code, which runs only with --trust-remote-code.") from error
        raise HeadwaterError(f"{problem}: {first_line(error)}") from error


def open_model(source: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Open a causal language model in fp32 with its weights, ready to verify.

    source: a folder, or organization/name on the hub. trust_remote_code: whether its own code may run.
    Raises `HeadwaterError` if there is none, or if it cannot be read.
    """
    check_source(source)
    with explaining_code(source, f"{source!r} cannot be read as a causal language model"):
        if AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).is_encoder_decoder:
            raise HeadwaterError(f"{source!r} is an encoder-decoder; name a causal language model.")
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=trust_remote_code, dtype=torch.float32)
    if (folder := Path(source)).is_dir():
        check_files(weight_files(folder, pickled=True), repr(source), model)
    model.config.return_dict = True
    return model.eval()
