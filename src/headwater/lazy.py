"""Packages whose names are imported when they are first used, by a module's own `__getattr__` (PEP 562).

if TYPE_CHECKING:                       # for type checkers and readers
    from headwater.growth import grow
__getattr__, __dir__ = lazy.names(__name__, {"headwater.growth": ["grow"]})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


def names(package: str, of: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    of: modules, each with the names that it provides.
    """
    modules = {name: module for module, given in of.items() for name in given}
    there = vars(sys.modules[package])

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = there[name] = getattr(import_module(modules[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*there, *modules})

    return __getattr__, __dir__


class Function(ModuleType):
    """A module that can be called: `headwater.compare(recipe)` is `headwater.api.compare(recipe)`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        package, _, name = self.__name__.partition(".")
        return getattr(import_module(f"{package}.api"), name)(*arguments, **named)


class Package(ModuleType):
    """A package that has functions and modules of the same names: importing such a module makes it a `Function`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FUNCTIONS and isinstance(value, ModuleType):
            value.__class__ = Function
        super().__setattr__(name, value)


# Functions of headwater.api that have the same name as a module of the package.
FUNCTIONS = ("compare", "plan", "retrofit")
