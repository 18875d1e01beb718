"""Random changes to training images, by torchvision's v2 transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from headwater_lab.util.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

Probability = Annotated[float, Field(ge=0, le=1)]
# RandAugment as the papers write it, (magnitude, deviation): operations per image, and the largest magnitude.
OPERATIONS, LARGEST = 2, 10.0
BINS = 31


class Augmentation(Settings):
    """`augmentation:` of image data. Nothing is changed by default. Transforms are applied in this order."""

    crop: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """Crop a random region, with a share of the area between these two and an aspect ratio from 3/4 to 4/3, and resize
    it (Inception's crop; ImageNet: [0.08, 1]). null takes the part that evaluation takes."""
    flip: Probability = 0.0
    """Probability of a horizontal flip."""
    rand_augment: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """RandAugment (arXiv 1909.13719): two random operations, whose magnitude (of 10) is drawn from a normal
    distribution with this mean and standard deviation."""
    erase: Probability = 0.0
    """Probability of random erasing (arXiv 1708.04896)."""
    mixup: float = Field(default=0.0, ge=0, le=100)
    """α of mixup (arXiv 1710.09412); 0 for none."""
    cutmix: float = Field(default=0.0, ge=0, le=100)
    """α of CutMix (arXiv 1905.04899); 0 for none. With mixup too, each image gets one of the two at random."""

    @property
    def draws(self) -> bool:
        """Whether any transform is random, and torchvision is needed."""
        settings = self.crop, self.rand_augment, self.flip, self.erase, self.mixup, self.cutmix
        return any(setting not in (None, 0) for setting in settings)

    @property
    def back(self) -> int:
        """1 if each row is mixed with the one before it, else 0."""
        return int(bool(self.mixup or self.cutmix))

    def model_post_init(self, context: Any) -> None:
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"data.augmentation.crop must be the least and largest share of the area, not {self.crop}")
        if self.rand_augment is not None and not (0 <= self.rand_augment[0] <= LARGEST and self.rand_augment[1] >= 0):
            raise ValueError(
                f"data.augmentation.rand_augment must be a magnitude (0 to 10) and a deviation, not {self.rand_augment}"
            )


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let PyTorch's random functions, which torchvision calls, draw from `generator`; restore the global state after.

    The training step must not run meanwhile in another thread.
    """
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())


class Changer:
    """A function from an image and its generator to normalized pixels [C, H, W], changed at random."""

    def __init__(
        self,
        settings: Augmentation,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        shorter: int | None = None,
    ) -> None:
        """Set up the transforms. shorter: without a random crop, as for `fit_image`."""
        if settings.draws:
            from torchvision.transforms import v2
            from torchvision.transforms.v2 import InterpolationMode

        self.draws, self.size = settings.draws, size
        self.transforms: list[Callable[[Image], Image]] = [partial(fit_image, size=size, shorter=shorter)]
        if settings.crop is not None:
            crop = v2.RandomResizedCrop(size, scale=settings.crop, interpolation=InterpolationMode.BICUBIC)
            self.transforms = [crop]
        if settings.flip:
            self.transforms.append(v2.RandomHorizontalFlip(settings.flip))
        if settings.rand_augment is not None:
            by_level = [v2.RandAugment(OPERATIONS, level, BINS) for level in range(BINS)]
            self.transforms.append(partial(_rand_augmented, by_level, settings))
        self.erase = v2.RandomErasing(settings.erase) if settings.erase else None
        self.mean, self.std = (np.array(values, np.float32).reshape(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Image, draw: torch.Generator) -> Tensor:
        with drawing_from(draw) if self.draws else nullcontext():
            for transform in self.transforms:
                image = transform(image)
            # Normalized by hand, because torchvision's conversion and normalization take longer than all else for a
            # small image, and PyTorch's operations would start threads in each worker thread.
            pixels = np.empty((len(self.mean), *self.size), np.float32)
            np.divide(np.asarray(image).reshape(*self.size, -1).transpose(2, 0, 1), np.float32(255), out=pixels)
            pixels -= self.mean
            pixels /= self.std
            changed = torch.from_numpy(pixels)
            return changed if self.erase is None else self.erase(changed)


def fit_image(image: Image, size: tuple[int, int], shorter: int | None) -> Image:
    """Fit an image to this height and width, as evaluation does: the whole image squeezed, or the center after resizing
    the shorter side to `shorter` pixels."""
    from PIL.Image import Resampling

    height, width = size
    if shorter is None:
        return image if image.size == (width, height) else image.resize((width, height), Resampling.BICUBIC)
    least = min(image.size)
    image = image.resize((image.width * shorter // least, image.height * shorter // least), Resampling.BICUBIC)
    x, y = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((x, y, x + width, y + height))


def _rand_augmented(by_level: list[Any], settings: Augmentation, image: Image) -> Image:
    assert settings.rand_augment is not None
    magnitude, deviation = map(torch.tensor, settings.rand_augment)
    level = torch.normal(magnitude, deviation).clamp(0, LARGEST) / LARGEST * (BINS - 1)
    return by_level[round(float(level))](image)


def mix_images(
    settings: Augmentation,
    pixels: Tensor,
    labels: Tensor,
    classes: int,
    draws: Sequence[Callable[[], torch.Generator]],
) -> tuple[Tensor, Tensor]:
    """Mix each row with the one `settings.back` rows before it; the first rows have none, and are left out.

    pixels [N, C, H, W] and labels [N] become [N - back, C, H, W] and probabilities [N - back, classes]. draws: for each
    of those a generator with the same numbers whenever it is called.
    """
    from torchvision.transforms import v2

    kinds = [
        kind(alpha=a, num_classes=classes)
        for kind, a in ((v2.MixUp, settings.mixup), (v2.CutMix, settings.cutmix))
        if a
    ]
    images = torch.empty_like(pixels[settings.back :])
    shares = torch.empty(len(images), classes)
    for row, draw in enumerate(draws):
        kind = kinds[int(torch.randint(len(kinds), (), generator=draw()))]
        pair = [row, row + settings.back]
        with drawing_from(draw()):
            x, y = kind(pixels[pair], labels[pair])
        images[row], shares[row] = x[1], y[1]
    return images, shares
