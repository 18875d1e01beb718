"""Learning-rate schedules after the warm-up."""

import math

from headwater_lab.optimization.registry import register_schedule


@register_schedule
def cosine(progress: float, *, min_learning_rate_ratio: float) -> float:
    """A half cosine from the peak to `min_learning_rate_ratio`."""
    return min_learning_rate_ratio + (1 - min_learning_rate_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@register_schedule
def constant(progress: float) -> float:
    """The peak."""
    return 1.0
