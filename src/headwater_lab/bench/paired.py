"""Interleaved runs A B A B … and the ratio of each pair, so that drift of the machine does not matter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headwater.cost.hardware import seconds


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of A and B in each pair of one interleaved run."""

    a: list[float]
    b: list[float]

    @property
    def ratios(self) -> list[float]:
        return [x / y for x, y in zip(self.a, self.b, strict=True)]

    @property
    def ratio(self) -> float:
        """Median over the pairs of time A / time B."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return low, high


def interleave(a: Callable[[], None], b: Callable[[], None], pairs: int, warmup: int = 3) -> PairedTimes:
    """Time `pairs` pairs; the order within a pair alternates."""
    for _ in range(warmup):
        a()
        b()
    times: dict[Callable, list[float]] = {a: [], b: []}
    for pair in range(pairs):
        for run in (a, b) if pair % 2 == 0 else (b, a):
            times[run].append(seconds(run))
    return PairedTimes(times[a], times[b])


def take_turns(names: Iterable[str], turns: int) -> Iterator[tuple[str, bool]]:
    """(name, whether its run counts): every name once a turn, in alternating order. The first turn warms up."""
    order = list(names)
    for turn in range(turns + 1):
        for name in order if turn % 2 else reversed(order):
            yield name, turn > 0
