"""Shipped recipes and presets: which runs are the same, and what models cost."""

from __future__ import annotations

from typing import Any

from product import PRESETS, estimate, identities, shipped_recipes


def recipe_runs() -> dict[str, Any]:
    """The shipped recipes' runs by what they are: `same` lists those that are one run, `single` all others.

    A run is a recipe; or an arm of its comparison with seed 0, "RECIPE: ARM", at a size "RECIPE: ARM @ SIZE"; or one
    of its stages, "RECIPE: … > STAGE".
    """
    runs: dict[str, list[str]] = {}
    for name, path in shipped_recipes().items():
        for label, identity in identities(path).items():
            runs.setdefault(identity, []).append(f"{name}: {label}" if label else name)
    groups = sorted(map(sorted, runs.values()))
    return {
        "same": [labels for labels in groups if len(labels) > 1],
        "single": [labels[0] for labels in groups if len(labels) == 1],
    }


def estimates() -> dict[str, Any]:
    """`plan PRESET --json` of every preset."""
    return {name: estimate(name) for name in PRESETS}
