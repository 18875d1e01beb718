"""Which combination of mechanisms is best at a budget: every one that fits together, then the best ones again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from headwater.compare.trials import trials_of
from headwater.errors import HeadwaterError
from headwater.recipe import Compare, Halving, Recipe
from headwater.records import read_record
from headwater.registry import REGISTRY, resolve

VANILLA = "vanilla"
# What a finalist's seeds are numbered from: those that chose it are not among them.
FRESH = 10_000


def candidates(
    recipe: Recipe, mechanisms: Mapping[str, dict[str, Any]] | None, most: int | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(arms that combine the mechanisms, vanilla first; why other combinations cannot be).

    mechanisms: name -> options; default all that this model can have with their default options.
    most: mechanisms in a combination at most.
    """
    data = recipe.data.build()
    vanilla = {name: value for name, value in recipe.model.items() if name != "mechanisms"}
    order = [name for name in REGISTRY if mechanisms is None or name in mechanisms]
    arms: dict[str, dict[str, Any]] = {VANILLA: {"model": {"mechanisms": {}}}}
    refused: dict[str, str] = {}
    for chosen in _subsets(order, most):
        options = {name: (mechanisms or {}).get(name, {}) for name in chosen}
        label = " + ".join(chosen)
        try:
            recipe.model_copy(update={"model": vanilla | {"mechanisms": options}}).config_for(data)
        except HeadwaterError as error:
            refused[label] = str(error)
            continue
        if all(resolve(name).kernels(resolve(name).options(options[name])) is None for name in chosen):
            arms[label] = {"model": {"mechanisms": options}}
        else:
            refused[label] = "needs the eager attention kernel"
    return arms, refused


def _subsets(names: list[str], most: int | None) -> Iterator[tuple[str, ...]]:
    for size in range(1, (most or len(names)) + 1):
        yield from combinations(names, size)


def search_recipe(
    recipe: Recipe,
    arms: dict[str, dict[str, Any]],
    seeds: int,
    halving: Halving | None,
    rates: list[float],
    equal: str | None,
) -> Recipe:
    """The comparison that chooses: all arms, with successive halving."""
    if len(arms) < 2:
        raise HeadwaterError("None of the mechanisms fits this model; name others with --mechanism.")
    section = Compare.model_validate(
        dict(
            arms=arms,
            baseline=VANILLA,
            seeds=list(range(seeds)),
            halving=halving if halving is not None and len(arms) > halving.factor else None,
            learning_rates=rates,
            equal=equal,
        )
    )
    model = {name: value for name, value in recipe.model.items() if name != "mechanisms"}
    return recipe.model_copy(update={"name": f"{recipe.name}-search", "compare": section, "model": model})


def best_arms(search: Recipe, out: Path, count: int) -> list[str]:
    """The `count` best arms of a search that is done, best first: by the mean over the seeds of those trained longest.

    Vanilla is none of them. An arm of which a run diverged is not chosen.
    """
    from headwater.compare.tuning import WORST, score  # scikit-learn comes with it

    arms: dict[str, list[tuple[int, float]]] = {}
    for trial in trials_of(search, out):
        record = read_record(trial.folder)
        step = record.held_out[-1].step if record.held_out else 0
        arms.setdefault(trial.experiment.arm, []).append((step, score(record)))
    means = {arm: (min(s for s, _ in runs), sum(v for _, v in runs) / len(runs)) for arm, runs in arms.items()}
    order = sorted((arm for arm in means if arm != VANILLA), key=lambda arm: means[arm], reverse=True)
    chosen = [arm for arm in order if means[arm][1] > WORST / len(arms)][:count]
    if not chosen:
        raise HeadwaterError("Every combination diverged; lower training.learning_rate, or give --learning-rate.")
    return chosen


def final_recipe(search: Recipe, out: Path, best: list[str], seeds: int) -> Recipe:
    """The comparison that judges: the best arms against vanilla, with seeds that chose nothing.

    Each at the learning rate that the search has found for it.
    """
    assert search.compare is not None
    rates = {
        trial.experiment.arm: read_record(trial.folder).recipe["training"]["learning_rate"]
        for trial in trials_of(search, out)
    }
    arms = {arm: search.compare.arms[arm] | {"training": {"learning_rate": rates[arm]}} for arm in [VANILLA, *best]}
    changes = {
        "arms": arms,
        "seeds": [FRESH + seed for seed in range(seeds)],
        "halving": None,
        "learning_rates": [],
    }
    name = search.name.removesuffix("-search")
    title = f"{search.title or name}: the best, tested on seeds that chose nothing"
    section = search.compare.model_copy(update=changes)
    return search.model_copy(update={"name": f"{name}-final", "compare": section, "title": title})
