"""Local files as bytes, text and rows. Any bad content raises a `HeadwaterError`.

JSON is read by Python's own parser, a line at a time: it stops at deep nesting, where others overflow the stack.
"""

from __future__ import annotations

import bz2
import codecs
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headwater.errors import HeadwaterError
from headwater.files import check_local

TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Bytes read at a time.
CHUNK = 2**22
# The same for a compressed file: a block is unpacked whole, and may be thousands of times as large.
PACKED_CHUNK = 2**13
# Rows of a parquet file at a time.
ROWS = 64
# A longer line of JSON is an error: parsing needs several times its memory.
LONGEST_LINE = 2**28
# Number of columns to list when one is missing.
NAMED_COLUMNS = 30


@dataclass(frozen=True)
class Columns:
    """text: the column with the text. by: the column, dotted if nested, with the domain's name.

    text_option, by_option: the options that set them.
    """

    text: str
    by: str | None = None
    text_option: str = "--text-column"
    by_option: str = "--by"

    @property
    def outermost(self) -> list[str]:
        return list(dict.fromkeys([self.text, *([self.by.partition(".")[0]] if self.by else [])]))

    def check(self, names: Iterable[str], where: str) -> None:
        """Raise `HeadwaterError` if one of them is missing."""
        names = list(names)
        for option, column in ((self.text_option, self.text), (self.by_option, self.by)):
            if column and (column if column == self.text else column.partition(".")[0]) not in names:
                known = [name if name.isprintable() else repr(name) for name in names[:NAMED_COLUMNS]]
                more = ", …" if len(names) > NAMED_COLUMNS else ""
                raise HeadwaterError(
                    f"{where!r} has no column {column!r}; set {option} to one of: {', '.join(known)}{more}."
                )

    def domain(self, row: dict[str, Any], where: str) -> str | None:
        """The domain of a row. Raises `HeadwaterError` if it is not a name."""
        if not self.by:
            return None
        value: Any = row
        for name in self.by.split("."):
            if isinstance(value, str) and value.startswith("{"):  # nested, and written as text
                value = json.loads(value)
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return "none"
        if isinstance(value, dict | list):
            inner = f"; its fields: {', '.join(map(str, value))}" if isinstance(value, dict) else ""
            raise HeadwaterError(f"Column {self.by!r} of {where!r} holds {type(value).__name__}, not a name{inner}.")
        encoded(name := str(value), f"column {self.by!r} of {where}")
        return name


def printable(name: str) -> str:
    """A file's name with the bytes that are not UTF-8 escaped, so that it can be printed and stored."""
    return name.encode(errors="backslashreplace").decode()


def check_name(path: Path) -> None:
    """Raise `HeadwaterError` for a folder whose name is not UTF-8: no tokenizer can be written to it."""
    if (name := printable(str(path))) != str(path):
        raise HeadwaterError(f"The name '{name}' is not UTF-8; name another folder.")


def encoded(text: str, where: str) -> bytes:
    """The text in UTF-8. Raises `HeadwaterError` if it contains half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise HeadwaterError(f"{where!r} contains half of a surrogate pair, which is not a character.") from error


def local_path(name: str) -> Path:
    """The path that a user wrote, with ~ expanded. Raises `HeadwaterError` for an invalid one."""
    if not name:
        raise HeadwaterError("The name of a file or folder is empty; pass a name.")
    check_local(name)
    try:
        path = Path(name).expanduser()
        path.is_file()
    except RuntimeError as error:
        raise HeadwaterError(f"The home folder in {name!r} is not known; write the full path.") from error
    except OSError as error:
        raise HeadwaterError(f"{name[:80]!r} cannot be read: {error.strerror}.") from error
    return path


def table_kind(file: Path) -> str | None:
    """The kind of table that a file's name implies, compressed or not; None for text."""
    name = file.with_suffix("") if file.suffix in PACKED else file
    return TABLES.get(name.suffix)


def is_text(file: Path) -> bool:
    """Whether the whole unpacked file is UTF-8 without NUL bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(file) as stream:
        try:
            while data := stream.read(CHUNK):
                if b"\0" in data:
                    return False
                decoder.decode(data)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading in a `with`, unpacked by its suffix; reading errors become `HeadwaterError`."""
    try:
        if not file.is_file():  # opening a pipe would wait for its writer
            raise HeadwaterError(f"{_named(file)} is no longer a regular file.")
        decompressor = PACKED.get(file.suffix)
        with io.BufferedReader(_Unpacked(file, decompressor), CHUNK) if decompressor else file.open("rb") as stream:
            yield stream
    except HeadwaterError:
        raise
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error


def skip(stream: IO[bytes], size: int) -> None:
    """Seek to byte `size` of a file from `opened`, compressed or not."""
    if stream.seekable():
        stream.seek(size)
        return
    while size and (data := stream.read(min(size, CHUNK))):
        size -= len(data)


def unreadable(file: Path, error: Exception) -> HeadwaterError:
    """The error for a file that cannot be read."""
    cause = error.__cause__ or error
    text = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).splitlines()[0]
    if isinstance(error, EOFError):
        text = "it is truncated; copy it again"
    kind = f" as {file.suffix[1:]}" if file.suffix in {**TABLES, **PACKED} else ""
    return HeadwaterError(f"{_named(file)} cannot be read{kind}: {text[:300].rstrip('.')}.")


