"""A corpus as a stream: the documents of `read_corpus` one after another, in bounded memory.

Files and shards are read in order. A document longer than `LONGEST` characters comes in parts, cut where a line ends.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from headwater_lab.data.corpus import (
    FEW_FILES,
    PIECE,
    Document,
    check_one_kind,
    cut,
    load_hub_rows,
    local_files,
    name_in,
    piece_end,
    row_document,
)
from headwater_lab.data.reading import (
    CHUNK,
    ROWS,
    Columns,
    TableRow,
    encoded,
    is_text,
    opened_text,
    rows_of_tables,
    table_kind,
    table_rows,
    unreadable,
)

# Characters in a part of a long document: at least PART, at most LONGEST.
PART = 2**18
LONGEST = 2 * PART
# Bytes to read at most to find out whether a corpus has fewer than FEW_FILES documents.
FEW_BYTES = 2**26


@dataclass(frozen=True)
class TextSource:
    """What to read, and how to split it into documents."""

    source: str
    """As for `read_corpus`."""
    text_column: str = "text"
    config: str | None = None
    """The configuration of a dataset on the hub."""
    split: str | None = None
    """Its split; default train."""
    separator: str | None = None
    """The line that separates documents of a text file."""
    begins: str | None = None
    """A regular expression for the line of a text file, or the row of a table, that begins a document."""
    by: str | None = None
    """The column, dotted if nested, with the name of a document's domain."""

    @property
    def columns(self) -> Columns:
        return Columns(self.text_column, self.by)


class Stream:
    """Iterates over the parts of `source`, and counts what it skips. Raises `HeadwaterError`.

    empty: documents without text. none: rows without one. skipped: names of the files that are not text.
    """

    def __init__(self, source: TextSource) -> None:
        self.source = source
        self.empty = self.none = 0
        self.skipped: list[str] = []
        found = local_files(source.source)
        self.root, self.files = found or (Path(), [])
        self.shards = None if found else _hub_shards(source)
        self.names = [name_in(file, self.root) for file in self.files]
        texts = [file for file in self.files if not table_kind(file)]
        self.marked = bool(source.separator or source.begins)
        self.few_texts = bool(texts) and len(texts) == len(self.files) < FEW_FILES
        self.columns = source.columns
        self.kinds = set[bool]()

    @property
    def fingerprint(self) -> list[Any]:
        """Names, sizes and times of the files, or the dataset's shards, which must not change in between."""
        if self.shards is not None:
            return [len(self.shards)]
        try:
            states = [file.stat() for file in self.files]
        except OSError as error:
            raise unreadable(Path(error.filename), error) from error
        return [[name, state.st_size, state.st_mtime_ns] for name, state in zip(self.names, states, strict=True)]

    def __iter__(self) -> Iterator[Document]:
        if self.few_texts and not self.marked:
            # A text that would be one piece is cut smaller, as a whole.
            self.few_texts = len(list(itertools.islice(self._documents(), 2))) > 1
        documents = self._documents()
        if self.marked or self.few_texts:
            yield from documents
            return

        # Enough documents to tell whether there are FEW_FILES.
        first_parts: list[Document] = []
        keys: set[int] = set()
        size = 0
        for part in documents:
            first_parts.append(part)
            keys.add(hash(part.key))
            size += len(part.data)
            if len(keys) >= FEW_FILES or size > FEW_BYTES:
                yield from first_parts
                del first_parts
                yield from documents
                return
        yield from cut(_joined(first_parts))

    def _documents(self) -> Iterator[Document]:
        """The parts in file order."""
        self.empty, self.none, self.skipped = 0, 0, []
        if self.shards is not None:
            begin = 0  # rows are numbered across shards
            for shard in self.shards:
                tables = shard.with_format("arrow").iter(batch_size=ROWS)
                rows = rows_of_tables(tables, self.columns, Path(self.source.source))
                begin = yield from self._rows(rows, self.source.source, begin)
        for file, name in zip(self.files, self.names, strict=True):
            if table_kind(file):
                yield from self._rows(table_rows(file, self.columns), name)
            elif is_text(file):
                yield from self._text(file, name)
            else:
                self.skipped.append(name)
        self.columns.require(self.source.source)

    def _rows(self, rows: Iterator[TableRow], name: str, begin: int = 0) -> Generator[Document, None, int]:
        """The documents of rows that are numbered from `begin` on; the result is the number after the last."""
        begins = self.source.begins and re.compile(self.source.begins)
        gathered: list[str] = []
        first, owner = begin, None
        index = begin
        for value, domain in rows:
            document = row_document(value, self.source.text_column, name, name, index)
            text = document.text
            if text:
                self.kinds.add(document.is_chat)
                check_one_kind(self.source.source, self.kinds)
            if not begins:
                if text:
                    yield from self._parts(f"{name}:{index}", text, domain, document.is_chat)
                elif isinstance(value, str) or value == []:
                    self.empty += 1
                else:
                    self.none += 1
                index += 1
                continue
            if re.match(begins, text) and gathered:
                yield from self._parts(f"{name}:{first}", "".join(gathered), owner)
                gathered = []
            if not gathered:
                first, owner = index, domain
            gathered.append(text or " \n")  # an empty line, as it stood in the file
            index += 1
        if gathered:
            yield from self._parts(f"{name}:{first}", "".join(gathered), owner)
        return index

    def _parts(self, name: str, text: str, domain: str | None, is_chat: bool = False) -> Iterator[Document]:
        """A document in memory."""
        encoded(text, name)  # raises an error for what UTF-8 cannot encode
        if len(text) <= LONGEST or is_chat:
            yield Document(name, text, text, is_chat, domain)
            return
        start = 0
        while start < len(text):
            end = _part_end(text, start) if len(text) - start > LONGEST else len(text)
            part = text[start:end]
            yield Document(name, part, text, False, domain, start == 0, end == len(text))
            start = end

    def _text(self, file: Path, name: str) -> Iterator[Document]:
        """The documents of a text file: pieces of it, the text between two marks, or the whole file."""
        whole = not self.marked and not self.few_texts
        border = self._border()
        index = 0
        with opened_text(file) as stream:
            text = _Window(stream)
            first, key = True, ""
            while True:
                end, following = border(text)
                known = end >= 0
                if not known:
                    end = following = len(text.buffer)
                length = end - text.start
                if length > LONGEST and (known or text.ended or length > LONGEST + PIECE):
                    end = following = _part_end(text.buffer, text.start)
                    length, last = end - text.start, False
                elif known or text.ended:
                    last = True
                else:
                    text.read()
                    continue
                part = text.buffer[text.start : end]
                text.start = following
                if first:
                    key = name if whole else part
                if part or not first:
                    label = name if whole else f"{name}#{index}"
                    yield Document(label, part, key, first=first, last=last)
                    index += last
                elif known or index == 0:  # nothing before a mark, or in the file
                    self.empty += 1
                first = last
                if last and text.ended and text.start == len(text.buffer):
                    return

    def _border(self) -> Callable[[_Window], tuple[int, int]]:
        """A function that finds where the window's first document ends and the next begins; -1 if not in the window."""
        separator, begins = self.source.separator, self.source.begins
        if separator is not None:
            line = re.compile(rf"^{re.escape(separator)}\r?(?:\n|\Z)", re.MULTILINE)
        elif begins is not None:
            line = re.compile(begins, re.MULTILINE)
        elif self.few_texts:
            return lambda text: (end := piece_end(text.buffer, text.start, text.ended), end)
        else:
            return lambda text: (-1, -1)

        def find(text: _Window) -> tuple[int, int]:
            # A line that is not read to its end may continue.
            complete = len(text.buffer) if text.ended else text.buffer.rfind("\n", text.start) + 1
            start = max(text.start if separator is not None else text.start + 1, text.sought)
            # `^` must look at the character before: the slice begins at a line's start only.
            found = line.search(text.buffer, start, complete) if start < complete else None
            if found is None:
                text.sought = max(text.sought, complete)
                return -1, -1
            text.sought = found.start()
            return found.start(), found.end() if separator is not None else found.start()

        return find


