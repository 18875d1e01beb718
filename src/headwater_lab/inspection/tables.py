"""Inspections as tables, with one column per model."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headwater_lab.inspection.inspection import Inspection
from headwater_lab.util.terminal import SideBySide, Table

# Show up to this many heads individually, and the range of more.
HEADS = 4

CENSUS = {
    "heads": "all",
    "current_key_current_value": "α1 > α2, β1 > β2: this token's key, this token's value",
    "previous_key_current_value": "α1 ≤ α2, β1 > β2: previous key, this value",
    "current_key_previous_value": "α1 > α2, β1 ≤ β2: this key, previous value",
    "previous_key_previous_value": "α1 ≤ α2, β1 ≤ β2: previous key, previous value",
}
# Measures by layer, most of them by head: label -> attribute of an inspection.
MEASURES = {
    "token similarity: a layer's input": "read.hidden",
    "token similarity: values": "read.values",
    "entropy, nats": "read.entropy",
    "entropy, share of maximum": "read.normalized_entropy",
    "attention to the first token": "read.first_token",
    "attention to the previous token": "read.previous_token",
    "previous token's value": "read.previous_token_effective",
    "attention to learned pairs": "read.beside",
    "induction: attention": "induction.attention",
    "induction: value": "induction.effective",
    "share of heads' output": "read.use",
}


def build_tables(inspections: Sequence[Inspection]) -> list[Table]:
    """Scalars with the census, and measurements on rows, if any."""
    measured = any(inspection.read for inspection in inspections)
    return [scalars_table(inspections), *([read_table(inspections)] if measured else [])]


def write_numbers(values: Sequence[float | None] | float | None) -> str:
    """Write one number, several numbers, or the range of many."""
    if values is None:
        return ""
    if isinstance(values, float):
        return f"{values:.3f}"
    numbers = [value for value in values if value is not None]
    if len(numbers) > HEADS:
        return f"{min(numbers):.3f} … {max(numbers):.3f}"
    return "  ".join(f"{value:.3f}" for value in numbers)


def _add_section(table: SideBySide, title: str, rows: dict[str, list[str]]) -> None:
    table.section = title
    for label, cells in rows.items():
        table.add_cells(label, cells)


def scalars_table(inspections: Sequence[Inspection]) -> Table:
    caption = f"One number per head; the range if there are more than {HEADS}."
    names = [model.name for model in inspections]
    table = SideBySide(names, title="Scalars, as used by the forward pass", caption=caption)
    facts = {
        "parameters": [f"{model.parameters:,}" for model in inspections],
        "layers, query heads, key/value heads": [
            f"{model.layers}, {model.query_heads}, {model.key_value_heads}" for model in inspections
        ],
        "mechanisms": [", ".join(model.mechanisms) for model in inspections],
    }
    _add_section(table, "model", facts)
    by_layer = [{(scalars.key, scalars.layer): scalars.values for scalars in model.scalars} for model in inspections]
    depth = range(max(model.layers for model in inspections))
    for key in dict.fromkeys(key for values in by_layer for key, _ in values):
        mechanism, symbol, module = key
        rows = {f"layer {i}": [write_numbers(values.get((key, i))) for values in by_layer] for i in depth}
        _add_section(table, f"{symbol} ({mechanism}{', ' if module else ''}{module})", rows)
    _add_section(table, "key/value heads by the larger weight", _census_rows(inspections))
    return table.table


def _census_rows(inspections: Sequence[Inspection]) -> dict[str, list[str]]:
    census = [{} if model.census is None else asdict(model.census) for model in inspections]
    return {label: [str(counts.get(field, "")) for counts in census] for field, label in CENSUS.items()}


def read_measure(inspection: Inspection, label: str) -> Any:
    """Read the values of a measure by layer; None if it was not measured."""
    record, _, field = MEASURES[label].partition(".")
    return getattr(getattr(inspection, record), field, None)


def read_table(inspections: Sequence[Inspection]) -> Table:
    samples = [model.sample for model in inspections]
    of_images = any(sample is not None and sample.patches is not None for sample in samples)
    table = SideBySide(
        [model.name for model in inspections],
        title="Measured on images" if of_images else "Measured on rows of tokens; induction on random ones",
        caption=f"One number per query head; the range if there are more than {HEADS}.",
    )
    sizes = [str(sample or "") for sample in samples]
    _add_section(table, "sample", {"images" if of_images else "rows × tokens": sizes})
    for label in MEASURES:
        columns = [list(read_measure(model, label) or ()) for model in inspections]
        _add_section(table, label, _layer_rows(inspections, columns))
    elsewhere = [model.skip_use if model.read and model.attends_elsewhere else [] for model in inspections]
    _add_section(table, "share of heads that attend elsewhere", _layer_rows(inspections, elsewhere))
    return table.table


def _layer_rows(inspections: Sequence[Inspection], columns: Sequence[Sequence[Any]]) -> dict[str, list[str]]:
    """Make the cells of each layer, and of the last one's output. columns: by model, the values of its layers."""
    models = list(zip(columns, (model.layers for model in inspections), strict=True))
    rows = {}
    for layer in range(max(depth for _, depth in models)):
        rows[f"layer {layer}"] = [
            write_numbers(column[layer]) if layer < min(depth, len(column)) else "" for column, depth in models
        ]
    rows["output"] = [write_numbers(column[depth]) if depth < len(column) else "" for column, depth in models]
    return rows
