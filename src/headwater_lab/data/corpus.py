"""Documents and their sources: files, folders, globs, Hugging Face datasets, the standard library.

A document has an id and a text. Which documents are held out is decided by a hash, never by position: a hash of the
file's relative path if a document is a file, of the text if it is a row of a table or a piece of a long file.
"""

import ast
import fnmatch
import glob
import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.plugins.trust import check_link
from headwater.util.errors import HeadwaterError, first_line
from headwater.util.files import explain_absence
from headwater.util.hub import check_reachable, is_path
from headwater_lab.data.chat import content_of
from headwater_lab.data.reading import DEFAULT, MARK, encode_text, escape_name, local_path, table_kind

STDLIB, TOPICS, DOCS = "python-stdlib", "python-topics", "python-docs"
# A corpus with fewer files than this is cut into pieces, so that some can be held out.
FEW_FILES = 20
# Characters in a piece: at least PIECE, at most LONGEST_PIECE, less than `tokenizer.LONGEST`.
PIECE = 16_384
# Number of pieces for a text that would otherwise be a single one, and their minimum characters.
FEW_PIECES, SHORTEST_PIECE = 10, 16
LONGEST_PIECE = 4 * PIECE
NO_IDS = np.empty(0, np.uint32)


@dataclass(frozen=True)
class Document:
    """A document.

    id: its name in records. key: the text or path that is hashed for the split; of a long document within a text file,
    its first part. is_chat: its text is a conversation in JSON, see `headwater_lab.data.chat`. domain: the value of the
    column that a corpus is split by. ids: its tokens, if the source has them; special: how many of
    these the text leaves out. is_held_out: what the source states.
    """

    id: str
    text: str
    key: str
    is_chat: bool = False
    domain: str | None = None
    ids: np.ndarray = field(default_factory=lambda: NO_IDS, compare=False)
    special: int = 0
    is_held_out: bool | None = None

    @property
    def data(self) -> bytes:
        """The text in UTF-8."""
        return self.text.encode()

    def hash_fraction(self, purpose: str = "") -> float:
        """A number in [0, 1) that depends only on the key (and its purpose)."""
        return int.from_bytes(hashlib.sha256((self.key + purpose).encode()).digest()[:8], "big") / 2**64


def check_column_is_read(column: str, sources: Sequence[str], option: str) -> None:
    """Raise `HeadwaterError` if a column other than the default is set and no source is a table. option: its name."""
    if column != DEFAULT and sources and not any("tables" in kinds_in(source) for source in sources):
        raise HeadwaterError(f"{option} is for tables, and {sources[0]!r} has none; leave it out.")


def kinds_in(source: str) -> set[str]:
    """List the kinds of content in a source: tables, text files, datasets on the hub (whose rows are tables)."""
    if source in GENERATED:
        return {"text files"}
    if (local := local_files(source)) is None:
        return {"tables", "datasets on the hub"}
    return {"tables" if table_kind(file) else "text files" for file in local[1]}


def no_text(source: str, skipped: list[str]) -> HeadwaterError:
    """Make the error for a source without documents. skipped: the names of its files that are not text."""
    tail = f": none of its {len(skipped)} files is UTF-8 text" if skipped else ", or only empty documents"
    return HeadwaterError(f"There is no text in {source!r}{tail}; name a file or folder with text.")


def too_short(source: str, content: str) -> HeadwaterError:
    """Make the error for a source with fewer than two texts. content: its description."""
    return HeadwaterError(f"{source!r} is {content}, too short to hold out part of it; use more text.")


def name_in(file: Path, root: Path) -> str:
    """Return a file's name in records: its path below `root`."""
    return escape_name(file.relative_to(root).as_posix())


def row_document(value: Any, column: str, where: str, row: int, domain: str | None = None) -> Document:
    """Make a row's document, without text if the row has none. Raises `HeadwaterError` if the value is not text."""
    text, is_chat = content_of(value, column, where, row) or ("", False)
    text = text.removeprefix(MARK)
    encode_text(text, name := f"{where}:{row}")
    return Document(name, text, text, is_chat, domain)


def _stdlib_files(root: Path) -> list[Path]:
    """List the standard library's own sources: no installed packages, no tests, no generated tables."""
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}

    def is_wanted(file: Path) -> bool:
        names = file.relative_to(root).parts
        if unwanted.intersection(names) or file.name.startswith("_sysconfigdata"):
            return False
        return names[0] != "encodings" or b"gencodec" not in file.read_bytes()

    return sorted(file for file in root.rglob("*.py") if file.is_file() and is_wanted(file))


def read_topics() -> Iterator[Document]:
    """The language reference that `help()` reads from, a document for each topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise HeadwaterError("This Python has no pydoc_data, which python-topics reads; use another source.") from None
    for name, text in sorted(topics.items()):
        yield Document(f"{name}.rst", text, key=name)


def read_docstrings() -> Iterator[Document]:
    """Read English text: the standard library's docstrings, a document for each file, and the language reference."""
    root = Path(sysconfig.get_path("stdlib"))
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in _stdlib_files(root):
        nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, described)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        if text:
            relative = name_in(file, root)
            yield Document(relative, text + "\n", key=relative)
    yield from read_topics()


# Corpora that are made from Python itself.
GENERATED = {TOPICS: read_topics, DOCS: read_docstrings}


