"""What an image model costs to train and to run on given hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import Hardware
from headwater.cost.shared import (
    AnyPrice,
    SideBySide,
    TrainingLimits,
    ceilings,
    check,
    common_fields,
    si,
    training_limits,
)
from headwater.util.terminal import Table


@dataclass(frozen=True)
class ImageLimits(TrainingLimits):
    """inference_ceiling: images/s of one device classifying, if only matmuls ran, at the peak."""

    inference_ceiling: float


@dataclass(frozen=True)
class AtImageSize:
    """What depends on the size of the images. FLOPs are per image, bytes for the whole batch.

    tokens: of an image. forward: by part. step_bytes: training state and activations with the gradient checkpointing
    that was asked for.
    """

    image_size: tuple[int, int]
    tokens: int
    forward: dict[str, float]
    training: float
    activation_bytes: int
    activation_bytes_checkpointed: int
    step_bytes: int
    limits: ImageLimits | None


@dataclass(frozen=True)
class ImagePrice(AnyPrice):
    """The price of one config of image models. images: the training budget."""

    images: float | None
    at: list[AtImageSize]


def price(
    config: HeadwaterVisionConfig,
    name: str = "model",
    batch: int = 1,
    images: float | None = None,
    hardware: Hardware | None = None,
    devices: int = 1,
    precision: str = "bf16-mixed",
    mfu: float = 0.4,
    gradient_checkpointing: bool = False,
    averages: bool = False,
) -> ImagePrice:
    """Price a config at its image_size; the arguments are those of `headwater.cost.price`."""
    check(precision, mfu, (("batch", batch), ("devices", devices)), {"images": images})
    state, forward = cost.state_bytes(config, precision, averages=averages), cost.forward_flops_per_image(config)
    training = cost.training_flops(config, config.tokens)

    def activations(count: int, checkpointed: bool) -> int:
        return sum(cost.activation_bytes(config, config.tokens, count, precision, checkpointed).values())

    def limits(device: Hardware) -> ImageLimits:
        memory = activations(1, False), activations(1, True)
        return ImageLimits(
            **training_limits(device, precision, devices, mfu, images, training, sum(state.values()), memory),
            inference_ceiling=device.peak(precision) / sum(forward.values()),
        )

    at = AtImageSize(
        image_size=config.image_shape,
        tokens=config.tokens,
        forward=forward,
        training=training,
        activation_bytes=activations(batch, False),
        activation_bytes_checkpointed=activations(batch, True),
        step_bytes=sum(state.values()) + activations(batch, gradient_checkpointing),
        limits=None if hardware is None else limits(hardware),
    )
    size = {"patch": list(config.patch_shape), "classes": config.num_labels}
    settings = dict(name=name, precision=precision, batch=batch, mfu=mfu, devices=devices, hardware=hardware)
    fields = common_fields(config, size, state, gradient_checkpointing=gradient_checkpointing, **settings)
    return ImagePrice(**fields, images=images, at=[at])


def table(prices: Sequence[ImagePrice]) -> Table:
    """The prices side by side, with ratios to the first."""
    first, here = prices[0], [one.at[0] for one in prices]
    note = (
        f"{first.precision}; FLOPs are matmuls; × is over the first column.",
        "Activations and largest batches are estimates.",
        *ceilings(first.hardware, first.precision),
    )
    result = SideBySide([one.name for one in prices], " ".join(note))
    row = result.row
    result.parameters([one.parameters for one in prices])
    result.section("training state")
    row("bytes", [sum(one.state_bytes.values()) for one in prices], ratio=True)
    sizes = dict.fromkeys(f"{one.image_size[0]} x {one.image_size[1]}" for one in here)
    result.section(f"images of {', '.join(sizes)}")
    row("sequence length", [one.tokens for one in here])
    for part in here[0].forward:
        label = "linear layers" if part == "maps" else part
        row(f"forward FLOPs per image: {label}", [one.forward[part] for one in here])
    row("forward FLOPs per image", [sum(one.forward.values()) for one in here], ratio=True)
    row("training FLOPs per image", [one.training for one in here], ratio=True)
    result.activations(first.batch, here, any(one.gradient_checkpointing for one in prices))
    limits = [one.limits for one in here if one.limits is not None]
    if limits:
        budget = "" if first.images is None else f"{si(first.images)} images"
        result.training("images", "images", first, budget, limits)
        row("inference ceiling, images/s, one device", [one.inference_ceiling for one in limits], ratio=True)
    result.devices_needed(prices)
    return result.table
