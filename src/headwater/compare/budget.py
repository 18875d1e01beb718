"""Arms at equal cost: equal tokens, FLOPs or time by steps, equal parameters by the width of the feed-forward."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from headwater import cost
from headwater.compare.prices import Told, folder_of, pinned
from headwater.config import HeadwaterConfig
from headwater.data.base import Data
from headwater.errors import HeadwaterError
from headwater.recipe import Recipe
from headwater.registry import resolve

# How far an arm may differ from the baseline's parameters, since the feed-forward's width is a whole number.
TOLERANCE = 0.01


def equalized(recipe: Recipe, out: Path | None = None, tell: Told = lambda line: None) -> Recipe:
    """The recipe with arms changed so that they cost the same as the baseline, as `compare.equal` says (null then).

    tokens: the number of steps. flops: the number of steps, of training FLOPs as `headwater plan` counts them.
    time: the number of steps, of training time as measured on this machine when the comparison in `out` began.
    parameters: the width of the feed-forward, or the pairs of what replaces it; to within 1 %.
    Warm-ups do not change. Raises `HeadwaterError` if an arm cannot be made to fit, or times have no `out` to be in.
    """
    section = recipe.compare
    if section is None or section.equal is None:
        return recipe
    fit = _Fit(recipe, out, tell)
    sizes: dict[str, dict] = {}
    arms: dict[str, dict] = {}
    for name, change in section.arms.items():
        if not section.sizes:
            arms[name] = change if name == section.baseline else _merge(change, fit(name, None))
            continue
        # A change that depends on the size goes with the size, under the arm's name.
        arms[name] = change
        for size, own in section.sizes.items():
            fitted = {} if name == section.baseline else fit(name, size)
            sizes.setdefault(size, dict(own)).setdefault("arms", {})
            sizes[size]["arms"] = sizes[size]["arms"] | {name: _merge(own.get("arms", {}).get(name, {}), fitted)}
    return recipe.model_copy(
        update={"compare": section.model_copy(update={"arms": arms, "sizes": sizes, "equal": None})}
    )


def _merge(change: dict, more: dict) -> dict:
    return change | {section: change.get(section, {}) | fields for section, fields in more.items()}


class _Fit:
    """What an arm must change to cost the same as the baseline. Data are read once."""

    def __init__(self, recipe: Recipe, out: Path | None, tell: Told) -> None:
        self.recipe, self.out, self.tell = recipe, out, tell
        self.built: dict[str, Data] = {}
        self.ratios = cache(self._ratios)

    def _ratios(self, size: str | None) -> dict[str, float]:
        """Of each arm, time per token over the baseline's, at a size."""
        if self.out is None:
            raise HeadwaterError(
                f"compare.equal=time needs an output folder, and {self.recipe.name!r} has none; use "
                "`headwater compare`."
            )
        section = self.recipe.compare
        assert section is not None
        arms = {name: self.recipe.arm(name, section.seeds[0], size) for name in section.arms}
        return pinned(arms, section.baseline, folder_of(self.recipe, size, self.out), self.tell)

    def data(self, recipe: Recipe) -> Data:
        key = recipe.data.model_dump_json()
        if key not in self.built:
            self.built[key] = recipe.data.build()
        return self.built[key]

    def __call__(self, name: str, size: str | None) -> dict:
        """Of an arm, at a size."""
        section = self.recipe.compare
        assert section is not None
        equal = section.equal
        base, arm = (self.recipe.arm(one, section.seeds[0], size) for one in (section.baseline, name))
        for one in (base, arm):
            if one.stages or (one.start is not None and equal != "tokens"):
                what = "stages" if one.stages else "a model to start with"
                raise HeadwaterError(
                    f"compare.equal={equal} works only for whole runs from scratch, but {self.recipe.name!r} has "
                    f"{what}; set sizes and steps yourself, and compare.equal=null."
                )
        data, own = self.data(base), self.data(arm)
        if equal == "parameters":
            wanted = sum(cost.parameters(base.config_for(data)).values())
            return {"model": _resized(arm, own, wanted, name)}
        budget = base.training.steps * _step_cost(base, data, equal == "flops")
        longer = self.ratios(size)[name] if equal == "time" else 1.0
        steps = round(budget / (longer * _step_cost(arm, own, equal == "flops")))
        if steps <= arm.training.warmup_steps:
            raise HeadwaterError(
                f"With equal {'FLOPs' if equal == 'flops' else equal}, arm {name!r} gets {steps} steps, no more than "
                f"its {arm.training.warmup_steps} warm-up steps; give the baseline more steps."
            )
        return {"training": {"steps": steps}}


def _step_cost(recipe: Recipe, data: Data, flops: bool) -> float:
    count = recipe.training.batch_size * recipe.training.accumulate * data.context
    return count * (cost.training_flops(recipe.config_for(data), data.context) if flops else 1.0)


def _resized(recipe: Recipe, data: Data, wanted: int, name: str) -> dict:
    """The fields of `model:` whose parameters come closest to `wanted`."""
    config = recipe.config_for(data)
    mechanisms: dict = config.mechanisms or {}
    given: dict = recipe.model.get("mechanisms") or mechanisms
    own = {name: resolve(name).feed_forward_size(options) for name, options in mechanisms.items()}
    mechanism, option = next(((name, option) for name, option in own.items() if option), (None, None))

    def change(width: int) -> dict:
        if mechanism is None:
            return {"intermediate_size": width}
        return {"mechanisms": given | {mechanism: (given.get(mechanism) or {}) | {option: width}}}

    def parameters(width: int) -> int:
        return sum(cost.parameters(_changed(recipe, data, change(width))).values())

    # Parameters are linear in the width.
    one, two = parameters(8), parameters(16)
    width = round(8 + 8 * (wanted - one) / max(1, two - one))
    if width < 1 or abs(parameters(width) - wanted) > TOLERANCE * wanted:
        raise HeadwaterError(
            f"No width of the feed-forward gives the arm {name!r} the baseline's {wanted:,} parameters; change its "
            "other sizes, or set compare.equal=tokens."
        )
    return change(width)


def _changed(recipe: Recipe, data: Data, fields: dict) -> HeadwaterConfig:
    return recipe.model_copy(update={"model": recipe.model | fields}).config_for(data)
