"""Tables and consoles that print names and sentences literally, and fit the terminal's width.

Names of arms, files and columns may come from other people's files. Rich would read `[keys]` in one as markup and drop
it, and a terminal obeys control characters; here neither happens. Styled text is a `Prose`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement, measure_renderables
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

# Control characters except tabs and line ends, marks that change the text direction, and halves of surrogate pairs,
# which represent bytes of file names that are not text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Words, with the spaces before them. They include text with spaces that is copied or read as a whole: code, calls,
# quoted paths, intervals, a number with its unit or deviation.
_WORD = re.compile(
    r"\s*(?:`[^`]*`|\w\([^()]*\)|(?<!\w)'[^']*/[^']*'|\[[^\s\[]+, [^\s\]]+\]"
    r"|\d (?:%|[A-Za-z]{1,3}\b)|\d [±–] \d|× \d|\S)+"
)
# Names, numbers with their intervals and other cells of this width are not broken.
NARROW = 24
# Stack the rows of a table rather than break a cell into more lines.
MOST_LINES = 8
# Wider than any table.
UNLIMITED = 2**20


def literal(text: str) -> str:
    r"""Replace control characters and unprintable characters by escapes such as \x1b."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Prose:
    """Literal text that wraps between words; longer words stick out. Further lines of indented text are indented more.

    text: without control characters. style: of rich.
    """

    def __init__(self, text: str, style: str = "") -> None:
        self.text, self.style = literal(text).expandtabs(), style

    def __str__(self) -> str:
        return self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        narrow, wide = (max(map(cell_len, self.break_lines(width))) for width in (0, UNLIMITED))
        return Measurement(narrow, wide)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.break_lines(UNLIMITED if options.no_wrap else options.max_width):
            if options.justify == "right":
                line = " " * (options.max_width - cell_len(line)) + line
            yield Text(line, self.style, no_wrap=True, overflow="ignore")

    def break_lines(self, width: int) -> Iterator[str]:
        """Break the text into lines of at most this width, where words are no longer."""
        for line in self.text.split("\n"):
            indent = len(line) - len(line.lstrip())
            hang, begun = " " * (indent and indent + 2), ""
            for word in _WORD.findall(line):
                if begun and cell_len(begun + word) > width:
                    yield begun
                    begun = hang + word.lstrip()
                else:
                    begun += word
            yield begun


class Terminal(Console):
    """A console without markup, highlighting, emoji codes and control characters.

    Sentences wrap on a terminal, and are one line each in files and pipes. A `Text` never wraps, such as a command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        if any(isinstance(item, str | Prose | Table) for item in objects):
            options["crop"] = False  # a path that is wider than the terminal is shown in full
        if any(isinstance(item, Text if self.is_terminal else str | Text) for item in objects):
            options["soft_wrap"] = True
        super().print(*(Prose(item) if isinstance(item, str) else item for item in objects), **options)

    def render_str(self, text: str, **options: Any) -> Text:  # before widths are counted
        return super().render_str(literal(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(literal(segment.text), segment.style)


class Table(RichTable):
    """A table whose texts are literal on any console, including the caller's.

    Where it is wider than the console, its headers wrap, or its long cells too. If that does not suffice, the last
    columns follow below, beside the first one again. Where not even three columns fit, the rows are stacked: the first
    cell, and below it `column: cell` for each of the others that is not empty.
    """

    def __init__(self, *, title: str | None = None, caption: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        # Rich would wrap these at the table's width, and inside words.
        self.above = [] if title is None else [Prose(title, "table.title")]
        self.below = [] if caption is None else [Prose(caption, "table.caption")]

    def add_column(self, header: RenderableType = "", *arguments: Any, **options: Any) -> None:
        super().add_column(_make_literal(header), *arguments, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_make_literal, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.above
        yield from self._lay_out(console, options)
        yield from self.below

    def _lay_out(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if (widths := self._fit_columns(console, options)) is not None:
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)
            return
        columns = list(range(len(self.columns)))
        for count in columns[:2:-1]:
            block = self._select_columns(columns[:count])
            if block._fit_columns(console, options) is not None:
                yield from block._lay_out(console, options)
                yield from self._select_columns([0, *columns[count:]])._lay_out(console, options)
                return
        yield from self._stack_rows(options.max_width)
        yield Prose("")

    def _select_columns(self, indices: Sequence[int]) -> "Table":
        table = copy(self)
        table.columns = [replace(self.columns[index], _index=number) for number, index in enumerate(indices)]
        return table

    def _fit_columns(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """Choose the columns' widths; None if the rows are to be stacked."""
        unlimited = options.update(width=UNLIMITED)
        for column in self.columns:
            column.width = None
        heads = [Measurement.get(console, unlimited, column.header) for column in self.columns]
        cells = [measure_renderables(console, unlimited, list(column.cells)) for column in self.columns]
        full = [max(head.maximum, cell.maximum) for head, cell in zip(heads, cells, strict=True)]
        room = options.max_width - (Measurement.get(console, unlimited, self).maximum - sum(full))
        for unbroken in (UNLIMITED, NARROW):
            shortest = [cell.maximum if cell.maximum <= unbroken else cell.minimum for cell in cells]
            least = [max(head.minimum, cell) for head, cell in zip(heads, shortest, strict=True)]
            if sum(least) <= room:
                widths = _share_width(room, least, full)
                lines = [cell.maximum / max(1, width) for cell, width in zip(cells, widths, strict=True)]
                return widths if max(lines, default=0) <= MOST_LINES else None
        return None

    def _stack_rows(self, width: int) -> Iterator[RenderableType]:
        names = [str(column.header) for column in self.columns]
        for first, *cells in zip(*(column.cells for column in self.columns), strict=True):
            yield first
            indent = " " * (len(str(first)) - len(str(first).lstrip()) + 2)
            lines: list[str] = []
            for pair in (f"{name}: {cell}" for name, cell in zip(names[1:], cells, strict=True) if str(cell)):
                if lines and cell_len(longer := f"{lines[-1]}   {pair}") <= width:
                    lines[-1] = longer
                else:
                    lines.append(indent + pair)
            yield from map(Prose, lines)


def _share_width(room: int, least: Sequence[int], full: Sequence[int]) -> list[int]:
    """Widen columns up to their full widths, those that lack least first, and the others equally."""
    widths, room = list(least), room - sum(least)
    lacking = sorted(range(len(least)), key=lambda index: full[index] - least[index])
    for position, index in enumerate(lacking):
        share = min(full[index] - least[index], room // (len(lacking) - position))
        widths[index], room = widths[index] + share, room - share
    return widths


def lined(*columns: str, rows: Iterable[Iterable[Any]] = (), left: Collection[str] = ("",), **options: Any) -> Table:
    """Make a table with a line under its head. left: the left-aligned columns. options: of `Table`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), **options)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _make_literal(cell: Any) -> Any:
    return Prose(cell) if isinstance(cell, str) else cell


class SideBySide:
    """A table with a column for each of `names`, in sections that appear with their first row."""

    def __init__(self, names: Iterable[str], **options: Any) -> None:
        self.section, self.table = "", lined("", *names, **options)

    def add_cells(self, label: str, cells: Iterable[str]) -> None:
        """Add a row to the present section, unless all its cells are empty."""
        if not any(cells := [*cells]):
            return
        if self.section:
            self.table.add_section()
            self.table.add_row(Prose(self.section, "bold"))
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
