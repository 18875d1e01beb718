"""Stop texts, which end a continuation and may arrive in parts."""

from collections.abc import Sequence


class UntilStop:
    """A filter that passes a text on in pieces, up to the first of some stop texts.

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
            beginnings = (stop[:count] for stop in self.stops for count in range(1, len(stop)))
            length -= max((len(beginning) for beginning in beginnings if text_before.endswith(beginning)), default=0)
        self.pending, visible = self.pending[length:], self.pending[:length]
        return visible


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the beginning of a text, up to the first of the stop texts in it."""
    return text[: min((start for start in map(text.find, stops) if start >= 0), default=len(text))]
