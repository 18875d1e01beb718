"""Which combination of mechanisms is best at a budget: all valid ones, then the best ones again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from headwater.compare.trials import trials_of
from headwater.errors import HeadwaterError
from headwater.recipe import Halving, Recipe, parse
from headwater.records import read_record
from headwater.registry import MECHANISMS

VANILLA = "vanilla"
# First seed of the final test, so that the seeds of the selection are not among them.
FRESH = 10_000
PAIRS = 2


def candidates(
    recipe: Recipe, mechanisms: Mapping[str, dict[str, Any]] | None, most: int | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(arms that combine the mechanisms, vanilla first; reasons for invalid combinations, smaller ones first).

    mechanisms: name -> options; default: all, with their default options. The recipe's own
        mechanisms are ignored. They act in the registry's order.
    most: maximum number of mechanisms in a combination; default: all that are named, or 2 if none are, since the
        combinations of all mechanisms are thousands.

    Raises `HeadwaterError` for a recipe with `stages` or `start`.
    """
    if recipe.stages or recipe.start is not None:
        raise HeadwaterError(
            f"search trains each combination from scratch in a single run, but {recipe.name!r} has "
            f"{'stages' if recipe.stages else 'a model to start with'}; use a recipe without."
        )
    if most is None and mechanisms is None:
        most = PAIRS
    data = recipe.data.build()
    vanilla = {name: value for name, value in recipe.model.items() if name != "mechanisms"}
    known = list(dict.fromkeys((*MECHANISMS.names, *(mechanisms or ()))))
    order = [name for name in known if mechanisms is None or name in mechanisms]
    arms: dict[str, dict[str, Any]] = {VANILLA: {"model": {"mechanisms": {}}}}
    refused: dict[str, str] = {}
    for chosen in _subsets(order, most):
        options = {name: (mechanisms or {}).get(name, {}) for name in chosen}
        label = " + ".join(chosen)
        try:
            recipe.model_copy(update={"model": vanilla | {"mechanisms": options}}).config_for(data)
            arms[label] = {"model": {"mechanisms": options}}
        except HeadwaterError as error:
            refused[label] = str(error)
    return arms, refused


def _subsets(names: list[str], most: int | None) -> Iterator[tuple[str, ...]]:
    for size in range(1, (most or len(names)) + 1):
        yield from combinations(names, size)


def search_recipe(
    recipe: Recipe,
    arms: dict[str, dict[str, Any]],
    seeds: int,
    final: int,
    halving: Halving | None = None,
    rates: Sequence[float] = (),
    equal: str | None = None,
) -> Recipe:
    """The comparison that chooses `final` arms among all, with successive halving if there are enough of them.

    Raises `HeadwaterError` if there is nothing to choose, and for conflicting settings.
    """
    names = [arm for arm in arms if arm != VANILLA]
    if len(names) < 2:
        what = f"only {names[0]}" if names else "no mechanism"
        raise HeadwaterError(
            f"There is nothing to choose: besides {VANILLA} {what} is left; name more with --mechanism, or "
            "compare two arms with headwater compare."
        )
    if final > len(names):
        raise HeadwaterError(
            f"--final {final} is more than the {len(names)} available combinations; use {len(names)} or fewer."
        )
    halving = halving if halving is not None and len(names) >= halving.factor else None
    if halving is not None and equal == "flops":
        raise HeadwaterError(
            "At equal FLOPs combinations have different steps, but successive halving compares at equal steps; add "
            "--no-halving, or use --equal parameters."
        )
    section = dict(
        arms=arms,
        baseline=VANILLA,
        seeds=list(range(seeds)),
        halving=None if halving is None else halving.model_dump(),
        learning_rates=list(rates),
        equal=equal,
    )
    values = recipe.model_dump(mode="json")
    values["model"].pop("mechanisms", None)
    named = {"name": f"{recipe.name}-search", "title": f"{recipe.title or recipe.name}: the selection"}
    return parse(values | named | {"compare": section}, "search")


def best_arms(search: Recipe, out: Path, count: int) -> list[str]:
    """The `count` best arms of a finished search, best first, by the mean over seeds of those trained longest.

    Excludes vanilla and any arm with a diverged run. Raises `HeadwaterError` if all have.
    """
    from headwater.compare.tuning import WORST, score

    runs: dict[str, list[tuple[int, float]]] = {}
    for trial in trials_of(search, out):
        record = read_record(trial.folder)
        step = record.held_out[-1].step if record.held_out else 0
        runs.setdefault(trial.experiment.arm, []).append((step, score(record)))
    means = {
        arm: (min(step for step, _ in of_arm), sum(value for _, value in of_arm) / len(of_arm))
        for arm, of_arm in runs.items()
        if arm != VANILLA and all(value > WORST for _, value in of_arm)
    }
    if not means:
        raise HeadwaterError("Every combination diverged; lower training.learning_rate, or pass --learning-rate.")
    return sorted(means, key=lambda arm: means[arm], reverse=True)[:count]


def final_recipe(search: Recipe, out: Path, best: Sequence[str], seeds: int) -> Recipe:
    """The final test: the best arms against vanilla, with fresh seeds.

    Each uses the learning rate that the search found for it.
    """
    section = search.compare
    assert section is not None
    rates = {
        trial.experiment.arm: read_record(trial.folder).recipe["training"]["learning_rate"]
        for trial in trials_of(search, out)
    }
    arms = {arm: section.arms[arm] | {"training": {"learning_rate": rates[arm]}} for arm in [VANILLA, *best]}
    changes = {
        "arms": arms,
        "seeds": [FRESH + seed for seed in range(seeds)],
        "halving": None,
        "learning_rates": [],
    }
    named = {
        "name": search.name.removesuffix("-search") + "-final",
        "title": search.title.removesuffix(": the selection") + ": the best, tested on fresh seeds",
    }
    return search.model_copy(update=named | {"compare": section.model_copy(update=changes)})
