"""Arms that match the baseline: equal tokens or FLOPs through steps, equal parameters through width."""

from headwater.cost import counts as cost
from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import Data
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.model_estimates import find_teacher

# Tolerance for the number of parameters, since the feed-forward's width is a whole number.
TOLERANCE = 0.01


def match_arms(recipe: Recipe) -> Recipe:
    """Change the arms to cost the same as the baseline by `compare.match`, which is then null.

    tokens: the number of steps. flops: the number of steps, of training FLOPs as `headwater plan` counts them.
    parameters: the width of the feed-forward, or the pairs of what replaces it; to within 1 %.
    Warm-ups do not change. Raises `HeadwaterError` if an arm cannot match.
    """
    section = recipe.compare
    if section is None or section.match is None:
        return recipe
    arms, sizes = dict(section.arms), dict(section.sizes)
    built: dict[str, Data] = {}  # by its settings
    for name in section.arms:
        if name == section.baseline:
            continue
        if not sizes:
            arms[name] = _merge_changes(arms[name], _fit_arm(recipe, name, None, built))
        for size in section.sizes:  # the change may depend on the size
            by_arm = sizes[size].get("arms", {})
            changes = _merge_changes(by_arm.get(name, {}), _fit_arm(recipe, name, size, built))
            sizes[size] = sizes[size] | {"arms": by_arm | {name: changes}}
    return recipe.model_copy(
        update={"compare": section.model_copy(update={"arms": arms, "sizes": sizes, "match": None})}
    )


def _merge_changes(change: dict, changes: dict) -> dict:
    return change | {section: change.get(section, {}) | fields for section, fields in changes.items()}


def _fit_arm(recipe: Recipe, name: str, size: str | None, built: dict[str, Data]) -> dict:
    """Find the changes with which an arm costs the same as the baseline at a size. built: data by their settings."""
    section = recipe.compare
    assert section is not None
    match = section.match
    base, arm = (recipe.arm(candidate, section.seeds[0], size) for candidate in (section.baseline, name))
    for candidate in (base, arm):
        if candidate.stages or (candidate.start is not None and match != "tokens"):
            reason = "stages" if candidate.stages else "a model to start with"
            raise HeadwaterError(
                f"compare.match={match} works only for whole runs from scratch, but {recipe.name!r} has "
                f"{reason}; set sizes and steps yourself, and compare.match=null."
            )
    data, arm_data = (_build_once(candidate, built) for candidate in (base, arm))
    if match == "parameters":
        target = sum(cost.parameters(base.config_for(data)).values())
        return {"model": _resize_feed_forward(arm, arm_data, target, name)}
    budget = base.training.steps * _step_cost(base, data, match == "flops")
    steps = round(budget / _step_cost(arm, arm_data, match == "flops"))
    if steps <= arm.training.warmup_steps:
        raise HeadwaterError(
            f"With equal {'FLOPs' if match == 'flops' else match}, arm {name!r} gets {steps} steps, no more than "
            f"its {arm.training.warmup_steps} warm-up steps; give the baseline more steps."
        )
    return {"training": {"steps": steps}}


def _build_once(recipe: Recipe, built: dict[str, Data]) -> Data:
    key = recipe.data.model_dump_json()
    if key not in built:
        built[key] = recipe.data.build()
    return built[key]


def _step_cost(recipe: Recipe, data: Data, flops: bool) -> float:
    count = recipe.training.batch_size * recipe.training.gradient_accumulation_steps * data.context
    if not flops:
        return count
    return count * cost.training_flops(recipe.config_for(data), data.context, find_teacher(recipe))


def _reads_few(options: dict) -> bool:
    """Whether a token reads a few of the feed-forward's pairs."""
    top_k = options.get("top_k")
    return bool(top_k.get("feed_forward") if isinstance(top_k, dict) else top_k)


def _resize_feed_forward(recipe: Recipe, data: Data, target: int, name: str) -> dict:
    """Find the fields of `model:` whose parameters come closest to `target`."""
    config = recipe.config_for(data)
    mechanisms: dict = config.mechanisms or {}
    options: dict = recipe.model.get("mechanisms") or mechanisms
    # With top_k the number of pairs cannot be chosen freely.
    sized = [name for name, chosen in mechanisms.items() if "ffn_pairs" in chosen and not _reads_few(chosen)]
    mechanism = sized[0] if sized else None

    def change(width: int) -> dict:
        if mechanism is None:
            return {"intermediate_size": width}
        return {"mechanisms": options | {mechanism: (options.get(mechanism) or {}) | {"ffn_pairs": width}}}

    def parameters(width: int) -> int:
        changed = recipe.model_copy(update={"model": recipe.model | change(width)})
        return sum(cost.parameters(changed.config_for(data)).values())

    # Parameters are linear in the width.
    narrow, wide = parameters(8), parameters(16)
    width = round(8 + 8 * (target - narrow) / max(1, wide - narrow))
    if width < 1 or abs(parameters(width) - target) > TOLERANCE * target:
        raise HeadwaterError(
            f"No width of the feed-forward gives the arm {name!r} the baseline's {target:,} parameters; change its "
            "other sizes, or set compare.match=tokens."
        )
    return change(width)
