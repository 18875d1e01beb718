"""Rows about headwater's shipped recipes, presets, mechanisms and synthetic tasks."""

from collections.abc import Sequence
from typing import Any

from headwater.config.presets import PRESETS, preset
from headwater.cost.counts import parameters
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater_lab.data.synthetic import list_tasks
from headwater_lab.recipe.overrides import read_text, read_yaml
from headwater_lab.recipe.recipe_files import shipped_recipes


def describe_recipes() -> Sequence[dict[str, Any]]:
    """List the recipes that `train`, `compare` and `plan` accept by name."""
    rows = []
    for name, path in shipped_recipes().items():
        values = read_yaml(read_text(path, "recipe"), repr(str(path)))
        command = "compare" if "compare" in values else "train"
        rows.append({"name": name, "command": command, "title": values.get("title", ""), "file": str(path)})
    return rows


def describe_presets() -> Sequence[dict[str, Any]]:
    """List the papers' models, for `headwater plan` and `headwater.config.presets.preset`."""
    rows = []
    for name, shipped in PRESETS.items():
        config = preset(name)
        mechanisms = config.mechanisms or {}
        rows.append(
            {
                "name": name,
                "paper": shipped.paper,
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "heads": config.num_attention_heads,
                "kv_heads": config.num_key_value_heads,
                "parameters": sum(parameters(config).values()),
                "reported": shipped.reported,
                "note": shipped.note,
                "reads": [resolve(mechanism).source or mechanism for mechanism in mechanisms],
            }
        )
    return rows


def describe_mechanisms() -> Sequence[dict[str, Any]]:
    """List mechanisms of headwater and of installed packages."""
    rows = []
    for name in MECHANISMS.names:
        mechanism = MECHANISMS.resolve(name)
        first_line = (mechanism.__doc__ or "").strip().partition("\n")[0]
        rows.append({"name": name, "reads": mechanism.source or name, "description": first_line})
    return rows


def describe_tasks() -> Sequence[dict[str, Any]]:
    """List the synthetic tasks, each with a held-out row and the score of guessing."""
    rows = []
    for settings in list_tasks():
        task = settings.build()
        rows.append(
            {
                "name": settings.kind,
                "settings": settings.model_dump(mode="json", exclude={"kind", "held_out"}),
                "row": task.write_row(task.held_out(), 0),
                "metric": task.metric,
                "guess": task.evaluate(task.guess_logits).metrics[task.metric],
            }
        )
    return rows


DESCRIBED = {
    "recipes": describe_recipes,
    "presets": describe_presets,
    "mechanisms": describe_mechanisms,
    "tasks": describe_tasks,
}
