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

        changes: its `unit`, `info` and `title`, and whether it is `visible`. done_before: the growth of `done` is the
        work of an earlier run, which does not count towards the speed.
        """


SILENT = Observer()


class NamedTasks(Progress, Observer):
    """Tasks by name, with rich's counts."""

    def __init__(self, *columns: str | ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self.tasks_by_name: dict[str, TaskID] = {}

    def update_task(
        self, name: str, done: int, total: int | None = None, done_before: bool = False, **changes: Any
    ) -> Task:
        """Update the task of this name; the first update creates it."""
        title, unit = changes.pop("title", name), changes.pop("unit", "")
        if name not in self.tasks_by_name:
            options = {"total": total, "completed": done, "unit": unit, "info": "", "done_before": done}
            self.tasks_by_name[name] = self.add_task(title, **options)
        task = self._tasks[self.tasks_by_name[name]]
        if done_before:
            changes["done_before"] = task.fields["done_before"] + done - task.completed
        self.update(task.id, completed=done, **changes)
        return task


def estimate_time_left(task: Task) -> timedelta | None:
    """Estimate how long a task still takes, from its mean speed since it was first shown.

    rich's own estimate takes the updates of the last seconds, of which long training steps have none or two at once.
    """
    done = task.completed - task.fields["done_before"]
    if task.finished or task.total is None or done <= 0 or not task.elapsed:
        return None
    return timedelta(seconds=int((task.total - task.completed) * task.elapsed / done))


def write_line(task: Task) -> str:
    """Write a task's progress as one line of text."""
    count = f"{task.completed:,.0f}" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}"
    progress = f"{task.fields['unit']} {count}".strip() if task.total is not None or task.completed else ""
    time_left = estimate_time_left(task)
    remaining = "" if time_left is None else f"{time_left} left"
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
