"""The table that `headwater plan` prints."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from headwater.cost.estimate import AtContext, Limits, Price
from headwater.cost.hardware import Hardware
from headwater_lab.util.terminal import SideBySide, Table, si


class PriceTable(SideBySide):
    """A table with a column for each model, and ratios to the first."""

    def __init__(self, prices: Sequence[Price]) -> None:
        super().__init__((price.name for price in prices), caption=_write_note(prices))
        self.prices = prices
        self.unit, self.batch = prices[0].unit, f"batch {prices[0].batch}"
        # Whether some layers run only for a prompt's last token.
        self.is_shortened = any(price.last_token_layers for price in prices)

    def add_row(self, label: str, values: Sequence[Any], ratio: bool = True) -> None:
        """Add a row, unless no model has a value. Values by part are summed."""
        values = [sum(value.values()) if isinstance(value, dict) else value for value in values]
        cells = ["" if v is None else f"{v:,}" if isinstance(v, int) and v < 100_000 else si(v) for v in values]
        if ratio and values[0]:
            cells[1:] = [
                f"{cell} ×{(value or 0) / values[0]:.3f}" for cell, value in zip(cells[1:], values[1:], strict=True)
            ]
        self.add_cells(label, cells)

    def add_rows(self, sources: Sequence[Any], labels: Mapping[str, str], ratio: bool = True) -> None:
        """Add a row for each field of the sources, by its label."""
        for label, field in labels.items():
            self.add_row(label, [getattr(source, field) for source in sources], ratio)

    def add_models(self) -> None:
        """Add rows of what no context changes."""
        self.section = "parameters"
        for name in self.prices[0].parameters:
            if any(price.parameters[name] for price in self.prices):
                self.add_row(name, [price.parameters[name] for price in self.prices], ratio=False)
        self.add_rows(self.prices, {"all": "parameters"})
        if self.unit == "token":
            self.section = "K/V cache"
            self.add_rows(self.prices, {"bytes per token": "cache_bytes_per_token"})
        if self.is_shortened:
            self.section = "prompt"
            self.add_rows(self.prices, {"layers for its last token alone": "last_token_layers"}, ratio=False)
        self.section = "training state"
        self.add_rows(self.prices, {"bytes": "state_bytes"})

    def add_context(self, estimates: Sequence[AtContext]) -> None:
        """Add rows for one context, or size of images."""
        forward = f"forward FLOPs per {self.unit}"
        if self.unit == "image":
            sizes = (
                f"{high} x {wide}"
                for high, wide in (estimate.image_size for estimate in estimates if estimate.image_size)
            )
            self.section = f"images of {', '.join(dict.fromkeys(sizes))}"
            self.add_rows(estimates, {"sequence length": "context"}, ratio=False)
        else:
            self.section = f"context {estimates[0].context:,}"
        for name in estimates[0].forward:
            label = f"{forward}: {'linear layers' if name == 'maps' else name}"
            self.add_row(label, [estimate.forward[name] for estimate in estimates], ratio=False)
        self.add_rows(estimates, {forward: "forward", "  full attention": "forward_full"})
        self.add_rows(estimates, {f"training FLOPs per {self.unit}": "training", "  full attention": "training_full"})
        if self.is_shortened:
            self.add_rows(estimates, {f"FLOPs of a prompt, {self.batch}": "prefill"})
        if self.unit == "token":
            self.add_rows(estimates, {"FLOPs of one sequence's next token": "decoding"})
        memory = {f"cache bytes, {self.batch}": "cache_bytes", f"activation bytes, {self.batch}": "activation_bytes"}
        self.add_rows(estimates, memory)
        self.add_rows(estimates, {"  gradient checkpointing": "activation_bytes_checkpointed"}, ratio=False)
        if any(map(_list_memory_settings, self.prices)):
            self.add_rows(estimates, {"training state and activations, as trained": "step_bytes"})

    def add_limits(self, hardware: Hardware, limits: Sequence[Limits | None]) -> None:
        """Add rows about the hardware's limits."""
        price, units = self.prices[0], f"{self.unit}s"
        self.add_rows(limits, {f"training ceiling, {units}/s, {price.devices} × {hardware.name}": "training_ceiling"})
        budgets = [(price.images if self.unit == "image" else price.tokens) or 0 for price in self.prices]
        amount = si(budgets[0]) if self.unit == "image" else si(budgets[0]).replace("G", "B")
        budget = f"{amount} {units}"
        if len(set(budgets)) > 1:
            self.add_row(f"training {units}", budgets, ratio=False)
            budget = "these"
        days = f"days for {budget} at MFU {price.mfu:g}"
        self.add_rows(limits, {days: "days", "device-hours": "device_hours"}, ratio=False)
        largest = f"largest batch, {'images' if self.unit == 'image' else 'rows'} per device"
        batches = {largest: "largest_batch", "  gradient checkpointing": "largest_batch_checkpointed"}
        self.add_rows(limits, batches, ratio=False)
        generation = f"generation ceiling, tokens/s, {self.batch}"
        self.add_rows(limits, {generation: "generation_ceiling", "most sequences when generating": "most_sequences"})
        self.add_rows(limits, {"inference ceiling, images/s, one device": "inference_ceiling"})


def estimate_table(prices: Sequence[Price]) -> Table:
    """Lay the prices out side by side, with ratios to the first; all of text, or all of images."""
    result = PriceTable(prices)
    result.add_models()
    for estimates in zip(*(price.at for price in prices), strict=True):
        result.add_context(estimates)
        if prices[0].hardware is not None:
            result.add_limits(prices[0].hardware, [estimate.limits for estimate in estimates])
    if any((price.devices_needed or 1) > 1 for price in prices):
        result.add_rows(prices, {"devices to shard the training state over": "devices_needed"}, ratio=False)
    return result.table


def _list_memory_settings(price: Price) -> list[str]:
    """List in words the settings that change the memory of training."""
    settings = ["gradient checkpointing"] if price.gradient_checkpointing else []
    if "teacher" in price.state_bytes:
        settings.append("a teacher, whose forward pass is in the FLOPs")
    if price.loss_chunk_tokens is not None:
        settings.append(f"logits of {price.loss_chunk_tokens:,} tokens at once")
    if price.masked:
        some = len(price.masked) < len(price.at)
        lengths = f" of {', '.join(f'{length:,}' for length in price.masked)} tokens" if some else ""
        settings.append(f"a mask for packed rows{lengths}")
    return settings


def _write_note(prices: Sequence[Price]) -> str:
    """Write the footnote of the table."""
    precision, device = prices[0].precision, prices[0].hardware
    attention = ", causal attention unless it says full" if prices[0].unit == "token" else ""
    sentences = [
        f"{precision}; FLOPs are matmuls{attention}; × is over the first column.",
        "Activations and largest batches are estimates.",
    ]
    for way in dict.fromkeys(chain(*map(_list_memory_settings, prices))):
        names = ", ".join(price.name for price in prices if way in _list_memory_settings(price))
        sentences.append(f"Trained with {way}: {names}.")
    if device is not None:
        sentences.append(
            f"{device.name}: {device.peak(precision) / 1e12:.4g} TFLOP/s, {device.memory / 1e9:.4g} GB, "
            f"{device.bandwidth / 1e9:.4g} GB/s ({device.source}). Ceilings are 100 % of these."
        )
    limits = [estimate.limits for price in prices for estimate in price.at if estimate.limits is not None]
    if any(limit.most_sequences is not None and limit.generation_ceiling is None for limit in limits):
        sentences.append(f"No generation ceiling where memory holds fewer than {prices[0].batch:,} sequences.")
    return " ".join(sentences)
