"""How arms are told apart: by color, marker and dashes, so that none of them is the only channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Okabe-Ito, which stays apart for the color-blind, without yellow, which white paper swallows. The baseline is gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6b7683"
# Names of plotly, with the path of each within ±5 for legends.
SYMBOLS = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
    "square": "M-3.5,-3.5H3.5V3.5H-3.5Z",
    "diamond": "M0,-5L5,0L0,5L-5,0Z",
    "triangle-up": "M0,-4.5L4.5,3.5H-4.5Z",
    "triangle-down": "M0,4.5L4.5,-3.5H-4.5Z",
    "cross": "M-1.5,-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "x": "M0,-2L2.5,-4.5L4.5,-2.5L2,0L4.5,2.5L2.5,4.5L0,2L-2.5,4.5L-4.5,2.5L-2,0L-4.5,-2.5L-2.5,-4.5Z",
}
# Names of plotly, with SVG's.
DASHES = {"solid": "", "dash": "6,3", "dot": "2,2", "dashdot": "6,2,2,2", "longdash": "10,3"}


@dataclass(frozen=True)
class Style:
    """How one arm is drawn: by plotly's names of a symbol and a dash."""

    color: str
    symbol: str
    dash: str
    baseline: bool = False

    @property
    def path(self) -> str:
        return SYMBOLS[self.symbol]

    @property
    def stroke(self) -> str:
        return DASHES[self.dash]


def styles(arms: Sequence[str], baseline: str) -> dict[str, Style]:
    """A style for each arm, no two alike among 210."""
    others = [arm for arm in arms if arm != baseline]
    found = {arm: _style(place) for place, arm in enumerate(others)}
    return {arm: found.get(arm, Style(GREY, "circle", "solid", baseline=True)) for arm in arms}


def _style(place: int) -> Style:
    # Six colors and seven markers have no common divisor: each of the first 42 arms is a pair of its own.
    symbol, dash = [*SYMBOLS][(place + 1) % len(SYMBOLS)], [*DASHES][place // len(COLORS) % len(DASHES)]
    return Style(COLORS[place % len(COLORS)], symbol, dash)
