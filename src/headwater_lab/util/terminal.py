"""Tables and consoles that print names and sentences literally.

Names of arms, files and columns may come from other people's files. Rich would read `[keys]` in one as markup and drop
it, and a terminal obeys control characters; here neither happens. Styled text is a `rich.text.Text`.
"""

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
    r"""Replace control characters and unprintable characters by escapes such as \x1b."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A console without markup, highlighting, emoji codes and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # before widths are counted
        return super().render_str(literal(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(literal(segment.text), segment.style)


class Table(RichTable):
    """A table whose texts are literal on any console, including the caller's."""

    def __init__(self, *, title: str | None = None, caption: str | None = None, **options: Any) -> None:
        super().__init__(
            title=None if title is None else Text(literal(title), "table.title"),
            caption=None if caption is None else Text(literal(caption), "table.caption"),
            **options,
        )

    def add_column(self, header: RenderableType = "", *arguments: Any, **options: Any) -> None:
        super().add_column(_make_literal(header), *arguments, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_make_literal, cells), **options)


def lined(
    *columns: str, rows: Iterable[Iterable[Any]] = (), left: Collection[str] = ("",), fold: bool = False, **options: Any
) -> Table:
    """Make a table with a line under its head. options: of `Table`.

    left: the left-aligned columns. fold: break long text instead of cutting it off.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left", **options)
    for name in columns:
        justify, overflow = "left" if name in left else "right", "fold" if fold else "ellipsis"
        table.add_column(name, justify=justify, overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def _make_literal(cell: Any) -> Any:
    return Text(literal(cell)) if isinstance(cell, str) else cell


class SideBySide:
    """A table with a column for each of `names`, in sections that appear with their first row."""

    def __init__(self, names: Iterable[str], **options: Any) -> None:
        self.section, self.table = "", lined("", *names, fold=True, **options)
        self.table.columns[0].no_wrap = True

    def add_cells(self, label: str, cells: Iterable[str]) -> None:
        """Add a row to the present section, unless all its cells are empty."""
        if not any(cells := [*cells]):
            return
        if self.section:
            self.table.add_section()
            self.table.add_row(Text(self.section, "bold"))
            self.section = ""
        self.table.add_row(f"  {label}", *cells)


def counted(number: int, noun: str = "seed") -> str:
    """Write a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def si(value: float) -> str:
    """Write four significant digits with k, M, G, T, P."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.95:
            return f"{value:.4g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.4g} P"
