"""Positions beside a latent: whole numbers in every cache, whatever the model's dtype."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from conftest import assert_near, build, decode, tokens
from headwater import HeadwaterError
from headwater.models.cache import HeadwaterLayer, HeadwaterStaticLayer

LONG = 400  # bfloat16 rounds whole numbers above 256


def make_early(config):
    cache = StaticCache(config=config, max_cache_len=LONG)
    cache.early_initialization(1, 2, 8, torch.bfloat16, "cpu")
    return cache


@pytest.mark.parametrize(
    "make",
    [
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config=config, max_cache_len=LONG),
        make_early,
    ],
    ids=["growing", "static", "static, early"],
)
def test_positions_are_not_rounded(make):
    model = build({"low_rank_kv": {}}).bfloat16()
    ids, cache = tokens(1, LONG), make(model.config)
    with torch.no_grad():
        decode(model, ids, [300, 99, 1], cache=cache)
    for layer in cache.layers:
        assert layer.values[0, 0, :, 0].tolist() == list(range(LONG))


def test_a_cache_that_rounds_them_is_refused():
    """As a plain DynamicCache of older versions of transformers does, where values have the dtype of keys."""
    attention = build({"low_rank_kv": {}}).model.layers[0].self_attn
    keys, positions = torch.ones(1, 2, 3, 8, dtype=torch.float64), torch.arange(3)[None, None, :, None]
    assert attention.finish_keys(keys, positions).shape == keys.shape
    with pytest.raises(HeadwaterError, match=r"rounds the positions.*DynamicCache\(config=model.config\)"):
        attention.finish_keys(keys, positions.bfloat16())


def test_a_layer_that_is_not_told_positions_does_not_guess():
    attention = build({"low_rank_kv": {}}).model.layers[0].self_attn
    with pytest.raises(HeadwaterError, match="need position_ids"):
        attention(torch.zeros(1, 3, 32, dtype=torch.float64))


def test_early_memory_keeps_values_whose_dtype_changes():
    """As under autocast: PyTorch refuses to store them, and nothing is lost."""
    layer = HeadwaterStaticLayer(max_cache_len=5)
    layer.lazy_initialization(*(torch.zeros(1, 2, 0, 8) for _ in range(2)))
    ones = torch.ones(1, 2, 1, 8)
    layer.update(ones, ones)
    with pytest.raises(RuntimeError, match="dtype"):
        layer.update(ones, ones.bfloat16())
    assert layer.values.sum() == ones.sum()


def test_positions_without_rope_are_not_stored():
    model, ids = build({"low_rank_kv": {}}, position="alibi"), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    assert_near(decode(model, ids, [4, 1, 4], cache=cache), model(ids).logits)
    layer = cache.layers[0]
    assert isinstance(layer, HeadwaterLayer)
    assert layer.values.shape == (2, 0, 9, 8)
