"""What a model is not to be called with, one check at a time."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from conftest import config
from headwater import HeadwaterError
from headwater.models import input_checks as checks
from headwater.models.input_checks import CachedLayer
from headwater.nn.documents import Positions
from headwater.nn.masks import find_new_tokens

T = 4
LAYERS = [CachedLayer(2, 2, None), CachedLayer(2, 2, 3)]
ROW = torch.zeros(1, T, 8)


def cached(rows=1, heads=2, layers=2):
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.zeros(rows, heads, 5, 4), torch.zeros(rows, heads, 5, 4), layer)
    return cache


def test_a_position_for_each_token():
    checks.check_position_count(torch.arange(T)[None], T)
    with pytest.raises(HeadwaterError, match="has 3 positions, but the input has 4 tokens"):
        checks.check_position_count(torch.arange(3)[None], T)
    with pytest.raises(HeadwaterError, match="position_ids has 1 dimensions; pass rows"):
        checks.check_position_count(torch.arange(T), T)


def test_a_cache_of_this_model_and_these_rows():
    checks.check_cache(LAYERS, None, ROW)
    checks.check_cache(LAYERS, cached(), ROW)
    few = DynamicCache(config=config(num_hidden_layers=1))
    for cache, sentence in (
        (object(), "must be a transformers Cache, not object"),
        (few, "for 1 layers, but the model has 2"),
        (cached(rows=3), "was made for 3 rows, and the input has 1"),
        (DynamicCache(config=config(num_hidden_layers=2, sliding_window=2)), "layer 0 is None"),
    ):
        with pytest.raises(HeadwaterError, match=sentence):
            checks.check_cache(LAYERS, cache, ROW)


def test_layers_that_keep_fewer_tokens_than_are_attended_to():
    growing = DynamicCache(config=config(num_hidden_layers=1, sliding_window=3)).layers[0]
    assert [checks.drops_visible_tokens(growing, window, T) for window in (None, 3, 5)] == [True, False, True]
    static = StaticCache(config=config(num_hidden_layers=1, sliding_window=3), max_cache_len=3).layers[0]
    assert not checks.drops_visible_tokens(static, 5, 2)  # not full yet
    assert checks.drops_visible_tokens(static, 5, T)
    assert not checks.drops_visible_tokens(cached().layers[0], None, T)


def test_a_cache_of_as_many_heads():
    checks.check_cached_heads(LAYERS, None)
    checks.check_cached_heads(LAYERS, cached())
    with pytest.raises(HeadwaterError, match=r"Layer 0 caches 2 heads of keys and 2 of values, .* has 4 and 4"):
        checks.check_cached_heads(LAYERS, cached(heads=4))


def test_a_kernels_mask_of_this_size():
    checks.check_mask_size(torch.ones(1, 1, T, 9), T, 9)
    with pytest.raises(HeadwaterError, match="is for 4 new tokens among 9, but there are 4 among 8"):
        checks.check_mask_size(torch.ones(1, 1, T, 9), T, 8)


def test_no_padding_between_embeddings():
    gap, left = torch.tensor([[1, 0, 1, 1]]), torch.tensor([[0, 0, 1, 1]])
    checks.check_gaps(None, None, has_window=True)
    checks.check_gaps(left, None, has_window=True)
    checks.check_gaps(gap, None, has_window=False)
    checks.check_gaps(gap, torch.zeros(1, T), has_window=True)  # ids, whose padding is the caller's own
    with pytest.raises(HeadwaterError, match="takes no embeddings with padding between them"):
        checks.check_gaps(gap, None, has_window=True)


def test_starts_of_documents_that_a_cache_does_not_keep():
    starts = torch.zeros(1, T, dtype=torch.bool)
    for allowed in ((None, 5, 2), (starts, 0, 2), (starts, 5, 1)):
        checks.check_document_starts(*allowed)
    with pytest.raises(HeadwaterError, match="pass document_starts only without a cache"):
        checks.check_document_starts(starts, 5, 2)


def test_positions_that_are_learned():
    learned, tokens = config(position="learned", max_position_embeddings=5), find_new_tokens(ROW)
    checks.check_learned_positions(config(), tokens, Positions(torch.tensor([[9]]), False))
    checks.check_learned_positions(learned, tokens, Positions(torch.tensor([[1, 4]]), False))
    with pytest.raises(HeadwaterError, match="Position 5 is beyond this model's 5 learned positions"):
        checks.check_learned_positions(learned, tokens, Positions(torch.tensor([[1, 5]]), False))
    late = tokens._replace(past=2)
    with pytest.raises(HeadwaterError, match="Position 5 is beyond"):
        checks.check_learned_positions(learned, late, Positions(torch.zeros(1, T), True))
