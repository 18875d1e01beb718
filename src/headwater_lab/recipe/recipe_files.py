"""Find a recipe, read it, and apply the user's overrides."""

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headwater.plugins.trust import trust_names_in
from headwater.util.errors import HeadwaterError, nearest, shown
from headwater.util.files import local
from headwater.util.layout import package_folder
from headwater_lab.data.reading import local_path
from headwater_lab.data.shards import prepared_folder
from headwater_lab.recipe.messages import build_refusal
from headwater_lab.recipe.overrides import apply_overrides, check_overrides, parse_override, read_text, read_yaml
from headwater_lab.recipe.recipe import Recipe, find_data_class, parse
from headwater_lab.recipe.unread import find_unread, list_chains

logger = logging.getLogger(__name__)


def recipes_folder() -> Path:
    """Find the folder of the shipped recipes: in the installed package, or at the root of a checkout."""
    package = package_folder(__name__)
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """List the shipped recipes by name: the path below their folder, without .yaml."""
    folder = recipes_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(argument: str | Path) -> Path:
    """Find a recipe: a file, or one of `shipped_recipes` by its name, or by a unique last part of it.

    Raises `HeadwaterError` if there is neither.
    """
    path = local(argument)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    short_names = [full_name.rpartition("/")[2] for full_name in shipped]
    matches = [full_name for full_name, short in zip(shipped, short_names, strict=True) if short == name]
    if len(matches) == 1:
        return shipped[matches[0]]
    if path.exists():
        return path  # a folder or a device, for which reading raises an error
    if matches:
        raise HeadwaterError(f"Several recipes are named {name!r}; choose one of: {', '.join(matches)}.")
    guess = nearest(name, [*shipped, *short_names])
    raise HeadwaterError(
        f"There is no recipe {shown(str(argument))}, neither a file nor a shipped one; "
        f"{guess if len(guess) < 80 else '`headwater list recipes` lists the shipped ones.'}"
    )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file that the user names, and trust the external names in it from then on.

    overrides: "dotted.key=value"; values are YAML. Raises `HeadwaterError`.
    """
    values = read_yaml(read_text(path, "recipe"), repr(str(path)))
    if not isinstance(values, dict):
        raise HeadwaterError(f"{str(path)!r}: a recipe is a mapping of sections (data, model, training, …).")
    trust_names_in(values)
    return change_recipe(values, overrides, str(path))


def read_recipe(recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a mapping, or from a file or a shipped recipe by its name. overrides: "dotted.key=value".

    Raises `HeadwaterError`.
    """
    if isinstance(recipe, str | Path):
        return load_recipe(find_recipe(recipe), overrides)
    if isinstance(recipe, Recipe):
        return change_recipe(recipe.model_dump(mode="json"), overrides, "the recipe") if overrides else recipe
    if not isinstance(recipe, Mapping):
        raise HeadwaterError(f"A recipe is a dict, a file's path or a shipped recipe's name, not {shown(recipe)}.")
    trust_names_in(recipe)
    return change_recipe(copy.deepcopy(dict(recipe)), overrides, "the recipe")


def change_recipe(values: dict[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    """Make a recipe from plain values, which may be a file's, and the user's overrides; the last one wins.

    Raises `HeadwaterError`, also for a field of either that no run reads. A field of the values may apply only
    without the overrides.
    """
    stages = values.get("stages")
    stages = dict(enumerate(stages)) if isinstance(stages, list) else {}
    parsed = _parse_overrides(overrides, stages)
    override_values = apply_overrides({}, parsed)
    changed = apply_overrides(values | {"stages": stages} if stages else values, parsed)
    if isinstance(changed.get("stages"), dict):
        changed["stages"] = [*changed["stages"].values()]
    fields = override_values["data"] if isinstance(override_values.get("data"), dict) else {}
    if _names_prepared(fields) and changed["data"].get("kind") == "text":
        changed["data"]["kind"] = fields["kind"] = "prepared"
    if "kind" in fields and isinstance(values.get("data"), dict):
        changed["data"] = _drop_other_kind(changed["data"], fields)
    recipe = parse(changed, where)
    chains = list_chains(recipe)
    unread = find_unread(recipe, chains, values)
    if unread and overrides:
        with suppress(HeadwaterError):  # it may be valid only with the overrides
            original = parse(values, where)
            unread = find_unread(original, list_chains(original), values)
    if unread := list(dict.fromkeys([*unread, *find_unread(recipe, chains, override_values)])):
        raise build_refusal(where, unread)
    return recipe


def _parse_overrides(overrides: Sequence[str], stages: Mapping[int, Any]) -> list[tuple[str, list[Any], Any]]:
    """Parse overrides, each (its text, the names in its key, its value), and log those that a later one replaces."""
    check_overrides(overrides)
    parsed: list[tuple[str, list[Any], Any]] = []
    for text in overrides:
        names, value = parse_override(text)
        trust_names_in([names, value])
        is_of_stage = names[0] == "stages" and len(names) > 1
        parsed.append((text, _number_stage(text, names, stages) if is_of_stage else names, value))
    last = {tuple(names): text for text, names, _ in parsed}
    for text, names, _ in parsed:
        if text != last[tuple(names)]:
            logger.warning(f"{text} has no effect, since {last[tuple(names)]} follows it.")
    return parsed


def _names_prepared(data: Mapping[str, Any]) -> bool:
    """Whether overrides of `data:` name a prepared folder, without the kind."""
    source = data.get("source")
    return "kind" not in data and isinstance(source, str) and prepared_folder(local_path(source)) is not None


def _number_stage(text: str, names: Sequence[str], stages: Mapping[int, Any]) -> list[Any]:
    """Replace a stage's name, or its number as text, by its number in the key of an override of its fields."""
    titles = {i: str(stage.get("name")) if isinstance(stage, dict) else "" for i, stage in stages.items()}
    path = ".".join(names[1:])  # stage names may contain dots
    for number, title in [*titles.items(), *((i, str(i)) for i in stages)]:
        if title and path.startswith(f"{title}."):
            return ["stages", number, *path.removeprefix(f"{title}.").split(".")]
    problem = f"there is no such stage; {nearest(names[1], titles.values())}" if stages else "the recipe has no stages."
    raise HeadwaterError(f"The override {shown(text)} does not fit: {problem}")


def _drop_other_kind(values: dict[str, Any], kept_fields: Collection[str]) -> dict[str, Any]:
    """Drop fields from `data:` that its new kind does not have. kept_fields: those to keep anyway."""
    try:
        find_data_class(values).model_validate(values)
    except ValidationError as error:
        wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}.difference(kept_fields)
        return {name: value for name, value in values.items() if name not in wrong}
    except ValueError:  # an unknown kind: parsing raises an error
        pass
    return values


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read the user's "key=value" overrides as plain values, e.g. of fields of a model. Raises `HeadwaterError`."""
    values = apply_overrides({}, [(text, *parse_override(text)) for text in overrides])
    trust_names_in(values)
    return values
