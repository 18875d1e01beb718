"""How figures look: as matplotlib draws them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_style() -> Iterator[None]:
    """Draw and save with matplotlib's own settings, and take two dollar signs in a name for no formula.

    matplotlib reads settings from a matplotlibrc in the current folder, which may be anyone's and can start LaTeX.
    """
    from matplotlib import rc_context, rcParamsDefault

    defaults = {name: value for name, value in dict.items(rcParamsDefault) if not name.startswith("backend")}
    with rc_context(defaults | {"text.parse_math": False}):
        yield
