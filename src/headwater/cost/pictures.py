"""The picture of what models cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import counts as cost
from headwater.util.errors import HeadwaterError
from headwater.util.outputs import default_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwater.config.text import HeadwaterConfig

# Okabe-Ito, which stays apart for the color-blind.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def figure(configs: Mapping[str, HeadwaterConfig], contexts: Sequence[int]) -> Figure:
    """Forward FLOPs per token against context, counting full attention as TokenFormer's figure 5 does.

    The slope is the cost of attention between tokens, 4·L·H·d; the height at 0 that of the parameters. Each combination
    of mechanisms has a line style. Raises `HeadwaterError` for image models.
    """
    from matplotlib.figure import Figure

    if any(isinstance(config, HeadwaterVisionConfig) for config in configs.values()):
        raise HeadwaterError("Only text models have a plot of FLOPs against context.")
    with default_style():
        result = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = result.subplots()
        styles: dict[tuple[str, ...], str] = {}
        for index, (name, config) in enumerate(configs.items()):
            style = styles.setdefault(tuple(config.mechanisms or {}), ("-", "--", ":", "-.")[len(styles) % 4])
            flops = [cost.forward_flops_per_token(config, context, causal=False) / 1e9 for context in contexts]
            axes.plot(contexts, flops, style, color=COLORS[index % len(COLORS)], label=f"\u200a{name}")
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("forward GFLOPs per token, full attention")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        return result
