"""headwater: Transformers whose keys and values come from more places than the current token and layer.

What is named here is imported when it is first used, so that `import headwater` takes no time.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from headwater import auto_classes as _auto_classes
from headwater import process as _process  # noqa: F401  before what takes time to import

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig
    from headwater.errors import HeadwaterError
    from headwater.growth import grow
    from headwater.models.causal_lm import HeadwaterForCausalLM, HeadwaterModel
    from headwater.presets import preset

__version__ = "0.1.0"
__all__ = [
    "HeadwaterConfig",
    "HeadwaterError",
    "HeadwaterForCausalLM",
    "HeadwaterModel",
    "__version__",
    "grow",
    "preset",
]
_MODULES = {
    "HeadwaterConfig": "config",
    "HeadwaterError": "errors",
    "HeadwaterForCausalLM": "models.causal_lm",
    "HeadwaterModel": "models.causal_lm",
    "grow": "growth",
    "preset": "presets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"headwater.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_auto_classes.register()
