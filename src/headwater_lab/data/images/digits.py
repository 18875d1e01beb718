"""scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: real data that need no download."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field

from headwater.util.seeding import generator
from headwater_lab.data.base import register_kind
from headwater_lab.data.images.image_data import ImageData, Images, ImageSettings
from headwater_lab.data.images.image_reading import convert_channels

if TYPE_CHECKING:
    from PIL.Image import Image


@register_kind
class DigitsSettings(ImageSettings):
    """`data:` of a recipe, with `kind: digits`: the UCI optical digits' test part, as in scikit-learn."""

    kind: Literal["digits"] = "digits"
    image_size: int = Field(default=8, ge=1, le=1024)
    """Pixels; digits larger than 8 x 8 are interpolated."""
    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of each digit's images to evaluate on, the same for every seed."""

    @property
    def known_classes(self) -> int:
        return 10

    def build(self) -> ImageData:
        self.check_extras()
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
        labels = [int(label) for label in digits.target]
        train, held_out = [], []
        for digit in range(10):
            of_digit = [index for index, label in enumerate(labels) if label == digit]
            order = torch.randperm(len(of_digit), generator=generator("digits", digit)).tolist()
            count = max(1, round(self.held_out * len(of_digit)))
            held_out += [of_digit[i] for i in order[:count]]
            train += [of_digit[i] for i in order[count:]]
        return ImageData(
            self,
            DigitImages(pixels, labels, sorted(train), self.channels),
            DigitImages(pixels, labels, sorted(held_out), self.channels),
            [str(digit) for digit in range(10)],
            {"sha256": hashlib.sha256(pixels.tobytes() + bytes(labels)).hexdigest()},
        )


class DigitImages(Images):
    """See `Images`."""

    def __init__(self, pixels: np.ndarray, labels: list[int], numbers: list[int], channels: int) -> None:
        from PIL.Image import fromarray

        self.numbers, self.labels = numbers, [labels[number] for number in numbers]
        self.images = [convert_channels(fromarray(pixels[number]), "", channels) for number in numbers]

    def open(self, index: int, draw: torch.Generator) -> Image:
        return self.images[index]
