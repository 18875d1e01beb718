"""Documents of a source, in order: one after another in bounded memory for a corpus on disk, or all of them."""

import hashlib
import itertools
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from headwater.util.errors import HeadwaterError
from headwater_lab.data import corpus, reading
from headwater_lab.data.corpus import Document
from headwater_lab.data.tokenizer import LONGEST, part_end

# Maximum bytes to read to find out whether a corpus has fewer than FEW_FILES documents.
FEW_BYTES = 2**26


@dataclass(frozen=True)
class TextSource:
    """A source, and how to split it into documents."""

    source: str
    """A file, folder or glob of text, JSONL, CSV or parquet files, compressed or not; a Hugging Face dataset ("name",
    "owner/name", either with ":split"); "python-stdlib", its sources; "python-topics", the text of Python's language
    reference; "python-docs", that and the docstrings of the sources."""
    text_column: str = reading.DEFAULT
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


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and the facts about them in a record."""

    documents: list[Document]
    facts: dict[str, Any]


def read_corpus(source: str, text_column: str = reading.DEFAULT) -> Corpus:
    """Read all documents of a source, described as in `TextSource`. Raises `HeadwaterError` if there are none."""
    stream = Stream(TextSource(source), reading.Columns(text_column, option="data.text_column"))
    documents = list(stream)
    if not documents:
        raise corpus.no_text(source, stream.skipped)
    content = hashlib.sha256()
    for document in documents:
        content.update(f"{document.id}\0{hashlib.sha256(document.data).hexdigest()}\n".encode())
    facts: dict[str, Any] = {
        "source": source,
        "documents": len(documents),
        "bytes": sum(len(document.data) for document in documents),
        "sha256": content.hexdigest(),
        "skipped_not_utf8": len(stream.skipped),
        "skipped_without_text": stream.empty + stream.none,
    }
    if source == corpus.STDLIB or source in corpus.GENERATED:
        facts["python"] = platform.python_version()
    if stream.shards is not None:
        facts["dataset"] = source.partition(":")[0]  # its name on the hub
    return Corpus(documents, facts)


def read_documents(source: str, column: str, option: str | None) -> tuple[list[Document], list[str]]:
    """Return (the documents of a source, described as in `TextSource`, uncut; the names of files that are not text).

    option: that sets the column of tables, if one does. Raises `HeadwaterError` if there are none.
    """
    stream = Stream(TextSource(source), reading.Columns(column, option=option))
    documents = list(stream.iterate_documents())
    if not documents:
        raise corpus.no_text(source, stream.skipped)
    return documents, stream.skipped


class Stream:
    """An iterator over the documents of `source` that counts what it skips. Raises `HeadwaterError`.

    columns: to read a dataset whole, with these; default: stream it, after checking the options of the source.
    empty: documents without text. none: rows without one. skipped: names of the files that are not text.
    """

    def __init__(self, source: TextSource, columns: reading.Columns | None = None) -> None:
        if columns is None:
            _check_options(source)
        self.source, self.begins = source, re.compile(source.begins or "")
        self.empty = self.none = 0
        self.skipped: list[str] = []
        self.generate = corpus.GENERATED.get(source.source)
        local = (Path(), []) if self.generate else corpus.local_files(source.source)
        self.root, self.files = local or (Path(), [])
        self.shards: list[Any] | None = None
        if not local:
            rows = corpus.load_hub_rows(source.source, source.config, source.split, streaming=columns is None)
            count = rows.num_shards if columns is None else 1
            self.shards = [rows.shard(num_shards=count, index=index) for index in range(count)]
        self.names = [corpus.name_in(file, self.root) for file in self.files]
        self.marked = bool(source.separator or source.begins)
        self.columns = columns or reading.Columns(source.text_column, source.by)
        self.kinds = set[bool]()

    @property
    def fingerprint(self) -> list[Any]:
        """Return names, sizes and times of the files, or the dataset's shards, which must not change meanwhile."""
        if self.shards is not None:
            return [len(self.shards)]
        return fingerprint_files(self.names, self.files)

    def __iter__(self) -> Iterator[Document]:
        has_few_texts = 0 < len(self.files) < corpus.FEW_FILES and not any(map(reading.table_kind, self.files))
        cuts_texts = has_few_texts and not self.marked
        # A text that would be a single piece stays whole here, and is cut more finely later.
        cuts_texts = cuts_texts and len(list(itertools.islice(self.iterate_documents(True), 2))) > 1
        documents = self.iterate_documents(cuts_texts)
        if self.marked or cuts_texts:
            yield from documents
            return

        # Read enough documents to know whether there are FEW_FILES.
        first_documents: list[Document] = []
        keys: set[int] = set()
        size = 0
        for document in documents:
            first_documents.append(document)
            keys.add(hash(document.key))
            size += len(document.data)
            if len(keys) >= corpus.FEW_FILES or size > FEW_BYTES:
                yield from first_documents
                del first_documents
                yield from documents
                return
        yield from corpus.cut_documents(first_documents)

    def iterate_documents(self, cuts_texts: bool = False) -> Iterator[Document]:
        """Yield the documents in file order, uncut. cuts_texts: cut text files into pieces."""
        self.empty = self.none = self.columns.rows = 0
        self.skipped = []
        if self.generate:
            yield from self.generate()
        if self.shards is not None:
            numbers = itertools.count()  # across shards
            for shard in self.shards:
                tables = shard.with_format("arrow").iter(batch_size=reading.ROWS)
                rows = reading.rows_of_tables(tables, self.columns, Path(self.source.source))
                yield from self._read_rows(rows, self.source.source, numbers)
        for file, name in zip(self.files, self.names, strict=True):
            if reading.table_kind(file):
                yield from self._read_rows(reading.table_rows(file, self.columns), name, itertools.count())
            elif reading.is_text(file):
                with reading.open_text(file) as text:
                    yield from self._read_text(text, name, cuts_texts)
            else:
                self.skipped.append(name)
        self.columns.check_missing(self.source.source)

    def _read_rows(self, rows: Iterator[reading.TableRow], name: str, numbers: Iterator[int]) -> Iterator[Document]:
        """Yield the documents of rows, which take the next of the numbers."""
        gathered: list[Document] = []
        for (value, domain), index in zip(rows, numbers, strict=False):
            document = corpus.row_document(value, self.columns.text, name, index, domain)
            if document.text:
                self.kinds.add(document.is_chat)
                if len(self.kinds) > 1:
                    raise HeadwaterError(
                        f"{self.source.source!r} has both conversations and plain text; prepare them separately, "
                        "and mix the folders by weight."
                    )
            if self.source.begins:
                if gathered and self.begins.match(document.text):
                    yield _join_rows(gathered)
                    gathered = []
                gathered.append(document)
            elif document.text:
                yield document
            elif isinstance(value, str) or value == []:
                self.empty += 1
            else:
                self.none += 1
        if gathered:
            yield _join_rows(gathered)

    def _read_text(self, text: IO[str], name: str, in_pieces: bool) -> Iterator[Document]:
        """Yield the documents of a text file: the text between two marks, pieces of it, or the whole file."""
        contents: Iterable[str]
        chunks = iter(partial(text.read, reading.CHUNK), "")
        if self.marked:
            groups = itertools.groupby(self._numbered_lines(text), key=itemgetter(0))
            contents = (_gather_text((line for _, line in lines), name) for _, lines in groups)
        else:
            contents = corpus.cut_text(chunks) if in_pieces else [_gather_text(chunks, name)]
        index, is_empty = 0, True
        for content in contents:
            is_empty = False
            if not content:  # no text before the first mark, or in the file
                self.empty += 1
            elif in_pieces or self.marked:
                key = content[: part_end(content, 0)] if len(content) > LONGEST else content
                yield Document(f"{name}#{index}", content, key)
                index += 1
            else:
                yield Document(name, content, name)
        self.empty += is_empty

    def _numbered_lines(self, text: IO[str]) -> Iterator[tuple[int, str]]:
        """Yield (number of its document, line) for a text with marks; an empty line stands for each separator."""
        separator = self.source.separator
        number, is_start, is_first = 0, True, True
        for line in iter(partial(text.readline, LONGEST), ""):
            if separator is None:
                number += bool(is_start and not is_first and self.begins.match(line))
                yield number, line
            elif is_start and line.removesuffix("\n").removesuffix("\r") == separator:
                yield number, ""
                number += 1
            else:
                yield number, line
            is_start, is_first = line.endswith("\n"), False


