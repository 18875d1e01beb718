"""Inspections as tables, with one column per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from headwater_lab.inspection.inspection import Inspection
from headwater_lab.inspection.pairs import PairContribution
from headwater_lab.util.terminal import Table, lined

# Show up to this many heads one by one, otherwise the range.
HEADS = 4
NAMED = 2  # strongest pairs to list per layer

CENSUS = {
    "heads": "all",
    "current_key_current_value": "α1 > α2, β1 > β2: this token's key, this token's value",
    "previous_key_current_value": "α1 ≤ α2, β1 > β2: previous key, this value",
    "current_key_previous_value": "α1 > α2, β1 ≤ β2: this key, previous value",
    "previous_key_previous_value": "α1 ≤ α2, β1 ≤ β2: previous key, previous value",
}
# Measures by layer, most of them by head: label, and where they stand in an inspection.
MEASURES = {
    "token similarity: a layer's input": "read.hidden",
    "token similarity: values": "read.values",
    "entropy, nats": "read.entropy",
    "entropy, share of maximum": "read.normalized_entropy",
    "attention to the first token": "read.first_token",
    "most attended position": "read.largest",
    "attention to the previous token": "read.previous_token",
    "previous token's value": "read.previous_token_effective",
    "attention to learned pairs": "read.beside",
    "induction: attention": "induction.attention",
    "induction: value": "induction.effective",
    "share of heads' output": "read.use",
}

# What the measures are called on images.
ON_IMAGES = {
    "first token": "class token",
    "most attended position": "most attended token",
    "previous token": "previous patch",
    "token similarity": "patch similarity",
}


def named(label: str, found: Sequence[Inspection]) -> str:
    """A measure's label, in the words of what was read."""
    if any(one.images for one in found):
        for word, on_images in ON_IMAGES.items():
            label = label.replace(word, on_images)
    return label


def tables(found: Sequence[Inspection]) -> list[Table]:
    """Scalars with the census; measurements on rows; and the pairs of each Pattention, if any."""
    result = [scalars_table(found)]
    if any(one.read for one in found):
        result.append(read_table(found))
    result += [pairs_table(one) for one in found if one.read is not None and one.read.maps]
    return result


def numbers(values: Sequence[float | None] | float | None) -> str:
    """One number, several numbers, or the range of many."""
    if values is None:
        return ""
    if isinstance(values, float):
        return f"{values:.3f}"
    shown = [value for value in values if value is not None]
    if len(shown) > HEADS:
        return f"{min(shown):.3f} … {max(shown):.3f}"
    return "  ".join(f"{value:.3f}" for value in shown)


class _Table:
    """Sections of rows, without rows and sections that are empty for all models."""

    def __init__(self, title: str, found: Sequence[Inspection], caption: str) -> None:
        self.table = lined("", *(one.name for one in found), fold=True, title=title, caption=caption)
        self.table.columns[0].no_wrap = True

    def section(self, title: str, rows: dict[str, list[str]]) -> None:
        rows = {label: cells for label, cells in rows.items() if any(cells)}
        if rows:
            self.table.add_section()
            self.table.add_row(Text(title, "bold"))
            for label, cells in rows.items():
                self.table.add_row(f"  {label}", *cells)


def scalars_table(found: Sequence[Inspection]) -> Table:
    table = _Table(
        "Scalars, as used by the forward pass", found, f"One number per head; the range if there are more than {HEADS}."
    )
    depth = range(max(one.layers for one in found))
    known = [{(s.mechanism, s.symbol, s.place, s.layer): s for s in one.scalars} for one in found]
    facts = {
        "parameters": [f"{one.parameters:,}" for one in found],
        "layers, query heads, key/value heads": [
            f"{one.layers}, {one.query_heads}, {one.key_value_heads}" for one in found
        ],
        "mechanisms": [", ".join(one.mechanisms) for one in found],
    }
    table.section("model", facts)
    for mechanism, symbol, place in dict.fromkeys(key[:3] for one in known for key in one):
        cells = {
            f"layer {layer}": [
                numbers(scalar.values) if (scalar := one.get((mechanism, symbol, place, layer))) else ""
                for one in known
            ]
            for layer in depth
        }
        table.section(f"{symbol} ({mechanism}{', ' if place else ''}{place})", cells)
    cells = {
        label: ["" if one.census is None else f"{getattr(one.census, field)}" for one in found]
        for field, label in CENSUS.items()
    }
    table.section("key/value heads by the larger weight", cells)
    return table.table


def measured(one: Inspection, label: str) -> Any:
    """The values of a measure by layer; None if it was not measured."""
    part, _, field = MEASURES[label].partition(".")
    return getattr(getattr(one, part), field, None)


def read_table(found: Sequence[Inspection]) -> Table:
    samples = [one.text or one.images for one in found]
    of_images = any(one.images for one in found)
    table = _Table(
        "Measured on images" if of_images else "Measured on rows of tokens; induction on random ones",
        found,
        f"One number per query head; the range if there are more than {HEADS}.",
    )
    layers = max(one.layers for one in found)

    def by_layer(columns: Sequence[Mapping[int, Any]]) -> dict[str, list[str]]:
        return {f"layer {layer}": [numbers(column.get(layer)) for column in columns] for layer in range(layers)}

    table.section(
        "sample", {"images" if of_images else "rows × tokens": [sample.size if sample else "" for sample in samples]}
    )
    for label in MEASURES:
        columns = [dict(enumerate(measured(one, label) or ())) for one in found]
        last = [numbers(column.pop(one.layers, None)) for column, one in zip(columns, found, strict=True)]
        table.section(named(label, found), by_layer(columns) | {"output": last})
    elsewhere = [dict(enumerate(one.skip_use if one.read and one.attends_elsewhere else ())) for one in found]
    table.section("share of heads that attend elsewhere", by_layer(elsewhere))
    return table.table


def pairs_table(one: Inspection) -> Table:
    """The parameter tokens of a model, and what the strongest pairs fire for."""
    assert one.read is not None
    table = lined(
        title=f"Parameter tokens of {one.name}",
        caption="Effective: how many pairs share the work at a token. A pair fires where it contributes more than "
        "twice the mean pair; silent pairs never fire here.",
    )
    for column in ("map", "pairs", "effective", "fire", "silent"):
        table.add_column(column, justify="left" if column == "map" else "right", no_wrap=True)
    table.add_column("strongest pairs, and the tokens they contribute most at")
    for map in one.read.maps:
        pairs = "; ".join(_said(pair) for pair in map.strongest[:NAMED])
        table.add_row(
            f"{map.layer} {map.place}",
            f"{map.pairs:,}",
            f"{map.effective:.1f}",
            f"{map.fires:.1%}",
            f"{map.silent:.1%}",
            pairs,
        )
    return table


def _said(pair: PairContribution) -> str:
    """A pair's number and the tokens it contributes most at, with a few characters before each."""
    tokens = [f"{token.before[-6:]}»{token.token}«" for token in pair.tokens]
    return f"{pair.pair}: " + " ".join(repr(token)[1:-1] for token in tokens)
