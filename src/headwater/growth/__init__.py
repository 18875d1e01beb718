"""Grow, shrink and merge trained models by parameter tokens (`pairs`); widen linear ones (`widening`)."""

from headwater.growth.pairs import TauAnnealing, grow, grown_config, importance, merge, pairs_of, shrink
from headwater.growth.widening import widen, widened_config

__all__ = [
    "TauAnnealing",
    "grow",
    "grown_config",
    "importance",
    "merge",
    "pairs_of",
    "shrink",
    "widen",
    "widened_config",
]
