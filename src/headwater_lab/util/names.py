"""File names made from texts."""

import re
import zlib

# File systems allow 255 bytes, and a temporary file has a longer name than its target.
NAME_BYTES = 200


def is_file_name(text: str) -> bool:
    """Whether a text can be the name of one file or folder: printable, not a path and not hidden."""
    return (
        text.isprintable()
        and text == text.strip()
        and not text.startswith(".")
        and not set(text) & {"/", "\\"}
        and 0 < len(text.encode()) <= NAME_BYTES
    )


def file_name(text: str) -> str:
    """Make a file name for a text: the text if possible, else its letters and a checksum."""
    if is_file_name(text):
        return text
    stem = re.sub(r"[\W_]+", "-", text).strip("-").encode()[: NAME_BYTES // 2].decode(errors="ignore")
    return f"{stem}-{zlib.crc32(text.encode(errors='surrogatepass')):08x}".lstrip("-")
