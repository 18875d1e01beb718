"""Deadlines for work that may take far too long, such as calls of other people's tokenizers.

A pattern in tokenizer.json can need longer than the age of the universe for a line of text, and a chat template can be
an endless loop.
"""

import contextvars
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headwater.util.errors import HeadwaterError

T = TypeVar("T")

# The most that a tokenizer may take to be loaded, and for a million characters or fewer.
SECONDS_TO_LOAD, SECONDS = 120.0, 10.0


def within(seconds: float, work: Callable[[], T], problem: str) -> T:
    """Run `work` in a thread and return its result. Raises its errors, and `HeadwaterError` if it takes longer.

    Both the clock and the process's computing time count, so that a busy machine causes no error. The thread cannot be
    stopped: it ends with the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run_work() -> None:
        try:
            results.append(work())
        except BaseException as error:  # also the panics of Rust libraries, which are no Exceptions
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run_work,), name="tokenizer", daemon=True)
    begun, computed = time.monotonic(), time.process_time()
    thread.start()
    while True:
        thread.join(max(0.1, seconds - (time.monotonic() - begun)))
        if not thread.is_alive():
            break
        if time.monotonic() - begun > seconds and time.process_time() - computed > seconds:
            raise HeadwaterError(f"{problem}; use another tokenizer.")
    if errors:
        raise errors[0]
    return results[0]
