"""Classes of images, by a trained model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import BaseImageProcessor

from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.data.images.image_reading import read_image
from headwater_lab.training.checkpoints import check_sums, load_model, newest_checkpoint
from headwater_lab.training.trained_models import PROCESSOR, open_image_processor

BATCH = 32


def load_for_prediction(path: Path) -> tuple[HeadwaterForImageClassification, BaseImageProcessor]:
    """Load the model and image processor of a checkpoint, or of a run's newest one. Raises `HeadwaterError`."""
    path = newest_checkpoint(path)
    check_sums(path)
    model = load_model(path)
    if not isinstance(model, HeadwaterForImageClassification):
        raise HeadwaterError(f"{str(path)!r} is a text model, which `headwater generate` runs; name an image model.")
    processor = open_image_processor(path)
    if processor is None:
        raise HeadwaterError(f"{str(path)!r} has no {PROCESSOR}; save the image processor there.")
    return model.eval(), processor


@torch.no_grad()
def predict_images(
    model: HeadwaterForImageClassification, processor: BaseImageProcessor, images: Sequence[Path]
) -> Iterator[dict[str, float]]:
    """Yield each image's classes with their probabilities, the likeliest first. Raises `UnreadableImage`."""
    config = model.config
    for start in range(0, len(images), BATCH):
        opened = [read_image(path, shown(str(path)), config.num_channels) for path in images[start : start + BATCH]]
        pixels = processor(images=opened, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)
        for row in model(pixel_values=pixels).logits.double().softmax(-1).cpu():
            order = row.argsort(descending=True, stable=True).tolist()
            yield {config.id2label[number]: float(row[number]) for number in order}
