"""A corpus as a stream: the documents of `read_corpus` one after another, in bounded memory.

Files and shards are read in order. A document longer than `LONGEST` characters comes in parts, cut where a line ends.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError
from headwater_lab.data.corpus import (
    FEW_FILES,
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
        if source.separator is not None and (not source.separator or "\n" in source.separator):
            raise HeadwaterError("--separator is empty or has several lines; pass the one between two documents.")
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
        begins = re.compile(self.source.begins) if self.source.begins else None
        gathered: list[Document] = []
        numbers = itertools.count(begin)
        for (value, domain), index in zip(rows, numbers, strict=False):
            document = row_document(value, self.source.text_column, name, name, index, domain)
            if document.text:
                self.kinds.add(document.is_chat)
                check_one_kind(self.source.source, self.kinds)
            if begins:
                if gathered and begins.match(document.text):
                    yield from _gathered_parts(gathered)
                    gathered = []
                gathered.append(document)
            elif document.text:
                yield from _document_parts(document)
            elif isinstance(value, str) or value == []:
                self.empty += 1
            else:
                self.none += 1
        if gathered:
            yield from _gathered_parts(gathered)
        return next(numbers)

    def _text(self, file: Path, name: str) -> Iterator[Document]:
        """The documents of a text file: pieces of it, the text between two marks, or the whole file."""
        whole = not self.marked and not self.few_texts
        with opened_text(file) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            parts: Iterator[tuple[str, bool]]
            if self.marked:
                documents = itertools.groupby(self._numbered_lines(text), key=itemgetter(0))
                parts = chain.from_iterable(_parts(line for _, line in lines) for _, lines in documents)
            else:
                contents = iter(partial(text.read, CHUNK), "")
                parts = _parts(contents) if whole else _small_pieces(contents)
            first, key, index, is_empty = True, name, 0, True
            for part, last in parts:
                is_empty = False
                key = part if first and not whole else key
                if part:
                    label = name if whole else f"{name}#{index}"
                    yield Document(label, part, key, first=first, last=last)
                    index += last
                else:  # nothing before a mark, or in the file
                    self.empty += 1
                first = last
            self.empty += is_empty

    def _numbered_lines(self, text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
        """(number of its document, line) of a text with marks; an empty line stands for each separator."""
        separator, begins = self.source.separator, re.compile(self.source.begins or "")
        number, is_start, is_first = 0, True, True
        for line in iter(partial(text.readline, LONGEST), ""):
            if separator is None:
                number += bool(is_start and not is_first and begins.match(line))
                yield number, line
            elif is_start and line.removesuffix("\n").removesuffix("\r") == separator:
                yield number, ""
                number += 1
            else:
                yield number, line
            is_start, is_first = line.endswith("\n"), False


def _gathered_parts(rows: list[Document]) -> Iterator[Document]:
    """The parts of a document that these rows are; one without text is an empty line, as it stood in the file."""
    text = "".join(row.text or " \n" for row in rows)
    return _document_parts(replace(rows[0], text=text, key=text))


def _document_parts(document: Document) -> Iterator[Document]:
    """The parts of a document in memory; a conversation stays whole."""
    first = True
    for part, last in [(document.text, True)] if document.is_chat else _parts([document.text]):
        yield replace(document, text=part, first=first, last=last)
        first = last


def _parts(contents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(part, whether it is the last) of a document with these contents."""
    text = ""
    for content in contents:
        text, start = text + content, 0
        while len(text) - start > LONGEST:
            end = _part_end(text, start)
            yield text[start:end], False
            start = end
        text = text[start:]
    yield text, True


def _small_pieces(contents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(piece, True) for each document that a text is cut into."""
    text = ""
    for content in chain(contents, [""]):
        text, start = text + content, 0
        while (end := piece_end(text, start, not content)) >= 0:
            yield text[start:end], True
            start = end
        text = text[start:]


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
