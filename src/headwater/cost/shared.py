"""What prices of text and image models share: checks of what is asked for, and the columns of the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import Hardware
from headwater.util.errors import HeadwaterError, shown
from headwater.util.terminal import lined

PRECISIONS = ("64-true", "32-true", "bf16-mixed", "bf16-true")


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


def training_limits(
    device: Hardware,
    precision: str,
    devices: int,
    mfu: float,
    budget: float | None,
    flops: float,
    state: int,
    activations: tuple[int, int],
) -> dict[str, Any]:
    """The fields of `TrainingLimits`. flops: of a token or image; activations: of one row, also checkpointed."""
    ceiling = devices * device.peak(precision) / flops
    hours = None if budget is None else budget / (ceiling * mfu) / 3600
    free = max(0.0, device.memory - state)
    return {
        "training_ceiling": ceiling,
        "days": None if hours is None else hours / 24,
        "device_hours": None if hours is None else hours * devices,
        "largest_batch": int(free // activations[0]),
        "largest_batch_checkpointed": int(free // activations[1]),
    }


def common_fields(
    config: HeadwaterConfig, size: dict[str, Any], state: dict[str, int], **settings: Any
) -> dict[str, Any]:
    """The fields of `AnyPrice`. size: what its shape has besides; settings: those of the price."""
    hardware = settings["hardware"]
    return settings | {
        "shape": {
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "heads": config.num_attention_heads,
            "key/value heads": config.num_key_value_heads,
            **size,
            "mechanisms": list(config.mechanisms or {}),
        },
        "parameters": cost.parameters(config),
        "state_bytes": state,
        "devices_needed": None if hardware is None else -int(-sum(state.values()) // hardware.memory),
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

    def __init__(self, names: Sequence[str], note: str) -> None:
        self.table = lined(caption=note)
        self.table.add_column("", no_wrap=True)
        for name in names:
            self.table.add_column(name, justify="right", overflow="fold")

    def section(self, title: str) -> None:
        self.table.add_section()
        self.table.add_row(Text(title, "bold"))

    def row(self, label: str, values: Sequence[float | None], ratio: bool = False) -> None:
        cells = ["" if v is None else f"{v:,}" if isinstance(v, int) and v < 100_000 else si(v) for v in values]
        if ratio and values[0]:
            cells[1:] = [
                f"{cell} ×{(value or 0) / values[0]:.3f}" for cell, value in zip(cells[1:], values[1:], strict=True)
            ]
        self.table.add_row(f"  {label}", *cells)

    def field(self, label: str, costs: Sequence[Any], name: str, ratio: bool = False) -> None:
        """A row of a field of each model's costs; of its sum, where it has parts."""
        values = [getattr(cost, name) for cost in costs]
        self.row(label, [sum(value.values()) if isinstance(value, Mapping) else value for value in values], ratio)

    def forward_flops(self, unit: str, costs: Sequence[Any], name: str) -> None:
        """Rows of the FLOPs of a forward pass, by part and in all."""
        for part in getattr(costs[0], name):
            label = "linear layers" if part == "maps" else part
            self.row(f"forward FLOPs per {unit}: {label}", [getattr(cost, name)[part] for cost in costs])
        self.field(f"forward FLOPs per {unit}", costs, name, ratio=True)

    def activations(self, batch: int, costs: Sequence[Any], trained: bool) -> None:
        """Rows of activation bytes. trained: with those of training as it is asked for."""
        self.field(f"activation bytes, batch {batch}", costs, "activation_bytes", ratio=True)
        self.field("  gradient checkpointing", costs, "activation_bytes_checkpointed")
        if trained:
            self.field("training state and activations, as trained", costs, "step_bytes", ratio=True)

    def training(self, unit: str, rows: str, price: AnyPrice, budget: str, limits: Sequence[TrainingLimits]) -> None:
        """Rows of what the hardware allows in training. budget: in words; "" without one."""
        on = f"{price.devices} × {price.hardware.name}" if price.hardware else ""
        self.field(f"training ceiling, {unit}/s, {on}", limits, "training_ceiling", ratio=True)
        if budget:
            self.field(f"days for {budget} at MFU {price.mfu:g}", limits, "days")
            self.field("device-hours", limits, "device_hours")
        self.field(f"largest batch, {rows} per device", limits, "largest_batch")
        self.field("  gradient checkpointing", limits, "largest_batch_checkpointed")

    def devices_needed(self, prices: Sequence[AnyPrice]) -> None:
        if any((one.devices_needed or 1) > 1 for one in prices):
            self.field("devices to shard the training state over", prices, "devices_needed")

    def parameters(self, parts: Sequence[Mapping[str, int]]) -> None:
        """The section of parameters, those of each model by part."""
        self.section("parameters")
        for part in parts[0]:
            if any(one[part] for one in parts):
                self.row(part, [one[part] for one in parts])
        self.row("all", [sum(one.values()) for one in parts], ratio=True)


def ceilings(hardware: Hardware | None, precision: str) -> list[str]:
    """The end of a footnote: what the ceilings are."""
    if hardware is None:
        return []
    return [
        f"{hardware.name}: {hardware.peak(precision) / 1e12:.4g} TFLOP/s, {hardware.memory / 1e9:.4g} GB, "
        f"{hardware.bandwidth / 1e9:.4g} GB/s ({hardware.source}). Ceilings are 100 % of these."
    ]
