"""Observers that receive reports from functions while they work."""

from typing import Any


class Observer:
    """A receiver of results, notices and progress. This one ignores them; the one of the commands prints.

    listens: whether to measure quantities that are only reported.
    """

    listens = False

    def say(self, text: Any) -> None:
        """Receive a sentence or a table of the result."""

    def tell(self, line: str) -> None:
        """Receive a notice, such as a warning."""

    def show(self, name: str, done: int, total: int | None = None, **changes: Any) -> None:
        """Receive the progress of a task. changes: its `unit`, `info` and `title`, and whether it is `visible`."""


SILENT = Observer()
