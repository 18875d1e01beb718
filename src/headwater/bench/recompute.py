"""What recomputing activations saves in memory, and costs in time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headwater.bench.training import bases, training_step
from headwater.hardware import seconds
from headwater.training.recompute import recompute_activations

CHOICES: tuple[bool | str, ...] = (False, "half", "attention", True)


class Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that still exist: `now`, and at most `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                self.seen[key] = (StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        self.seen = {key: value for key, value in self.seen.items() if not value[0].expired()}
        return sum(size for _, size in self.seen.values())


@dataclass(frozen=True)
class Recomputing:
    """kept: bytes after a forward pass with its loss. peak: the most at any time of both passes, with the gradients.
    seconds: of training steps.
    """

    kept: int
    peak: int
    seconds: list[float]

    @property
    def second(self) -> float:
        return statistics.median(self.seconds)


def bench_recompute(
    *, layers: int = 8, width: int = 256, context: int = 256, batch_size: int = 8, vocabulary: int = 512, turns: int = 7
) -> dict[bool | str, Recomputing]:
    """A model without mechanisms under each value of `training.gradient_checkpointing`, on a CPU, in turns."""
    ids = torch.randint(vocabulary, (batch_size, context), generator=torch.Generator().manual_seed(0))
    memory: dict[bool | str, tuple[int, int]] = {}
    steps: dict[bool | str, Callable[[], None]] = {}
    for what in CHOICES:
        model, _ = bases("llama", layers=layers, width=width, context=context, vocabulary=vocabulary)
        recompute_activations(model.train(), what)
        memory[what] = live_bytes(lambda model=model: model(ids, labels=ids, use_cache=False).loss)  # type: ignore[misc]
        for parameter in model.parameters():
            parameter.grad = None
        steps[what] = training_step(model, ids, False)
        steps[what]()
    times: dict[bool | str, list[float]] = {what: [] for what in CHOICES}
    for turn in range(turns):
        for what in CHOICES if turn % 2 else reversed(CHOICES):
            times[what].append(seconds(steps[what]))
    return {what: Recomputing(*memory[what], times[what]) for what in CHOICES}


def live_bytes(loss: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """(bytes kept after the forward pass, peak of both passes), without the parameters."""
    with Live() as live:
        made = loss()
        kept = live.now
        made.backward()
    return kept, live.peak
