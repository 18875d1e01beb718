"""What a config costs to train and to run on given hardware, from `cost`'s counts. Nothing is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import images, text
from headwater.cost.images import ImagePrice
from headwater.cost.pictures import COLORS, figure
from headwater.cost.schedule import price_schedule, schedule_table
from headwater.cost.shared import si
from headwater.cost.text import Price
from headwater.util.errors import HeadwaterError
from headwater.util.terminal import Table

__all__ = [
    "COLORS",
    "ImagePrice",
    "Price",
    "figure",
    "price",
    "price_schedule",
    "schedule_table",
    "si",
    "table",
]


def price(config: HeadwaterConfig, **settings: Any) -> Any:
    """Price a config: a `Price`, or for an image model an `ImagePrice`.

    name: default "model". context: of text, tokens per row, one or several; default: the config's
    max_position_embeddings. batch: rows, or sequences being generated, or images; default 1. tokens, images: the
    training budget of either kind. hardware: a `Hardware`. devices: default 1. precision: as in recipes, default
    bf16-mixed; the cache is in the matmuls' dtype. mfu: the assumed share of the peak that training reaches, default
    0.4. gradient_checkpointing, and of text loss_chunk_tokens: as in recipes. averages: with `training.ema_decay`.
    masked: packed rows of text have a mask in memory (`headwater.cost.counts.activation_bytes`). Raises
    `HeadwaterError` for
    invalid values.
    """
    of_images = isinstance(config, HeadwaterVisionConfig)
    for name in ("context", "tokens") if of_images else ("images",):
        if settings.pop(name, None) is not None:
            raise HeadwaterError(
                f"{name} is not for {'image' if of_images else 'language'} models; "
                + ("set image_size, and give a budget in images." if of_images else "give a budget in tokens.")
            )
    return images.price(config, **settings) if of_images else text.price(config, **settings)


def table(prices: Sequence[Price] | Sequence[ImagePrice]) -> Table:
    """The prices side by side, with ratios to the first; all of text, or all of images."""
    if isinstance(prices[0], ImagePrice):
        return images.table(cast(Sequence[ImagePrice], prices))
    return text.table(cast(Sequence[Price], prices))
