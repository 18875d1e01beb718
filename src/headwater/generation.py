"""Loading a checkpoint, and continuing prompts with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase, TextStreamer

from headwater.data.tokenizer import separator
from headwater.errors import HeadwaterError
from headwater.models.cache import cache_bytes
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


@dataclass(frozen=True)
class Continued:
    """What `continue_prompts` made: each prompt's continuation, tokens made, seconds, bytes of the cache at the end."""

    texts: list[str]
    tokens: int
    seconds: float
    cache_bytes: int


def continue_prompts(
    model: HeadwaterForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: Sequence[str] = (),
    streamer: TextStreamer | None = None,
) -> Continued:
    """Continue `prompts` as one left-padded batch, each as the beginning of a document.

    temperature: 0 takes the likeliest token each time. stop: a continuation ends before the first of these strings.
    streamer: prints the text of a single prompt as it is made.
    """
    start = separator(tokenizer)
    rows = [[start, *tokenizer(prompt, add_special_tokens=False).input_ids] for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[start] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(seed)
    cache = DynamicCache(config=model.config)
    started = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=start,
        eos_token_id=start,
        **(
            {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
        ),
        **({"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}),
    )
    seconds = time.perf_counter() - started
    new = made[:, longest:]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in new]
    for end in stop:
        texts = [text.split(end)[0] for text in texts]
    return Continued(texts, int((new != start).sum()), seconds, cache_bytes(cache))
