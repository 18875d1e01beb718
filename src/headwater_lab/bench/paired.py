"""Interleaved runs A B A B … and the ratio of each pair, so that drift of the machine does not matter."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwater.util.processor import describe_cpu
from headwater_lab.util.machine_speed import seconds
from headwater_lab.util.terminal import counted

T = TypeVar("T")
Show = Callable[[str, int, int], None]


def ignore_progress(name: str, done: int, total: int) -> None:
    """Receive the progress of a task, and do nothing with it."""


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
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    def write_cells(self) -> dict[str, str]:
        """Write the ratio and its quartiles, as columns of a benchmark."""
        low, high = self.quartiles
        return {"ratio": f"{self.ratio:.3f}", "quartiles": f"{low:.3f} – {high:.3f}"}


class TurnsInterrupted(KeyboardInterrupt):
    """A signal between turns. results: by name, of at least two whole turns."""

    def __init__(self, results: dict[str, list[Any]]) -> None:
        super().__init__()
        self.results = results


def time_interleaved(
    a: Callable[[], object], b: Callable[[], object], pairs: int, show: Show = ignore_progress
) -> PairedTimes:
    """Time `pairs` pairs; the order within a pair alternates. See `take_turns`."""
    times = take_turns({"a": partial(seconds, a), "b": partial(seconds, b)}, pairs, warmup=3, show=show)
    return PairedTimes(**times)


def take_turns(
    runs: Mapping[str, Callable[[], T]], turns: int, warmup: int = 1, show: Show = ignore_progress
) -> dict[str, list[T]]:
    """Run each once a turn, in alternating order, and return the results by name, without those of `warmup` turns.

    show: receives ("turns", turns done, all turns), with those to warm up. Raises `TurnsInterrupted` after SIGINT or
    SIGTERM if two turns are whole, otherwise `KeyboardInterrupt`.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    whole_turns = 0
    try:
        for turn in range(-warmup, turns):
            show("turns", warmup + turn, warmup + turns)
            for name in runs if turn % 2 == 0 else reversed(list(runs)):
                result = runs[name]()
                if turn >= 0:
                    results[name].append(result)
            whole_turns = turn + 1
        show("turns", warmup + turns, warmup + turns)
    except KeyboardInterrupt as signal:
        if whole_turns < 2:
            raise
        raise TurnsInterrupted({name: values[:whole_turns] for name, values in results.items()}) from signal
    return results


def random_ids(vocab_size: int, *shape: int) -> Tensor:
    """Draw token ids of a shape, always the same."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


def describe_device(device: str) -> str:
    """Name a device in the title of a table; the CPU by its model."""
    return f"{describe_cpu()}, {counted(torch.get_num_threads(), 'thread')}" if device == "cpu" else device
