"""Small models and inputs for tests. Everything is fp64 and seeded, so that tolerances can be tight."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.cache_name import cache_of

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def config(mechanisms: dict | None = None, gpt2: bool = False, **changes: Any) -> HeadwaterConfig:
    """A small config. Raises `HeadwaterError` if its layers cannot be planned."""
    make = HeadwaterConfig.gpt2 if gpt2 else HeadwaterConfig
    small = make(**(SIZES | dict(mechanisms=mechanisms or {}) | changes))
    plan_layers(small)
    return small


def disturb(model: Any, scale: float = 0.2) -> Any:
    """Perturb every parameter: initial zeros, ones and halves would hide an error."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(scale * noise.to(parameter.dtype))
    return model


def build(mechanisms: dict | None = None, gpt2: bool = False, **changes: Any) -> HeadwaterForCausalLM:
    """A perturbed fp64 model in eval mode."""
    return disturb(HeadwaterForCausalLM(config(mechanisms, gpt2, **changes)).double()).eval()


@functools.cache
def _build_cached(description: str) -> HeadwaterForCausalLM:
    mechanisms, changes = json.loads(description)
    return build(mechanisms, **changes)


def shared(mechanisms: dict | None = None, **changes: Any) -> HeadwaterForCausalLM:
    """Build a model as `build` does, once per process. Do not change it."""
    return _build_cached(json.dumps([mechanisms or {}, changes]))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def document_positions(rows: Sequence[Iterable[int]]) -> Tensor:
    """Position ids of packed rows, each given by the lengths of its documents."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


def decode(
    model: HeadwaterForCausalLM,
    ids: Tensor,
    chunks: Iterable[int],
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """Logits of `ids`, fed to the model with a cache in chunks of these lengths."""
    logits, end = [], 0
    for chunk in chunks:
        start, end = end, end + chunk
        out = model(
            ids[:, start:end],
            attention_mask=None if attention_mask is None else attention_mask[:, :end],
            position_ids=None if position_ids is None else position_ids[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = cache_of(out)
        logits.append(out.logits)
    assert end == ids.shape[1], "the chunks do not cover the row"
    return torch.cat(logits, dim=1)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal to within `tolerance` times the largest expected element (at least 1)."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual - expected).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item()), f"largest difference {error:.2e}"
