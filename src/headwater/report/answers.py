"""Held-out images with the answers of a finished run, if its checkpoint and its data still exist."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from headwater.data.images import ImageData, ImageSettings
from headwater.errors import HeadwaterError, NotTrusted
from headwater.inspect.images import as_picture
from headwater.models.kinds import AnyModel
from headwater.outside import may_read
from headwater.recipe import AnyData, untrusted_in
from headwater.records import RunRecord
from headwater.report.comparison import Comparison
from headwater.report.newest import MOST, model_of
from headwater.seeding import generator

if TYPE_CHECKING:
    from torch import Tensor

LOOKED, BATCH = 256, 32  # images to classify at most, and at once
EACH = 8  # wrong and right answers to show
SIDE = 112  # pixels of the longer side that the page keeps
# Images in a folder all of which would have to be read to find those that the run left out.
FEW = 100_000


@dataclass(frozen=True)
class AnsweredImage:
    """An image. png: in base64. probability: the model's, of its answer."""

    name: str
    png: str
    label: str
    answer: str
    probability: float

    @property
    def said(self) -> str:
        """The class; if the answer is wrong, both, and how sure the model was."""
        if self.answer == self.label:
            return self.label
        return f"{self.label}, answered {self.answer} ({100 * self.probability:.0f} %)"


@dataclass(frozen=True)
class Answers:
    """Of one run: the first wrong and the first right answers among `looked` random images, `correct` of them right."""

    arm: str
    seed: int
    looked: int
    correct: int
    wrong: list[AnsweredImage]
    right: list[AnsweredImage]


def answers_of(comparison: Comparison) -> Answers | None:
    """Of the best arm, and of its runs the first, that can still be loaded; None if there is none, and for text."""
    if comparison.trained_on != "images":
        return None
    means = {s.arm: s.mean for s in comparison.summaries if s.mean is not None}
    for arm in sorted(means, key=lambda arm: means[arm], reverse=not comparison.lower_is_better):
        for run in comparison.finished(arm):
            if run.parameters > MOST:
                continue
            data = _data_of(run)
            model = model_of(comparison, run) if data is not None else None
            if model is None or data is None:
                continue
            try:
                return _answers(arm, run.seed, model, data)
            except HeadwaterError:  # an image that is gone, or a model for others
                continue
    return None


def _data_of(run: RunRecord) -> ImageData | None:
    """The images that a run was evaluated on; None if they are elsewhere, have changed, or may not be read
    (`headwater.outside`). Nothing is downloaded.
    """
    try:
        settings = TypeAdapter(AnyData).validate_python(run.recipe["data"])
        if not isinstance(settings, ImageSettings):
            return None
        source = getattr(settings, "source", None)
        if source is not None and not (may_read(source) and Path(source).is_dir()):
            return None
        if getattr(settings, "skip_broken", False) and run.data.get("train_images", 0) > FEW:
            return None
        data = settings.build()
    except NotTrusted:
        raise
    except (HeadwaterError, ValidationError, KeyError, OSError) as error:
        if isinstance(error, ValidationError) and (refused := untrusted_in(error)) is not None:
            raise refused from error
        return None
    return data if data.description.get("sha256") == run.data.get("sha256") else None


@torch.no_grad()
def _answers(arm: str, seed: int, model: AnyModel, data: ImageData) -> Answers:
    found: dict[bool, list[AnsweredImage]] = {True: [], False: []}
    looked = correct = 0
    for numbers in _batches(len(data.held_out)):
        batch = data.held_out_images(numbers)
        pixels = batch["pixel_values"].to(model.device, model.dtype)
        probabilities, answers = model(pixel_values=pixels).logits.double().softmax(-1).max(-1)
        said = (x.tolist() for x in (batch["labels"], answers, probabilities))
        for number, image, label, answer, probability in zip(numbers, batch["pixel_values"], *said, strict=True):
            looked += 1
            correct += answer == label
            if len(found[answer == label]) < EACH:
                png = _png(image, data)
                classes = model.config.id2label
                name = data.held_out.name(number)
                found[answer == label].append(AnsweredImage(name, png, classes[label], classes[answer], probability))
        if min(map(len, found.values())) == EACH:
            break
    return Answers(arm, seed, looked, correct, found[False], found[True])


def _batches(count: int) -> Iterator[list[int]]:
    """Numbers of held-out images, the same ones in every report."""
    chosen = torch.randperm(count, generator=generator("report", "images"))[:LOOKED]
    for batch in chosen.split(BATCH):
        yield batch.tolist()


def _png(pixels: Tensor, data: ImageData) -> str:
    """Normalized pixels [C, H, W] as they look, no larger than `SIDE`."""
    from PIL import Image

    image = Image.fromarray(np.round(255 * as_picture(pixels, data.mean, data.std)).astype(np.uint8))
    image.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()
