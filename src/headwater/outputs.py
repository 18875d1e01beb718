"""Files under a name that the user chose, or in the user's folder: only those that headwater wrote are replaced.

What headwater writes says so itself: JSON by its keys, pages by their generator, pictures by their metadata. Formats of
pictures without metadata, such as JPEG, are written but never replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.drawing import default_style
from headwater.errors import HeadwaterError
from headwater.files import check_local, explaining, replace_text, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Whether headwater wrote a file, by its content.
IsOurs = Callable[[bytes], bool]

# The keys of each JSON file.
EVALUATION = ("headwater", "format", "rows", "models")
INSPECTION = ("headwater", "schema_version", "models")
GPU = ("headwater", "device", "phases")
REPRODUCTION = ("table", "paper_says", "claims")

GENERATOR = b'<meta name="generator" content="headwater">'
_AUTHOR = "headwater"
_METADATA = {"png": "Software", "svg": "Creator", "pdf": "Creator", "ps": "Creator", "eps": "Creator"}
_PICTURES = (
    b"tEXtSoftware\0headwater",  # PNG
    b"<dc:title>headwater</dc:title>",  # SVG
    b"/Creator (headwater)",  # PDF
    b"%%Creator: headwater\n",  # PostScript
)
# Bytes at the beginning and end of a picture in which its metadata lie.
_NEAR = 2**14


def has_keys(keys: Collection[str]) -> IsOurs:
    """A test for a JSON object with these keys."""

    def test(content: bytes) -> bool:
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            return False
        return isinstance(values, dict) and values.keys() >= {*keys}

    return test


def is_page(content: bytes) -> bool:
    """Whether headwater wrote this HTML page."""
    return GENERATOR in content[:_NEAR]


def is_picture(content: bytes) -> bool:
    """Whether headwater drew this picture."""
    return any(mark in content[:_NEAR] or mark in content[-_NEAR:] for mark in _PICTURES)


def check_replaceable(file: Path, is_ours: IsOurs | None = None) -> None:
    """Raise `HeadwaterError` unless a file can be written: nothing is there, or a file that headwater wrote.

    is_ours: default: the caller has checked the content.
    """
    check_local(file)
    if not os.path.lexists(file):
        return
    if file.is_symlink():
        raise HeadwaterError(f"{str(file)!r} is a link, which is not replaced; choose another name.")
    if not file.is_file():
        what = "a folder" if file.is_dir() else "not a regular file"
        raise HeadwaterError(f"{str(file)!r} cannot be written: it is {what}; choose another name.")
    try:
        if is_ours is None or is_ours(file.read_bytes()):
            return
    except OSError as error:
        raise HeadwaterError(f"{str(file)!r} cannot be read: {error.strerror}; choose another name.") from error
    raise HeadwaterError(
        f"{str(file)!r} already exists, and this command of headwater did not write it; choose another name, or move "
        "it away."
    )


def write_json(
    file: Path, content: Mapping[str, Any], keys: Collection[str], *, indent: int = 1, allow_nan: bool = True
) -> None:
    """Write a JSON file with these keys. Raises `HeadwaterError` for another's file, or if it cannot be written."""
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=allow_nan) + "\n"
    _write(file, text, has_keys(keys))


def write_page(file: Path, html: str) -> None:
    """Write an HTML page. Raises `HeadwaterError` for another's file, or if it cannot be written."""
    _write(file, html, is_page)


def write_document(file: Path, text: str) -> None:
    """Write a page of a documentation, whose content the caller has checked. Raises `HeadwaterError`."""
    _write(file, text, None)


def save_figure(figure: Figure, file: Path, dpi: int) -> Path:
    """Draw a figure to a file, in the format of its suffix; returns its path.

    Raises `HeadwaterError` for another's file, for a suffix that no picture has, or if it cannot be written.
    """
    check_replaceable(file, is_picture)
    kind = file.suffix.removeprefix(".").lower()
    with explaining(lambda problem: f"{str(file)!r} could not be written: {problem}."), replacing(file) as beside:
        try:
            more: dict[str, Any] = {"metadata": {_METADATA[kind]: _AUTHOR}} if kind in _METADATA else {}
            with default_style():
                figure.savefig(beside, dpi=dpi, format=kind, **more)
        except ValueError as error:  # a suffix that no picture has
            raise HeadwaterError(f"{str(file)!r} cannot be drawn: {error}") from error
    return file


def _write(file: Path, text: str, is_ours: IsOurs | None) -> None:
    check_replaceable(file, is_ours)
    with explaining(lambda problem: f"{str(file)!r} could not be written: {problem}."):
        replace_text(file, text)
