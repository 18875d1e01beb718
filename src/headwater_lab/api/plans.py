"""The function `lab.plan` and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from headwater.config.text import HeadwaterConfig
from headwater.cost import ModelEstimate
from headwater.plugins.trust import trust_names
from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.api.common import PathLike, Result
from headwater_lab.api.settings import PlanSettings
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.model_estimates import estimate_models, plan_models
from headwater_lab.util.terminal import counted, si

if TYPE_CHECKING:
    from headwater_lab.comparison.run_costs import RunCost


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """Estimates of text models or of image models.

    runs: what the runs of the comparisons among them cost, by the recipe's name.
    """

    estimates: list[ModelEstimate]
    runs: dict[str, list[RunCost]] = field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        """Return a row per model and context or image size."""
        return [
            {
                "model": estimate.name,
                "context": at_context.context,
                "image_size": at_context.image_size,
                "parameters": sum(estimate.parameters.values()),
                f"training_flops_per_{estimate.unit}": at_context.training,
                "cache_bytes_per_token": estimate.cache_bytes_per_token,
                "cache_bytes": at_context.cache_bytes,
                "activation_bytes": at_context.activation_bytes,
                "days": at_context.limits and at_context.limits.days,
            }
            for estimate in self.estimates
            for at_context in estimate.at
        ]

    def __repr__(self) -> str:
        sizes = [f"{estimate.name} {si(sum(estimate.parameters.values()))}" for estimate in self.estimates]
        further = f" and {len(sizes) - 6} more" if len(sizes) > 6 else ""
        return f"Plan of {counted(len(sizes), 'model')} by parameters: {', '.join(sizes[:6])}{further}"


def plan(
    *models: HeadwaterConfig | Recipe | Mapping[str, Any] | PathLike,
    overrides: Sequence[str] = (),
    vocab_size: int | None = None,
    trust: Sequence[str] = (),
    **settings: Unpack[PlanSettings],
) -> Plan:
    """Estimate the cost of models before training, like `headwater plan`.

    models: configs, recipes, presets by name, config.json files, checkpoints or runs. overrides: "field=value" for all
    models, or "training.field=value", "data.…" and "compare.…" for recipes. vocab_size: instead of the models'.
    settings: the command's options context, batch, tokens, images, hardware, devices, mfu and precision
    (`headwater_lab.api.settings.PlanSettings` describes them). trust: as in `train`. Raises `HeadwaterError`.
    """
    trust_names(trust)
    if unknown := [name for name in settings if name not in PlanSettings.__annotations__]:
        raise HeadwaterError(f"plan has no setting {unknown[0]!r}; {nearest(unknown[0], PlanSettings.__annotations__)}")
    planned = plan_models(models, overrides, vocab_size)
    estimates = estimate_models(planned, **settings)
    recipes = {id(model.recipe): model.recipe for model in planned.values() if model.recipe is not None}
    compared = [recipe for recipe in recipes.values() if recipe.compare is not None]
    if not compared:
        return Plan(estimates)
    from headwater_lab.comparison.run_costs import count_run_costs  # plain models do not need this package

    runs = {recipe.name: count_run_costs(recipe, vocab_size, estimates[0]) for recipe in compared}
    return Plan(estimates, {name: costs for name, costs in runs.items() if costs})