def _named(file: Path) -> str:
    return repr(printable(str(file)))


class _Unpacked(io.RawIOBase):
    """Unpack a file of one or more streams. A truncated end or a damaged later stream is an error; the readers of bz2
    and xz in the standard library, and zstandard's, ignore one or the other."""

    def __init__(self, file: Path, decompressor: Callable[[], Any]) -> None:
        self.file, self.decompressor = file.open("rb"), decompressor
        self.stream: Any = None
        self.left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            if self.stream is None or self.stream.eof:
                # .gz and .xz may have zeros between streams and after the last.
                data = (self.stream.unused_data if self.stream else b"").lstrip(b"\0") or self._packed()
                while self.stream and data and not (data := data.lstrip(b"\0")):
                    data = self._packed()
                if not data and self.stream is None:
                    raise EOFError
                if not data:
                    return 0
                self.stream = self.decompressor()
            elif not (data := self._packed()):
                raise EOFError
            try:
                self.left = memoryview(self.stream.decompress(data))
            except (zlib.error, lzma.LZMAError) as error:
                raise OSError(str(error)) from error
        size = min(len(self.left), len(buffer))
        buffer[:size], self.left = self.left[:size], self.left[size:]
        return size

    def _packed(self) -> bytes:
        return self.file.read(PACKED_CHUNK)

    def close(self) -> None:
        self.file.close()
        super().close()


class _Zstd:
    """A decompressor with the standard library's interface."""

    def __init__(self) -> None:
        try:
            from zstandard import ZstdDecompressor, ZstdError
        except ImportError as error:
            raise OSError("it needs `pip install zstandard`; install that, or unpack the file") from error
        self.error = ZstdError
        self.frame = ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return self.frame.eof

    @property
    def unused_data(self) -> bytes:
        return self.frame.unused_data

    def decompress(self, data: bytes) -> bytes:
        try:
            return self.frame.decompress(data)
        except self.error as error:
            raise OSError(str(error)) from error


PACKED: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _Zstd,
}

TableRow = tuple[int, Any, str | None]


def table_rows(file: Path, columns: Columns, begin: int = 0) -> Iterator[TableRow]:
    """(offset after the row, its text, its domain) from offset `begin` on, in bounded memory.

    A `.json` file with one array is read whole. Raises `HeadwaterError`.
    """
    if table_kind(file) == "parquet":
        yield from rows_of_tables(_parquet(file, columns), columns, begin, file)
        return
    where, seen = printable(str(file)), begin > 0
    for number, row in _json_rows(file, begin):
        if not isinstance(row, dict):
            raise HeadwaterError(f"Line {number} of {where!r} is not a JSON object.")
        if not seen:
            columns.check(row, where)
            seen = True
        try:
            domain = columns.domain(row, where)
        except (ValueError, RecursionError) as error:
            raise _bad_json(file, number, error) from error
        yield number, row.get(columns.text), domain


def _json_rows(file: Path, begin: int) -> Iterator[tuple[int, Any]]:
    """(number, row) past the first `begin`. One row per line, since rows of real corpora do not share one schema."""
    with opened(file) as stream:
        is_array = ".jsonl" not in file.name and stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    with opened(file) as stream:
        if is_array:
            yield from itertools.islice(enumerate(_parsed(file, 1, stream.read()), 1), begin, None)
            return
        for number in itertools.count(1):
            line = stream.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                size = f"{LONGEST_LINE / 1e6:,.0f} MB"
                raise HeadwaterError(f"Line {number} of {_named(file)} is longer than {size}; split that document.")
            if number > begin and line.strip():
                yield number, _parsed(file, number, line)


def _parsed(file: Path, number: int, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise _bad_json(file, number, error) from error


def _bad_json(file: Path, number: int, error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    text = "it is nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    kind = "jsonl" if ".jsonl" in file.name else "json"
    return HeadwaterError(f"{_named(file)} cannot be read as {kind}: line {number}: {text[:300]}")


def _parquet(file: Path, columns: Columns) -> Iterator[Any]:
    """Tables of a file. Not read with datasets, which loads whole row groups: they can be as large as the file."""
    from pyarrow.parquet import ParquetFile

    with (
        opened(file) as stream,
        ParquetFile(stream, pre_buffer=False, buffer_size=2**20) as table,
    ):
        columns.check(table.schema_arrow.names, printable(str(file)))
        yield from table.iter_batches(batch_size=ROWS, columns=columns.outermost)


def rows_of_tables(tables: Iterable[Any], columns: Columns, begin: int, file: Path) -> Iterator[TableRow]:
    """Rows of Arrow tables, past the first `begin`."""
    number, where = 0, printable(str(file))
    try:
        for table in tables:
            if not number:
                columns.check(table.schema.names, where)
            if number + len(table) <= begin:
                number += len(table)
                continue
            found = [table.column(name).to_pylist() for name in columns.outermost]
            for row in zip(*found, strict=True):
                number += 1
                if number > begin:
                    domain = columns.domain(dict(zip(columns.outermost, row, strict=True)), where)
                    yield number, row[0], domain
    except HeadwaterError:
        raise
    except Exception as error:  # readers of parquet and of the network can raise anything
        raise unreadable(file, error) from error
