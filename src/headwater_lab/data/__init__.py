"""Kinds of data, which register where they are defined: every file of this folder is read."""

import pkgutil
from importlib import import_module

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
