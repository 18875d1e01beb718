"""The values of `training.optimizer` and `training.schedule`, and the fields of `training:` that each of them reads."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from headwater.plugins.registry import Registry
from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.util.settings import Settings

OPTIMIZERS = Registry("optimizer", "headwater.optimizers", {})
SCHEDULES = Registry("schedule", "headwater.schedules", {})

F = TypeVar("F", bound=Callable[..., Any])


def register_optimizer(make: F) -> F:
    """Make a function an optimizer under its own name: parameter groups, which keep their names -> one or more
    optimizers that together hold every parameter."""
    OPTIMIZERS.built_in[make.__name__] = f"{make.__module__}:{make.__qualname__}"
    return make


def register_schedule(fraction: F) -> F:
    """Make a function a schedule by its name: progress after warm-up, 0 to 1 -> share of the peak learning rate."""
    SCHEDULES.built_in[fraction.__name__] = f"{fraction.__module__}:{fraction.__qualname__}"
    return fraction


def fields_read(thing: Any) -> list[str]:
    """List the fields of `training:` that an optimizer or a schedule reads: a function's keyword-only parameters.

    A class such as torch.optim's takes the learning rate and its own arguments, `optimizer_options`.
    """
    if isinstance(thing, type):
        return ["learning_rate", "optimizer_options"]
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return []
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def values_read(thing: Any, training: Settings) -> dict[str, Any]:
    """Read the values of these fields. Raises `HeadwaterError` for a parameter that is not a field."""
    names, fields = fields_read(thing), type(training).model_fields
    for name in names:
        if name not in fields:
            raise HeadwaterError(
                f"{thing.__name__!r} takes {name!r}, which is not a field of training; {nearest(name, fields)}"
            )
    return {name: getattr(training, name) for name in names}
