"""What mechanisms do before each step of a training run: `ActsInTraining`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from headwater.mechanisms.capabilities import ActsInTraining, Step
from headwater_lab.recipe.schema import Recipe
from headwater_lab.training.start import Beginning


class Hooks:
    """The modules of a model that act before each step, with what checkpoints store for them.

    kept: that, by the module's name. notices: warnings for the record of a run that begins.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, beginning: Beginning | None, kept: dict[str, Any] | None
    ) -> None:
        """kept: of a resumed run; None for one that begins."""
        start: dict[str, Any] = {}
        if recipe.start is not None and beginning is not None:
            start = recipe.start.model_dump(mode="json") | {"tau": "anneal" if beginning.anneals else "keep"}
        self.first = Step(0, recipe.training.steps, recipe.training.warmup_steps, start)
        mechanisms = {name: module for name, module in model.named_modules() if isinstance(module, ActsInTraining)}
        if kept is None:
            asked = ((name, module.prepare_training(self.first)) for name, module in mechanisms.items())
            kept = {name: value for name, value in asked if value is not None}
        self.kept = kept
        self.modules = [(mechanisms[name], value) for name, value in kept.items()]
        counted = Counter(type(module) for module, _ in self.modules)
        said = (kind.describe_training(count, self.first) for kind, count in counted.items())
        self.notices = [message for message in said if message is not None]

    def prepare_step(self, number: int) -> None:
        """Call them; number: the step, from 0."""
        step = self.first._replace(number=number)
        for module, kept in self.modules:
            module.prepare_step(kept, step)
