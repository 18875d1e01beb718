"""Trained models of others: as headwater's and back, and with mechanisms added."""

from headwater.retrofit.add import add_mechanisms, function_change
from headwater.retrofit.families import FAMILIES, Family, from_transformers, to_transformers

__all__ = ["FAMILIES", "Family", "add_mechanisms", "from_transformers", "function_change", "to_transformers"]
