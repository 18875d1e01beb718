"""What prices of text and image models share: checks of what is asked for, and the columns of the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from headwater.errors import HeadwaterError, shown
from headwater.hardware import Hardware
from headwater.terminal import lined

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
    gradient_checkpointing: bool | str | float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_parameters": sum(self.parameters.values())}


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
