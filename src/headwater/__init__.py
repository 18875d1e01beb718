"""headwater: Transformers whose keys and values come from more places than the current token and layer.

What is named here is imported when it is first used, so that `import headwater` takes no time.
"""

from typing import TYPE_CHECKING

from headwater import auto_classes as _auto_classes
from headwater import lazy as _lazy
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
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "headwater.config": ["HeadwaterConfig"],
        "headwater.errors": ["HeadwaterError"],
        "headwater.growth": ["grow"],
        "headwater.models.causal_lm": ["HeadwaterForCausalLM", "HeadwaterModel"],
        "headwater.presets": ["preset"],
    },
)
_auto_classes.register()
