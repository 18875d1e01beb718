"""Models with random sizes and mechanisms against the reference, in one pass and in chunks with a cache."""

import random
from itertools import pairwise

import pytest
import torch

from conftest import assert_near, build, decode, tokens
from golden.variants import VARIANTS
from headwater.util.errors import HeadwaterError
from references import reference

LENGTH = 11


def draw_config(draw: random.Random) -> tuple[dict, dict]:
    """Mechanisms with their options, and changes of the small config."""
    names = draw.sample(sorted(VARIANTS), draw.choice([1, 1, 2, 2, 3]))
    mechanisms = {name: draw.choice([{}, *VARIANTS[name]]) for name in names}
    heads = draw.choice([1, 2, 3, 4, 6])
    changes = dict(
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=draw.choice([4, 8, 10]),
        hidden_size=draw.choice([12, 20, 32]),
        intermediate_size=draw.choice([7, 24, 48]),
        num_hidden_layers=draw.choice([2, 3, 3, 4, 5]),
        attention_bias=draw.random() < 0.2,
        mlp_bias=draw.random() < 0.2,
        tie_word_embeddings=draw.random() < 0.3,
        feed_forward=draw.choice(["gated", "gated", "plain"]),
    )
    if draw.random() < 0.3:
        changes |= dict(sliding_window=draw.choice([2, 3, 4, 7]))
        if draw.random() < 0.6:
            changes |= dict(
                sliding_layers=[n for n in range(changes["num_hidden_layers"]) if draw.random() < 0.5] or [0]
            )
    return mechanisms, changes


def build_random(seed: int):
    """The first of the seed's models that is not refused."""
    draw = random.Random(seed)
    for _ in range(20):
        mechanisms, changes = draw_config(draw)
        try:
            return build(mechanisms, **changes)
        except HeadwaterError:  # options that exclude each other, or too few layers: a sentence, and no other error
            continue
    raise AssertionError("twenty configs in turn are refused")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed % 20 == 0 else pytest.mark.slow) for seed in range(400)]
)
@torch.no_grad()
def test_random_model_equals_the_reference(seed):
    model = build_random(seed)
    ids = tokens(1, LENGTH, seed=seed)
    expected = reference(model)(ids[0])
    assert_near(model(ids, use_cache=False).logits[0], expected, 1e-10)
    cuts = sorted(random.Random(seed).sample(range(1, LENGTH), 3))
    chunks = [after - before for before, after in pairwise([0, *cuts, LENGTH])]
    assert_near(decode(model, ids, chunks)[0], expected, 1e-10)
