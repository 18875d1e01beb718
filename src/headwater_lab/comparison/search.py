"""Search for the best combination of mechanisms: train all valid ones, then the best ones again."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials
from headwater_lab.comparison.tuning import WORST, find_score
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.training.records import read_record

VANILLA = "vanilla"
SEEDS = [0, 1]  # seeds for choosing combinations
FINAL_SEEDS = [10_000 + seed for seed in range(6)]  # seeds for the final test, none of them used for choosing
FINALISTS = 2
PAIRS = 2


def find_candidates(
    recipe: Recipe, mechanisms: Mapping[str, dict[str, Any]] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Find the arms that combine mechanisms, vanilla first, and the reasons against invalid combinations.

    mechanisms: name -> options; default: all with their default options, alone and in pairs, because all combinations
        would be thousands. The recipe's own mechanisms are ignored. They act in the registry's order.

    Raises `HeadwaterError` for a recipe with `stages` or `start`.
    """
    if recipe.stages or recipe.start is not None:
        raise HeadwaterError(
            f"--search trains each combination from scratch in a single run, but {recipe.name!r} has "
            f"{'stages' if recipe.stages else 'a model to start with'}; use a recipe without."
        )
    data = recipe.data.build()
    vanilla = {name: value for name, value in recipe.model.items() if name != "mechanisms"}
    arms: dict[str, dict[str, Any]] = {VANILLA: {"model": {"mechanisms": {}}}}
    refused: dict[str, str] = {}
    for options in _combine(mechanisms):
        label = " + ".join(options)
        try:
            recipe.model_copy(update={"model": vanilla | {"mechanisms": options}}).config_for(data)
            arms[label] = {"model": {"mechanisms": options}}
        except HeadwaterError as error:
            refused[label] = str(error)
    return arms, refused


def _combine(mechanisms: Mapping[str, dict[str, Any]] | None) -> Iterator[dict[str, dict[str, Any]]]:
    """Combine mechanisms with their options, smaller combinations first; of all mechanisms, only pairs."""
    options: dict[str, dict[str, Any]] = {name: {} for name in MECHANISMS.names} | dict(mechanisms or {})
    names = [name for name in options if mechanisms is None or name in mechanisms]
    for size in range(1, (PAIRS if mechanisms is None else len(names)) + 1):
        for combination in combinations(names, size):
            yield {name: options[name] for name in combination}


def make_search(recipe: Recipe, arms: dict[str, dict[str, Any]]) -> Recipe:
    """Make the comparison that chooses among the arms.

    It keeps the learning rates and `match` (default: equal parameters) of the recipe's own comparison. Raises
    `HeadwaterError` if there is nothing to choose, and for a comparison of several sizes or until decided.
    """
    for field in ("ladder", "sizes", "sequential"):
        if recipe.compare is not None and getattr(recipe.compare, field):
            raise HeadwaterError(
                f"--search compares at the recipe's own size, with fixed seeds, so compare.{field} has no effect; "
                "take it out of the recipe."
            )
    names = [arm for arm in arms if arm != VANILLA]
    if len(names) <= FINALISTS:
        few = f"only {' and '.join(names)}" if names else "no mechanism"
        raise HeadwaterError(
            f"There is nothing to choose: apart from {VANILLA}, {few} is left; name more with --mechanism, or compare "
            "them without --search."
        )
    settings = recipe.compare
    section: dict[str, Any] = dict(arms=arms, baseline=VANILLA, seeds=SEEDS, match="parameters")
    if settings is not None:
        section |= {"match": settings.match or "parameters", "workers": settings.workers}
        if settings.learning_rates:
            section |= {"learning_rates": settings.learning_rates, "tuning_seeds": settings.tuning_seeds}
    values = recipe.model_dump(mode="json")
    values["model"].pop("mechanisms", None)
    name = {"name": f"{recipe.name}-search", "title": f"{recipe.title or recipe.name}: the selection"}
    return parse(values | name | {"compare": section}, "search")


def choose_best(search: Recipe, out: Path) -> list[str]:
    """Choose the best arms of a finished search, best first, by the mean over seeds.

    Excludes vanilla and any arm with a diverged run. Raises `HeadwaterError` if all have.
    """
    scores: dict[str, list[float]] = {}
    for trial in list_trials(search, out):
        scores.setdefault(trial.experiment.arm, []).append(find_score(read_record(trial.folder)))
    means = {arm: sum(s) / len(s) for arm, s in scores.items() if arm != VANILLA and min(s) > WORST}
    if not means:
        raise HeadwaterError("Every combination diverged; lower training.learning_rate or compare.learning_rates.")
    return sorted(means, key=lambda arm: means[arm], reverse=True)[:FINALISTS]


def make_final(search: Recipe, out: Path, best: Sequence[str]) -> Recipe:
    """Make the final test: the best arms against vanilla, with fresh seeds.

    Each uses the learning rate that the search found for it.
    """
    section = search.compare
    assert section is not None
    rates = {
        trial.experiment.arm: read_record(trial.folder).recipe["training"]["learning_rate"]
        for trial in list_trials(search, out)
    }
    arms = {arm: section.arms[arm] | {"training": {"learning_rate": rates[arm]}} for arm in [VANILLA, *best]}
    changes = {"arms": arms, "seeds": FINAL_SEEDS, "learning_rates": []}
    name = {
        "name": search.name.removesuffix("-search") + "-final",
        "title": search.title.removesuffix(": the selection") + ": the best, tested on fresh seeds",
    }
    return search.model_copy(update=name | {"compare": section.model_copy(update=changes)})
