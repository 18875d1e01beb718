"""A model's cache as transformers passes it: until 5.23 as `past_key_values`, from 5.24 on as `cache`.

Our models take it under either name, and return it under the installed version's.
"""

from dataclasses import fields
from typing import Any, TypeGuard

from transformers import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from headwater.util.errors import HeadwaterError

# The name for the cache in the installed transformers: an argument of `forward` and `generate`, and an output field.
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache that was passed under one of its names; None if there is none. Raises `HeadwaterError` for two.

    Both names may hold the same cache, or one of them an empty one, as with PEFT's prompts.
    """
    if past_key_values is None or cache is None:
        return cache if past_key_values is None else past_key_values
    filled = [candidate for candidate in (past_key_values, cache) if not is_empty(candidate)]
    if past_key_values is not cache and len(filled) != 1:
        raise HeadwaterError("past_key_values and cache are two names for the same argument; pass only one.")
    return past_key_values if past_key_values is cache else filled[0]


def is_empty(cache: Any) -> bool:
    """Whether this is a cache that holds no tokens."""
    return isinstance(cache, Cache) and not cache.get_seq_length()


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate`; None if there is none."""
    return getattr(output, CACHE, None)


def is_paged(cache: Any) -> TypeGuard[PagedAttentionCache]:
    """Whether it is the cache of transformers' continuous batching, which is not a `Cache`.

    Until 5.23 the attention kernel stores keys and values in it; from 5.24 on attention does, before it calls it.
    """
    return isinstance(cache, PagedAttentionCache)
