"""The command line as a process: signals, standard streams, the working directory.

`headwater_lab` imports this before anything that takes time. It acts only if the process is the command line,
not in programs that use the library.
"""

import atexit
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import FrameType

from headwater.util.layout import COMMAND_LINE, LABORATORY, LIBRARY


def is_command() -> bool:
    """Whether this process was started as `headwater …` or `python -m headwater_lab …`."""
    try:
        started = sys.orig_argv[-len(sys.argv)]  # the script or module, before the arguments
    except (AttributeError, IndexError):
        return False
    return PurePath(started).stem in (LIBRARY, LABORATORY, f"-m{LABORATORY}")


def set_up() -> None:
    """Set up a command-line process, before anything else."""
    gc.set_threshold(50_000, 20, 20)  # garbage collection during imports takes a tenth of a command's start-up time
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes do not search the current folder for modules
    _open_streams()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # shells ignore signals for background jobs
                signal.signal(number, _interrupt)
    atexit.register(_flush_output)  # registered first, so called last
    try:
        os.getcwd()
    except OSError:
        print("headwater: The working directory no longer exists; change to one that does.", file=sys.stderr)
        sys.exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop with `KeyboardInterrupt`, which gives exit code 130.

    Outside a command, exit at once: nothing is lost, and an interrupted import leaves modules incomplete.
    """
    within = False
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "importlib._bootstrap":
            os._exit(130)
        within = within or (name == COMMAND_LINE and frame.f_code.co_name == "main")
        frame = frame.f_back
    if not within:
        os._exit(130)
    raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, to finish and save a step. A second signal stops at once.

    Outside the main thread, where Python handles no signals, the event is never set.
    """
    stop = threading.Event()

    def request_stop(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handle_signals(request_stop):
        yield stop


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by this handler in the block, if it runs in the main thread.

    Signals that are ignored stay ignored: a shell starts background jobs with SIGINT ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    handled = [number for number in signals if signal.getsignal(number) not in (None, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


def _open_streams() -> None:
    """Make sure that standard streams are open, and print any text: as \\xe9 where the encoding has no é."""
    # Otherwise the next opened files would take the file descriptors of closed streams.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")  # the encoding in which files are read
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    sys.stderr = _Aside(
        open(2, "wb", closefd=False),  # noqa: SIM115
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Aside(io.TextIOWrapper):
    """Standard error whose reader may close without ending the run."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def _flush_output() -> None:
    """At exit: flush the output, and set the exit code if that fails."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process is ending anyway
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:  # the reader closed the pipe
            print(f"headwater: The output could not be written: {error.strerror}.", file=sys.stderr)
        os._exit(1 if error.errno == errno.EPIPE else 2)


if is_command():
    set_up()
