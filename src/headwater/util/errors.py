"""The exception that users should see, and helpers for its message."""

import difflib
import linecache
import reprlib
import traceback
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

LARGEST = 2**63


def render_briefly(error: BaseException) -> list[str]:
    """Render an error for a notebook: the lines of its cells that led to it, and the message, without other frames.

    IPython calls this as the method `_render_traceback_` of an exception. `%debug` still has all frames.
    """
    frames = traceback.walk_tb(error.__traceback__)
    calls = [(frame, line) for frame, line in frames if frame.f_globals.get("__name__") == "__main__"]
    lines = [linecache.getline(frame.f_code.co_filename, line).strip() for frame, line in calls]
    cells = [f"line {line}: {text}" for (_, line), text in zip(calls, lines, strict=True)]
    return [*cells, f"{type(error).__name__}: {error}"]


class HeadwaterError(ValueError):
    """An error that the user can fix. The message says what is wrong and what to change.

    The command line prints it to stderr and exits with status 2; library users catch it as a `ValueError`.
    """

    _render_traceback_ = render_briefly


class NotTrusted(HeadwaterError):
    """A file names code from outside headwater that the user has not trusted (`headwater.plugins.outside`)."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: the nearest known name, or all of them if none is near."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(names)}."


def either(names: Sequence[str]) -> str:
    """Join names as alternatives: a; a or b; a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def sentence(error: BaseException) -> str:
    """Return an error's message in one line; for one wrapped by a strict dataclass, the inner message."""
    inner = error if isinstance(error, HeadwaterError) else error.__cause__ or error
    return " ".join(str(inner).split())


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or the error's name if it has no message."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


def find_unusable(value: Any) -> tuple[tuple[str, ...], str] | None:
    """Find the first invalid number inside a value: its place, and what is wrong with it."""
    if isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if (problem := find_unusable(inner)) is not None:
                return (str(name), *problem[0]), problem[1]
    elif isinstance(value, float) and not isfinite(value):
        return (), f"{value} is not a finite number"
    elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
        return (), f"{shown(value)} is beyond 64 bits"
    return None


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlong = 40
_short.maxdict = _short.maxlist = 8


def shown(value: Any) -> str:
    """Write a value for a message: on one line, shortened if it is long."""
    return _short.repr(value).replace("\n", " ")
