"""The exception that users should see, and helpers for its message."""

import linecache
import re
import reprlib
import traceback
from collections.abc import Collection, Iterable, Sequence
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
    """A file names code from outside headwater that the user has not trusted (`headwater.plugins.trust`)."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: up to three near names, or all names if none is near."""
    names = sorted(names)
    close = find_near(name, names)
    return f"did you mean {either(list(map(repr, close)))}?" if close else f"known names: {', '.join(names)}."


def find_near(name: str, names: Iterable[str]) -> list[str]:
    """Find the names that somebody may have meant: a misspelt one, or else up to three that contain all its words."""
    names = sorted(names)
    if typo := find_misspelt(name, names):
        return [typo]
    words = split_words(name)
    longer = [
        candidate
        for candidate in names
        if all(
            any(piece == word or (len(word) > 3 and piece.startswith(word)) for piece in split_words(candidate))
            for word in words
        )
    ]
    return longer if words and len(longer) <= 3 else []


def find_misspelt(name: str, names: Iterable[str]) -> str | None:
    """Find the name of which this one is a misspelling: one letter in four is wrong at most, and no digit."""
    digits = re.sub(r"\D", "", name)
    edits = {candidate: _count_edits(name, candidate) for candidate in names if re.sub(r"\D", "", candidate) == digits}
    close = min(edits, key=lambda candidate: (edits[candidate], candidate), default=None)
    return close if close is not None and edits[close] <= max(1, len(name) // 4) and len(name) > 2 else None


def split_words(name: str) -> list[str]:
    """Split a name into its words, in lower case."""
    return re.findall(r"[^\W_]+", name.lower())


def _count_edits(a: str, b: str) -> int:
    """Count the letters to insert, delete, replace or swap with the next until a is b (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, target in enumerate(b, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != target)))
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]:
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def check_known(message: str, name: Any, names: Collection[str]) -> None:
    """Raise `HeadwaterError` unless a name is known: "MESSAGE 'name'; did you mean …?"."""
    if name not in names:
        raise HeadwaterError(f"{message} {name!r}; {nearest(str(name), names)}")


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
