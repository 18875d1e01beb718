"""Local files as bytes, text and rows. Any bad content raises a `HeadwaterError`.

JSON is read by Python's own parser, a line at a time: it stops at deep nesting, where others overflow the stack.
"""

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, AnyStr

from headwater.util.errors import HeadwaterError
from headwater.util.files import check_local, open_regular

TABLES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
DELIMITERS = {"csv": ",", "tsv": "\t"}
# The default column of text, and the column of conversations that is read if there is none.
DEFAULT, MESSAGES = "text", "messages"
# A column next to conversations that lists functions a model may call. Training does not read it.
TOOLS = "tools"
# Columns in which a text that is JSON is read as a conversation.
CONVERSATIONS = (MESSAGES, "conversations")
MISSING = object()
NO_TOOLS: tuple[Any, ...] = (MISSING, None, "", [])
# Bytes read at a time.
CHUNK = 2**22
# Rows of a parquet file at a time, fewer if they take more bytes than this.
ROWS = 64
MOST_ROWS = 2**28
# Maximum length of a line of JSON, since parsing needs several times its memory.
LONGEST_LINE = 2**28
# Maximum number of columns to list if one is missing.
NAMED_COLUMNS = 30
# Maximum number of rows before the first that has the domain's column.
FIRST_ROWS = 10_000
# The byte order mark.
MARK = "\ufeff"
# pyarrow's name for the compression behind each suffix. Its readers reject truncated files and damaged later streams,
# and unpack one piece at a time.
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


class Columns:
    """The columns to read from a source, and whether any row so far has had them.

    text: the column with the text. by: the column with the domain's name. Both are dotted if nested: meta.text.
    option: the one that sets `text`; None if there is none.
    """

    def __init__(self, text: str, by: str | None = None, option: str | None = "--text-column") -> None:
        self.text, self.by = text, by
        self.options = {text: option, **({by: "--by"} if by else {})}
        # Columns that no row has had yet.
        self.missing = dict.fromkeys(self.options)
        # Names of the columns seen so far, slightly more than an error lists.
        self.names: dict[str, None] = {}
        self.rows = 0

    def find_columns(self, names: Iterable[str]) -> list[str]:
        """Find which of a table's columns to read."""
        names = set(names)
        columns = [*self.options, *([MESSAGES] if self.text == DEFAULT else []), _tools_column(self.text)]
        return [c for name in columns for c in (name, name.partition(".")[0]) if c in names]

    def add_names(self, names: Iterable[str]) -> None:
        """Note names for the error about a missing column."""
        self.names |= dict.fromkeys(itertools.islice(names, NAMED_COLUMNS + 1 - len(self.names)))

    def read_cells(self, row: dict[str, Any], where: str) -> tuple[Any, str | None]:
        """Return (the text's value, None if the row has none; its domain). Raises `HeadwaterError`.

        Conversations in a column `messages` stand in for a column `text`, the default, that a row lacks.
        """
        self.rows += 1
        if self.missing and len(self.names) <= NAMED_COLUMNS:
            self.add_names(_dotted_names(row))
        if self.by in self.missing and self.rows > FIRST_ROWS:  # otherwise all rows would go into one domain
            self.check_missing(where)
        text = _read_cell(row, self.text, where)
        if text is MISSING and self.text == DEFAULT:
            conversation = parse_list(row.get(MESSAGES, MISSING))
            text = conversation if conversation is None or isinstance(conversation, list) else MISSING
        if text is not MISSING:
            self.missing.pop(self.text, None)
            is_chat = isinstance(text, list) or self.text.rpartition(".")[2] in CONVERSATIONS
            if is_chat and _read_cell(row, tools := _tools_column(self.text), where) not in NO_TOOLS:
                raise HeadwaterError(f"Column {tools!r} of {where!r} is not read by training; remove it.")
        return None if text is MISSING else text, self._read_domain(row, where)

    def _read_domain(self, row: dict[str, Any], where: str) -> str | None:
        if not self.by:
            return None
        value = _read_cell(row, self.by, where)
        if value is not MISSING:
            self.missing.pop(self.by, None)
        if value is None or value is MISSING:
            return "none"
        if isinstance(value, dict | list):
            inner = f"; its fields: {', '.join(map(str, value))}" if isinstance(value, dict) else ""
            raise HeadwaterError(f"Column {self.by!r} of {where!r} holds {type(value).__name__}, not a name{inner}.")
        encode_text(name := str(value), f"column {self.by!r} of {where}")
        return name

    def check_missing(self, where: str) -> None:
        """Raise `HeadwaterError` if there were rows and a column was missing in all of them."""
        for column in self.missing if self.rows else ():
            names = [name if name.isprintable() else repr(name) for name in [*self.names][:NAMED_COLUMNS]]
            ellipsis = ", …" if len(self.names) > NAMED_COLUMNS else ""
            option = self.options[column]
            advice = f"set {option} to one of" if option else "rename one of its columns"
            raise HeadwaterError(f"{where!r} has no column {column!r}; {advice}: {', '.join(names)}{ellipsis}.")


