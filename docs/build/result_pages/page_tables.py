"""Tables of the generated pages: data first, then HTML that sorts and filters with docs/assets/tables.js."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

VERDICTS = {
    "replicates": "good",
    "better": "good",
    "met": "good",
    "ok": "good",
    "fails": "bad",
    "worse": "bad",
    "missed": "bad",
}


GENERATED = "Generated from the files in `results/` each time this site is built.\n"
LONG = 40  # characters of a cell


class Markup(str):
    """A cell that is HTML already."""


Cell = str | Markup


@dataclass(frozen=True)
class Source:
    """Where a table's figures come from; empty fields were not recorded."""

    command: str = ""
    date: str = ""
    code: str = ""
    hardware: str = ""
    seeds: str = ""
    file: str = ""
    note: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of a page. choices: columns that readers filter by one of their values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    source: Source = field(default_factory=Source)
    choices: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells for {len(self.columns)} columns: {row}")


def render_table(table: PageTable) -> str:
    """Render a table with its caption and, below it, where its figures come from."""
    choices = ",".join(str(table.columns.index(name)) for name in table.choices)
    kinds = [_find_kind(column) for column in zip(*table.rows, strict=True)] or [""] * len(table.columns)
    head = "".join(_render_header(name, kind) for name, kind in zip(table.columns, kinds, strict=True))
    body = "\n".join(_render_row(row, kinds) for row in table.rows)
    label = html.escape(", ".join(filter(None, [table.title, table.source.hardware])), quote=True)
    return (
        f'\n<div class="results">\n<div class="results-scroll" role="region" tabindex="0" aria-label="{label}">\n'
        f'<table class="results-table" data-choices="{choices}">\n<caption>{render_text(table.title)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n{render_source(table.source)}</div>\n"
    )


def _render_header(name: str, kind: str) -> str:
    return f'<th scope="col"{kind}>{html.escape(name)}</th>' if name else f"<td{kind}></td>"  # an empty th is an error


def _render_row(row: Sequence[Cell], kinds: Sequence[str]) -> str:
    first, *others = (_render_cell(cell) for cell in row)
    cells = [f'<th scope="row"{kinds[0]}>{first}</th>']
    cells += [f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True)]
    return f"<tr>{''.join(cells)}</tr>"


def _find_kind(cells: Sequence[Cell]) -> str:
    """The class of a column, as an attribute: numbers, long texts, or neither."""
    filled = [cell for cell in cells if cell]
    if filled and all(re.match(r"[+×−-]?\d", cell) is not None and len(cell) < LONG for cell in filled):
        return ' class="number"'
    return ' class="long"' if any(len(cell) > LONG and not isinstance(cell, Markup) for cell in filled) else ""


def _render_cell(cell: Cell) -> str:
    if isinstance(cell, Markup):
        return cell
    if cell in VERDICTS or cell == "inconclusive":
        return f'<span class="verdict {VERDICTS.get(cell, "open")}">{cell}</span>'
    return render_text(cell)


def render_text(text: str) -> str:
    """Escape a text, with `code` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def render_source(source: Source) -> str:
    """Render where figures come from as a line; '' if nothing is known."""
    parts = [f"<code>{html.escape(command.strip())}</code>" for command in source.command.split(";") if command.strip()]
    parts += [html.escape(part) for part in (source.date, source.code, source.hardware, source.seeds) if part]
    parts += [f"from <code>{html.escape(source.file)}</code>"] if source.file else []
    note = f"<br>{render_text(source.note)}" if source.note else ""
    return f'<p class="results-source">{" · ".join(parts)}{note}</p>\n' if parts or note else ""


def write_value(value: object) -> str:
    """Write a figure of a JSON file as it is shown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " – ".join(map(write_value, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {write_value(item)}" for name, item in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _write_float(value)
    return str(value)


def _write_float(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def tabulate(rows: Sequence[Mapping[str, object]]) -> tuple[list[str], list[list[str]]]:
    """Lay JSON objects out as columns and rows; columns that no row fills are left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    return names, [[write_value(row.get(name)) for name in names] for row in rows]
