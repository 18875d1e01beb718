"""headwater: Transformers whose keys and values come from more places than the current token and layer.

Names are imported on first use, so that `import headwater` takes no time.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from headwater.models import auto_classes as _auto_classes
from headwater.util import extras as _extras

if TYPE_CHECKING:
    from headwater.config.presets import preset
    from headwater.config.text import HeadwaterConfig
    from headwater.config.vision import HeadwaterVisionConfig
    from headwater.models.causal_lm import HeadwaterForCausalLM, HeadwaterModel
    from headwater.models.image_classification import HeadwaterForImageClassification, HeadwaterImageModel
    from headwater.util.errors import HeadwaterError

__version__ = "0.2.0.dev0"
_HOMES = {
    "HeadwaterConfig": "headwater.config.text",
    "HeadwaterError": "headwater.util.errors",
    "HeadwaterForCausalLM": "headwater.models.causal_lm",
    "HeadwaterForImageClassification": "headwater.models.image_classification",
    "HeadwaterImageModel": "headwater.models.image_classification",
    "HeadwaterModel": "headwater.models.causal_lm",
    "HeadwaterVisionConfig": "headwater.config.vision",
    "preset": "headwater.config.presets",
}
__all__ = [
    "HeadwaterConfig",
    "HeadwaterError",
    "HeadwaterForCausalLM",
    "HeadwaterForImageClassification",
    "HeadwaterImageModel",
    "HeadwaterModel",
    "HeadwaterVisionConfig",
    "__version__",
    "preset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(_import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted(__all__)


_auto_classes.register_models()
_extras.look_after_imports()