def _tools_column(column: str) -> str:
    """Name the column `tools` next to a column of conversations, dotted if that is nested."""
    outer, dot, _ = column.rpartition(".")
    return outer + dot + TOOLS


def parse_list(value: Any) -> Any:
    """Parse a text that is a list in JSON; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _read_cell(row: dict[str, Any], column: str, where: str) -> Any:
    """Read the value of a column, dotted if nested; `MISSING` if the row has none. Raises `HeadwaterError`."""
    if column in row:
        return row[column]
    value: Any = row
    path = column.split(".")
    for depth, name in enumerate(path):
        if isinstance(value, str) and value.startswith("{"):  # a nested value that is stored as JSON text
            value = json.loads(value)
        if isinstance(value, list):
            raise HeadwaterError(
                f"Column {'.'.join(path[:depth])!r} of {where!r} is a list, so {column!r} has several values in a row; "
                "name another column, or write one row for each item."
            )
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def _dotted_names(row: dict[str, Any]) -> Iterator[str]:
    """List the names of a row's columns, and of the fields inside them."""
    for name, value in row.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield str(name)


def escape_name(name: str) -> str:
    """Escape the bytes of a file's name that are not UTF-8, so that it can be printed and stored."""
    return name.encode(errors="backslashreplace").decode()


def check_name(path: Path) -> None:
    """Raise `HeadwaterError` for a folder whose name is not UTF-8: no tokenizer can be written to it."""
    if (name := escape_name(str(path))) != str(path):
        raise HeadwaterError(f"The name '{name}' is not UTF-8; name another folder.")


def encode_text(text: str, where: str) -> bytes:
    """The text in UTF-8. Raises `HeadwaterError` if it contains half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise HeadwaterError(f"{where!r} contains half of a surrogate pair, which is not a character.") from error


def local_path(name: str) -> Path:
    """Expand ~ in a path that a user wrote. Raises `HeadwaterError` for an invalid one."""
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
    """Find the kind of table from a file's name, compressed or not; None for text."""
    name = file.with_suffix("") if file.suffix.lower() in PACKED else file
    return TABLES.get(name.suffix.lower())


def is_text(file: Path) -> bool:
    """Whether the whole unpacked file is UTF-8 without NUL characters."""
    with open_text(file) as stream:
        try:
            return all("\0" not in text for text in iter(partial(stream.read, CHUNK), ""))
        except UnicodeDecodeError:
            return False


