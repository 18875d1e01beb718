"""Tables as CSV, Markdown and LaTeX. Each file begins with a mark, so that headwater replaces only its own."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, starmap
from typing import Any

from headwater_lab.util.terminal import Prose, literal

# A cell: its text, or (text, class): better, worse or soft.
PageCell = str | tuple[str, str]
# Letters in a line of a LaTeX cell.
LINE = 36
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]\d+)?")
_GREEK = "αβγδεζηθικλμνξπρςστυφχψωΓΔΘΛΞΠΣΥΦΨΩ"
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho varsigma sigma tau upsilon phi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "#$%&_{}"}
    | {letter: f"{{{letter}}}" for letter in "[]*"}  # after a line's end, these would be its arguments
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}"}
    | {'"': r"\char34{}", "±": r"$\pm$", "×": r"$\times$", "–": r"\textendash{}", "…": r"\ldots{}"}
    | {letter: rf"$\{name}$" for letter, name in zip(_GREEK, _GREEK_NAMES.split(), strict=True)}
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

    @classmethod
    def from_rows(cls, caption: str, rows: Sequence[Mapping[str, PageCell]], **options: Any) -> "PageTable":
        """Make a table of rows that are by column, in the order of the first one's columns."""
        return cls(caption, list(rows[0]) if rows else [], [list(row.values()) for row in rows], **options)

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
    r"""Write a table for \input, its caption in a comment."""
    columns = list(starmap(_break_column, zip(table.columns, *table.texts, strict=True)))
    text = _write_tabular(columns, "l" if table.text else "r")
    lines = [
        rf"% Written by headwater: {name}, for \input. It needs \usepackage{{graphicx}}.",
        f"% {_join_lines(table.caption)}",
        text,
    ]
    if max(map(ord, text)) > 0x17F:  # the letters that pdflatex's fonts have
        lines[0] += " Compile it with lualatex or xelatex and a font that has all its letters."
    return "\n".join([*lines, ""])


def _break_column(head: str, *cells: str) -> list[list[str]]:
    """Break long cells into lines, and the head into lines of their width."""
    lines = [[*Prose(_join_lines(cell)).break_lines(LINE)] for cell in cells]
    width = max(map(len, chain(*lines)), default=LINE)
    return [[*Prose(_join_lines(head)).break_lines(width)], *lines]


def _write_tabular(columns: Sequence[Sequence[Sequence[str]]], side: str) -> str:
    """Write columns as a tabular, shrunk if it is wider than a line. side: the alignment of all but the first."""
    sides = ["l", *side * (len(columns) - 1)]
    head, *body = (
        " & ".join(map(_write_latex_cell, cells, sides, repeat("t" if number else "b"))) + r" \\"
        for number, cells in enumerate(zip(*columns, strict=True))
    )
    lines = [
        r"\noindent\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{''.join(sides)}}}",
        *(r"\hline", head, r"\hline", *body, r"\hline"),
        r"\end{tabular}}%",
    ]
    return "\n".join(lines)


def _write_latex_cell(lines: Sequence[str], side: str, position: str) -> str:
    text = r" \\ ".join(map(_escape_latex, lines))
    return text if len(lines) == 1 else rf"\begin{{tabular}}[{position}]{{@{{}}{side}@{{}}}}{text}\end{{tabular}}"


def _escape_latex(text: str) -> str:
    # Two equal signs in a row would be joined: -- is a dash.
    text = re.sub(r"([-,])(?=\1)", r"\1{}", text.translate(_LATEX))
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text)


def _join_lines(text: str) -> str:
    return " ".join(literal(text).split())


# By format: the suffix of its files, and what writes a table with a name.
TABLE_FORMATS = {"csv": (".csv", write_csv_table), "md": (".md", write_markdown), "latex": (".tex", write_latex)}
