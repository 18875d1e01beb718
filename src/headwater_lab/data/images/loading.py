"""Batches of images read in other processes, by PyTorch's `DataLoader`."""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import Batch
from headwater_lab.util.machine import cores

T = TypeVar("T")


def load_batches(load: Callable[[T], Batch], batches: Iterable[T], workers: int) -> Generator[Batch, None, None]:
    """Yield `load` of each batch, in order. `workers` processes, at most one per core, read ahead; 0: this one.

    They start immediately, because processes started in a thread cannot end cleanly. The generator raises `load`'s
    `HeadwaterError`s, and one if a process ends.
    """
    workers = min(workers, cores())
    loader = DataLoader(
        _Parts(load),
        sampler=batches,
        batch_size=None,
        num_workers=workers,
        # fork starts at once and copies nothing. Elsewhere Python's default is used, which pickles the data.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise it would draw from the global generator, as training does
    )
    return _check_batch(_begin_loading(loader))


def _begin_loading(loader: DataLoader[Batch | HeadwaterError]) -> Iterator[Batch | HeadwaterError]:
    """Start the loader's processes, and return its batches.

    Ctrl-C in a terminal also reaches them, but the parent still needs their batches to finish a step, so they inherit a
    signal mask that blocks it. If a worker ended, PyTorch's signal handler would raise an error anywhere in the parent.
    Without that handler, whoever waits for the batch gets the error, within five seconds.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return iter(loader)  # signal handlers can only be set in the main thread
    handler, blocked = signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check_batch(batches: Iterator[Batch | HeadwaterError]) -> Generator[Batch, None, None]:
    try:
        for batch in batches:
            if isinstance(batch, HeadwaterError):
                raise batch
            yield batch
    except (RuntimeError, ConnectionError, EOFError) as error:
        # A worker that is ending still counts as alive, and only its connection is lost. "Caught": an error in `read`.
        lost = not isinstance(error, RuntimeError) or "DataLoader worker (pid" in str(error)
        if str(error).startswith("Caught") or not lost:
            raise
        raise HeadwaterError(
            "A process that read images has ended, perhaps for lack of memory; give the container more shared memory "
            "(docker run --ipc=host), or set data.workers=0."
        ) from error
    finally:
        del batches  # ends the workers, even if an error's traceback keeps this frame alive


class _Parts(Dataset[Batch | HeadwaterError], Generic[T]):
    """A dataset whose indices are parts. User errors are returned, because `DataLoader` would add a traceback."""

    def __init__(self, load: Callable[[T], Batch]) -> None:
        self.read = load

    def __getitem__(self, batch: T) -> Batch | HeadwaterError:
        try:
            return self.read(batch)
        except HeadwaterError as error:
            return error
