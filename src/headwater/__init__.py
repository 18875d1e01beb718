"""headwater: Transformers whose keys and values come from more places than the current token and layer."""

from headwater import process as _process  # noqa: F401  before what takes time to import

# isort: split
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
