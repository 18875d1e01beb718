"""Synthetic tasks: endless streams of rows, nothing stored; one file per task, described in docs/reference/tasks.md."""

from headwater_lab.data.base import DATA
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings

__all__ = ["SyntheticData", "SyntheticSettings", "list_tasks"]


def list_tasks() -> list[SyntheticSettings]:
    """List all tasks with their defaults, in each of their variants."""
    tasks = [kind for kind in map(DATA.resolve, DATA.built_in) if issubclass(kind, SyntheticSettings)]
    return [variant for task in tasks for variant in task.list_variants()]