@contextmanager
def open_file(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading in a `with`, unpacked by its suffix; reading errors become `HeadwaterError`."""
    try:
        with open_regular(file) as stream:
            if file.suffix.lower() == ".xz":
                raise HeadwaterError(f"{_quote_name(file)} is packed with xz, which is not read; use gzip or zstd.")
            if (packing := PACKED.get(file.suffix.lower())) is None:
                yield stream
                return
            if not file.stat().st_size:
                raise EOFError
            from pyarrow import CompressedInputStream, PythonFile

            with io.BufferedReader(CompressedInputStream(PythonFile(stream, mode="r"), packing), CHUNK) as unpacked:
                yield unpacked
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise describe_unreadable(file, error) from error


@contextmanager
def open_text(file: Path) -> Iterator[IO[str]]:
    """Open a text file as `open_file` does, in UTF-8 with or without a byte order mark; line ends stay as they are."""
    with open_file(file) as stream:
        yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")


def describe_unreadable(file: Path, error: Exception) -> HeadwaterError:
    """Make the error for a file that cannot be read."""
    cause = error.__cause__ or error
    text = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).splitlines()[0]
    if isinstance(error, EOFError) or text.startswith("Truncated"):
        text = "it is truncated; copy it again"
    kind = f" as {file.suffix[1:]}" if file.suffix.lower() in {**TABLES, **PACKED} else ""
    return HeadwaterError(f"{_quote_name(file)} cannot be read{kind}: {text[:300].rstrip('.')}.")


def _quote_name(file: Path) -> str:
    return repr(escape_name(str(file)))


TableRow = tuple[Any, str | None]


def table_rows(file: Path, columns: Columns) -> Iterator[TableRow]:
    """Yield (the row's text or None, its domain), in bounded memory.

    Raises `HeadwaterError`. A row without the column is no error here: `columns.check_missing` is one if all of them
    lack it.
    """
    kind, where = table_kind(file), escape_name(str(file))
    with open_file(file) as stream:
        if kind == "parquet":
            yield from rows_of_tables(parquet_tables(stream, columns), columns, file)
            return
        for number, row in csv_rows(stream, file, columns) if kind in DELIMITERS else json_rows(stream, file):
            try:
                cells = columns.read_cells(row, where)
            except (ValueError, RecursionError) as error:
                raise _bad_line(file, number, error) from error
            yield cells


def json_rows(stream: Any, file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row): of each line, since rows of real corpora do not share one schema, or of one array."""
    is_array = stream.peek(64)[:64].removeprefix(MARK.encode()).lstrip()[:1] == b"["
    for number, line in enumerate([_read_array(stream, file)] if is_array else _read_lines(stream, file), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _bad_line(file, number, error) from error
        for index, row in enumerate(content, 1) if is_array else [(number, content)]:
            if not isinstance(row, dict):
                name = "Item" if is_array else "Line"
                raise HeadwaterError(f"{name} {index} of {_quote_name(file)} is not a JSON object.")
            yield index, row


def _read_array(stream: IO[bytes], file: Path) -> bytes:
    """Read a file that is one JSON array. Raises `HeadwaterError` if it is larger than LONGEST_LINE, unpacked."""
    data = stream.read(LONGEST_LINE + 1)
    if len(data) > LONGEST_LINE:
        raise HeadwaterError(
            f"{_quote_name(file)} is one JSON array of more than {LONGEST_LINE / 1e6:,.0f} MB; write one "
            "object a line: jq -c '.[]' FILE > FILE.jsonl"
        )
    return data


def _read_lines(stream: IO[AnyStr], file: Path) -> Iterator[AnyStr]:
    """Yield the lines of a file in bounded memory. Raises `HeadwaterError` for one longer than LONGEST_LINE."""
    for number in itertools.count(1):
        line = stream.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            size = f"{LONGEST_LINE / 1e6:,.0f} MB"
            raise HeadwaterError(f"Line {number} of {_quote_name(file)} is longer than {size}; split that document.")
        yield line


def _bad_line(file: Path, number: int, error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    text = "it is nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return HeadwaterError(f"{_quote_name(file)} cannot be read as {table_kind(file)}: line {number}: {text[:300]}")


def csv_rows(stream: IO[bytes], file: Path, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row); the first line names the columns."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
    lines = _read_lines(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), file)
    delimiter = DELIMITERS[table_kind(file) or "csv"]
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        columns.add_names(names)
        if twice := next((name for name in columns.find_columns(names) if names.count(name) > 1), None):
            raise HeadwaterError(f"{_quote_name(file)} has two columns {twice!r}; rename one of them.")
        for number, cells in enumerate(reader, 1):
            extra = cells.pop(None, [])
            row = {name: cell for name, cell in cells.items() if cell is not None}
            if extra:
                raise HeadwaterError(
                    f"Line {reader.line_num} of {_quote_name(file)} has {len(names) + len(extra)} fields, and the "
                    f"first line names {len(names)} columns; quote text that contains {delimiter!r} or line breaks."
                )
            *_, last = row.values()
            if MARK in row.get(names[0], "") and last.strip().endswith(names[-1]):
                raise HeadwaterError(
                    f"Line {reader.line_num} of {_quote_name(file)} names the columns again; join files without their "
                    "first lines and byte order marks."
                )
            yield number, row
    except csv.Error as error:
        raise _bad_line(file, reader.reader.line_num, error) from error


def parquet_tables(stream: IO[bytes], columns: Columns) -> Iterator[Any]:
    """Read the tables of a file; not with datasets, which loads whole row groups, which can be as large as the file."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(stream, pre_buffer=False, buffer_size=2**20) as table:
        schema = table.schema_arrow
        columns.add_names(schema.empty_table().flatten().column_names)  # and the fields inside them
        names = columns.find_columns(schema.names)
        # Do not read the metadata of columns: if it is damaged, pyarrow 26 ends the process.
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        size = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        rows = max(1, min(ROWS, MOST_ROWS // max(1, size)))
        # Read some column anyway, because rows without the requested ones still count.
        yield from table.iter_batches(batch_size=rows, columns=names or schema.names[:1])


def rows_of_tables(tables: Iterable[Any], columns: Columns, file: Path) -> Iterator[TableRow]:
    """Yield the rows of Arrow tables."""
    where = escape_name(str(file))
    try:
        for table in tables:
            columns.add_names(table.schema.empty_table().flatten().column_names)
            for row in table.select(columns.find_columns(table.schema.names)).to_pylist():
                yield columns.read_cells(row, where)
    except HeadwaterError:
        raise
    except Exception as error:  # readers of parquet and of the network can raise anything
        raise describe_unreadable(file, error) from error
