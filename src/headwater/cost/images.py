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
    first, costs = prices[0], [price.at[0] for price in prices]
    note = (
        f"{first.precision}; FLOPs are matmuls; × is over the first column.",
        "Activations and largest batches are estimates.",
        *ceilings(first.hardware, first.precision),
    )
    result = SideBySide([price.name for price in prices], " ".join(note))
    result.parameters([price.parameters for price in prices])
    result.section("training state")
    result.field("bytes", prices, "state_bytes", ratio=True)
    sizes = dict.fromkeys(f"{cost.image_size[0]} x {cost.image_size[1]}" for cost in costs)
    result.section(f"images of {', '.join(sizes)}")
    result.field("sequence length", costs, "tokens")
    result.forward_flops("image", costs, "forward")
    result.field("training FLOPs per image", costs, "training", ratio=True)
    result.activations(first.batch, costs, any(price.gradient_checkpointing for price in prices))
    limits = [cost.limits for cost in costs if cost.limits is not None]
    if limits:
        budget = "" if first.images is None else f"{si(first.images)} images"
        result.training("images", "images", first, budget, limits)
        result.field("inference ceiling, images/s, one device", limits, "inference_ceiling", ratio=True)
    result.devices_needed(prices)
    return result.table
