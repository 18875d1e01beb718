"""Find a recipe, read it, and apply the user's overrides."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwater.plugins.outside import trust_names_in
from headwater.util.errors import HeadwaterError, nearest, shown
from headwater.util.files import local
from headwater_lab.recipe.data import without_other_kind
from headwater_lab.recipe.messages import refusal
from headwater_lab.recipe.overrides import overridden, override, plain, read_text
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.recipe.shipped import shipped_recipes
from headwater_lab.recipe.unread import chains_of, unread_fields


def find_recipe(argument: str | Path) -> Path:
    """The path of a recipe: a file, or one of `shipped_recipes` by its name, or by a unique last part of it.

    Raises `HeadwaterError` if there is neither.
    """
    path = local(argument)
    if path.is_file():
        return path
    known = shipped_recipes()
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in known:
        return known[name]
    alike = [one for one in known if one.rpartition("/")[2] == name]
    if len(alike) == 1:
        return known[alike[0]]
    if path.exists():
        return path  # a folder or a device, for which reading raises an error
    if alike:
        raise HeadwaterError(f"Several recipes are named {name!r}; choose one of: {', '.join(alike)}.")
    guess = nearest(name, [*known, *(one.rpartition("/")[2] for one in known)])
    what = f"There is no recipe {shown(str(argument))}, neither a file nor a shipped one"
    raise HeadwaterError(f"{what}; {guess if len(guess) < 80 else '`headwater list recipes` lists the shipped ones.'}")


# As it was written, its key, its value.
Override = tuple[str, list[str], Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe that the user names, whose outside names are trusted from then on.

    overrides: "dotted.key=value"; values are YAML. Raises `HeadwaterError`.
    """
    values = plain(read_text(path, "recipe"), repr(str(path)))
    if not isinstance(values, dict):
        raise HeadwaterError(f"{str(path)!r}: a recipe is a mapping of sections (data, model, training, …).")
    trust_names_in(values)
    return changed_recipe(values, overrides, str(path))


def read_recipe(recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a mapping, or from a file or a shipped recipe by its name. overrides: "dotted.key=value".

    Raises `HeadwaterError`.
    """
    if isinstance(recipe, str | Path):
        return load_recipe(find_recipe(recipe), overrides)
    if isinstance(recipe, Recipe):
        return changed_recipe(recipe.model_dump(mode="json"), overrides, "the recipe") if overrides else recipe
    if not isinstance(recipe, Mapping):
        raise HeadwaterError(f"A recipe is a dict, a file's path or a shipped recipe's name, not {shown(recipe)}.")
    trust_names_in(recipe)
    return changed_recipe(copy.deepcopy(dict(recipe)), overrides, "the recipe")


def changed_recipe(values: dict[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    """A recipe from plain values, which may be a file's, and the user's overrides, of which the last counts.

    Raises `HeadwaterError`, also for a field of either that no run reads. A field of the values may be for a run
    without the overrides.
    """
    of_stages: list[Override] = []
    others: list[Override] = []
    for text in overrides:
        key, value = override(text)
        (of_stages if key[0] == "stages" and len(key) > 1 else others).append((text, key, value))
        trust_names_in([key, value])
    said, changed = overridden({}, others), overridden(values, others)
    if "kind" in (fields := said.get("data") or {}) and isinstance(values.get("data"), dict):
        changed["data"] = without_other_kind(changed["data"], fields)
    by_stage = _by_stage(changed.get("stages"), of_stages)
    if by_stage:
        stages = changed["stages"]
        said["stages"] = {number: overridden({}, changes) for number, changes in by_stage.items()}
        changed["stages"] = [overridden(stage, by_stage.get(number, [])) for number, stage in enumerate(stages)]
    recipe = parse(changed, where)
    unread = unread_fields(recipe, chains := chains_of(recipe), values)
    if unread and overrides:
        with suppress(HeadwaterError):  # it may need the overrides
            alone = parse(values, where)
            unread = unread_fields(alone, chains_of(alone), values)
    if unread := list(dict.fromkeys([*unread, *unread_fields(recipe, chains, said)])):
        raise refusal(where, unread)
    return recipe


def _by_stage(stages: Any, overrides: list[Override]) -> dict[int, list[Override]]:
    """Overrides "stages.NAME.…=value" by the stage's number, for its name or number. Raises `HeadwaterError`."""
    found: dict[int, list[Override]] = {}
    # A stage's name may have dots itself.
    stages = stages if isinstance(stages, list) else []
    names = [str(one.get("name")) if isinstance(one, dict) else "" for one in stages]
    known = [*((name, i) for i, name in enumerate(names) if name), *((str(i), i) for i in range(len(names)))]
    for text, key, value in overrides:
        rest = ".".join(key[1:])
        for name, number in known:
            if rest.startswith(f"{name}."):
                found.setdefault(number, []).append((text, rest.removeprefix(f"{name}.").split("."), value))
                break
        else:
            raise HeadwaterError(
                f"The override {shown(text)} does not fit: "
                f"{'there is no such stage; ' + nearest(key[1], names) if names else 'the recipe has no stages.'}"
            )
    return found


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The plain values of the user's "key=value" overrides, e.g. of fields of a model. Raises `HeadwaterError`."""
    values = overridden({}, [(text, *override(text)) for text in overrides])
    trust_names_in(values)
    return values
