"""`headwater plan`: estimates before training."""

from collections.abc import Sequence
from typing import Annotated, Unpack

from headwater_lab.api.settings import PlanSettings
from headwater_lab.cli.arguments import print_result, say, split_overrides, tell
from headwater_lab.cli.options import LOOK, AsJson, Values, command


@command(LOOK, "plan gpt2-124m tokenformer-124m --hardware H100 --tokens 300B")
def plan_models(
    configs: Sequence[str],
    *,
    vocab_size: Annotated[int | None, Values(min=1)] = None,
    json: AsJson = False,
    **settings: Unpack[PlanSettings],
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware.

    Of a recipe with a compare section, also what all its runs cost, and what runs that share a trunk save.

    configs: Presets, recipes (a column per arm), config.json files or checkpoints; field=value changes all of them,
        training.field=value how they are trained, data.… and compare.… a recipe's sections.
    vocab_size: Vocabulary size, instead of the configs'.
    """
    from headwater_lab.api.plans import plan
    from headwater_lab.training.estimate_table import estimate_table

    models, changes = split_overrides(configs)
    planned = plan(*models, overrides=changes, vocab_size=vocab_size, **settings)
    estimates, unit = planned.estimates, f"{planned.estimates[0].unit}s"
    print_result([estimate.to_json() for estimate in estimates], [estimate_table(estimates)], json, indent=2)
    if json or not planned.runs:
        return
    from headwater_lab.comparison.run_costs import tabulate_costs
    from headwater_lab.comparison.trials import describe_runs
    from headwater_lab.recipe.recipe_files import read_recipe

    for name, costs in planned.runs.items():
        say(tabulate_costs(name, costs, unit, estimates[0]))
    for recipe in [name for name in models if name.endswith((".yaml", ".yml"))]:
        if runs := describe_runs(read_recipe(recipe)):
            tell(runs)
