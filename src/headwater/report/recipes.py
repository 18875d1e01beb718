"""The recipe of a comparison, reconstructed from its records, and each arm's changes to the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from headwater.errors import HeadwaterError, NotTrusted
from headwater.recipe import parse
from headwater.records import RunRecord
from headwater.report.comparison import Comparison, arm_of

# Fields that are not an arm's.
NAMES = ("name", "title", "seed", "compare")


@dataclass(frozen=True)
class Remade:
    """A recipe as YAML. exact: it reproduces every run's settings hash."""

    yaml: str
    exact: bool


def remade(sizes: Sequence[Comparison]) -> Remade:
    """One recipe for all trials of an experiment, with the tuned learning rates."""
    first = sizes[0]
    records = [record for one in sizes for record in one.records]
    trials = {(arm_of(record), _size(record)): _settings(record) for record in records}
    arms = list(dict.fromkeys(arm for arm, _ in trials))
    names = list(dict.fromkeys(size for _, size in trials if size is not None))
    base = common(list(trials.values()))
    of_size = {size: common([trials[arm, size] for arm in arms if (arm, size) in trials]) for size in names}
    rest = {
        (arm, size): changes(settings, _over(base, of_size[size]) if size is not None else base)
        for (arm, size), settings in trials.items()
    }
    compare: dict[str, Any] = {
        "baseline": first.baseline,
        "seeds": sorted({record.seed for record in records}),
        "threshold": first.threshold,
        "budgets": first.budgets,
        "arms": {},
    }
    own: dict[str, dict[str, Any]] = {}
    for arm in arms:
        everywhere = [change for (name, _), change in rest.items() if name == arm]
        same = all(change == everywhere[0] for change in everywhere)
        compare["arms"][arm] = everywhere[0] if same else {}
        for (name, size), change in rest.items():
            if name == arm and not same and size is not None and change:
                own.setdefault(size, {})[arm] = change
    if names:
        compare["sizes"] = {
            size: changes(of_size[size], base) | ({"arms": own[size]} if size in own else {}) for size in names
        }
    values = {"name": first.name, "title": first.title, **base, "compare": compare}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return Remade(text, _makes(text, records))


def _makes(text: str, records: Iterable[RunRecord]) -> bool:
    try:
        recipe = parse(yaml.safe_load(text), "the report's recipe")
        return all(
            recipe.arm(arm_of(record), record.seed, _size(record)).digest() == record.config_hash for record in records
        )
    except NotTrusted:
        raise
    except HeadwaterError:
        return False


def _size(record: RunRecord) -> str | None:
    return record.experiment.size if record.experiment else None


def _settings(record: RunRecord) -> dict[str, Any]:
    return {section: value for section, value in record.recipe.items() if section not in NAMES}


def _atomic(path: tuple[str, ...]) -> bool:
    """Whether a mapping is one value: the order of mechanisms matters, and merging would change it."""
    return path == ("model", "mechanisms")


def common(settings: Sequence[dict[str, Any]], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that all have in common."""
    found: dict[str, Any] = {}
    for key, value in settings[0].items():
        if not all(key in one for one in settings):
            continue
        values = [one[key] for one in settings]
        if all(_same(one, value, (*path, key)) for one in values):
            found[key] = value
        elif all(isinstance(one, dict) for one in values) and not _atomic((*path, key)):
            found[key] = common(values, (*path, key))
    return found


def changes(settings: dict[str, Any], base: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of `settings` that differ from `base`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key in base and _same(value, base[key], (*path, key)):
            continue
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and not _atomic((*path, key))
        found[key] = changes(value, base[key], (*path, key)) if both else value
    return found


def _same(one: Any, other: Any, path: tuple[str, ...]) -> bool:
    if _atomic(path) and isinstance(one, dict) and isinstance(other, dict):
        return list(one.items()) == list(other.items())
    return bool(one == other)


def _over(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in base.keys() & change.keys() if isinstance(base[key], dict) and isinstance(change[key], dict)}
    return base | {key: _over(base[key], value) if key in both else value for key, value in change.items()}


def differences(comparison: Comparison) -> dict[str, list[tuple[str, str, str]]]:
    """By arm: (field, the baseline's value, the arm's) of each recipe field that differs; "–" if it is not set."""
    settings = {arm: flat(_settings(comparison.runs(arm)[0])) for arm in comparison.arms}
    base = settings.get(comparison.baseline, {})
    found = {}
    for arm, own in settings.items():
        if arm == comparison.baseline:
            continue
        keys = dict.fromkeys([*base, *own])
        changed = [key for key in keys if base.get(key) != own.get(key) and not key.startswith("reporting.")]
        found[arm] = [(key, base.get(key, "–"), own.get(key, "–")) for key in changed]
    return found


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted field -> value, as in YAML."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        elif value != {} or prefix:
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
            found[f"{prefix}{key}"] = text.removesuffix("\n").removesuffix("\n...").strip()
    return found
