"""A limit of time for other people's code: a tokenizer's pattern or a chat template may never end."""

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from headwater.util.errors import HeadwaterError

T = TypeVar("T")
# The most for a chat template, and for a tokenizer for a million characters or fewer.
SECONDS = 10.0


def within(seconds: float, work: Callable[[], T], problem: str) -> T:
    """Run `work` in a thread and return its result. Raises its errors, and `HeadwaterError` if it takes longer.

    Both the clock and the process's computing time count, so that a busy machine causes no error. The thread cannot be
    stopped: it ends with the process.
    """
    result: Future[T] = Future()

    def run_work() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # includes panics of Rust libraries, which are not Exceptions
            result.set_exception(error)

    begun, computed = time.monotonic(), time.process_time()
    threading.Thread(target=contextvars.copy_context().run, args=(run_work,), daemon=True).start()
    while not wait([result], max(0.1, seconds - (time.monotonic() - begun))).done:
        if time.monotonic() - begun > seconds and time.process_time() - computed > seconds:
            raise HeadwaterError(f"{problem}; use another tokenizer.")
    return result.result()