def local_files(source: str) -> tuple[Path, list[Path]] | None:
    """List (the folder that names are relative to, its files); None if `source` looks like a dataset's name.

    Raises `HeadwaterError` if there are none, and for a link out of the folder that the user does not trust.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return root, _stdlib_files(root)
    path = local_path(source)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        hidden = re.compile(r"(.*/)?\.")
        files = [file for file in _walk_folder(path) if not hidden.match(file.relative_to(path).as_posix())]
        if not files:
            raise HeadwaterError(f"The folder {source!r} holds no files.")
        for file in files:
            if file.is_symlink():  # no folder above it is a link
                check_link(file, path)
        return path, files
    if path.exists():
        raise HeadwaterError(f"{source!r} is not a regular file; save its contents to a file first.")
    if glob.has_magic(source):
        fixed = Path(*itertools.takewhile(lambda name: not glob.has_magic(name), path.parts))
        files = _match_files(fixed, path.parts[len(fixed.parts) :])
        if not files:
            raise HeadwaterError(f"No file matches {source!r}.")
        return fixed, files
    if is_path(source) or re.fullmatch(r"\.[A-Za-z]\w{0,7}", path.suffix):
        raise HeadwaterError(f"{explain_absence(path)}.")
    return None


def _walk_folder(folder: Path) -> list[Path]:
    """List all regular files below a folder, sorted. Links to folders are not followed: they may form loops."""

    def refuse(error: OSError) -> None:
        raise HeadwaterError(f"The folder {error.filename!r} cannot be read: {error.strerror}.") from error

    paths = (Path(where) / name for where, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(file for file in paths if _is_regular(file, folder))


def _is_regular(file: Path, root: Path) -> bool:
    """Whether it is a regular file. Raises `HeadwaterError` for a link to nothing below `root`, unless it is hidden."""
    if file.is_symlink() and not any(name.startswith(".") for name in file.relative_to(root).parts):
        with suppress(OSError):  # links that form a loop
            try:
                file.stat()
            except FileNotFoundError as error:
                raise HeadwaterError(
                    f"{str(file)!r} is a link to {os.readlink(file)!r}, which does not exist; copy that, or remove the "
                    "link."
                ) from error
    return file.is_file()


def _match_files(root: Path, pattern: tuple[str, ...]) -> list[Path]:
    """List the regular files below `root` that match a shell pattern. `**` does not follow links either."""
    cut = pattern.index("**") if "**" in pattern else len(pattern)
    names = glob.glob(str(Path(*pattern[:cut])), root_dir=root) if cut else [""]
    paths = [root / name for name in names]
    if cut < len(pattern):
        paths = [
            file
            for folder in paths
            for file in (_walk_folder(folder) if folder.is_dir() else [])
            if _fits_pattern(file.relative_to(folder).parts, pattern[cut:])
        ]
    return sorted(file for file in set(paths) if _is_regular(file, root))


def _fits_pattern(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the parts of a path match the parts of a pattern; hidden names must be matched explicitly."""
    if not names or not pattern:
        return not names and not pattern
    head, *tail = pattern
    if head == "**":
        inside = not names[0].startswith(".") and (_fits_pattern(names[1:], pattern) or (len(names) == 1 and not tail))
        return inside or _fits_pattern(names, tuple(tail))
    dotted = names[0].startswith(".") and not head.startswith(".")
    return not dotted and fnmatch.fnmatchcase(names[0], head) and _fits_pattern(names[1:], tuple(tail))


def load_hub_rows(source: str, config: str | None = None, split: str | None = None, streaming: bool = False) -> Any:
    """Load a dataset of the hub, "name" or "owner/name", either with ":split"; by default its split train."""
    from datasets import load_dataset

    name, _, named_split = source.partition(":")
    check_reachable("dataset", name)
    try:
        return load_dataset(name, config, split=split or named_split or "train", streaming=streaming)
    except Exception as error:  # downloads and dataset layouts fail in many ways
        raise HeadwaterError(f"The dataset {name!r} could not be loaded: {first_line(error)}") from error


def cut_documents(documents: Iterable[Document]) -> list[Document]:
    """Cut the documents of a small corpus so that some can be held out, more finely if there would be only one."""
    documents = list(documents)
    result = [piece for document in documents for piece in cut_document(document)]
    if len(result) == 1:
        result = list(cut_document(documents[0], max(SHORTEST_PIECE, len(documents[0].text) // FEW_PIECES)))
    return result


def cut_document(document: Document, size: int | None = None) -> Iterator[Document]:
    """Cut a document, but no chat, at line ends into pieces of about `size` (`PIECE`) characters, each its own key."""
    if document.is_chat:
        yield document
        return
    for count, piece in enumerate(cut_text([document.text], size)):
        yield Document(f"{document.id}#{count}", piece, key=piece, domain=document.domain)


def cut_text(contents: Iterable[str], size: int | None = None) -> Iterator[str]:
    """Cut a text, which is read from `contents` as needed, after a line end, else a space, else at the largest size."""
    size = size or PIECE
    longest = LONGEST_PIECE * size // PIECE
    text = ""
    for content in itertools.chain(contents, [""]):
        text, start = text + content, 0
        while len(text) - start >= (longest if content else 1):
            ends = (text.find(mark, start + size, start + longest) + 1 for mark in ("\n", " "))
            end = next(filter(None, ends), min(len(text), start + longest))
            yield text[start:end]
            start = end
        text = text[start:]
