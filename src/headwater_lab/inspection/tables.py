"""Inspections as tables, with one column per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from headwater_lab.inspection.inspection import InspectedImages, Inspection
from headwater_lab.inspection.pairs import Firing, PairContribution
from headwater_lab.util.terminal import Table, lined

# Show up to this many heads one by one, otherwise the range.
HEADS = 4
NAMED, TOLD = 2, 4  # strongest pairs to list per layer, and pairs that tell classes apart

CENSUS = {
    "heads": "all",
    "current_key_current_value": "α1 > α2, β1 > β2: this token's key, this token's value",
    "previous_key_current_value": "α1 ≤ α2, β1 > β2: previous key, this value",
    "current_key_previous_value": "α1 > α2, β1 ≤ β2: this key, previous value",
    "previous_key_previous_value": "α1 ≤ α2, β1 ≤ β2: previous key, previous value",
}
# Measures of heads: label, and field of an inspection.
MEASURES: dict[str, Callable[[Inspection], list[list[float]] | None]] = {
    "entropy, nats": lambda one: one.read.entropy if one.read else None,
    "entropy, share of maximum": lambda one: one.read.normalized_entropy if one.read else None,
    "attention to the first token": lambda one: one.read.first_token if one.read else None,
    "most attended position": lambda one: one.read.largest if one.read else None,
    "attention to the previous token": lambda one: one.read.previous_token if one.read else None,
    "previous token's value": lambda one: one.read.previous_token_effective if one.read else None,
    "attention to learned pairs": lambda one: one.read.beside if one.read else None,
    "induction: attention": lambda one: one.induction.attention if one.induction else None,
    "induction: value": lambda one: one.induction.effective if one.induction else None,
    "share of heads' output": lambda one: one.read.use if one.read else None,
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
        self.table = lined(title=title, caption=caption)
        self.table.add_column("", no_wrap=True)
        for one in found:
            self.table.add_column(one.name, justify="right", overflow="fold")

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


def read_table(found: Sequence[Inspection]) -> Table:
    moved = max(sample.logits_moved for one in found if (sample := one.text or one.images))
    table = _Table(
        "Measured on images"
        if any(one.images for one in found)
        else "Measured on rows of tokens; induction on random ones",
        found,
        f"One number per query head; the range if there are more than {HEADS}. Inspection changed the logits by "
        f"{moved:.1e} of the largest.",
    )
    layers = max(one.layers for one in found)

    def by_layer(values: Callable[[Inspection], Sequence[Any] | None]) -> dict[str, list[str]]:
        columns = [(values(one) or [])[: one.layers] for one in found]
        return {
            f"layer {layer}": [numbers(column[layer]) if layer < len(column) else "" for column in columns]
            for layer in range(layers)
        }

    sizes = [f"{one.text.rows} × {one.text.context}" if one.text else "" for one in found]
    table.section("rows × tokens", {"": sizes})
    of_images: dict[str, Callable[[InspectedImages], str]] = {
        "number": lambda images: str(len(images.images)),
        "patches": lambda images: " × ".join(map(str, images.patches)),
        "right answers": lambda images: numbers(images.right),
    }
    cells = {name: [fact(one.images) if one.images else "" for one in found] for name, fact in of_images.items()}
    table.section("images", cells)
    last = {"output": [numbers(one.read.hidden[-1]) if one.read else "" for one in found]}
    hidden = by_layer(lambda one: one.read.hidden if one.read else None)
    table.section(named("token similarity: a layer's input", found), hidden | last)
    table.section(named("token similarity: values", found), by_layer(lambda one: one.read.values if one.read else None))
    for label, measure in MEASURES.items():
        table.section(named(label, found), by_layer(measure))
    elsewhere = by_layer(lambda one: one.skip_use if one.read and one.attends_elsewhere else None)
    table.section("share of heads that attend elsewhere", elsewhere)
    return table.table


def pairs_table(one: Inspection) -> Table:
    """The parameter tokens of a model, and what the strongest pairs fire for."""
    assert one.read is not None
    by_class = one.images is not None and len(one.groups) > 1  # if the classes are unknown, by image
    sparse = any(map.unread for map in one.read.maps)
    table = lined(
        title=f"Parameter tokens of {one.name}",
        caption="Effective: how many pairs share the work at a token. A pair fires where it contributes more than "
        "twice the mean pair; silent pairs never fire here" + ("; unread ones add nothing." if sparse else "."),
    )
    for column in ("map", "pairs", "effective", "fire", "silent", *(["unread"] if sparse else [])):
        table.add_column(column, justify="left" if column == "map" else "right", no_wrap=True)
    telling = f"pairs that tell the {one.grouped_by} apart: where each contributes most, over the mean"
    table.add_column(telling if by_class else "strongest pairs, and the tokens they contribute most at")
    for map in one.read.maps:
        shares = [f"{share:.1%}" for share in (map.fires, map.silent, *([map.unread] if sparse else []))]
        pairs = _telling(map, one.groups) if by_class else "; ".join(_said(pair) for pair in map.strongest[:NAMED])
        table.add_row(f"{map.layer} {map.place}", f"{map.pairs:,}", f"{map.effective:.1f}", *shares, pairs)
    return table


def _telling(map: Firing, classes: Sequence[str]) -> str:
    """The pairs that tell classes apart, with the class that each fires for."""
    found = []
    for pair, by_class in zip(map.telling[:TOLD], map.by_text, strict=False):
        most = max(range(len(classes)), key=by_class.__getitem__)
        found.append(f"{pair}: {classes[most]} ×{by_class[most]:.1f}")
    return "; ".join(found)


def _said(pair: PairContribution) -> str:
    """A pair's number and the tokens it contributes most at, with a few characters before each."""
    tokens = [f"{token.before[-6:]}»{token.token}«" for token in pair.tokens]
    return f"{pair.pair}: " + " ".join(repr(token)[1:-1] for token in tokens)