class _Window:
    """Decoded text of a file; the unused part starts at `start`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.buffer, self.start, self.ended = "", 0, False
        # No border begins before this.
        self.sought = 0

    def read(self) -> None:
        data = self.stream.read(CHUNK)
        self.ended = not data
        # One character before the start is kept, for `^`.
        cut = max(0, self.start - 1)
        self.buffer = self.buffer[cut:] + self.decoder.decode(data, final=self.ended)
        self.start -= cut
        self.sought = max(0, self.sought - cut)


def _part_end(text: str, start: int) -> int:
    """Where to cut a document so that byte-level BPE gives the same tokens: a line end between two that are not blank.

    Else the first line end from PART characters on, else the first space, else after LONGEST characters.
    """
    if found := re.compile(r"(?<=\S)\n(?=\S)").search(text, start + PART, start + LONGEST):
        return found.end()
    if (end := text.find("\n", start + PART, start + LONGEST)) >= 0:
        return end + 1
    if (end := text.find(" ", start + PART, start + LONGEST)) >= 0:
        return end
    return start + LONGEST


def _joined(parts: list[Document]) -> Iterator[Document]:
    """The documents of which these are the parts."""
    for _, group in itertools.groupby(parts, key=lambda part: part.id):
        first, *others = group
        yield replace(first, text="".join([first.text, *(part.text for part in others)]), last=True)


def _hub_shards(source: TextSource) -> list[Any]:
    rows = load_hub_rows(source.source, source.config, source.split, streaming=True)
    return [rows.shard(num_shards=rows.num_shards, index=index) for index in range(rows.num_shards)]
