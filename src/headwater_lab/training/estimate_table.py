"""The table that `headwater plan` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from headwater.cost.estimate import AtContext, Limits, Price
from headwater.cost.hardware import Hardware
from headwater_lab.util.terminal import Table, lined, si


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
            sizes = (f"{high} x {wide}" for high, wide in (each.image_size for each in here if each.image_size))
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


def estimate_table(prices: Sequence[Price]) -> Table:
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
