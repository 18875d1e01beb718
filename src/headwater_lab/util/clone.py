"""The code that runs, and the day, for records of results."""

import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


def today() -> str:
    """The day in UTC, as YYYY-MM-DD."""
    return datetime.now(UTC).date().isoformat()


@cache
def find_commit() -> str | None:
    """Find the commit of the clone that headwater runs from; None if it is installed, or git is missing."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip() or None
    return None
