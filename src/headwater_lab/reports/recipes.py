"""Each arm's changes to the baseline's recipe."""

from typing import Any

import yaml

from headwater_lab.reports.comparison import Comparison

# Fields that do not distinguish arms.
NAMES = ("name", "title", "seed", "compare")


def find_changes(comparison: Comparison) -> dict[str, list[tuple[str, str, str]]]:
    """Return, by arm, (field, the baseline's value, the arm's) for each field that differs; "–" if it is not set."""
    recipes = {arm: comparison.runs(arm)[0].recipe for arm in comparison.arms}
    settings = {
        arm: flatten_settings({key: value for key, value in recipe.items() if key not in NAMES})
        for arm, recipe in recipes.items()
    }
    base = settings.pop(comparison.baseline, {})
    changes = {}
    for arm, arm_settings in settings.items():
        keys = dict.fromkeys([*base, *arm_settings])
        changed = [key for key in keys if base.get(key) != arm_settings.get(key) and not key.startswith("reporting.")]
        changes[arm] = [(key, base.get(key, "–"), arm_settings.get(key, "–")) for key in changed]
    return changes


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted field -> value, as in YAML."""
    fields: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            fields |= flatten_settings(value, f"{prefix}{key}.")
        elif value != {} or prefix:
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
            fields[f"{prefix}{key}"] = text.removesuffix("\n").removesuffix("\n...").strip()
    return fields
