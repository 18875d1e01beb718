"""Loading a checkpoint to generate from."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headwater.errors import HeadwaterError
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.training.checkpoint import checkpoints, load_model


def newest_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run it names. Raises `HeadwaterError` if nothing is there."""
    if not path.is_dir():
        raise HeadwaterError(f"There is no checkpoint folder {str(path)!r}.")
    whole = checkpoints(path)
    return whole[-1] if whole else path


def load_for_generation(path: Path) -> tuple[HeadwaterForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint folder, or of the newest checkpoint of a run. Raises `HeadwaterError`."""
    path = newest_checkpoint(path)
    model = load_model(path)
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        raise HeadwaterError(f"{str(path)!r} has no tokenizer: its model was not trained on text.")
    return model.eval(), AutoTokenizer.from_pretrained(path)
