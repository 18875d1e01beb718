"""The one exception a user should meet, and the help that goes into its sentence."""

import difflib
from collections.abc import Iterable


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


def sentence(error: BaseException) -> str:
    """What an error says in one line; of one that a strict dataclass has wrapped, what was inside."""
    inner = error if isinstance(error, HeadwaterError) else error.__cause__ or error
    return " ".join(str(inner).split())
