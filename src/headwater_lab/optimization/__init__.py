"""Optimizers and learning-rate schedules, which register where they are defined: every file of this folder is read."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
