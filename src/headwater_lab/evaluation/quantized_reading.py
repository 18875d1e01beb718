"""Let a model read texts and prompts through a quantized cache."""

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

# Bits of a quantized cache, and the latest tokens that it keeps whole.
CacheBits = Literal[2, 4]
KEPT = 128


@dataclass
class RowCount:
    """Rows of tokens that a model has read, and how many of them were longer than the tokens that stay whole."""

    rows: int = 0
    longer: int = 0

    def add_batch(self, ids: Tensor) -> None:
        """Count the rows of ids [B, T]; shorter rows of a batch count as its longest."""
        self.rows += len(ids)
        self.longer += len(ids) if ids.shape[1] > KEPT else 0


@contextmanager
def read_quantized(model: PreTrainedModel, bits: CacheBits | None) -> Iterator[RowCount]:
    """Let all calls without a cache, and `generate`, use a quantized cache. Yields the count of rows that they read.

    A call gives the logits as if the tokens after the first `KEPT` came one by one. The cache quantizes its history
    when the last of `KEPT` tokens comes, so the others may come together. `generate` reads its prompt at once, and
    quantizes it for the tokens that it adds. With `bits` None all is as without this.
    Raises `HeadwaterError` for a model that does not use the cache.
    """
    plain_forward, plain_generate, count = model.forward, model.generate, RowCount()
    if bits is None:
        yield count
        return

    @wraps(plain_forward)
    def forward(input_ids: Tensor, **options: Any) -> Any:
        if options.get("past_key_values") is not None or options.get(CACHE) is not None:  # a step of `generate`
            return plain_forward(input_ids=input_ids, **options)
        count.add_batch(input_ids)
        if input_ids.shape[1] <= KEPT:
            return plain_forward(input_ids=input_ids, **options)
        cache, logits = make_quantized_cache(model.config, bits), []
        for piece in _split_tokens(input_ids):
            logits.append(plain_forward(input_ids=piece, **{CACHE: cache}).logits)
            if cache.get_seq_length() == 0:
                raise HeadwaterError(f"A {model.config.model_type} model has no cache of keys and values to quantize.")
        return CausalLMOutputWithPast(logits=torch.cat(logits, dim=1))

    @wraps(plain_generate)
    def generate(input_ids: Tensor, **options: Any) -> Any:
        count.add_batch(input_ids)
        return plain_generate(input_ids, past_key_values=make_quantized_cache(model.config, bits), **options)

    model.forward, model.generate = forward, generate
    try:
        yield count
    finally:
        del model.forward, model.generate


def _split_tokens(ids: Tensor) -> list[Tensor]:
    """Split ids [B, T] where the cache quantizes: after the first `KEPT`; then after `KEPT` - 1 tokens and one more."""
    first, rest = ids[:, :KEPT], ids[:, KEPT:]
    return [first, *(piece for group in rest.split(KEPT, dim=1) for piece in group.split(KEPT - 1, dim=1))]


def make_quantized_cache(config: Any, bits: CacheBits) -> Cache:
    """Make transformers' quantized cache (backend quanto), or headwater's for one of its models, whose layers quantize
    what they store. Raises `ValueError` or `HeadwaterError` for layers with sliding windows."""
    if isinstance(config, HeadwaterConfig):
        return HeadwaterQuantizedCache(config, bits, KEPT)
    return QuantizedCache("quanto", config, nbits=bits, residual_length=KEPT)
