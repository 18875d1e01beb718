"""Larger models from trained ones: more layers, more width, more parameter tokens; and fewer of these."""

from headwater.growth.grown_model import grow, grown_config
from headwater.growth.methods import GrowthOptions
from headwater.growth.parameter_tokens import importance, pairs_of, shrink

__all__ = ["GrowthOptions", "grow", "grown_config", "importance", "pairs_of", "shrink"]
