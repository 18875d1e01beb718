"""Observers that receive reports from functions while they work."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from html import escape
from typing import Any

from rich.progress import Progress, ProgressColumn, Task, TaskID

# Minimum seconds between two updates of a notebook's progress.
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
        """Receive the progress of a task.

        changes: its `unit`, `info` and `title`, and whether it is `visible`. done_before: `done` now includes work of
        an earlier run, which does not count towards the speed.
        """


SILENT = Observer()


class NamedTasks(Progress, Observer):
    """Tasks by name, with rich's counts and estimates of the time left."""

    def __init__(self, *columns: str | ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self.tasks_by_name: dict[str, TaskID] = {}

    def update_task(
        self, name: str, done: int, total: int | None = None, done_before: bool = False, **changes: Any
    ) -> Task:
        """Update the task of this name; the first update creates it."""
        title, unit = changes.pop("title", name), changes.pop("unit", "")
        if name not in self.tasks_by_name:
            self.tasks_by_name[name] = self.add_task(title, total=total, completed=done, unit=unit, info="")
        elif done_before:
            self.reset(self.tasks_by_name[name], completed=done)
        self.update(self.tasks_by_name[name], completed=done, **changes)
        return self._tasks[self.tasks_by_name[name]]


def write_line(task: Task) -> str:
    """Write a task's progress as one line of text."""
    count = f"{task.completed:,.0f}" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}"
    progress = f"{task.fields['unit']} {count}".strip() if task.total is not None or task.completed else ""
    seconds = None if task.finished or not task.completed else task.time_remaining
    remaining = "" if seconds is None else f"{timedelta(seconds=int(seconds))} left"
    return "  ".join(filter(None, (task.description.strip(), progress, task.fields["info"], remaining)))


class NotebookProgress(NamedTasks):
    """A display of progress and notices under a cell of a notebook."""

    def __init__(self) -> None:
        super().__init__(disable=True)  # used only for counting, because rich's display needs ipywidgets
        self.display: Any = None
        self.updated = 0.0

    def say(self, text: Any) -> None:
        print(text)

    def tell(self, line: str) -> None:
        print(line)

    def show(self, name: str, done: int, total: int | None = None, **changes: Any) -> None:
        """Update the task of this name. What changes faster than `UPDATE_SECONDS` is shown later, except the end."""
        task, moment = self.update_task(name, done, total, **changes), time.monotonic()
        if task.finished or moment - self.updated >= UPDATE_SECONDS:
            self.updated = moment
            self.draw()

    def draw(self) -> None:
        """Draw the visible tasks: a bar and a line for each."""
        lines = {write_line(task): task.percentage for task in self.tasks if task.visible}
        bars = [
            f'<div><progress value="{share:.1f}" max="100"></progress> {escape(line)}</div>'
            for line, share in lines.items()
        ]
        content = {"text/plain": "\n".join(lines), "text/html": "".join(bars)}
        if self.display is None:
            from IPython.display import display  # always installed here: only notebooks use this observer

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
