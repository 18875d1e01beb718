"""The one exception a user should meet, and the help that goes into its sentence."""

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

LARGEST = 2**63


class HeadwaterError(ValueError):
    """Something the user can put right. The message is one sentence that says what to change.

    The command line prints it to stderr and exits with status 2; library users catch it as a `ValueError`.
    """


class Diverged(HeadwaterError):
    """A run whose loss or weights are no numbers any more. In a comparison that is a result, not a failure."""


class Interrupted(Exception):
    """Asked to stop, with everything saved. The message says how to go on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A tail for "unknown name" sentences: the nearest known name, or all of them where none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(known)}."


def either(names: Sequence[str]) -> str:
    """The names as alternatives: a; a or b; a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def sentence(error: BaseException) -> str:
    """What an error says in one line; of one that a strict dataclass has wrapped, what was inside."""
    inner = error if isinstance(error, HeadwaterError) else error.__cause__ or error
    return " ".join(str(inner).split())


def unusable(value: Any) -> tuple[tuple[str, ...], str] | None:
    """The first number inside a value that nobody can mean: where it is, and what is wrong with it."""
    if isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if (found := unusable(inner)) is not None:
                return (str(name), *found[0]), found[1]
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
    """A value as a sentence shows it: on one line, and cut if it is long."""
    return _short.repr(value)
