"""Pictures of what models cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater import cost
from headwater.drawing import default_style
from headwater.vision_config import HeadwaterVisionConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwater.config import HeadwaterConfig

# Okabe-Ito, which stays apart for the color-blind.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def figure(configs: Mapping[str, HeadwaterConfig], contexts: Sequence[int]) -> Figure:
    """Forward FLOPs per token against context, counting full attention as TokenFormer's figure 5 does.

    The slope is the cost of attention between tokens, 4·L·H·d; the height at 0 that of the parameters. Each combination
    of mechanisms has a line style.
    """

    def line(config: HeadwaterConfig) -> tuple[Sequence[float], list[float]]:
        return contexts, [cost.forward_flops_per_token(config, context, causal=False) / 1e9 for context in contexts]

    return _lines(configs, line, "context (tokens)", "forward GFLOPs per token, full attention")


def figure_of_images(configs: Mapping[str, HeadwaterVisionConfig]) -> Figure:
    """Forward FLOPs per image against the width of square images, up to twice the size that each model is made for."""

    def line(config: HeadwaterVisionConfig) -> tuple[list[float], list[float]]:
        (high, wide), (_, columns), resized = config.patch_shape, config.grid, copy.copy(config)
        widths, flops = [], []
        for patches in range(1, 2 * columns + 1):
            resized.image_size = (patches * high, patches * wide)
            widths.append(float(patches * wide))
            flops.append(sum(cost.forward_flops_per_image(resized).values()) / 1e9)
        return widths, flops

    return _lines(configs, line, "width of an image (pixels)", "forward GFLOPs per image")


def _lines(configs: Mapping[str, Any], line: Callable[[Any], tuple[Any, Any]], across: str, up: str) -> Figure:
    from matplotlib.figure import Figure

    with default_style():
        result = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = result.subplots()
        styles: dict[tuple[str, ...], str] = {}
        for index, (name, config) in enumerate(configs.items()):
            style = styles.setdefault(tuple(config.mechanisms or {}), ("-", "--", ":", "-.")[len(styles) % 4])
            axes.plot(*line(config), style, color=COLORS[index % len(COLORS)], label=f"\u200a{name}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        return result
