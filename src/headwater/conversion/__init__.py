"""Convert trained models to headwater's and back, and add mechanisms."""

from headwater.conversion.add import add_mechanisms
from headwater.conversion.families import FAMILIES
from headwater.conversion.family import Family
from headwater.conversion.foreign import LAYOUTS, read_foreign
from headwater.conversion.transformers_models import config_of, from_transformers, load_transformers, to_transformers

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "Family",
    "add_mechanisms",
    "config_of",
    "from_transformers",
    "load_transformers",
    "read_foreign",
    "to_transformers",
]
