"""Experiments with headwater's models: the commands as functions.

    import headwater_lab as lab

    run = lab.train(recipe, "runs/mine")

What is named here is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater_lab.api import compare, grow, plan, reproduce, retrofit, train

__all__ = ["compare", "grow", "plan", "reproduce", "retrofit", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module("headwater_lab.api"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
