"""Convert trained models to headwater's and back, add mechanisms, or replace linear layers by parameter tokens."""

from headwater.conversion.add import add_mechanisms, function_change
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
from headwater.conversion.parameter_tokens import Report, to_parameter_tokens

FAMILIES |= {family.name: family for family in (VIT, DEIT)}

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "Family",
    "Report",
    "add_mechanisms",
    "config_of",
    "from_transformers",
    "function_change",
    "load_transformers",
    "read_foreign",
    "to_parameter_tokens",
    "to_transformers",
]
