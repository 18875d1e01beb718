"""`headwater list`: what comes with headwater, by name."""

from typing import Any, Literal

from headwater_lab.cli.arguments import print_result
from headwater_lab.cli.options import LOOK, AsJson, command
from headwater_lab.util.terminal import lined

Catalogue = Literal["recipes", "presets", "mechanisms", "tasks"]


@command(LOOK, "list presets", trusts=False)
def list_shipped(kind: Catalogue | None = None, *, json: AsJson = False) -> None:
    """List shipped recipes, presets, mechanisms and synthetic tasks.

    kind: Default: all four.
    """
    from headwater_lab.api.listing import DESCRIBED

    rows = {name: describe() for name, describe in DESCRIBED.items() if kind in (None, name)}
    tables = []
    for name, listed in rows.items():
        columns = COLUMNS[name]
        cells = [[_write_value(row[title]) for title in columns] for row in listed]
        text_columns = set(columns) - set(NUMBERS)
        tables.append(lined(*columns, rows=cells, left=text_columns, title=name))
    print_result(rows if kind is None else rows[kind], tables, json, indent=2)


# The columns that each table shows. guess: the score of always guessing the most frequent label.
COLUMNS = {
    "recipes": ("name", "command", "title"),
    "presets": ("name", "paper", "layers", "width", "heads", "kv_heads", "parameters", "reads"),
    "mechanisms": ("name", "reads", "description"),
    "tasks": ("name", "settings", "row", "metric", "guess"),
}
NUMBERS = ("layers", "width", "heads", "kv_heads", "parameters", "guess")


def _write_value(value: Any) -> str:
    """Write a cell of a table."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items())
    return value if isinstance(value, str) else "; ".join(value)
