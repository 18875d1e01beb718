"""Loading a checkpoint, and continuing prompts with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase, StopStringCriteria, TextStreamer

from headwater.models.cache import HeadwaterQuantizedCache, cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.decoding import LONGEST, Decoder
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.data.tokenizer import encode_texts, separator_id, warn_of_unknown
from headwater_lab.data.tokenizer_files import find_tokenizer, list_turn_ends
from headwater_lab.serving.prompts import apply_chat_template
from headwater_lab.serving.stops import UntilStop, before_stop
from headwater_lab.training.checkpoints import check_sums, load_model, newest_checkpoint
from headwater_lab.training.trained_models import is_foreign, open_source

logger = logging.getLogger(__name__)
# Fields of a generation_config.json that change a text and that `continue_prompts` neither reads nor replaces.
IGNORED = {
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens"),
    *("stop_strings", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams", "guidance_scale"),
    *("temperature", "top_p", "top_k", "num_return_sequences", "penalty_alpha"),
}


def load_for_generation(
    path: Path, follow: Collection[str] = ()
) -> tuple[HeadwaterForCausalLM, PreTrainedTokenizerBase]:
    """Load the model and tokenizer of a checkpoint folder, a run's newest checkpoint, or a folder of transformers.

    follow: settings of generation_config.json that stay in the model's. Raises `HeadwaterError`.
    """
    path = newest_checkpoint(path)
    if is_foreign(path):
        source = open_source(str(path))
        model, tokenizer = source.model, source.tokenizer
    else:
        check_sums(path)
        model = load_model(path)
        tokenizer = find_tokenizer(path, model.config.vocab_size)
    if tokenizer is None:
        raise HeadwaterError(f"{str(path)!r} has no tokenizer: its model was not trained on text.")
    if separator_id(tokenizer) is None:
        raise HeadwaterError(
            f"The tokenizer in {str(path)!r} has neither an end-of-text nor a begin-of-text token to start a text "
            f"with; add its tokenizer_config.json, or use the tokenizer the model was trained with."
        )
    stored = model.generation_config
    if changed := sorted((IGNORED - set(follow)) & stored.to_diff_dict().keys()):
        logger.warning(f"generation_config.json sets {', '.join(changed)}, which is not followed here.")
    # `continue_prompts` sets the rest.
    model.generation_config = GenerationConfig(**{name: getattr(stored, name) for name in ("eos_token_id", *follow)})
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Continued:
    """The result of `continue_prompts`: continuations, whether each ended by itself, tokens, seconds, and the cache's
    bytes and reserved bytes."""

    texts: list[str]
    finished: list[bool]
    tokens: int
    seconds: float
    cache_bytes: int
    reserved_bytes: int


def continue_prompts(
    model: HeadwaterForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    chat: bool = False,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[str] = (),
    stream: bool = False,
    decoder: Decoder | None = None,
    cache_bits: int | None = None,
) -> Continued:
    """Continue `prompts` as one left-padded batch, each up to a stop token of the model or its tokenizer.

    chat: answer each as a user's message, in the tokenizer's chat template; otherwise the tokenizer decides what is
    before each, as in transformers and engines.
    temperature: 0 is greedy. top_k: 0 is no limit. stop: a continuation ends before the first of these strings.
    stream: print a single prompt, unless it is a message, and its continuation as it is generated.
    decoder: use its static cache instead of a growing one; the texts are the same. cache_bits: 2 or 4: quantize a
    growing cache.
    """
    _check_texts(prompts, stop)
    end = cast(int, separator_id(tokenizer))  # `load_for_generation` has checked that there is one
    ends = torch.tensor(sorted({end, *list_ends(model), *(list_turn_ends(tokenizer) if chat else ())}))
    warn_of_unknown(tokenizer, prompts)
    rows = _encode_messages(tokenizer, prompts) if chat else encode_prompts(tokenizer, prompts)
    longest = max(map(len, rows))
    _check_length(model, longest, max_new_tokens)
    ids = torch.tensor([[end] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    streamer = _Stream(tokenizer, stop, skip_prompt=chat) if stream else None
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": end, "eos_token_id": ends.tolist()}
    started = time.perf_counter()
    if decoder is not None:
        watch = _watch_tokens(tokenizer, ids, ends, streamer, stop)
        generated = decoder(ids, mask, seed=seed, watch=watch, **sampling, **options)
        cache = decoder.cache
        if streamer is not None:
            streamer.end()
    else:
        torch.manual_seed(seed)
        cache = HeadwaterQuantizedCache(model.config, cache_bits) if cache_bits else DynamicCache(config=model.config)
        options |= sampling | {"do_sample": True} if temperature > 0 else {"do_sample": False}
        if stop:
            options |= {"stop_strings": list(stop), "tokenizer": tokenizer}
        generated = model.generate(ids, attention_mask=mask, past_key_values=cache, streamer=streamer, **options)
    seconds = time.perf_counter() - started
    new = generated[:, longest:].cpu()
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in new]
    is_end = torch.isin(new, ends)
    ended = is_end.any(dim=1).tolist()
    return Continued(
        [before_stop(text, stop) for text in texts],
        [at_end or before_stop(text, stop) != text for text, at_end in zip(texts, ended, strict=True)],
        int(is_end.logical_not().sum()),
        seconds,
        cache_bytes(cache),
        cache_bytes(cache, reserved=True),
    )


def list_ends(model: HeadwaterForCausalLM) -> list[int]:
    """List the stop tokens in a model's generation_config.json."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


