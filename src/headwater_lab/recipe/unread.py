"""What the user says and no run reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater_lab.recipe.recipe import Recipe
from headwater_lab.util.settings import ReadIf, Settings


def unread_fields(recipe: Recipe, said: Mapping[str, Any]) -> list[str]:
    """A sentence for each field among these values that none of the recipe's runs reads, and that is not its default.

    What an arm or a stage inherits may be for others: a field that the recipe sets counts for all runs, one that an arm
    or a stage sets for its own.
    """
    return [
        f"{where}{'.'.join(path)} has no effect {condition.otherwise.format(runs[0])}; leave it out"
        for where, values, runs in _parts(recipe, said)
        if runs  # else an override has taken them away
        for path, condition in _conditions(runs[0], values)
        if not any(condition.test(run, path[-1]) for run in runs)
    ]


def _parts(recipe: Recipe, said: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Sequence[Recipe]]]:
    """Parts of the values: where they are, what they say, and the runs that they are for."""
    trials = {("", None): recipe} if recipe.compare is None else recipe.trials()
    chains = {trial: [run for run, _ in each.chain(lambda name, _: Path(name))] for trial, each in trials.items()}

    def runs(arm: str | None = None, size: str | None = None) -> list[Recipe]:
        fitting = (chain for (a, s), chain in chains.items() if arm in (None, a) and size in (None, s))
        return [run for chain in fitting for run in chain]

    compare = said.get("compare") or {}
    yield "", {"compare": {name: value for name, value in compare.items() if name not in ("arms", "sizes")}}, [recipe]
    yield "", {name: value for name, value in said.items() if name not in ("compare", "stages")}, runs()
    for arm, values in (compare.get("arms") or {}).items():
        yield f"compare.arms.{arm}.", values, runs(arm)
    for size, values in (compare.get("sizes") or {}).items():
        yield f"compare.sizes.{size}.", values, runs(None, size)
        for arm, of_arm in values.get("arms", {}).items():
            yield f"compare.sizes.{size}.arms.{arm}.", of_arm, runs(arm, size)
    for number, stage in enumerate(recipe.stages):
        runs_of_stage = [chain[number + 1] for chain in chains.values() if len(chain) > number + 1]
        yield f"stages.{stage.name}.", (said.get("stages") or {}).get(number, {}), runs_of_stage


def _conditions(
    section: Settings, said: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], ReadIf]]:
    """The fields among these values that only some runs read, with the conditions."""
    for name, value in said.items():
        if (field := type(section).model_fields.get(name)) is None:
            continue
        value = tuple(value) if isinstance(value, list) else value
        if value != field.get_default(call_default_factory=True):
            yield from (((*path, name), each) for each in field.metadata if isinstance(each, ReadIf))
        if isinstance(inner := getattr(section, name), Settings) and isinstance(value, Mapping):
            yield from _conditions(inner, value, (*path, name))


def overruled(recipe: Recipe, runs: Iterable[Recipe], overrides: Sequence[str]) -> list[str]:
    """The keys of overrides whose values none of the runs of a recipe's comparison has."""
    values = [run.model_dump(mode="json") for run in runs]
    own = recipe.model_dump(mode="json", exclude={"name": True, "title": True, "compare": True})
    keys = dict.fromkeys(text.partition("=")[0] for text in overrides)
    return [key for key in keys if _is_overruled(_at(own, key), [_at(run, key) for run in values])]


def _is_overruled(value: Any, in_runs: Sequence[Any]) -> bool:
    return value is not None and not isinstance(value, dict) and value not in in_runs  # sections are merged


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
