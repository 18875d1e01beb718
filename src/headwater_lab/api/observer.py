"""What a function reports to while it works."""

from __future__ import annotations

from typing import Any


class Observer:
    """Receives results, notices and progress. This one takes no notice; that of the commands prints.

    listens: whether to measure what is only reported.
    """

    listens = False

    def say(self, part: Any) -> None:
        """Receive a sentence or a table of the result."""

    def tell(self, line: str) -> None:
        """Receive a notice, such as a warning."""

    def show(self, name: str, done: int, total: int | None = None, **changes: Any) -> None:
        """Receive the progress of a task. changes: its `unit`, `info` and `title`, and whether it is `visible`."""


SILENT = Observer()
