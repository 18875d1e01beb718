"""The basis of image data: order, augmentation, evaluation and the image processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F
from transformers import BaseImageProcessor

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.base import ALONE, Batch, DataSettings, Evaluation, Share, shuffle_rows
from headwater_lab.data.images.augment import Augmentation, Changer, mix_images
from headwater_lab.data.images.loading import load_batches

if TYPE_CHECKING:
    from PIL.Image import Image

# Maximum number of pixel values in a batch for evaluation.
PIXELS = 2**24
MEAN, STD = 0.5, 0.5

Pixels = Annotated[int, Field(ge=1, le=2**16)]
ImageSize = Pixels | Annotated[list[Pixels], Field(min_length=2, max_length=2)]


class ImageSettings(DataSettings):
    """Fields that all kinds of image data share."""

    image_size: ImageSize
    """Height and width in pixels, one number or [height, width]; images are resized to it."""
    channels: int = Field(default=3, ge=1, le=3)
    """3: red, green and blue; gray images repeat their one channel. 1: gray; colors become their luma."""
    augmentation: Augmentation = Augmentation()
    """Random changes to training images; null for none."""
    workers: int = Field(default=4, ge=0, le=256)
    """Processes that read and augment images, per training process, at most one per core; 0: the training thread.
    Results do not depend on it."""

    @field_validator("augmentation", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _channels_exist(self) -> ImageSettings:
        if self.channels == 2:
            raise ValueError("data.channels must be 1 (gray) or 3 (color), not 2")
        return self

    @property
    def known_classes(self) -> int | None:
        """The number of classes, if the settings alone determine it."""
        return None

    def check_extras(self) -> None:
        """Raise `HeadwaterError` if a package is missing; torchvision is needed only for random changes."""
        extras.check_extra("vision", () if self.augmentation.draws else ("torchvision",))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else (self.image_size[0], self.image_size[1])


class UnreadableImage(HeadwaterError):
    """An error for a file that is not an image, or is damaged; the message names it."""


class Images(Protocol):
    """Numbered images, each with its class."""

    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int, draw: torch.Generator) -> Image:
        """Open an image, in the settings' channels; draw: for randomly generated images. Raises `UnreadableImage`."""
        ...


