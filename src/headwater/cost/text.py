"""What a language model costs to train and to run on given hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
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
from headwater.util.errors import HeadwaterError
from headwater.util.terminal import Table


@dataclass(frozen=True)
class Limits(TrainingLimits):
    """What the hardware allows at one context.

    generation_ceiling: tokens/s of one device generating `batch` sequences, if it only read weights and cache.
    most_sequences: how many sequences' caches fit in memory with the weights.
    """

    generation_ceiling: float
    most_sequences: int


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


def price(
    config: HeadwaterConfig,
    *,
    name: str = "model",
    context: Sequence[int] | int | None = None,
    batch: int = 1,
    tokens: float | None = None,
    hardware: Hardware | None = None,
    devices: int = 1,
    precision: str = "bf16-mixed",
    mfu: float = 0.4,
    gradient_checkpointing: bool = False,
    loss_chunk_tokens: int | None = None,
    masked: bool = False,
    averages: bool = False,
) -> Price:
    """Price a config; the arguments are those of `headwater.cost.price`."""
    contexts: Sequence[Any] = (
        [config.max_position_embeddings] if context is None else context if isinstance(context, Sequence) else [context]
    )
    contexts = [contexts] if isinstance(contexts, str) else contexts
    sizes = (*(("context", length) for length in contexts), ("batch", batch), ("devices", devices))
    check(precision, mfu, sizes, {"tokens": tokens})
    if config.position == "learned" and max(contexts) > config.max_position_embeddings:
        raise HeadwaterError(
            f"Context {max(contexts)} is beyond the {config.max_position_embeddings} learned positions of {name!r}; "
            f"choose a smaller one, or set max_position_embeddings={max(contexts)}."
        )
    element, _ = cost.BYTES[precision]
    state = cost.state_bytes(config, precision, averages)

    def activations(length: int, rows: int, checkpointed: bool) -> int:
        return sum(
            cost.activation_bytes(config, length, rows, precision, checkpointed, loss_chunk_tokens, masked).values()
        )

    def limits(length: int, device: Hardware) -> Limits:
        flops = cost.training_flops_per_token(config, length)
        memory = activations(length, 1, False), activations(length, 1, True)
        weights = element * sum(cost.parameters(config).values())
        read = element * cost.weights_read(config) + batch * cost.cache_bytes_read(config, length, element)
        return Limits(
            **training_limits(device, precision, devices, mfu, tokens, flops, sum(state.values()), memory),
            generation_ceiling=batch * device.bandwidth / read,
            most_sequences=int(max(0.0, device.memory - weights) // cost.cache_bytes(config, length, 1, element)),
        )

    def at(length: int) -> AtContext:
        return AtContext(
            context=length,
            causal=cost.forward_flops(config, length),
            full=cost.forward_flops(config, length, causal=False),
            training_causal=cost.training_flops_per_token(config, length),
            training_full=cost.training_flops_per_token(config, length, causal=False),
            prefill=batch * cost.prefill_flops(config, length),
            cache_bytes=cost.cache_bytes(config, length, batch, element),
            activation_bytes=activations(length, batch, False),
            activation_bytes_checkpointed=activations(length, batch, True),
            step_bytes=sum(state.values()) + activations(length, batch, gradient_checkpointing),
            limits=None if hardware is None else limits(length, hardware),
        )

    settings = dict(name=name, precision=precision, batch=batch, mfu=mfu, devices=devices, hardware=hardware)
    size = {"vocabulary": config.vocab_size}
    fields = common_fields(config, size, state, gradient_checkpointing=gradient_checkpointing, **settings)
    return Price(
        **fields,
        tokens=tokens,
        cache_bytes_per_token=cost.cache_bytes_per_token(config, element),
        last_token_layers=config.num_hidden_layers - output_only_from(config, plan_layers(config)),
        loss_chunk_tokens=loss_chunk_tokens,
        masked=masked,
        at=[at(length) for length in contexts],
    )


def table(prices: Sequence[Price]) -> Table:
    """The prices side by side, with ratios to the first."""
    first = prices[0]
    result = SideBySide([one.name for one in prices], note(prices))
    section, row = result.section, result.row

    result.parameters([one.parameters for one in prices])
    section("K/V cache")
    row("bytes per token", [one.cache_bytes_per_token for one in prices], ratio=True)
    shortened = any(one.last_token_layers for one in prices)
    if shortened:
        section("prompt")
        row("layers for its last token alone", [one.last_token_layers for one in prices])
    section("training state")
    row("bytes", [sum(one.state_bytes.values()) for one in prices], ratio=True)
    for index, at in enumerate(first.at):
        here = [one.at[index] for one in prices]
        section(f"context {at.context:,}")
        for part in at.causal:
            label = "linear layers" if part == "maps" else part
            row(f"forward FLOPs per token: {label}", [one.causal[part] for one in here])
        row("forward FLOPs per token", [sum(one.causal.values()) for one in here], ratio=True)
        row("  full attention", [sum(one.full.values()) for one in here], ratio=True)
        row("training FLOPs per token", [one.training_causal for one in here], ratio=True)
        row("  full attention", [one.training_full for one in here], ratio=True)
        if shortened:
            row(f"FLOPs of a prompt, batch {first.batch}", [one.prefill for one in here], ratio=True)
        row(f"cache bytes, batch {first.batch}", [one.cache_bytes for one in here], ratio=True)
        trained = any(one.gradient_checkpointing or one.loss_chunk_tokens or one.masked for one in prices)
        result.activations(first.batch, here, trained)
        limits = [one.limits for one in here if one.limits is not None]
        if limits:
            budget = "" if first.tokens is None else f"{si(first.tokens).replace('G', 'B')} tokens"
            result.training("tokens", "rows", first, budget, limits)
            ceiling = f"generation ceiling, tokens/s, batch {first.batch}"
            row(ceiling, [one.generation_ceiling for one in limits], ratio=True)
            row("most sequences when generating", [one.most_sequences for one in limits], ratio=True)
    result.devices_needed(prices)
    return result.table


def note(prices: Sequence[Price]) -> str:
    """Footnote of the table."""
    first = prices[0]
    parts = [
        f"{first.precision}; FLOPs are matmuls, causal attention unless it says full; × is over the first column.",
        "Activations and largest batches are estimates.",
    ]
    for one in prices:
        how = [
            "gradient checkpointing" if one.gradient_checkpointing else "",
            "" if one.loss_chunk_tokens is None else f"logits of {one.loss_chunk_tokens:,} tokens at once",
            "a mask for packed rows" if one.masked else "",
        ]
        if any(how):
            parts.append(f"{one.name} trains with {', '.join(filter(None, how))}.")
    return " ".join([*parts, *ceilings(first.hardware, first.precision)])
