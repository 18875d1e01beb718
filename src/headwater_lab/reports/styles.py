"""Styles that distinguish arms by color, marker and dashes, so that none of them is the only channel."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwater_lab.util.outputs import COLORS

GREY = "#6b7683"  # the baseline's color
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES = ("-", "--", ":", "-.", (0, (10, 3)))


@dataclass(frozen=True)
class Style:
    """The style of one arm, in matplotlib's terms."""

    color: str
    marker: str = "o"
    line: str | tuple[int, tuple[int, ...]] = "-"


def choose_styles(arms: Sequence[str], baseline: str) -> dict[str, Style]:
    """Choose a style for each arm, no two alike among 210."""
    compared = [arm for arm in arms if arm != baseline]
    # 6 colors and 7 markers have no common divisor, so each of the first 42 arms gets a pair of its own.
    by_arm = {
        arm: Style(
            COLORS[index % len(COLORS)],
            MARKERS[(index + 1) % len(MARKERS)],
            LINES[index // len(COLORS) % len(LINES)],
        )
        for index, arm in enumerate(compared)
    }
    return {arm: by_arm.get(arm, Style(GREY)) for arm in arms}
