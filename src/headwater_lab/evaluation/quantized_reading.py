"""Let a model read texts and prompts through a quantized cache."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, QuantizedCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from headwater.config.text import HeadwaterConfig
from headwater.models.cache import HeadwaterQuantizedCache
from headwater.nn.cache_name import CACHE
from headwater.util.errors import HeadwaterError

# Bits of a quantized cache, and the number of tokens after which it quantizes them, with its history.
CacheBits = Literal[2, 4]
KEPT = 128


@dataclass
class RowCount:
    """Rows of tokens that a model has read, and how many of them from numbers that were quantized."""

    rows: int = 0
    quantized: int = 0

    def add_rows(self, rows: int, quantized: bool) -> None:
        self.rows += rows
        self.quantized += rows * quantized


@contextmanager
def read_quantized(model: PreTrainedModel, bits: CacheBits | None) -> Iterator[RowCount]:
    """Let all calls without a cache, and `generate`, use a quantized cache. Yields the count of rows that they read.

    A call gives the logits as if the tokens after the first `KEPT` came one by one. The cache quantizes its history
    when the last of `KEPT` tokens comes, so the others may come together. `generate` reads its prompt at once, and
    quantizes it for the tokens that it adds. With `bits` None all is as without this.
    Raises `HeadwaterError` for a model that does not use the cache, and for options of a call that would be lost.
    """
    plain_forward, plain_generate, count = model.forward, model.generate, RowCount()
    if bits is None:
        yield count
        return
    # Code of a model's own may know only the older name.
    cache_name = CACHE if CACHE in inspect.signature(plain_forward).parameters else "past_key_values"

    @wraps(plain_forward)
    def forward(input_ids: Tensor, use_cache: bool | None = None, **options: Any) -> Any:
        if options.get("past_key_values") is not None or options.get(CACHE) is not None:  # a step of `generate`
            return plain_forward(input_ids=input_ids, use_cache=use_cache, **options)
        count.add_rows(len(input_ids), input_ids.shape[1] > KEPT)
        if input_ids.shape[1] <= KEPT:
            return plain_forward(input_ids=input_ids, use_cache=False, **options)
        if options:
            raise HeadwaterError(f"A quantized cache is read without {', '.join(options)}; leave it out.")
        cache, logits = make_quantized_cache(model.config, bits), []
        for piece in _split_tokens(input_ids):
            logits.append(plain_forward(input_ids=piece, **{cache_name: cache}).logits)
            _check_used(model, cache)
        return CausalLMOutputWithPast(logits=torch.cat(logits, dim=1))

    @wraps(plain_generate)
    def generate(input_ids: Tensor, **options: Any) -> Any:
        count.add_rows(len(input_ids), True)
        cache = make_quantized_cache(model.config, bits)
        generated = plain_generate(input_ids, **{cache_name: cache}, **options)
        _check_used(model, cache)
        return generated

    replaced = {name: vars(model)[name] for name in ("forward", "generate") if name in vars(model)}
    model.forward, model.generate = forward, generate
    try:
        yield count
    finally:
        del model.forward, model.generate
        vars(model).update(replaced)


def _check_used(model: PreTrainedModel, cache: Cache) -> None:
    """Raise `HeadwaterError` if the model has left the cache empty."""
    if cache.get_seq_length() == 0:
        raise HeadwaterError(f"A {model.config.model_type} model has no cache of keys and values to quantize.")


def _split_tokens(ids: Tensor) -> list[Tensor]:
    """Split ids [B, T] where the cache quantizes: after the first `KEPT`; then after `KEPT` - 1 tokens and one more,
    because older transformers takes the tokens of a call for one."""
    first, rest = ids[:, :KEPT], ids[:, KEPT:]
    return [first, *(piece for group in rest.split(KEPT, dim=1) for piece in group.split(KEPT - 1, dim=1))]


def make_quantized_cache(config: Any, bits: CacheBits) -> Cache:
    """Make transformers' quantized cache (backend quanto), or headwater's for one of its models, whose layers quantize
    what they store. Raises `ValueError` or `HeadwaterError` for layers with sliding windows."""
    if isinstance(config, HeadwaterConfig):
        return HeadwaterQuantizedCache(config, bits, KEPT)
    return QuantizedCache("quanto", config, nbits=bits, residual_length=KEPT)
