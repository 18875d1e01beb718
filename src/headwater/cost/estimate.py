"""What a model of text or of images costs to train and to run on given hardware, and the table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Limits:
    """What the hardware allows at one context.

    training_ceiling: tokens or images/s of all devices, if only matmuls ran, at the peak.
    days, device_hours: for the budget at `mfu` of the peak; None without a budget.
    largest_batch: rows or images per device, which holds the full state; 0 if none fits.
    generation_ceiling: of text, tokens/s of one device generating `batch` sequences, if it only read weights and cache.
    most_sequences: of text, how many sequences' caches fit in memory with the weights.
    inference_ceiling: images/s of one device classifying, if only matmuls ran, at the peak.
    """

    training_ceiling: float
    days: float | None
    device_hours: float | None
    largest_batch: int
    largest_batch_checkpointed: int
    generation_ceiling: float | None = None
    most_sequences: int | None = None
    inference_ceiling: float | None = None


@dataclass(frozen=True)
class AtContext:
    """What depends on the context, or on the size of the images. FLOPs are per token or image, bytes for the batch.

    context: tokens per row, or of an image. image_size: None for text; what follows it is None for images.
    forward: forward FLOPs by part, causal for text. step_bytes: training state and activations with the gradient
    checkpointing that was asked for. forward_full, training_full: count the whole square of scores. prefill: FLOPs of a
    prompt of this length and its last token's logits, for the whole batch.
    """

    context: int
    forward: dict[str, float]
    training: float
    activation_bytes: int
    activation_bytes_checkpointed: int
    step_bytes: int
    limits: Limits | None
    image_size: tuple[int, int] | None = None
    forward_full: dict[str, float] | None = None
    training_full: float | None = None
    prefill: float | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Price:
    """The price of one config.

    tokens, images: the training budget, of text or of images.
    devices_needed: over how many the training state must be sharded to fit; None without hardware.
    gradient_checkpointing, loss_chunk_tokens: as in recipes. masked: packed rows have a mask in memory.
    last_token_layers: layers that run for a prompt's last token alone.
    """

    name: str
    shape: dict[str, Any]
    precision: str
    batch: int
    mfu: float
    devices: int
    hardware: Hardware | None
    tokens: float | None
    images: float | None
    parameters: dict[str, int]
    state_bytes: dict[str, int]
    devices_needed: int | None
    gradient_checkpointing: bool
    loss_chunk_tokens: int | None
    masked: bool
    cache_bytes_per_token: int
    last_token_layers: int
    at: list[AtContext]

    @property
    def unit(self) -> str:
        """What FLOPs are per: token or image."""
        return "token" if self.at[0].image_size is None else "image"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_parameters": sum(self.parameters.values())}


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
) -> Price:
    """Price a config of text or images.

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
    lengths = _list_lengths(config, context)
    sizes = (*(("context", length) for length in lengths), ("batch", batch), ("devices", devices))
    _check(precision, mfu, sizes, {"tokens": tokens, "images": images})
    _check_positions(config, name, max(lengths))
    budget = images if of_images else tokens
    plans, (element, _) = plan_layers(config), cost.BYTES[precision]
    state = cost.state_bytes(config, precision, averages, plans)
    held = sum(state.values())

    def activations(length: int, rows: int, checkpointed: bool) -> int:
        settings = precision, checkpointed, loss_chunk_tokens, masked
        return sum(cost.activation_bytes(config, length, rows, *settings, plans).values())

    def limits(length: int, device: Hardware, flops: float) -> Limits:
        ceiling = devices * device.peak(precision) / (3 * flops)
        hours = None if budget is None else budget / (ceiling * mfu) / 3600
        free = max(0.0, device.memory - held)
        running = dict[str, Any](inference_ceiling=device.peak(precision) / flops)
        return Limits(
            training_ceiling=ceiling,
            days=None if hours is None else hours / 24,
            device_hours=None if hours is None else hours * devices,
            largest_batch=int(free // activations(length, 1, False)),
            largest_batch_checkpointed=int(free // activations(length, 1, True)),
            **(running if of_images else _limit_generation(config, device, length, batch, element, plans)),
        )

    def at(length: int) -> AtContext:
        forward = cost.forward_flops(config, length, plans=plans)
        flops = sum(forward.values())
        image_size = (
            dict[str, Any](image_size=config.image_shape) if isinstance(config, HeadwaterVisionConfig) else None
        )
        return AtContext(
            context=length,
            forward=forward,
            training=3 * flops,
            activation_bytes=activations(length, batch, False),
            activation_bytes_checkpointed=activations(length, batch, True),
            step_bytes=held + activations(length, batch, gradient_checkpointing),
            limits=None if hardware is None else limits(length, hardware, flops),
            **(image_size or _count_text(config, length, batch, element, plans)),
        )

    return Price(
        name=name,
        shape=_describe_shape(config),
        precision=precision,
        batch=batch,
        mfu=mfu,
        devices=devices,
        hardware=hardware,
        tokens=tokens,
        images=images,
        parameters=cost.parameters(config, plans),
        state_bytes=state,
        devices_needed=None if hardware is None else -int(-held // hardware.memory),
        gradient_checkpointing=gradient_checkpointing,
        loss_chunk_tokens=loss_chunk_tokens,
        masked=masked,
        cache_bytes_per_token=cost.cache_bytes_per_token(config, element, plans),
        last_token_layers=0 if of_images else config.num_hidden_layers - output_only_from(config, plans),
        at=[at(length) for length in lengths],
    )


def _count_text(config: HeadwaterConfig, length: int, batch: int, element: int, plans: cost.Plans) -> dict[str, Any]:
    full = cost.forward_flops(config, length, causal=False, plans=plans)
    return dict(
        forward_full=full,
        training_full=3 * sum(full.values()),
        prefill=batch * cost.prefill_flops(config, length, plans=plans),
        cache_bytes=cost.cache_bytes(config, length, batch, element, plans),
    )


def _limit_generation(
    config: HeadwaterConfig, device: Hardware, length: int, batch: int, element: int, plans: cost.Plans
) -> dict[str, Any]:
    read = element * cost.weights_read(config, plans) + batch * cost.cache_bytes_read(config, length, element)
    free = max(0.0, device.memory - element * sum(cost.parameters(config, plans).values()))
    return dict(
        generation_ceiling=batch * device.bandwidth / read,
        most_sequences=int(free // cost.cache_bytes(config, length, 1, element, plans)),
    )


def _refuse_unread(of_images: bool, settings: Mapping[str, Any]) -> None:
    """Raise `HeadwaterError` for a setting of the other kind of models."""
    for name, value in settings.items():
        if value is not None:
            raise HeadwaterError(
                f"{name} is not for {'image' if of_images else 'language'} models; "
                + ("set image_size, and give a budget in images." if of_images else "give a budget in tokens.")
            )


def _list_lengths(config: HeadwaterConfig, context: Any) -> list[Any]:
    """The tokens in a row to price a model at, not yet checked."""
    if isinstance(config, HeadwaterVisionConfig):
        return [config.tokens]
    if context is None:
        return [config.max_position_embeddings]
    return [*context] if isinstance(context, Sequence) and not isinstance(context, str) else [context]


def _check_positions(config: HeadwaterConfig, name: str, length: int) -> None:
    if config.is_causal and config.position == "learned" and length > config.max_position_embeddings:
        raise HeadwaterError(
            f"Context {length} is beyond the {config.max_position_embeddings} learned positions of {name!r}; "
            f"choose a smaller one, or set max_position_embeddings={length}."
        )


def _describe_shape(config: HeadwaterConfig) -> dict[str, Any]:
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


def _check(precision: str, mfu: float, sizes: Sequence[tuple[str, Any]], budgets: Mapping[str, float | None]) -> None:
    """Raise `HeadwaterError` for a precision, share, size or budget that there is not."""
    if precision not in cost.BYTES:
        raise HeadwaterError(f"precision must be one of {', '.join(cost.BYTES)}, not {precision!r}.")
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

    def __init__(self, prices: Sequence[Price]) -> None:
        self.title = ""
        self.table = lined("", *(each.name for each in prices), fold=True, caption=_note(prices))
        self.table.columns[0].no_wrap = True

    def section(self, title: str) -> None:
        """Begin a section, which appears with its first row."""
        self.title = title

    def row(self, label: str, values: Sequence[Any], ratio: bool = True) -> None:
        """A row, left out if no model has a value."""
        if all(value is None for value in values):
            return
        if self.title:
            self.table.add_section()
            self.table.add_row(Text(self.title, "bold"))
            self.title = ""
        cells = ["" if v is None else f"{v:,}" if isinstance(v, int) and v < 100_000 else si(v) for v in values]
        if ratio and values[0]:
            cells[1:] = [
                f"{cell} ×{(value or 0) / values[0]:.3f}" for cell, value in zip(cells[1:], values[1:], strict=True)
            ]
        self.table.add_row(f"  {label}", *cells)

    def rows(self, sources: Sequence[Any], labels: Mapping[str, str], ratio: bool = True) -> None:
        """A row for each field of the sources, by its label. Of FLOPs by part, their sum."""
        for label, field in labels.items():
            values = [getattr(source, field) for source in sources]
            self.row(label, [sum(value.values()) if isinstance(value, dict) else value for value in values], ratio)

    def of_models(self, prices: Sequence[Price], shortened: bool) -> None:
        """Rows of what no context changes. shortened: with the layers that run for a prompt's last token alone."""
        self.section("parameters")
        for part in prices[0].parameters:
            if any(each.parameters[part] for each in prices):
                self.row(part, [each.parameters[part] for each in prices], ratio=False)
        self.rows(prices, {"all": "parameters"})
        if prices[0].unit == "token":
            self.section("K/V cache")
            self.rows(prices, {"bytes per token": "cache_bytes_per_token"})
        if shortened:
            self.section("prompt")
            self.rows(prices, {"layers for its last token alone": "last_token_layers"}, ratio=False)
        self.section("training state")
        self.rows(prices, {"bytes": "state_bytes"})

    def at_context(self, first: Price, here: Sequence[AtContext], shortened: bool) -> None:
        forward, batch = f"forward FLOPs per {first.unit}", f"batch {first.batch}"
        if first.unit == "image":
            sizes = (f"{high} x {wide}" for high, wide in (each.image_size or () for each in here))
            self.section(f"images of {', '.join(dict.fromkeys(sizes))}")
            self.rows(here, {"sequence length": "context"}, ratio=False)
        else:
            self.section(f"context {here[0].context:,}")
        for part in here[0].forward:
            label = f"{forward}: {'linear layers' if part == 'maps' else part}"
            self.row(label, [each.forward[part] for each in here], ratio=False)
        self.rows(here, {forward: "forward", "  full attention": "forward_full"})
        self.rows(here, {f"training FLOPs per {first.unit}": "training", "  full attention": "training_full"})
        if shortened:
            self.rows(here, {f"FLOPs of a prompt, {batch}": "prefill"})
        self.rows(here, {f"cache bytes, {batch}": "cache_bytes", f"activation bytes, {batch}": "activation_bytes"})
        self.rows(here, {"  gradient checkpointing": "activation_bytes_checkpointed"}, ratio=False)

    def limits(self, first: Price, hardware: Hardware, limits: Sequence[Limits | None]) -> None:
        """Rows of what the hardware allows."""
        units = f"{first.unit}s"
        self.rows(limits, {f"training ceiling, {units}/s, {first.devices} × {hardware.name}": "training_ceiling"})
        budget = si(first.images or 0) if first.unit == "image" else si(first.tokens or 0).replace("G", "B")
        days = f"days for {budget} {units} at MFU {first.mfu:g}"
        self.rows(limits, {days: "days", "device-hours": "device_hours"}, ratio=False)
        largest = f"largest batch, {'images' if first.unit == 'image' else 'rows'} per device"
        batches = {largest: "largest_batch", "  gradient checkpointing": "largest_batch_checkpointed"}
        self.rows(limits, batches, ratio=False)
        generation = f"generation ceiling, tokens/s, batch {first.batch}"
        self.rows(limits, {generation: "generation_ceiling", "most sequences when generating": "most_sequences"})
        self.rows(limits, {"inference ceiling, images/s, one device": "inference_ceiling"})


def table(prices: Sequence[Price]) -> Table:
    """The prices side by side, with ratios to the first; all of text, or all of images."""
    result, first = SideBySide(prices), prices[0]
    shortened = any(each.last_token_layers for each in prices)
    result.of_models(prices, shortened)
    for index in range(len(first.at)):
        here = [each.at[index] for each in prices]
        result.at_context(first, here, shortened)
        if any(map(_ways_to_train, prices)):
            result.rows(here, {"training state and activations, as trained": "step_bytes"})
        if first.hardware is not None:
            result.limits(first, first.hardware, [each.limits for each in here])
    if any((each.devices_needed or 1) > 1 for each in prices):
        result.rows(prices, {"devices to shard the training state over": "devices_needed"}, ratio=False)
    return result.table


def _ways_to_train(price: Price) -> list[str]:
    """What training has that changes its memory, in words."""
    ways = ["gradient checkpointing"] if price.gradient_checkpointing else []
    if price.loss_chunk_tokens is not None:
        ways.append(f"logits of {price.loss_chunk_tokens:,} tokens at once")
    return [*ways, "a mask for packed rows"] if price.masked else ways


def _note(prices: Sequence[Price]) -> str:
    """Footnote of the table."""
    first = prices[0]
    attention = ", causal attention unless it says full" if first.unit == "token" else ""
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
