"""`headwater list`: what comes with headwater, by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from headwater.util.terminal import lined
from headwater_lab.cli.common import out, quiet

Catalogue = Literal["recipes", "presets", "mechanisms", "tasks"]


def list(
    kind: Annotated[Catalogue | None, typer.Argument(help="Default: all four.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List shipped recipes, presets, mechanisms and synthetic tasks."""
    quiet()
    rows = {name: describe() for name, describe in DESCRIBED.items() if kind in (None, name)}
    if as_json:
        print(json.dumps(rows if kind is None else rows[kind], indent=2, ensure_ascii=False))
        return
    for name, listed in rows.items():
        columns = COLUMNS[name]
        table = lined(*columns, left=[title for title in columns if title not in NUMBERS], fold=True, title=name)
        table.columns[0].no_wrap = True
        for row in listed:
            table.add_row(*(_text(row[title]) for title in columns))
        out.print(table, highlight=False)


def describe_recipes() -> Sequence[dict[str, Any]]:
    """The recipes that `train`, `compare` and `plan` accept by name."""
    from headwater_lab.recipe.overrides import plain, read_text
    from headwater_lab.recipe.shipped import shipped_recipes

    rows = []
    for name, path in shipped_recipes().items():
        values = plain(read_text(path, "recipe"), repr(str(path)))
        command = "compare" if "compare" in values else "train"
        rows.append({"name": name, "command": command, "title": values.get("title", ""), "file": str(path)})
    return rows


def describe_presets() -> Sequence[dict[str, Any]]:
    """The papers' models, for `headwater plan` and `headwater.config.presets.preset`."""
    from headwater.config.presets import PRESETS, preset
    from headwater.cost.counts import parameters
    from headwater.plugins.registry import resolve

    rows = []
    for name, known in PRESETS.items():
        config = preset(name)
        mechanisms = config.mechanisms or {}
        rows.append(
            {
                "name": name,
                "paper": known.paper,
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "heads": config.num_attention_heads,
                "kv_heads": config.num_key_value_heads,
                "parameters": sum(parameters(config).values()),
                "reported": known.reported,
                "note": known.note,
                "reads": [resolve(mechanism).origin(options) for mechanism, options in mechanisms.items()],
            }
        )
    return rows


def describe_mechanisms() -> Sequence[dict[str, Any]]:
    """headwater's mechanisms, and those of installed packages."""
    from headwater.plugins.registry import MECHANISMS

    rows = []
    for name in MECHANISMS.names:
        mechanism = MECHANISMS.resolve(name)
        first_line = (mechanism.__doc__ or "").strip().partition("\n")[0]
        rows.append({"name": name, "reads": mechanism.origin(mechanism.options({})), "description": first_line})
    return rows


def describe_tasks() -> Sequence[dict[str, Any]]:
    """The synthetic tasks, each with a held-out row and the scores of a guess and of a solver."""
    from headwater_lab.data.synthetic import list_tasks

    rows = []
    for settings in list_tasks():
        task = settings.build()
        rows.append(
            {
                "name": settings.kind,
                "settings": settings.model_dump(mode="json", exclude={"kind", "held_out"}),
                "row": task.readable(task.held_out(), 0),
                "metric": task.metric,
                **task.sanity(),
            }
        )
    return rows


DESCRIBED = {
    "recipes": describe_recipes,
    "presets": describe_presets,
    "mechanisms": describe_mechanisms,
    "tasks": describe_tasks,
}
# Of the rows, what the tables show. guess: always the most frequent label; oracle: a solver that reads only the row.
COLUMNS = {
    "recipes": ("name", "command", "title"),
    "presets": ("name", "paper", "layers", "width", "heads", "kv_heads", "parameters", "reads"),
    "mechanisms": ("name", "reads", "description"),
    "tasks": ("name", "settings", "row", "metric", "guess", "oracle"),
}
NUMBERS = ("layers", "width", "heads", "kv_heads", "parameters", "guess", "oracle")


def _text(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return value if isinstance(value, str) else "; ".join(value)