class ImageData:
    """See `headwater_lab.data.base.Data`. A row is an image; its batches are pixel_values [B, C, H, W] and labels.

    labels: [B], numbers of classes; with mixup or CutMix [B, classes], the probability of each.
    """

    metric = "accuracy"
    lower_is_better = False
    tokenizer = None

    def __init__(
        self,
        settings: ImageSettings,
        train: Images,
        held_out: Images,
        classes: Sequence[str],
        description: dict[str, Any],
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_ratio: float | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        """mean, std: of pixels from 0 to 1, by channel; default 0.5. crop_ratio: the share of the shorter side that the
        center crop takes; None takes the whole image, squeezed. notices: warnings for the record of a run that begins.
        """
        self.notices = list(notices)
        self.reads_ahead = settings.workers > 0
        self.settings, self.train, self.held_out, self.classes = settings, train, held_out, list(classes)
        self.vocab_size, self.context = len(self.classes), 1  # the model itself cuts an image into tokens
        self.mean, self.std = list(mean or [MEAN] * settings.channels), list(std or [STD] * settings.channels)
        shorter = None if crop_ratio is None else round(max(settings.size) / crop_ratio)
        self.change = Changer(settings.augmentation, settings.size, self.mean, self.std, shorter)
        self.processor = image_processor(settings.size, settings.channels, self.mean, self.std, shorter)
        self.description = description | {
            "train_images": len(train),
            "held_out_images": len(held_out),
            "classes": len(self.classes),
        }

    def order_images(self, seed: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) without end, from row `start` on: a function of the seed."""
        images = shuffle_rows(len(self.train), seed, start)
        return ((row // len(self.train), index) for row, index in zip(itertools.count(start), images, strict=False))

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        load = partial(self.read_batch, seed, range(batch_size)[share.part(batch_size)])
        return load_batches(load, self.plan_batches(seed, batch_size, start), self.settings.workers)

    def plan_batches(self, seed: int, batch_size: int, start: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield (number of its first row, its rows) for each batch; mixed rows with the `back` rows before them."""
        back = self.settings.augmentation.back
        # The first rows of the run have no rows before them, and use those after them.
        earliest = list(itertools.islice(self.order_images(seed, 0), 2 * back))
        order = self.order_images(seed, max(0, start - back))
        previous = [earliest[number + 2 * back] if number < 0 else next(order) for number in range(start - back, start)]
        for first_row in itertools.count(start, batch_size):
            rows = previous + list(itertools.islice(order, batch_size))
            yield first_row, rows
            previous = rows[len(rows) - back :]

    def read_batch(self, seed: int, local_rows: range, numbered_rows: tuple[int, list[tuple[int, int]]]) -> Batch:
        """Read the rows `local_rows` of a batch of `plan_batches`. Raises `UnreadableImage`."""
        (start, rows), settings = numbered_rows, self.settings.augmentation
        rows = rows[local_rows.start : local_rows.stop + settings.back]
        pixels = torch.empty(len(rows), self.settings.channels, *self.settings.size)
        for target, row in zip(pixels, rows, strict=True):
            target.numpy()[...] = self.augment_image(seed, *row).numpy()
        labels = torch.tensor([self.train.labels[index] for _, index in rows])
        if settings.back:
            draws = [partial(generator, "mix", seed, start + row) for row in local_rows]
            pixels, labels = mix_images(settings, pixels, labels, len(self.classes), draws)
        return {"pixel_values": pixels, "labels": labels}

    def augment_image(self, seed: int, epoch: int, index: int) -> Tensor:
        """Return the pixels [C, H, W] of a training image, as this epoch sees it."""
        draw = generator("image", seed, epoch, index, 0)
        return self.change(self.train.open(index, draw), draw)

    def held_out_images(self, numbers: Sequence[int]) -> Batch:
        """Read these held-out images, the same for every seed. Raises `UnreadableImage`."""
        images = [self.held_out.open(number, generator("held out", number)) for number in numbers]
        labels = torch.tensor([self.held_out.labels[number] for number in numbers])
        return {"pixel_values": self.processor(images=images, return_tensors="pt")["pixel_values"], "labels": labels}

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure accuracy (top-1), top-5 accuracy with more than five classes, and loss in nats per image."""
        count = len(self.held_out)
        size = max(1, min(1024, PIXELS // (self.settings.channels * self.settings.size[0] * self.settings.size[1])))
        firsts = range(0, count, size)
        ranks, nats = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        numbers = range(share.rank, -(-len(firsts) // share.world) * share.world, share.world)
        # All processes must make equally many calls. A process without images left repeats its last ones.
        starts = [firsts[min(number, len(firsts) - 1)] for number in numbers]
        ranges = [range(start, min(start + size, count)) for start in starts]
        workers = min(self.settings.workers, len(ranges) - 1)
        with closing(load_batches(self.held_out_images, ranges, workers)) as batches:
            for number, images, batch in zip(numbers, ranges, batches, strict=True):
                scores, labels = logits(batch).float().cpu(), batch["labels"]
                if number < len(firsts):
                    rows = slice(images.start, images.stop)
                    right = scores.gather(1, labels[:, None])
                    # On ties the first class wins, as in argmax. NaN counts as wrong.
                    precedes = torch.arange(scores.shape[1]) < labels[:, None]
                    better = ~(scores <= right) | ((scores == right) & precedes)
                    ranks[rows] = better.sum(1).double()
                    nats[rows] = F.cross_entropy(scores, labels, reduction="none").double()
        ranks, nats = share.total(ranks), share.total(nats)
        metrics = {"accuracy": float((ranks < 1).double().mean())}
        if len(self.classes) > 5:
            metrics["accuracy/top-5"] = float((ranks < 5).double().mean())
        return Evaluation(metrics | {"loss": float(nats.mean())})


def image_processor(
    size: tuple[int, int],
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    shorter: int | None = None,
) -> BaseImageProcessor:
    """Make the image processor of transformers that prepares images for a trained model, and is saved with it.

    shorter: the shorter side is resized to this many pixels before the center crop; None resizes the whole image,
        whatever its aspect ratio.
    """
    # Resize with Pillow, as in training: torchvision gives other pixels, and accuracy would depend on whether it is
    # installed. The processor is saved as BitImageProcessor, which transformers loads with either backend.
    from transformers import BitImageProcessorPil

    shape = {"height": size[0], "width": size[1]}
    return BitImageProcessorPil(
        size=shape if shorter is None else {"shortest_edge": shorter},
        crop_size=shape,
        do_center_crop=shorter is not None,
        do_convert_rgb=channels == 3,
        image_mean=list(mean),
        image_std=list(std),
    )
