"""Figures that appear in a notebook, with or without pyplot."""

import io

from matplotlib.figure import Figure

from headwater_lab.util.outputs import default_style

DPI = 130


class ShownFigure(Figure):
    """A matplotlib figure that a notebook shows as a picture."""

    def _repr_png_(self) -> bytes:
        return draw_png(self)


@default_style()
def draw_png(figure: Figure) -> bytes:
    """Draw a figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()
