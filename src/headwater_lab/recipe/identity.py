"""The identity of a run: what decides its result."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from headwater_lab.util.settings import Settings

# Raise it when a default changes: fields at their defaults do not enter the identity, and records of runs with the old
# default would count as runs with the new one.
IDENTITY_VERSION = 2
# Fields that decide nothing.
ASIDE: Any = {
    "name": True,
    "title": True,
    "reporting": True,
    "compare": True,
    "training": {"timeout_minutes"},
    "data": {"workers"},
}


def identity_of(recipe: Settings) -> str:
    """A version and the SHA-256 of what decides the result. Runs of equal identity are the same run.

    Fields at their defaults do not enter it, nor does the place of a previous stage's checkpoint, whose own identity
    does.
    """
    content = recipe.model_dump(mode="json", exclude=ASIDE, exclude_defaults=True)
    content["data"] |= recipe.model_dump(include={"data": {"kind"}})["data"]
    if content.get("start", {}).get("previous") is not None:
        del content["start"]["checkpoint"]
    # Keys are sorted, but mechanisms apply in order, and the order of a mixture's sources decides which rows are
    # drawn.
    for section, name in (("model", "mechanisms"), ("data", "source")):
        if isinstance(content.get(section, {}).get(name), dict):
            content[section][name] = list(content[section][name].items())
    content = {name: value for name, value in content.items() if value}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{IDENTITY_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"
