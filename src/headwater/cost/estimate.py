"""Cost of training and running a model of text or of images on given hardware."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import Hardware
from headwater.util.errors import HeadwaterError, shown
from headwater.util.precision import Precision


@dataclass(frozen=True)
class Limits:
    """Limits that the hardware sets at one context.

    training_ceiling: tokens or images/s of all devices, if only matmuls ran, at the peak.
    days, device_hours: for the budget at `mfu` of the peak; None without a budget.
    largest_batch: rows or images per device, which holds the full state; 0 if none fits.
    generation_ceiling: of text, tokens/s of one device generating `batch` sequences, if it only read weights and cache,
        or only multiplied matrices, whichever is slower; None if memory does not hold their caches.
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
    """Figures that depend on the context, or the size of the images. FLOPs are per token or image, bytes for the batch.

    context: tokens per row, or of an image. image_size: None for text; what follows it is None for images.
    forward: forward FLOPs by part, causal for text. step_bytes: training state and activations with the chosen
    gradient checkpointing. forward_full, training_full: count the whole square of scores. prefill: FLOPs of a
    prompt of this length and its last token's logits, for the whole batch. decoding: of generating one more token.
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
    decoding: float | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class ModelEstimate:
    """The estimated cost of one config.

    tokens, images: the training budget, of text or of images.
    devices_needed: over how many the training state must be sharded to fit; None without hardware.
    gradient_checkpointing, loss_chunk_tokens: as in recipes. masked: the contexts at which packed rows have a mask in
    memory.
    last_token_layers: layers that run for a prompt's last token alone.
    """

    name: str
    shape: dict[str, Any]
    precision: Precision
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
    masked: list[int]
    cache_bytes_per_token: int
    last_token_layers: int
    at: list[AtContext]

    @property
    def unit(self) -> str:
        """Unit of FLOPs: token or image."""
        return "token" if self.at[0].image_size is None else "image"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_parameters": sum(self.parameters.values())}


def estimate_model(
    config: HeadwaterConfig,
    *,
    name: str = "model",
    context: Sequence[int] | int | None = None,
    batch: int = 1,
    tokens: float | None = None,
    images: float | None = None,
    hardware: Hardware | None = None,
    devices: int = 1,
    precision: Precision | str = Precision.BF16_MIXED,
    mfu: float = 0.4,
    gradient_checkpointing: bool = False,
    loss_chunk_tokens: int | None = None,
    masked: Collection[int] = (),
    averages: bool = False,
    teacher: HeadwaterConfig | None = None,
) -> ModelEstimate:
    """Estimate the cost of a config of text or images.

    context: of text, tokens per row, one or several; default: the config's max_position_embeddings. batch: rows, or
    sequences being generated, or images. tokens, images: the training budget of either kind. precision: as in recipes;
    the cache is in the matmuls' dtype. mfu: the assumed share of the peak that training reaches.
    gradient_checkpointing, and of text loss_chunk_tokens: as in recipes. averages: with `training.ema_decay`.
    masked: the contexts at which packed rows of text have a mask in memory (`headwater.cost.counts.activation_bytes`).
    teacher: the model that training distills from. Raises `HeadwaterError` for invalid values.
    """
    of_images = isinstance(config, HeadwaterVisionConfig)
    of_text = {"context": context, "tokens": tokens, "loss_chunk_tokens": loss_chunk_tokens, "masked": masked or None}
    _refuse_unread(of_images, of_text if of_images else {"images": images})
    lengths = _list_lengths(config, context)
    sizes = (*(("context", length) for length in lengths), ("batch", batch), ("devices", devices))
    _check_settings(mfu, sizes, {"tokens": tokens, "images": images})
    precision = read_precision(precision)
    _check_positions(config, name, max(lengths))
    budget = images if of_images else tokens
    element = precision.compute.itemsize
    state = cost.state_bytes(config, precision, averages, teacher)
    state_size = sum(state.values())

    def count_activations(length: int, rows: int, checkpointed: bool) -> int:
        settings = precision, checkpointed, loss_chunk_tokens, length in masked, teacher is not None
        return sum(cost.activation_bytes(config, length, rows, *settings).values())

    def find_limits(length: int, device: Hardware, flops: float) -> Limits:
        ceiling = devices * device.peak(precision) / cost.training_flops(config, length, teacher)
        hours = None if budget is None else budget / (ceiling * mfu) / 3600
        free = max(0.0, device.memory - state_size)
        running = dict[str, Any](inference_ceiling=device.peak(precision) / flops)
        return Limits(
            training_ceiling=ceiling,
            days=None if hours is None else hours / 24,
            device_hours=None if hours is None else hours * devices,
            largest_batch=int(free // count_activations(length, 1, False)),
            largest_batch_checkpointed=int(free // count_activations(length, 1, True)),
            **(running if of_images else _limit_generation(config, device, length, batch, precision)),
        )

    def estimate_at(length: int) -> AtContext:
        forward = cost.forward_flops(config, length)
        flops = sum(forward.values())
        image_size = (
            dict[str, Any](image_size=config.image_shape) if isinstance(config, HeadwaterVisionConfig) else None
        )
        return AtContext(
            context=length,
            forward=forward,
            training=cost.training_flops(config, length, teacher),
            activation_bytes=count_activations(length, batch, False),
            activation_bytes_checkpointed=count_activations(length, batch, True),
            step_bytes=state_size + count_activations(length, batch, gradient_checkpointing),
            limits=None if hardware is None else find_limits(length, hardware, flops),
            **(image_size or _count_text(config, length, batch, element, teacher)),
        )

    return ModelEstimate(
        name=name,
        shape=_describe_shape(config),
        precision=precision,
        batch=batch,
        mfu=mfu,
        devices=devices,
        hardware=hardware,
        tokens=tokens,
        images=images,
        parameters=cost.parameters(config),
        state_bytes=state,
        devices_needed=None if hardware is None else -int(-state_size // hardware.memory),
        gradient_checkpointing=gradient_checkpointing,
        loss_chunk_tokens=loss_chunk_tokens,
        masked=sorted({*masked} & {*lengths}),
        cache_bytes_per_token=cost.cache_bytes_per_token(config, element),
        last_token_layers=0 if of_images else config.num_hidden_layers - output_only_from(config, plan_layers(config)),
        at=[estimate_at(length) for length in lengths],
    )


def _count_text(
    config: HeadwaterConfig, length: int, batch: int, element: int, teacher: HeadwaterConfig | None
) -> dict[str, Any]:
    return dict(
        forward_full=cost.forward_flops(config, length, causal=False),
        training_full=cost.training_flops(config, length, teacher, causal=False),
        prefill=batch * cost.prefill_flops(config, length),
        decoding=cost.decoding_flops(config, length),
        cache_bytes=cost.cache_bytes(config, length, batch, element),
    )


def _limit_generation(
    config: HeadwaterConfig, device: Hardware, length: int, batch: int, precision: Precision
) -> dict[str, Any]:
    element = precision.compute.itemsize
    bytes_read = element * cost.weights_read(config) + batch * cost.cache_bytes_read(config, length, element)
    free = max(0.0, device.memory - element * sum(cost.parameters(config).values()))
    rates = device.bandwidth * batch / bytes_read, device.peak(precision) / cost.decoding_flops(config, length)
    most_sequences = int(free // cost.cache_bytes(config, length, 1, element))
    return dict(generation_ceiling=min(rates) if batch <= most_sequences else None, most_sequences=most_sequences)


def _refuse_unread(of_images: bool, settings: Mapping[str, Any]) -> None:
    """Raise `HeadwaterError` for a setting of the other kind of model."""
    for name, value in settings.items():
        if value is not None:
            raise HeadwaterError(
                f"{name} is not for {'image' if of_images else 'language'} models; "
                + ("set image_size, and give a budget in images." if of_images else "give a budget in tokens.")
            )


def _list_lengths(config: HeadwaterConfig, context: Any) -> list[Any]:
    """The tokens in a row to estimate a model at, not yet checked."""
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


def read_precision(name: str) -> Precision:
    """Look up a precision by name. Raises `HeadwaterError` for an unknown one."""
    if name not in list(Precision):
        raise HeadwaterError(f"precision must be one of {', '.join(Precision)}, not {name!r}.")
    return Precision(name)


def _check_settings(mfu: float, sizes: Sequence[tuple[str, Any]], budgets: Mapping[str, float | None]) -> None:
    """Raise `HeadwaterError` for an impossible share, size or budget."""
    for label, value in sizes:
        if not isinstance(value, int) or value < 1:
            raise HeadwaterError(f"{label} must be a whole number, at least 1, not {shown(value)}.")
    if not isinstance(mfu, int | float):
        raise HeadwaterError(f"mfu must be a number, not {shown(mfu)}.")
    if not 0 < mfu <= 1:
        raise HeadwaterError(f"mfu must be a fraction of the peak, above 0 and at most 1, not {mfu:g}.")
    for label, budget in budgets.items():
        if budget is not None and budget <= 0:
            raise HeadwaterError(f"{label} must be more than 0, not {budget:g}.")
