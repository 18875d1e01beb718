"""Stop texts, which end a continuation and may arrive in parts."""

from collections.abc import Sequence


class UntilStop:
    """Pass a text on in pieces, up to the first of some stop texts.

    stopped: whether a stop text has arrived. A possible beginning of one is held back until the next piece.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.pending, self.stopped = stops, "", False

    def feed(self, text: str, end: bool = False) -> str:
        """Add a piece of the text, and return what may be shown now. end: it is the last piece."""
        if self.stopped:
            return ""
        self.pending += text
        text_before = before_stop(self.pending, self.stops)
        self.stopped = text_before != self.pending
        length = len(text_before)
        if not (self.stopped or end):
            length -= max((_measure_overlap(text_before, stop) for stop in self.stops), default=0)
        self.pending, visible = self.pending[length:], self.pending[:length]
        return visible


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the beginning of a text, up to the first of the stop texts in it."""
    return text[: min((start for start in map(text.find, stops) if start >= 0), default=len(text))]


def _measure_overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop text."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)
