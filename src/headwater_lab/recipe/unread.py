"""What the user says and no run reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater_lab.recipe.recipe import Recipe
from headwater_lab.util.settings import ReadIf, Settings

# The runs of an arm at a size, stage by stage.
Chains = dict[tuple[str, str | None], list[Recipe]]


def chains_of(recipe: Recipe) -> Chains:
    """The runs of a recipe, with one seed for each arm."""
    trials = {("", None): recipe} if recipe.compare is None else recipe.trials()
    return {trial: [run for run, _ in each.chain(lambda name, _: Path(name))] for trial, each in trials.items()}


def unread_fields(recipe: Recipe, chains: Chains, said: Mapping[str, Any]) -> list[str]:
    """A sentence for each field among these values that none of the recipe's runs reads, and that is not its default.

    What an arm or a stage inherits may be for others: a field that the recipe sets counts for all runs, one that an arm
    or a stage sets for its own.
    """
    return [
        f"{where}{'.'.join(path)} has no effect {condition.otherwise.format(runs[0])}; leave it out"
        for where, values, runs in _parts(recipe, chains, said)
        if runs  # else an override has taken them away
        for path, condition in _conditions(runs[0], values)
        if not any(condition.test(run, path[-1]) for run in runs)
    ]


def _parts(
    recipe: Recipe, chains: Chains, said: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Sequence[Recipe]]]:
    """Parts of the values: where they are, what they say, and the runs that they are for."""
    sections, compare = dict(said), dict(_mapping(said.get("compare")))
    stages, arms, sizes = sections.pop("stages", None), compare.pop("arms", None), compare.pop("sizes", None)
    yield "", {"compare": compare}, [recipe]
    yield "", sections | {"compare": {}}, _runs(chains)
    for arm, values in _mapping(arms).items():
        yield f"compare.arms.{arm}.", _mapping(values), _runs(chains, arm)
    for size, values in _mapping(sizes).items():
        yield f"compare.sizes.{size}.", _mapping(values), _runs(chains, size=size)
        for arm, of_arm in _mapping(_mapping(values).get("arms")).items():
            yield f"compare.sizes.{size}.arms.{arm}.", _mapping(of_arm), _runs(chains, arm, size)
    of_stages = dict(enumerate(stages)) if isinstance(stages, list) else _mapping(stages)
    for number, stage in enumerate(recipe.stages):
        runs = [chain[number + 1] for chain in chains.values() if number + 1 < len(chain)]
        yield f"stages.{stage.name}.", _mapping(of_stages.get(number)), runs


def _mapping(value: Any) -> Mapping[Any, Any]:
    """A part of the values; an override may have replaced one that is no mapping."""
    return value if isinstance(value, Mapping) else {}


def _runs(chains: Chains, arm: str | None = None, size: str | None = None) -> list[Recipe]:
    """The runs of an arm or a size; default: of all."""
    fitting = [chain for (of, at), chain in chains.items() if arm in (None, of) and size in (None, at)]
    return [run for chain in fitting for run in chain]


def _conditions(
    section: Settings, said: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], ReadIf]]:
    """The fields among these values that only some runs read, with the conditions."""
    for name, value in said.items():
        if (field := type(section).model_fields.get(name)) is None:
            continue
        default = field.get_default(call_default_factory=True)
        if value != default and not (isinstance(default, tuple) and value == list(default)):
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
