"""Files that are whole or not there: checksums, and writing beside and renaming."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Bring a file or folder to the disk, so that a rename is not there before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str) -> None:
    """Write a file beside its place and rename it: whoever reads it sees the old content or the new."""
    beside = file.with_name(f".{file.name}")
    with beside.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)
