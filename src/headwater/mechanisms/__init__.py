"""The mechanisms, one file each, which opens with the paper, its equation and our departures from it.

Each class is a plain `nn.Module` for any PyTorch model, except the ones that only let layers share, and also describes
what it does in a headwater model. A class is imported when it is first used. For type checkers, import it from its own
module, such as `headwater.mechanisms.kv_shift`.
"""

from importlib import import_module as _import_module
from typing import Any

from headwater.mechanisms.contract import KV, Ancestors, AttentionInputs, Context, Cost, Hidden, Mechanism
from headwater.plugins.registry import MECHANISM_CLASSES as _MODULES

__all__ = ["KV", "Ancestors", "AttentionInputs", "Context", "Cost", "Hidden", "Mechanism"]
__all__ += sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(_import_module(_MODULES[name], __package__), name))
