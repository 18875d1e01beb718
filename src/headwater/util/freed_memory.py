"""The C library's settings for memory that a training step frees."""

import ctypes
import os
from contextlib import suppress


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees, up to 2 GB, where the C library is glibc.

    By default glibc gives it back at the end of a training step, and the next step's page faults take up to 4 % of its
    time. Settings of the user in the environment stay.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Together: setting one stops glibc from adapting the other, which would then stay at its tiny default.
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum: what is larger is always given back
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
