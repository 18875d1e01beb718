"""What a model of text or of images costs to train and to run on given hardware, and the table of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import Hardware
from headwater.util.errors import HeadwaterError, shown
from headwater.util.terminal import Table, lined

PRECISIONS = ("64-true", "32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class TrainingLimits:
    """What the hardware allows in training.

    training_ceiling: tokens or images/s of all devices, if only matmuls ran, at the peak.
    days, device_hours: for the budget at `mfu` of the peak; None without a budget.
    largest_batch: rows or images per device, which holds the full state; 0 if none fits.
    """

    training_ceiling: float
    days: float | None
    device_hours: float | None
    largest_batch: int
    largest_batch_checkpointed: int


@dataclass(frozen=True)
class Limits(TrainingLimits):
    """What the hardware allows at one context.

    generation_ceiling: tokens/s of one device generating `batch` sequences, if it only read weights and cache.
    most_sequences: how many sequences' caches fit in memory with the weights.
    """

    generation_ceiling: float
    most_sequences: int


@dataclass(frozen=True)
class ImageLimits(TrainingLimits):
    """inference_ceiling: images/s of one device classifying, if only matmuls ran, at the peak."""

    inference_ceiling: float


@dataclass(frozen=True)
class AtContext:
    """What depends on the context. FLOPs are per token, bytes for the whole batch.

    causal, full: forward FLOPs by part; full counts the whole square of scores, causal only the part that is used.
    prefill: FLOPs of a prompt of this length and its last token's logits, for the whole batch.
    step_bytes: training state and activations with the gradient checkpointing that was asked for.
    """

    context: int
    causal: dict[str, float]
    full: dict[str, float]
    training_causal: float
    training_full: float
    prefill: float
    cache_bytes: int
    activation_bytes: int
    activation_bytes_checkpointed: int
    step_bytes: int
    limits: Limits | None


@dataclass(frozen=True)
class AtImageSize:
    """What depends on the size of the images. FLOPs are per image, bytes for the whole batch.

    tokens: of an image. forward: by part. step_bytes: as of `AtContext`.
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
class AnyPrice:
    """What the price of every config has; `asdict` makes JSON of it.

    devices_needed: over how many the training state must be sharded to fit; None without hardware.
    gradient_checkpointing: as in recipes.
    """

    name: str
    shape: dict[str, Any]
    precision: str
    batch: int
    mfu: float
    devices: int
    hardware: Hardware | None
    parameters: dict[str, int]
    state_bytes: dict[str, int]
    devices_needed: int | None
    gradient_checkpointing: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_parameters": sum(self.parameters.values())}


@dataclass(frozen=True)
class Price(AnyPrice):
    """The price of one config of language models.

    tokens: the training budget. loss_chunk_tokens: as in recipes. masked: packed rows have a mask in memory.
    last_token_layers: layers that run for a prompt's last token alone.
    """

    tokens: float | None
    cache_bytes_per_token: int
    last_token_layers: int
    loss_chunk_tokens: int | None
    masked: bool
    at: list[AtContext]


@dataclass(frozen=True)
class ImagePrice(AnyPrice):
    """The price of one config of image models. images: the training budget."""

    images: float | None
    at: list[AtImageSize]


