"""Tables and consoles that print names and sentences literally.

Names of arms, files and columns may come from other people's files. Rich would read `[keys]` in one as markup and drop
it, and a terminal obeys control characters; here neither happens. Styled text is a `rich.text.Text`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

# Control characters except tabs and line ends, marks that change the text direction, and halves of surrogate pairs,
# which represent bytes of file names that are not text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def literal(text: str) -> str:
    r"""A text whose control characters and unprintable characters are replaced by escapes such as \x1b."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A console without markup, highlighting, emoji codes and control characters."""

    def __init__(self, **given: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **given)

    def render_str(self, text: str, **given: Any) -> Text:  # before widths are counted
        return super().render_str(literal(text), **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(literal(segment.text), segment.style)


class Table(RichTable):
    """A table whose texts are literal on any console, including the caller's."""

    def __init__(self, *, title: str | None = None, caption: str | None = None, **given: Any) -> None:
        super().__init__(
            title=None if title is None else Text(literal(title), "table.title"),
            caption=None if caption is None else Text(literal(caption), "table.caption"),
            **given,
        )

    def add_column(self, header: RenderableType = "", *rest: Any, **given: Any) -> None:
        super().add_column(_literal(header), *rest, **given)

    def add_row(self, *cells: RenderableType | None, **given: Any) -> None:
        super().add_row(*map(_literal, cells), **given)


def lined(
    *columns: str, rows: Iterable[Iterable[Any]] = (), left: Collection[str] = ("",), fold: bool = False, **given: Any
) -> Table:
    """A table with a line under its head, and texts beside it to the left. given: what `Table` takes.

    left: the columns that are not aligned to the right. fold: break what is too long, instead of cutting it off.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left", **given)
    for name in columns:
        justify, overflow = "left" if name in left else "right", "fold" if fold else "ellipsis"
        table.add_column(name, justify=justify, overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def _literal(cell: Any) -> Any:
    return Text(literal(cell)) if isinstance(cell, str) else cell


def counted(number: int, of: str = "seed") -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def si(value: float) -> str:
    """Four significant digits with k, M, G, T, P."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.95:
            return f"{value:.4g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.4g} P"
