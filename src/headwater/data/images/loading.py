"""Batches of images read in other processes, by PyTorch's `DataLoader`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from headwater.data.base import Batch
from headwater.errors import HeadwaterError
from headwater.hardware import cores

T = TypeVar("T")


def loaded(read: Callable[[T], Batch], parts: Iterable[T], workers: int) -> Generator[Batch, None, None]:
    """`read` of each part, in order; `workers` processes, at most one per core, read ahead. 0: this process reads.

    They start at once: those that begin in a thread cannot end well. The generator raises the `HeadwaterError`s of
    `read`, and one if a process ends.
    """
    workers = min(workers, cores())
    loader = DataLoader(
        _Parts(read),
        sampler=parts,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_listen_to_the_parent if workers else None,
        # Starts at once and copies nothing. Elsewhere Python chooses, and the data are pickled.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # else it would draw from the global one, as training does
    )
    return _checked(iter(loader))


def _checked(batches: Iterator[Batch | HeadwaterError]) -> Generator[Batch, None, None]:
    try:
        for batch in batches:
            if isinstance(batch, HeadwaterError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise HeadwaterError(
            f"A process that read images has ended ({str(error).splitlines()[0].rstrip('.')}); give the container more "
            "shared memory (docker run --ipc=host), or set data.workers=0."
        ) from error
    finally:
        del batches  # ends its processes, also where an error's traceback keeps this frame


class _Parts(Dataset[Batch | HeadwaterError], Generic[T]):
    """A dataset whose indices are parts. Errors for the user are returned, since `DataLoader` would add a traceback."""

    def __init__(self, read: Callable[[T], Batch]) -> None:
        self.read = read

    def __getitem__(self, part: T) -> Batch | HeadwaterError:
        try:
            return self.read(part)
        except HeadwaterError as error:
            return error


def _unchanged(batch: Any) -> Any:
    return batch


def _listen_to_the_parent(worker: int) -> None:
    """Ctrl-C in a terminal reaches all processes; the parent still wants its batches to end a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
