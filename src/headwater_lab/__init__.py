"""Experiments with headwater's models: the commands as functions.

    import headwater_lab as lab

    run = lab.train(recipe, "runs/mine")

Names are imported when they are first used.
"""

import sys
import warnings

if (
    sys.argv[:1] == ["-m"]  # Python sets this while it looks for the module to run
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == __name__
    and not sys.flags.safe_path
):
    # Python has put the current folder first on the path, and any module there would hide one of the same name.
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater_lab.util import process as _process  # noqa: F401  before what takes time to import

if TYPE_CHECKING:
    from headwater_lab.api.comparing import compare, load_results
    from headwater_lab.api.exporting import push_to_hub
    from headwater_lab.api.growing import grow, retrofit
    from headwater_lab.api.plans import plan
    from headwater_lab.api.reproducing import reproduce
    from headwater_lab.api.training import train

__all__ = ["compare", "grow", "load_results", "plan", "push_to_hub", "reproduce", "retrofit", "train"]

# tqdm warns about this in notebooks without ipywidgets, where progress is shown in another way.
warnings.filterwarnings("ignore", "IProgress not found")
_MODULES = {
    "compare": "comparing",
    "grow": "growing",
    "load_results": "comparing",
    "plan": "plans",
    "push_to_hub": "exporting",
    "reproduce": "reproducing",
    "retrofit": "growing",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(f"headwater_lab.api.{_MODULES[name]}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
