"""Convert trained models to headwater's and back, and add mechanisms."""

from headwater.conversion.add import add_mechanisms
from headwater.conversion.families import (
    FAMILIES,
    Family,
    config_of,
    from_transformers,
    load_transformers,
    to_transformers,
)
from headwater.conversion.foreign import LAYOUTS, read_foreign
from headwater.conversion.images import DEIT, VIT

FAMILIES |= {family.name: family for family in (VIT, DEIT)}

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
