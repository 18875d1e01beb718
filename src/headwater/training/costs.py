"""What a run costs, counted in what it trains on: tokens, or images."""

from __future__ import annotations

from headwater import cost
from headwater.config import HeadwaterConfig
from headwater.models.kinds import is_of_images


def training_flops(config: HeadwaterConfig, context: int) -> float:
    """Training FLOPs of a token in rows of `context` tokens, or of an image."""
    if is_of_images(config):
        return cost.training_flops_per_image(config)
    return cost.training_flops_per_token(config, context)


def embeddings(config: HeadwaterConfig) -> int:
    """Parameters of the embedding and of an untied output head. An image model has none: it computes with all."""
    if is_of_images(config):
        return 0
    counts = cost.parameters(config)
    return counts["embedding"] + counts["output head"]


def cache_bytes(config: HeadwaterConfig) -> int:
    """Bytes that a further token adds to the cache; 0 for images."""
    return 0 if is_of_images(config) else cost.cache_bytes_per_token(config)
