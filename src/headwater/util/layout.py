"""The names and folders of headwater's own code.

It is part of exported checkpoints, where transformers puts all code flat into a package of its own.
"""

import sys
from pathlib import Path

LIBRARY, LABORATORY = "headwater", "headwater_lab"
# The import packages of this distribution.
PACKAGES = frozenset({LIBRARY, LABORATORY})
# The package whose `main` is the command line; an interrupt there ends a command in order.
COMMAND_LINE = "headwater_lab.cli"
# Whether this code belongs to an exported checkpoint, whose classes are not those of the installed package.
IS_EXPORTED = __name__.partition(".")[0] != LIBRARY


def top_package(module: str) -> str:
    """Return the import package of a module: "headwater" for "headwater.nn.block"."""
    return module.partition(".")[0]


def is_ours(module: str) -> bool:
    """Whether a module is part of this distribution."""
    return top_package(module) in PACKAGES


def package_folder(module: str) -> Path:
    """Return the folder of an imported module's import package."""
    return Path(str(sys.modules[top_package(module)].__file__)).parent
