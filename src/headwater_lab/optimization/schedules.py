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


@register_schedule
def linear(progress: float, *, min_learning_rate_ratio: float) -> float:
    """A straight line from the peak to `min_learning_rate_ratio`."""
    return min_learning_rate_ratio + (1 - min_learning_rate_ratio) * (1 - progress)


@register_schedule
def wsd(
    progress: float,
    *,
    steps: int,
    warmup_steps: int,
    decay_fraction: float,
    decay_form: str,
    min_learning_rate_ratio: float,
) -> float:
    """The peak, and from `find_decay_start` on a decay to `min_learning_rate_ratio` (arXiv 2404.06395)."""
    start = find_decay_start(steps, decay_fraction)
    step = round(warmup_steps + progress * (steps - warmup_steps))
    if step <= start:
        return 1.0
    decayed = (step - start) / (steps - start)
    decayed = math.sqrt(decayed) if decay_form == "1-sqrt" else decayed
    return linear(decayed, min_learning_rate_ratio=min_learning_rate_ratio)


def find_decay_start(steps: int, decay_fraction: float) -> int:
    """Find the step after which the schedule wsd decays: up to it, the rate does not depend on the number of steps."""
    return steps - max(1, round(decay_fraction * steps))
