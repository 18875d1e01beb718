"""The images for an inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from headwater.config.vision import HeadwaterVisionConfig
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.images import ImageData
from headwater_lab.data.images.reading import read_image
from headwater_lab.inspection.sample import Sample
from headwater_lab.training.trained_models import PROCESSOR, Trained, build_data

IMAGES = 64  # held-out images to read


@dataclass(frozen=True, kw_only=True)
class ImageSample(Sample):
    """Images, pixel_values [images, C, H, W], and their names.

    grid: rows and columns of patches; first: tokens before them. middle, spread: mean and deviation by which channels
    were normalized.
    """

    names: list[str]
    grid: tuple[int, int]
    first: int
    middle: Sequence[float]
    spread: Sequence[float]

    @property
    def length(self) -> int:
        return self.first + self.grid[0] * self.grid[1]

    def words(self, row: int, position: int, lead: int = 0, trail: int = 0) -> tuple[str, str, str]:
        """A patch by its image, its row and its column, from 0."""
        row_of_patches, column = divmod(position - self.first, self.grid[1])
        is_patch = position >= self.first
        where = f"row {row_of_patches}, column {column}" if is_patch else f"token {position} before the patches"
        return "", f"{self.names[row]}: {where}", ""

    def picture(self, image: int) -> np.ndarray:
        """The pixels of an image as the model gets them, [H, W, 3], or [H, W] if grey, from 0 to 1."""
        mean, deviation = (torch.tensor(values).double().view(-1, 1, 1) for values in (self.middle, self.spread))
        pixels = (self.inputs["pixel_values"][image].double() * deviation + mean).clamp(0, 1).permute(1, 2, 0).numpy()
        return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def sample_images(trained: Trained, files: Sequence[Path], count: int | None) -> ImageSample:
    """These files; without files, `count` held-out images of the data the model was trained on, always the same.

    Raises `HeadwaterError` for files that are no images, and if there is nothing to read.
    """
    config = cast("HeadwaterVisionConfig", trained.model.config)
    if files:
        if count is not None:
            raise HeadwaterError("--rows is the number of held-out images; leave it out beside --image.")
        if config.num_channels not in (1, 3):
            raise HeadwaterError(
                f"Files have 1 or 3 channels, and {trained.source!r} takes {config.num_channels}; pass --scalars to "
                "see only its scalars."
            )
        processor = trained.tokenizer
        if processor is None:
            raise HeadwaterError(
                f"{trained.source!r} has no {PROCESSOR}, which says how images are prepared; save the image processor "
                "there, or leave out --image."
            )

        images = [read_image(file, str(file), config.num_channels) for file in files]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        names = [file.name for file in files]
        middle, spread = processor.image_mean, processor.image_std
    else:
        count = IMAGES if count is None else count
        if count < 1:
            raise HeadwaterError(f"--rows must be at least 1 image, not {count}.")
        data = build_data(trained.history)
        if not isinstance(data, ImageData):
            raise HeadwaterError(
                f"{trained.source!r} does not record its training data; pass images with --image FILE, or --scalars "
                "to see only its scalars."
            )
        order = torch.randperm(len(data.held_out.labels), generator=generator("inspect", "images"))
        chosen = order[:count].tolist()
        pixels = data.held_out_images(chosen)["pixel_values"]
        names = [data.held_out.name(number) for number in chosen]
        middle, spread = data.mean, data.std
    grid = config.grid_of(*pixels.shape[2:])
    if grid[0] * grid[1] < 2:
        raise HeadwaterError("Images of one patch have no attention to look at; pass --scalars to see only scalars.")
    return ImageSample(
        {"pixel_values": pixels.to(trained.model.dtype)},
        names=names,
        grid=grid,
        first=config.first_patch,
        middle=middle,
        spread=spread,
    )
