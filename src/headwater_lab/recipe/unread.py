"""Fields and overrides that no run reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headwater_lab.recipe.recipe import Recipe
from headwater_lab.util.settings import ReadIf, Settings

# (arm, size) -> the arm's runs, one per stage.
Chains = dict[tuple[str, str | None], list[Recipe]]


def list_chains(recipe: Recipe) -> Chains:
    """List the runs of a recipe, with one seed for each arm."""
    arms = {("", None): recipe} if recipe.compare is None else recipe.trials()
    return {trial: arm.stage_recipes for trial, arm in arms.items()}


def find_unread(recipe: Recipe, chains: Chains, values: Mapping[str, Any]) -> list[str]:
    """Write a sentence for each of these values that no run of the recipe reads, unless it is the default.

    A field that the recipe sets must be read by at least one of all runs, and a field that an arm or a stage sets by at
    least one of its runs.
    """
    return [
        f"{prefix}{'.'.join(path)} has no effect {condition.otherwise.format(runs[0])}; leave it out"
        for prefix, section, runs in _list_sections(recipe, chains, values)
        if runs  # otherwise an override has removed them
        for path, condition in _find_conditions(runs[0], section)
        if not any(condition.test(run, path[-1]) for run in runs)
    ]


def _list_sections(
    recipe: Recipe, chains: Chains, values: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Sequence[Recipe]]]:
    """Yield sections of the values: the prefix of their fields, their values, and the runs they apply to."""
    sections, compare = dict(values), dict(_read_mapping(values.get("compare")))
    stages, arms, sizes = sections.pop("stages", None), compare.pop("arms", None), compare.pop("sizes", None)
    yield "", {"compare": compare}, [recipe]
    yield "", sections | {"compare": {}}, _select_runs(chains)
    for arm, changes in _read_mapping(arms).items():
        yield f"compare.arms.{arm}.", _read_mapping(changes), _select_runs(chains, arm)
    for size, changes in _read_mapping(sizes).items():
        yield f"compare.sizes.{size}.", _read_mapping(changes), _select_runs(chains, size=size)
        for arm, arm_changes in _read_mapping(_read_mapping(changes).get("arms")).items():
            yield f"compare.sizes.{size}.arms.{arm}.", _read_mapping(arm_changes), _select_runs(chains, arm, size)
    by_number = dict(enumerate(stages)) if isinstance(stages, list) else _read_mapping(stages)
    for number, stage in enumerate(recipe.stages):
        runs = [chain[number + 1] for chain in chains.values() if number + 1 < len(chain)]
        yield f"stages.{stage.name}.", _read_mapping(by_number.get(number)), runs


def _read_mapping(value: Any) -> Mapping[Any, Any]:
    """Return a mapping among the values, which an override may have replaced by something else."""
    return value if isinstance(value, Mapping) else {}


def _select_runs(chains: Chains, arm: str | None = None, size: str | None = None) -> list[Recipe]:
    """Select the runs of an arm or a size; default: of all."""
    matching = [chain for trial, chain in chains.items() if arm in (None, trial[0]) and size in (None, trial[1])]
    return [run for chain in matching for run in chain]


def _find_conditions(
    section: Settings, values: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], ReadIf]]:
    """Find the fields among these values that only some runs read, with the conditions."""
    for name, value in values.items():
        if (field := type(section).model_fields.get(name)) is None:
            continue
        default = field.get_default(call_default_factory=True)
        if value != default and not (isinstance(default, tuple) and value == list(default)):
            yield from (((*path, name), entry) for entry in field.metadata if isinstance(entry, ReadIf))
        if isinstance(inner := getattr(section, name), Settings) and isinstance(value, Mapping):
            yield from _find_conditions(inner, value, (*path, name))


def find_overruled(recipe: Recipe, runs: Iterable[Recipe], overrides: Sequence[str]) -> list[str]:
    """Find the keys of overrides whose values no run of a recipe's comparison has."""
    by_run = [run.model_dump(mode="json") for run in runs]
    values = recipe.model_dump(mode="json", exclude={"name": True, "title": True, "compare": True})
    overruled = []
    for key in dict.fromkeys(text.partition("=")[0] for text in overrides):
        value = _look_up(values, key)
        # Skip mappings, which are merged and not replaced.
        if not isinstance(value, dict | None) and value not in [_look_up(run, key) for run in by_run]:
            overruled.append(key)
    return overruled


def _look_up(values: Any, key: str) -> Any:
    """Look up the value at a dotted key; None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