def price(
    config: HeadwaterConfig,
    *,
    name: str = "model",
    context: Sequence[int] | int | None = None,
    batch: int = 1,
    tokens: float | None = None,
    images: float | None = None,
    hardware: Hardware | None = None,
    devices: int = 1,
    precision: str = "bf16-mixed",
    mfu: float = 0.4,
    gradient_checkpointing: bool = False,
    loss_chunk_tokens: int | None = None,
    masked: bool = False,
    averages: bool = False,
) -> Any:
    """Price a config: a `Price`, or for an image model an `ImagePrice`.

    context: of text, tokens per row, one or several; default: the config's max_position_embeddings. batch: rows, or
    sequences being generated, or images. tokens, images: the training budget of either kind. precision: as in recipes;
    the cache is in the matmuls' dtype. mfu: the assumed share of the peak that training reaches.
    gradient_checkpointing, and of text loss_chunk_tokens: as in recipes. averages: with `training.ema_decay`.
    masked: packed rows of text have a mask in memory (`headwater.cost.counts.activation_bytes`). Raises
    `HeadwaterError` for invalid values.
    """
    of_images = isinstance(config, HeadwaterVisionConfig)
    of_text = {"context": context, "tokens": tokens, "loss_chunk_tokens": loss_chunk_tokens, "masked": masked or None}
    _refuse_unread(of_images, of_text if of_images else {"images": images})
    lengths = _lengths(config, context)
    sizes = (*(("context", length) for length in lengths), ("batch", batch), ("devices", devices))
    check(precision, mfu, sizes, {"tokens": tokens, "images": images})
    _check_positions(config, name, max(lengths))
    budget = images if of_images else tokens
    element, _ = cost.BYTES[precision]
    state, parameters = cost.state_bytes(config, precision, averages), cost.parameters(config)
    held = sum(state.values())

    def activations(length: int, rows: int, checkpointed: bool) -> int:
        return sum(
            cost.activation_bytes(config, length, rows, precision, checkpointed, loss_chunk_tokens, masked).values()
        )

    def limits(length: int, device: Hardware) -> TrainingLimits:
        ceiling = devices * device.peak(precision) / cost.training_flops(config, length)
        hours = None if budget is None else budget / (ceiling * mfu) / 3600
        free = max(0.0, device.memory - held)
        of_training: dict[str, Any] = dict(
            training_ceiling=ceiling,
            days=None if hours is None else hours / 24,
            device_hours=None if hours is None else hours * devices,
            largest_batch=int(free // activations(length, 1, False)),
            largest_batch_checkpointed=int(free // activations(length, 1, True)),
        )
        if isinstance(config, HeadwaterVisionConfig):
            forward = sum(cost.forward_flops_per_image(config).values())
            return ImageLimits(**of_training, inference_ceiling=device.peak(precision) / forward)
        read = element * cost.weights_read(config) + batch * cost.cache_bytes_read(config, length, element)
        free = max(0.0, device.memory - element * sum(parameters.values()))
        return Limits(
            **of_training,
            generation_ceiling=batch * device.bandwidth / read,
            most_sequences=int(free // cost.cache_bytes(config, length, 1, element)),
        )

    def at(length: int) -> AtContext | AtImageSize:
        shared: dict[str, Any] = dict(
            activation_bytes=activations(length, batch, False),
            activation_bytes_checkpointed=activations(length, batch, True),
            step_bytes=held + activations(length, batch, gradient_checkpointing),
            limits=None if hardware is None else limits(length, hardware),
        )
        training = cost.training_flops(config, length)
        if isinstance(config, HeadwaterVisionConfig):
            forward = cost.forward_flops_per_image(config)
            return AtImageSize(config.image_shape, tokens=length, forward=forward, training=training, **shared)
        return AtContext(
            context=length,
            causal=cost.forward_flops(config, length),
            full=cost.forward_flops(config, length, causal=False),
            training_causal=training,
            training_full=cost.training_flops_per_token(config, length, causal=False),
            prefill=batch * cost.prefill_flops(config, length),
            cache_bytes=cost.cache_bytes(config, length, batch, element),
            **shared,
        )

    common: dict[str, Any] = dict(
        name=name,
        shape=_shape_of(config),
        precision=precision,
        batch=batch,
        mfu=mfu,
        devices=devices,
        hardware=hardware,
        parameters=parameters,
        state_bytes=state,
        devices_needed=None if hardware is None else -int(-held // hardware.memory),
        gradient_checkpointing=gradient_checkpointing,
        at=[at(length) for length in lengths],
    )
    if of_images:
        return ImagePrice(**common, images=images)
    return Price(
        **common,
        tokens=tokens,
        cache_bytes_per_token=cost.cache_bytes_per_token(config, element),
        last_token_layers=config.num_hidden_layers - output_only_from(config, plan_layers(config)),
        loss_chunk_tokens=loss_chunk_tokens,
        masked=masked,
    )


def _refuse_unread(of_images: bool, settings: Mapping[str, Any]) -> None:
    """Raise `HeadwaterError` for a setting of the other kind of models."""
    for name, value in settings.items():
        if value is not None:
            raise HeadwaterError(
                f"{name} is not for {'image' if of_images else 'language'} models; "
                + ("set image_size, and give a budget in images." if of_images else "give a budget in tokens.")
            )


def _lengths(config: HeadwaterConfig, context: Any) -> list[Any]:
    """The tokens in a row to price a model at, not yet checked."""
    if isinstance(config, HeadwaterVisionConfig):
        return [config.tokens]
    if context is None:
        return [config.max_position_embeddings]
    return [*context] if isinstance(context, Sequence) and not isinstance(context, str) else [context]


def _check_positions(config: HeadwaterConfig, name: str, length: int) -> None:
    of_images = isinstance(config, HeadwaterVisionConfig)
    if not of_images and config.position == "learned" and length > config.max_position_embeddings:
        raise HeadwaterError(
            f"Context {length} is beyond the {config.max_position_embeddings} learned positions of {name!r}; "
            f"choose a smaller one, or set max_position_embeddings={length}."
        )


def _shape_of(config: HeadwaterConfig) -> dict[str, Any]:
    if isinstance(config, HeadwaterVisionConfig):
        of_kind = {"patch": list(config.patch_shape), "classes": config.num_labels}
    else:
        of_kind = {"vocab_size": config.vocab_size}
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "key/value heads": config.num_key_value_heads,
        **of_kind,
        "mechanisms": list(config.mechanisms or {}),
    }


def check(precision: str, mfu: float, sizes: Iterable[tuple[str, Any]], budgets: Mapping[str, float | None]) -> None:
    """Raise `HeadwaterError` for a precision, share, size or budget that there is not."""
    if precision not in PRECISIONS:
        raise HeadwaterError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}.")
    for label, value in sizes:
        if not isinstance(value, int) or value < 1:
            raise HeadwaterError(f"{label} must be a whole number, at least 1, not {shown(value)}.")
    if not 0 < mfu <= 1:
        raise HeadwaterError(f"mfu is a share of the peak, above 0 and at most 1, not {mfu:g}.")
    for label, budget in budgets.items():
        if budget is not None and budget <= 0:
            raise HeadwaterError(f"{label} must be more than 0, not {budget:g}.")


def si(value: float) -> str:
    """Four significant digits with k, M, G, T, P."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.95:
            return f"{value:.4g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.4g} P"


class SideBySide:
    """A table with a column for each model, and ratios to the first."""

    def __init__(self, prices: Sequence[Any]) -> None:
        self.prices, self.first = prices, prices[0]
        self.table = lined(caption=_note(prices))
        self.table.add_column("", no_wrap=True)
        for each in prices:
            self.table.add_column(each.name, justify="right", overflow="fold")

    def section(self, title: str) -> None:
        self.table.add_section()
        self.table.add_row(Text(title, "bold"))

    def row(self, label: str, values: Sequence[Any], ratio: bool = True) -> None:
        cells = ["" if v is None else f"{v:,}" if isinstance(v, int) and v < 100_000 else si(v) for v in values]
        if ratio and values[0]:
            cells[1:] = [
                f"{cell} ×{(value or 0) / values[0]:.3f}" for cell, value in zip(cells[1:], values[1:], strict=True)
            ]
        self.table.add_row(f"  {label}", *cells)

    def rows(self, sources: Sequence[Any], labels: Mapping[str, str], ratio: bool = True) -> None:
        """A row for each field of the sources, by its label."""
        for label, field in labels.items():
            self.row(label, [getattr(source, field) for source in sources], ratio)

    def parts(self, label: str, counts: Sequence[Mapping[str, float]]) -> None:
        """A row for each part of the FLOPs, and their sum."""
        for part in counts[0]:
            name = "linear layers" if part == "maps" else part
            self.row(f"{label}: {name}", [each[part] for each in counts], ratio=False)
        self.row(label, [sum(each.values()) for each in counts])

    def of_models(self, shortened: bool) -> None:
        """Rows of what no context changes. shortened: with the layers that run for a prompt's last token alone."""
        counts = [each.parameters for each in self.prices]
        self.section("parameters")
        for part in self.first.parameters:
            if any(each[part] for each in counts):
                self.row(part, [each[part] for each in counts], ratio=False)
        self.row("all", [sum(each.values()) for each in counts])
        if isinstance(self.first, Price):
            self.section("K/V cache")
            self.rows(self.prices, {"bytes per token": "cache_bytes_per_token"})
        if shortened:
            self.section("prompt")
            self.rows(self.prices, {"layers for its last token alone": "last_token_layers"}, ratio=False)
        self.section("training state")
        self.row("bytes", [sum(each.state_bytes.values()) for each in self.prices])

    def at_context(self, here: Sequence[AtContext], shortened: bool) -> None:
        batch = self.first.batch
        self.section(f"context {here[0].context:,}")
        self.parts("forward FLOPs per token", [each.causal for each in here])
        self.row("  full attention", [sum(each.full.values()) for each in here])
        self.rows(here, {"training FLOPs per token": "training_causal", "  full attention": "training_full"})
        if shortened:
            self.rows(here, {f"FLOPs of a prompt, batch {batch}": "prefill"})
        self.rows(here, {f"cache bytes, batch {batch}": "cache_bytes"})

    def at_image_size(self, here: Sequence[AtImageSize]) -> None:
        sizes = dict.fromkeys(f"{each.image_size[0]} x {each.image_size[1]}" for each in here)
        self.section(f"images of {', '.join(sizes)}")
        self.rows(here, {"sequence length": "tokens"}, ratio=False)
        self.parts("forward FLOPs per image", [each.forward for each in here])
        self.rows(here, {"training FLOPs per image": "training"})

    def memory(self, here: Sequence[Any]) -> None:
        self.rows(here, {f"activation bytes, batch {self.first.batch}": "activation_bytes"})
        self.rows(here, {"  gradient checkpointing": "activation_bytes_checkpointed"}, ratio=False)
        if any(map(_ways_to_train, self.prices)):
            self.rows(here, {"training state and activations, as trained": "step_bytes"})

    def limits(self, limits: Sequence[Any]) -> None:
        """Rows of what the hardware allows."""
        first, of_images = self.first, isinstance(self.first, ImagePrice)
        unit, row = ("images", "images") if of_images else ("tokens", "rows")
        training = f"training ceiling, {unit}/s, {first.devices} × {first.hardware.name}"
        self.rows(limits, {training: "training_ceiling"})
        if (budget := getattr(first, unit)) is not None:
            amount = si(budget) if of_images else si(budget).replace("G", "B")
            days = f"days for {amount} {unit} at MFU {first.mfu:g}"
            self.rows(limits, {days: "days", "device-hours": "device_hours"}, ratio=False)
        largest = f"largest batch, {row} per device"
        batches = {largest: "largest_batch", "  gradient checkpointing": "largest_batch_checkpointed"}
        self.rows(limits, batches, ratio=False)
        generation = f"generation ceiling, tokens/s, batch {first.batch}"
        of_text = {generation: "generation_ceiling", "most sequences when generating": "most_sequences"}
        inference = {"inference ceiling, images/s, one device": "inference_ceiling"}
        self.rows(limits, inference if of_images else of_text)


def table(prices: Sequence[Price] | Sequence[ImagePrice]) -> Table:
    """The prices side by side, with ratios to the first; all of text, or all of images."""
    result, first = SideBySide(prices), prices[0]
    shortened = any(getattr(each, "last_token_layers", 0) for each in prices)
    result.of_models(shortened)
    for index in range(len(first.at)):
        here: list[Any] = [each.at[index] for each in prices]
        if isinstance(first, ImagePrice):
            result.at_image_size(here)
        else:
            result.at_context(here, shortened)
        result.memory(here)
        if first.hardware is not None:
            result.limits([each.limits for each in here])
    if any((each.devices_needed or 1) > 1 for each in prices):
        result.rows(prices, {"devices to shard the training state over": "devices_needed"}, ratio=False)
    return result.table


def _ways_to_train(price: Price | ImagePrice) -> list[str]:
    """What training has that changes its memory, in words."""
    ways = ["gradient checkpointing"] if price.gradient_checkpointing else []
    if isinstance(price, Price) and price.loss_chunk_tokens is not None:
        ways.append(f"logits of {price.loss_chunk_tokens:,} tokens at once")
    return [*ways, "a mask for packed rows"] if isinstance(price, Price) and price.masked else ways


def _note(prices: Sequence[Price] | Sequence[ImagePrice]) -> str:
    """Footnote of the table."""
    first = prices[0]
    attention = "" if isinstance(first, ImagePrice) else ", causal attention unless it says full"
    parts = [
        f"{first.precision}; FLOPs are matmuls{attention}; × is over the first column.",
        "Activations and largest batches are estimates.",
    ]
    parts += [f"{each.name} trains with {', '.join(ways)}." for each in prices if (ways := _ways_to_train(each))]
    if (device := first.hardware) is not None:
        parts.append(
            f"{device.name}: {device.peak(first.precision) / 1e12:.4g} TFLOP/s, {device.memory / 1e9:.4g} GB, "
            f"{device.bandwidth / 1e9:.4g} GB/s ({device.source}). Ceilings are 100 % of these."
        )
    return " ".join(parts)