def _encode_messages(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    if tokenizer.chat_template is None:
        raise HeadwaterError("The model's tokenizer has no chat template; leave out --chat.")
    return [apply_chat_template(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Encode prompts as token ids; an empty one begins a document, as in OpenAI's API."""
    return [ids or [cast(int, separator_id(tokenizer))] for ids in encode_texts(tokenizer, prompts)]


def _check_texts(prompts: Sequence[str], stop: Sequence[str]) -> None:
    for text in (*prompts, *stop):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise HeadwaterError(f"A prompt or stop text has a lone surrogate, which is not valid text: {shown(text)}.")
    if "" in stop:
        raise HeadwaterError("A stop text is empty; leave it out.")


def _check_length(model: HeadwaterForCausalLM, tokens: int, max_new_tokens: int) -> None:
    """Raise `HeadwaterError` if a prompt of `tokens` and the new ones exceed the model's limit."""
    positions = model.config.max_position_embeddings
    most = max(LONGEST, positions)
    if tokens > most:
        raise HeadwaterError(f"A prompt has {tokens:,} tokens, but the limit is {most:,}; pass only its end.")
    if model.config.position == "learned" and tokens + max_new_tokens > positions:
        raise HeadwaterError(
            f"A prompt of {tokens} tokens and {max_new_tokens} new ones go beyond this model's {positions} learned "
            f"positions; shorten the prompt, or set --max-new-tokens to at most {max(0, positions - tokens)}."
        )


def _watch_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: torch.Tensor,
    ends: torch.Tensor,
    streamer: _Stream | None,
    stop: Sequence[str],
) -> Callable[[torch.Tensor], bool]:
    """Make a function that prints each step's tokens, and returns whether every row has ended."""
    if streamer is not None:
        streamer.put(prompts.cpu())
    at_stop = StopStringCriteria(tokenizer, list(stop)) if stop else None
    steps: list[torch.Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)

    def watch(tokens: torch.Tensor) -> bool:
        if streamer is not None:
            streamer.put(tokens)
        if at_stop is None:
            return False
        steps.append(tokens)
        ended.logical_or_(at_stop(torch.stack(steps, dim=1), None) | torch.isin(tokens, ends))
        return bool(ended.all())

    return watch


class _Stream(TextStreamer):
    """Print a prompt, unless it is to be skipped, and its continuation, up to the first stop text.

    Like transformers' streamer, it holds back a word until it is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], skip_prompt: bool = False) -> None:
        super().__init__(tokenizer, skip_prompt, skip_special_tokens=True)
        self.until = UntilStop(stop)
        self.prompt: int | None = 0 if skip_prompt else None  # characters of the prompt not yet received

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is None:
            self.prompt = len(self.tokenizer.decode(value[0] if value.ndim > 1 else value, skip_special_tokens=True))
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        prompt, new = text[: self.prompt], text[self.prompt :]
        self.prompt = (self.prompt or 0) - len(prompt)
        super().on_finalized_text(prompt + self.until.feed(new, stream_end), stream_end)
