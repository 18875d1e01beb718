"""How arms are told apart: by color, marker and dashes, so that none of them is the only channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater_lab.util.outputs import COLORS

GREY = "#6b7683"  # of the baseline
# Names of plotly, with the path of each within ±5 for legends, and matplotlib's name.
SYMBOLS = {
    "circle": ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "o"),
    "square": ("M-3.5,-3.5H3.5V3.5H-3.5Z", "s"),
    "diamond": ("M0,-5L5,0L0,5L-5,0Z", "D"),
    "triangle-up": ("M0,-4.5L4.5,3.5H-4.5Z", "^"),
    "triangle-down": ("M0,4.5L4.5,-3.5H-4.5Z", "v"),
    "cross": ("M-1.5,-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", "P"),
    "x": ("M0,-2L2.5,-4.5L4.5,-2.5L2,0L4.5,2.5L2.5,4.5L0,2L-2.5,4.5L-4.5,2.5L-2,0L-4.5,-2.5L-2.5,-4.5Z", "X"),
}
# plotly, SVG, matplotlib
DASHES = (
    ("solid", "", "-"),
    ("dash", "6,3", "--"),
    ("dot", "2,2", ":"),
    ("dashdot", "6,2,2,2", "-."),
    ("longdash", "10,3", (0, (10, 3))),
)


@dataclass(frozen=True)
class Style:
    """How one arm is drawn. symbol and dash are plotly's names; path and stroke SVG's; marker and line matplotlib's."""

    color: str
    symbol: str
    path: str
    marker: str
    dash: str
    stroke: str
    line: str | tuple[int, tuple[int, ...]]
    baseline: bool = False


def choose_styles(arms: Sequence[str], baseline: str) -> dict[str, Style]:
    """A style for each arm, no two alike among 210."""
    compared = [arm for arm in arms if arm != baseline]
    by_arm = {arm: _choose_style(index) for index, arm in enumerate(compared)}
    if baseline in arms:
        path, marker = SYMBOLS["circle"]
        by_arm[baseline] = Style(GREY, "circle", path, marker, "solid", "", "-", baseline=True)
    return {arm: by_arm[arm] for arm in arms}


def _choose_style(index: int) -> Style:
    # Six colors and seven markers have no common divisor: each of the first 42 arms is a pair of its own.
    symbol = list(SYMBOLS)[(index + 1) % len(SYMBOLS)]
    path, marker = SYMBOLS[symbol]
    dash, stroke, line = DASHES[index // len(COLORS) % len(DASHES)]
    return Style(COLORS[index % len(COLORS)], symbol, path, marker, dash, stroke, line)
