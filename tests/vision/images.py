"""Small image models and images for tests, in fp64, none of whose weights is at its start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from headwater import HeadwaterForImageClassification, HeadwaterVisionConfig
from headwater.testing import disturb

# A stand-in where transformers asks for torchvision.
with_a_processor = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"), reason="this version of transformers reads processors with torchvision"
)

SIZES = dict(
    image_size=[9, 16],  # 3 rows and 4 columns
    patch_size=[3, 4],
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_labels=5,
)


def vision_config(mechanisms: dict | None = None, **changes: Any) -> HeadwaterVisionConfig:
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), "pattention" not in (mechanisms or {}))
    return HeadwaterVisionConfig(**(SIZES | biases | dict(mechanisms=mechanisms or {}) | changes))


def image_model(mechanisms: dict | None = None, **changes: Any) -> HeadwaterForImageClassification:
    """A perturbed fp64 model in eval mode."""
    return disturb(HeadwaterForImageClassification(vision_config(mechanisms, **changes)).double()).eval()


def images(count: int, height: int = 9, width: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, height, width, generator=generator, dtype=torch.float64)
