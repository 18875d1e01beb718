"""Tables as CSV, Markdown and LaTeX. Each file begins with a mark, so that headwater replaces only its own."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from headwater_lab.util.terminal import literal

# A cell: its text, or (text, class): better, worse or soft.
PageCell = str | tuple[str, str]
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]\d+)?")
_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "#$%&_{}"}
    | {letter: f"{{{letter}}}" for letter in "[]*"}  # after a line's end, these would be its arguments
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}"}
    | {'"': r"\char34{}", "±": r"$\pm$", "×": r"$\times$", "–": r"\textendash{}", "…": r"\ldots{}", "τ": r"$\tau$"}
)


@dataclass(frozen=True)
class PageTable:
    """A table of the page. rows: the first cell of each is its heading. text: left-align the words in it.

    name: distinguishes its files from those of other tables of a section. numbers: its rows for CSV, unrounded.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    text: bool = False
    name: str = ""
    numbers: Sequence[Mapping[str, Any]] = ()

    @property
    def texts(self) -> list[list[str]]:
        return [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in self.rows]


def write_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV; cells are empty where there is no number."""
    names = list(dict.fromkeys(chain(*rows)))
    return _write_lines([names, *([row.get(name) for name in names] for row in rows)])


def _write_lines(lines: Iterable[Sequence[Any]]) -> str:
    output = io.StringIO()
    csv.writer(output, lineterminator="\n").writerows(lines)
    return output.getvalue()


def write_csv_table(table: PageTable, name: str) -> str:
    """Write a table as CSV: its numbers, or else its cells, in which numbers have no commas and no plus signs."""
    if table.numbers:
        return write_csv(table.numbers)
    head = ["table", "name", *table.columns[1:]]
    return _write_lines([head, *([name, heading, *map(_read_cell, row)] for heading, *row in table.texts)])


def _read_cell(cell: str) -> str:
    return cell.replace(",", "").removeprefix("+") if _NUMBER.fullmatch(cell) else cell


def write_markdown(table: PageTable, name: str) -> str:
    """Write a table as Markdown below its caption."""
    head, *body = [[_escape_markdown(cell) for cell in row] for row in (table.columns, *table.texts)]
    rule = ["---", *["---" if table.text else "---:"] * (len(head) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *body)]
    return "\n".join([f"<!-- Written by headwater: {name} -->", "", _escape_markdown(table.caption), "", *lines, ""])


def _escape_markdown(text: str) -> str:
    text = re.sub(r"[\\`*_|]|\](?=[(\[])", r"\\\g<0>", _join_lines(text))
    return re.sub("[&<>$~]", lambda match: f"&#{ord(match[0])};", text)


def write_latex(table: PageTable, name: str) -> str:
    r"""Write a table as a LaTeX tabular for \input, with its caption in a comment."""
    head, *body = [[_escape_latex(cell) for cell in row] for row in (table.columns, *table.texts)]
    body = [[name, *(re.sub(r"(?<!\w)-(?=\d)", "$-$", cell) for cell in cells)] for name, *cells in body]
    caption = _escape_latex(table.caption)
    lines = [" & ".join(row) + r" \\" for row in (head, *body)]
    lines = [
        rf"% Written by headwater: {name}, for \input. It needs no package.",
        f"% {caption}",
        rf"\begin{{tabular}}{{l{('l' if table.text else 'r') * (len(head) - 1)}}}",
        r"\hline",
        lines[0],
        r"\hline",
        *lines[1:],
        r"\hline",
        r"\end{tabular}",
    ]
    if max(map(ord, "".join(lines))) > 0x17F:  # the letters that pdflatex's fonts have
        lines[0] += " Compile it with lualatex or xelatex and a font that has all its letters."
    return "\n".join([*lines, ""])


def _escape_latex(text: str) -> str:
    # Two equal signs in a row would be joined: -- is a dash.
    return re.sub(r"([-,])(?=\1)", r"\1{}", _join_lines(text).translate(_LATEX))


def _join_lines(text: str) -> str:
    return " ".join(literal(text).split())


# By format: the suffix of its files, and what writes a table with a name.
TABLE_FORMATS = {"csv": (".csv", write_csv_table), "md": (".md", write_markdown), "latex": (".tex", write_latex)}
