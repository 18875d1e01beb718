"""From a source to documents: files, folders, globs, JSONL, parquet, Hugging Face datasets, the standard library.

A document has an id and a text. Which documents are held out is decided by a hash, never by position: of the file's
relative path where a document is a file, of the text where it is a row of a table or a piece of a long file.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError
from headwater.hub import check_reachable

STDLIB, TOPICS = "python-stdlib", "python-topics"
TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
PACKED = {".gz", ".zst", ".bz2", ".xz"}
# A corpus of fewer files than this is cut into pieces, so that some can be held out.
FEW_FILES = 20
PIECE = 16_384


@dataclass(frozen=True)
class Document:
    """id: what names it in records; key: what its split is hashed from."""

    id: str
    text: str
    key: str

    def fraction(self, purpose: str = "") -> float:
        """A number in [0, 1) that depends on the key (and what it is for) alone."""
        return int.from_bytes(hashlib.sha256((self.key + purpose).encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and the facts about them that a record keeps."""

    documents: list[Document]
    facts: dict[str, Any]


def read_corpus(source: str, text_column: str = "text") -> Corpus:
    """All documents of `source`. Raises `HeadwaterError` if there are none.

    source: "python-stdlib", its sources; "python-topics", the text of its language reference; a file, folder or glob of
        text, JSONL or parquet files; or a Hugging Face dataset ("name", "owner/name", either with ":split").
    text_column: the column (or JSON field) that holds the text.
    """
    skipped: list[str] = []
    if source == TOPICS:
        documents = list(topics())
    elif found := local_files(source):
        root, files = found
        documents = list(read_files(files, root, text_column, skipped))
    else:
        documents = list(_hub_documents(source, text_column))
    documents = [document for document in documents if document.text]
    if not documents:
        tail = f": none of its {len(skipped)} files is UTF-8 text" if skipped else ", or only empty files"
        raise HeadwaterError(f"There is no text in {source!r}{tail}; give a file or folder with text.")
    if len({document.key for document in documents}) < FEW_FILES:
        documents = [piece for document in documents for piece in pieces(document)]

    content = hashlib.sha256()
    for document in documents:
        content.update(f"{document.id}\0{hashlib.sha256(document.text.encode()).hexdigest()}\n".encode())
    facts = {
        "source": source,
        "documents": len(documents),
        "bytes": sum(len(document.text.encode()) for document in documents),
        "sha256": content.hexdigest(),
        "skipped_not_utf8": len(skipped),
    }
    if source in (STDLIB, TOPICS):
        facts["python"] = platform.python_version()
    return Corpus(documents, facts)


def read_files(files: Iterable[Path], root: Path, text_column: str, skipped: list[str]) -> Iterator[Document]:
    """The documents of local files; files that are not UTF-8 text are named in `skipped`."""
    for file in files:
        relative = file.relative_to(root).as_posix()
        if kind := table_kind(file):
            for index, text in enumerate(_table(kind, file, text_column)):
                yield Document(f"{relative}:{index}", text, key=text)
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(relative)
            continue
        if "\0" in text:  # valid UTF-8, but no text
            skipped.append(relative)
            continue
        yield Document(relative, text, key=relative)


def table_kind(file: Path) -> str | None:
    """The kind of table that a file's name promises, packed or not; None for text."""
    name = file.with_suffix("") if file.suffix in PACKED else file
    return TABLES.get(name.suffix)


def _stdlib_files(root: Path) -> list[Path]:
    """The standard library's own sources: no installed packages, no tests, no generated tables."""
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}

    def wanted(file: Path) -> bool:
        parts = file.relative_to(root).parts
        if unwanted.intersection(parts) or file.name.startswith("_sysconfigdata"):
            return False
        return parts[0] != "encodings" or b"gencodec" not in file.read_bytes()

    return sorted(file for file in root.rglob("*.py") if file.is_file() and wanted(file))


def topics() -> Iterator[Document]:
    """The language reference that `help()` reads from, a document for each topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise HeadwaterError(
            "This Python comes without pydoc_data, which python-topics reads; use another one, or another source."
        ) from None
    for name, text in sorted(topics.items()):
        yield Document(f"{name}.rst", text, key=name)


def local_files(source: str) -> tuple[Path, list[Path]] | None:
    """The folder that names are relative to, and the files; None if `source` looks like the name of a dataset."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return root, _stdlib_files(root)
    path = Path(source).expanduser()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise HeadwaterError(f"The folder {source!r} holds no files.")
        return path, files
    if glob.has_magic(source):
        files = sorted(file for name in glob.glob(str(path), recursive=True) if (file := Path(name)).is_file())
        if not files:
            raise HeadwaterError(f"No file matches {source!r}.")
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        return Path(*fixed), files
    # A dataset is called "name" or "owner/name"; whatever else this is, it is a path with nothing there.
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or re.fullmatch(r"\.[A-Za-z]\w{0,7}", path.suffix):
        raise HeadwaterError(f"There is no file or folder {source!r}.")
    return None


def _table(kind: str, file: Path, text_column: str) -> Iterator[str]:
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        rows = load_dataset(kind, data_files=str(file), split="train")
    except (DatasetGenerationError, ValueError, OSError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise HeadwaterError(f"{str(file)!r} cannot be read as {file.suffix[1:]}: {cause}") from error
    yield from _column(rows, text_column, str(file))


def _hub_documents(source: str, text_column: str) -> Iterator[Document]:
    from datasets import load_dataset

    name, _, split = source.partition(":")
    check_reachable("dataset", name)
    try:
        rows = load_dataset(name, split=split or "train")
    except Exception as error:  # the many ways a download or a dataset's own layout can fail
        raise HeadwaterError(f"The dataset {name!r} could not be loaded: {str(error).splitlines()[0]}") from error
    for index, text in enumerate(_column(rows, text_column, source)):
        yield Document(f"{source}:{index}", text, key=text)


def _column(rows: Any, text_column: str, where: str) -> Iterator[str]:
    if text_column not in rows.column_names:
        raise HeadwaterError(
            f"{where!r} has no column {text_column!r}; set data.text_column to one of: {', '.join(rows.column_names)}."
        )
    for text in rows[text_column]:
        if text is not None and not isinstance(text, str):
            raise HeadwaterError(f"Column {text_column!r} of {where!r} holds {type(text).__name__}, not text.")
        yield text or ""


def pieces(document: Document) -> Iterator[Document]:
    """A long document cut at line ends into pieces of about `PIECE` characters, each with a key of its own."""
    start, count = 0, 0
    text = document.text
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        piece = text[start:end]
        yield Document(f"{document.id}#{count}", piece, key=piece)
        start, count = end, count + 1
