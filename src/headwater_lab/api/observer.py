"""Observers that receive reports from functions while they work."""

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from typing import Any

# Seconds between two updates of a notebook's progress.
UPDATE_SECONDS = 0.3


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


@dataclass
class _Task:
    """A task in a notebook. start: the work that was done when it was first shown, and when that was."""

    title: str
    start: tuple[int, float]
    done: int = 0
    total: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Write its progress as a line: work done and in total, `info`, and the time left."""
        begun, moment = self.start
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        remaining = ""
        if self.total is not None and begun < self.done < self.total:
            seconds = (time.monotonic() - moment) / (self.done - begun) * (self.total - self.done)
            remaining = f"{timedelta(seconds=round(seconds))} left"
        fields = self.fields.get("unit", ""), count, self.fields.get("info", ""), remaining
        return "  ".join(filter(None, (self.title.strip(), *fields)))


class NotebookProgress(Observer):
    """A display of progress and notices under a cell of a notebook."""

    def __init__(self) -> None:
        self.tasks: dict[str, _Task] = {}
        self.display: Any = None
        self.updated = 0.0

    def say(self, text: Any) -> None:
        print(text)

    def tell(self, line: str) -> None:
        print(line)

    def show(self, name: str, done: int, total: int | None = None, **changes: Any) -> None:
        """Update the task of this name. What changes faster than `UPDATE_SECONDS` is shown later, except the end."""
        moment = time.monotonic()
        task = self.tasks.setdefault(name, _Task(changes.get("title", name), (done, moment)))
        task.done, task.total = done, task.total if total is None else total
        task.fields |= changes
        if moment - self.updated >= UPDATE_SECONDS or done == task.total:
            self.updated = moment
            self.draw()

    def draw(self) -> None:
        """Draw the visible tasks: a bar and a line for each."""
        visible = [task for task in self.tasks.values() if task.fields.get("visible", True)]
        bars = [
            f'<div><progress value="{task.done}" max="{task.total}"></progress> {escape(task.describe())}</div>'
            for task in visible
        ]
        content = {"text/plain": "\n".join(task.describe() for task in visible), "text/html": "".join(bars)}
        if self.display is None:
            from IPython.display import display  # which is there: only notebooks have this observer

            self.display = display(content, raw=True, display_id=True)
        else:
            self.display.update(content, raw=True)


def choose_observer(watch: Observer | None) -> Observer:
    """Choose the observer of a function that got none: a display in a notebook, otherwise a silent one."""
    if watch is not None:
        return watch
    python = sys.modules.get("IPython")
    shell = python and python.get_ipython()
    return NotebookProgress() if getattr(shell, "kernel", None) is not None else SILENT