def fingerprint_files(names: Sequence[str], files: Sequence[Path]) -> list[Any]:
    """Return names, sizes and times of files. Raises `HeadwaterError` if one is gone."""
    try:
        states = [file.stat() for file in files]
    except OSError as error:
        raise reading.describe_unreadable(Path(error.filename), error) from error
    return [[name, state.st_size, state.st_mtime_ns] for name, state in zip(names, states, strict=True)]


def _join_rows(rows: list[Document]) -> Document:
    """Join rows to a document; a row without text becomes the empty line that it was in the file."""
    text = "".join(row.text or " \n" for row in rows)
    return replace(rows[0], text=text, key=text)


def _gather_text(contents: Iterable[str], name: str) -> str:
    """Join contents to a document. Raises `HeadwaterError` if it is longer than LONGEST_LINE."""
    gathered: list[str] = []
    size = 0
    for content in contents:
        gathered.append(content)
        size += len(content)
        if size > reading.LONGEST_LINE:
            raise HeadwaterError(
                f"A document in {name!r} is longer than {reading.LONGEST_LINE / 1e6:,.0f} MB; split that file, or "
                "mark where its documents begin with `headwater data prepare --separator` or --begins."
            )
    return "".join(gathered)


def _check_options(source: TextSource) -> None:
    """Raise `HeadwaterError` for an option that is invalid, or has no effect on this source."""
    if source.separator is not None and (not source.separator or "\n" in source.separator):
        raise HeadwaterError("--separator is empty or has several lines; pass the line that separates documents.")
    try:
        re.compile(source.begins or "")
    except re.error as error:
        raise HeadwaterError(f"--begins {source.begins!r} is not a valid regular expression: {error}.") from error
    kinds = corpus.kinds_in(source.source)
    options = {
        "--separator": (source.separator, "text files"),
        "--by": (source.by, "tables"),
        "--text-column": (source.text_column if source.text_column != reading.DEFAULT else None, "tables"),
        "--config": (source.config, "datasets on the hub"),
        "--split": (source.split, "datasets on the hub"),
    }
    for option, (value, kind) in options.items():
        if value is not None and kind not in kinds:
            raise HeadwaterError(f"{option} is for {kind}, and {source.source!r} has none; leave it out.")
