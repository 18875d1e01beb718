"""Files under a name that the user chose: only those that headwater wrote are replaced, by the marks in them.

Formats of pictures without metadata, such as JPEG, are written but never replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.util.errors import HeadwaterError
from headwater.util.files import check_local, explain_disk_errors, replace_file, replace_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AUTHOR = "headwater"
# Without a date, so that the same figure gives the same bytes.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": _AUTHOR},
    "svg": {"Creator": _AUTHOR, "Date": None},
    "pdf": {"Creator": _AUTHOR, "CreationDate": None},
    "ps": {"Creator": _AUTHOR},
    "eps": {"Creator": _AUTHOR},
}
_MARKS = (
    b'<meta name="generator" content="headwater">',
    b"tEXtSoftware\0headwater",  # PNG
    b"<dc:title>headwater</dc:title>",  # SVG
    b"/Creator (headwater)",  # PDF
    b"%%Creator: headwater\n",  # PostScript
)
# How JSON, LaTeX, Markdown and CSV begin.
_BEGINNING = re.compile(
    rb'\{\s*"headwater":|% Written by headwater|<!-- Written by headwater|comparison,size,|table,name,'
)
# Bytes at the beginning and the end of a file that are searched for headwater's mark.
_NEAR = 2**14


def check_replaceable(file: Path) -> None:
    """Raise `HeadwaterError` unless a file can be written: it does not exist, or headwater wrote it."""
    check_local(file)
    if not os.path.lexists(file):
        return
    if file.is_symlink():
        raise HeadwaterError(f"{str(file)!r} is a link, which is not replaced; choose another name.")
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "not a regular file"
        raise HeadwaterError(f"{str(file)!r} cannot be written: it is {kind}; choose another name.")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise HeadwaterError(f"{str(file)!r} cannot be read: {error.strerror}; choose another name.") from error
    if _BEGINNING.match(content) or any(mark in content[:_NEAR] + content[-_NEAR:] for mark in _MARKS):
        return
    raise HeadwaterError(f"{str(file)!r} exists, and headwater did not write it; choose another name, or move it away.")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whose first key is "headwater". Raises `HeadwaterError` for another's file, or on failure."""
    write_text(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text marked as headwater's. Raises `HeadwaterError` for another's file, or on failure."""
    check_replaceable(file)
    with explain_disk_errors(lambda problem: f"{str(file)!r} could not be written: {problem}."):
        replace_text(file, text)


# Okabe and Ito's colors, which color-blind people can distinguish, without yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@contextmanager
def default_style() -> Iterator[None]:
    """Draw and save with matplotlib's own settings, and do not read two dollar signs in a name as a formula.

    matplotlib also reads a matplotlibrc in the current folder, which may come from someone else and can start LaTeX.
    """
    from matplotlib import rc_context, rcParamsDefault

    defaults = {name: value for name, value in dict.items(rcParamsDefault) if not name.startswith("backend")}
    # Fixed names in SVG files, and in PDF files the fonts (TrueType) that publishers ask for.
    with rc_context(defaults | {"text.parse_math": False, "svg.hashsalt": _AUTHOR, "pdf.fonttype": 42}):
        yield


def save_figure(figure: Figure, file: Path, dpi: int) -> Path:
    """Draw a figure to a file, in the format of its suffix; returns its path.

    Raises `HeadwaterError` for another's file, for a suffix that is not a picture's, or if it cannot be written.
    """
    check_replaceable(file)
    kind = file.suffix.removeprefix(".").lower()
    with (
        explain_disk_errors(lambda problem: f"{str(file)!r} could not be written: {problem}."),
        replace_file(file) as temporary,
    ):
        try:
            options: dict[str, Any] = {"metadata": _METADATA[kind]} if kind in _METADATA else {}
            with default_style():
                figure.savefig(temporary, dpi=dpi, format=kind, **options)
        except ValueError as error:  # no picture format has this suffix
            raise HeadwaterError(f"{str(file)!r} cannot be drawn: {error}") from error
    return file
