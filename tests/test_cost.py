"""Counted equals computed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.cost import cache_bytes, cache_bytes_per_token, forward_flops_per_token
from headwater.models import cache as caches

SHAPE = dict(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
ALL = {"kv_shift": {}, "value_residual": {}}
CONFIGS = {
    "llama": dict(SHAPE),
    "gpt2": dict(SHAPE, feed_forward="plain", qkv_bias=True),
    "wide heads": dict(SHAPE, head_dim=12),
    "mechanisms": dict(SHAPE, mechanisms=ALL),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_matmul_flops_are_those_pytorch_counts(name):
    config = HeadwaterConfig(**CONFIGS[name], attn_implementation="eager")
    context = 24
    model = HeadwaterForCausalLM(config)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(1, context, dtype=torch.long), use_cache=False)
    counted = counter.get_total_flops()
    # The eager kernel computes the whole square of scores; causally half of it, and the diagonal, is read.
    square = 2 * 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * context**2
    causal = square * (context + 1) / (2 * context)
    assert forward_flops_per_token(config, context) * context == pytest.approx(counted - square + causal)


def test_a_sliding_window_bounds_what_is_attended_to():
    full, sliding = HeadwaterConfig(**SHAPE), HeadwaterConfig(**SHAPE, sliding_window=5)
    seen = sum(min(t, 5) for t in range(1, 21)) / 20
    attended = 4 * 4 * 8 * 3
    difference = forward_flops_per_token(full, 20) - forward_flops_per_token(sliding, 20)
    assert difference == pytest.approx(attended * (10.5 - seen))
    assert forward_flops_per_token(sliding, 4) == forward_flops_per_token(full, 4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("window", [None, 6])
def test_cache_bytes_are_those_of_the_tensors(name, window):
    config = HeadwaterConfig(**CONFIGS[name], sliding_window=window)
    model = HeadwaterForCausalLM(config).eval()
    cache = model(torch.zeros(2, 11, dtype=torch.long), use_cache=True).past_key_values
    assert caches.cache_bytes(cache) == cache_bytes(config, tokens=11, batch_size=2)
    if window is None:
        more = model(torch.zeros(2, 1, dtype=torch.long), past_key_values=cache).past_key_values
        assert caches.cache_bytes(more) - cache_bytes(config, 11, 2) == 2 * cache_bytes_per_token(config)
