"""Progress of long commands: bars on a terminal, plain lines in files and pipes."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from headwater_lab.api.observer import NamedTasks, estimate_time_left, write_line
from headwater_lab.cli.arguments import say, stderr, tell
from headwater_lab.util.terminal import literal

# Minimum seconds between two lines about a task in a log. Its first and last line are always printed.
LINE_SECONDS = 10.0


class TimeLeftColumn(ProgressColumn):
    """The estimated time left."""

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        time_left = estimate_time_left(task)
        return Text("" if time_left is None else str(time_left), style="progress.remaining")


class ProgressReport(NamedTasks):
    """Printer of results on stdout, and of notices and progress on stderr: bars on a terminal, else plain lines.

    A line has the task's name, the work done and in total, `info` (for example the loss) and the time left. It is never
    cut to the width of a terminal. A dumb terminal, which cannot redraw, has lines.
    """

    listens = True

    def __init__(self) -> None:
        name = TextColumn("{task.description}", markup=False)
        info = TextColumn("{task.fields[info]}", markup=False)
        info.get_table_column().no_wrap = False  # on a narrow terminal, it wraps, and nothing is cut
        columns = (name, BarColumn(bar_width=10), MofNCompleteColumn(), info, TimeLeftColumn())
        super().__init__(*columns, console=stderr, disable=not stderr.is_terminal or stderr.is_dumb_terminal)
        self.printed: dict[TaskID, tuple[float, str]] = {}
        self.is_running = False
        self.stream = sys.stderr  # still works while other libraries' output is silenced

    def __enter__(self) -> ProgressReport:
        return self  # starts with the first update, so that an earlier error leaves no bar behind

    def say(self, text: Any) -> None:
        self.stop()  # the bars on stderr would draw over stdout's lines
        say(text)

    def tell(self, line: str) -> None:
        tell(line)

    def show(self, name: str, done: int, total: int | None = None, **changes: Any) -> None:
        """Update the task of this name; the first update creates and displays it."""
        self.start()
        task = self.update_task(name, done, total, **changes)
        if self.disable:
            self.print_line(task)

    def start(self) -> None:
        super().start()
        self.is_running = True

    def stop(self) -> None:
        if self.is_running and self.disable:
            for task in self.tasks:
                self.print_line(task, is_last=True)
        elif self.is_running:
            super().stop()
        self.is_running = False

    def print_line(self, task: Task, is_last: bool = False) -> None:
        """Print a task's line if the last one is old enough, and the line is new."""
        moment = time.monotonic()
        printed, text = self.printed.get(task.id, (-LINE_SECONDS, ""))
        if not is_last and task.visible and moment - printed < LINE_SECONDS:
            return
        if (line := write_line(task)) != text:
            self.printed[task.id] = moment, line
            print(literal(line), file=self.stream, flush=True)
