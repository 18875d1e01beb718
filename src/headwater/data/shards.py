"""Prepared folders: token shards that are memory-mapped, and the manifest that describes them. See docs/data.md."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from headwater.data.corpus import Document
from headwater.errors import HeadwaterError
from headwater.files import sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"
# Of a folder with one prepared folder per domain.
DOMAINS = "domains.json"
JOURNAL = "journal.json"
EVALUATION = "evaluation.jsonl"
TOKENIZER = "tokenizer"
FORMAT_VERSION = 1
SPLITS: tuple[Literal["train"], Literal["held_out"]] = ("train", "held_out")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ShardFacts(_Part):
    """One shard: `file`.tokens and `file`.borders."""

    file: str
    """Name of the token file."""
    tokens: int
    documents: int
    sha256: str
    borders_sha256: str

    @property
    def borders(self) -> str:
        """Name of the file with the start of each document."""
        return self.file.removesuffix(".tokens") + ".borders"


class SplitFacts(_Part):
    """One split."""

    documents: int
    bytes: int
    """Of text, in UTF-8."""
    tokens: int
    """With one separator per document."""
    shards: list[ShardFacts]


class TokenizerFacts(_Part):
    """The tokenizer that made the tokens; the folder holds a copy."""

    name: str
    sha256: str
    """Of its tokenizer.json."""
    vocabulary: int
    """Number of its tokens, added ones included."""


class Skipped(_Part):
    """What the source holds and the shards do not."""

    empty: int = 0
    """Documents without text."""
    none: int = 0
    """Rows without a text."""
    files: int = 0
    """Files that are not UTF-8 text."""
    names: list[str] = []
    """The first of those files, 20 at most."""


class EvaluationFacts(_Part):
    """evaluation.jsonl."""

    documents: int
    bytes: int
    """Of text, in UTF-8."""
    sha256: str


class Manifest(_Part):
    """What a prepared folder holds, and from what it was made."""

    format_version: Literal[1] = 1
    headwater: str
    """The version that made it."""
    source: str
    domain: str | None = None
    """The value of the column that the corpus was divided by."""
    settings: dict[str, Any]
    """Everything that decides the result."""
    tokenizer: TokenizerFacts
    separator: int
    """The token before each document."""
    dtype: Literal["uint16", "uint32"]
    """Of the token files, little-endian."""
    sha256: str
    """Of the documents' names and texts, as in the record of a run on the same source."""
    skipped: Skipped
    """In the whole source, whatever the domain."""
    train: SplitFacts
    held_out: SplitFacts
    evaluation: EvaluationFacts

    @property
    def documents(self) -> int:
        return self.train.documents + self.held_out.documents

    @property
    def bytes(self) -> int:
        return self.train.bytes + self.held_out.bytes

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


class Shards:
    """One split of a prepared folder as one stream of tokens, memory-mapped; a shard is opened when first read."""

    def __init__(self, folder: Path, facts: SplitFacts, dtype: np.dtype) -> None:
        self.folder, self.facts, self.dtype = folder, facts, dtype
        self.tokens, self.documents = facts.tokens, facts.documents
        # Where each shard begins in the stream, and the end.
        self.offsets = list(itertools.accumulate((shard.tokens for shard in facts.shards), initial=0))
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, in the folder's dtype; a view of the file where one shard has them."""
        parts = [self._shard(i)[0][a:b] for i, a, b in self._spans(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """The positions in [start, stop) at which a document begins, int64 and sorted."""
        found = [np.empty(0, np.int64)]
        for i, a, b in self._spans(start, stop):
            borders = self._shard(i)[1]
            low, high = np.searchsorted(borders, (a, b))
            found.append(borders[low:high].astype(np.int64) + self.offsets[i])
        return np.concatenate(found)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first, last + 1) for each shard that has some of [start, stop)."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"[{start}, {stop}) is not within {self.tokens} tokens")
        index = bisect.bisect_right(self.offsets, start) - 1
        while start < stop:
            end = min(stop, self.offsets[index + 1])
            yield index, start - self.offsets[index], end - self.offsets[index]
            start, index = end, index + 1

    def _shard(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index not in self._open:
            shard = self.facts.shards[index]
            self._open[index] = (
                np.memmap(self.folder / shard.file, dtype=self.dtype, mode="r"),
                np.memmap(self.folder / shard.borders, dtype="<i8", mode="r"),
            )
        return self._open[index]

    def __getstate__(self) -> dict[str, Any]:
        # A memory map sent to a worker process would be sent as a copy of the file.
        return self.__dict__ | {"_open": {}}


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    folder: Path
    manifest: Manifest
    train: Shards
    held_out: Shards

    def evaluation(self) -> list[Document]:
        """The documents kept as text to measure on, sorted by id."""
        with (self.folder / EVALUATION).open(encoding="utf-8", newline="\n") as lines:
            rows = [json.loads(line) for line in lines]
        return [Document(row["id"], row["text"], key=row["id"]) for row in rows]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's copy of the tokenizer."""
        from headwater.data.tokenizer import load_tokenizer

        return load_tokenizer(str(self.folder / TOKENIZER))


def open_prepared(folder: Path) -> Prepared:
    """Open a prepared folder; of its shards only the sizes are looked at.

    Raises `HeadwaterError` if it is not prepared or unfinished, or a file is missing or has the wrong size.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for file, size in _sizes(manifest):
        path = folder / file
        if not path.is_file():
            raise HeadwaterError(f"{str(path)!r} is missing; copy it again, or prepare the folder again.")
        if path.stat().st_size != size:
            raise HeadwaterError(
                f"{str(path)!r} has {path.stat().st_size} bytes, not {size}; copy it again, or prepare it again."
            )
    for name in (EVALUATION, f"{TOKENIZER}/tokenizer.json"):
        if not (folder / name).is_file():
            raise HeadwaterError(f"{str(folder / name)!r} is missing; copy it again, or prepare the folder again.")
    dtype = manifest.numpy_dtype
    return Prepared(folder, manifest, Shards(folder, manifest.train, dtype), Shards(folder, manifest.held_out, dtype))


def read_manifest(folder: Path) -> Manifest:
    """Raises `HeadwaterError` if there is none."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HeadwaterError(
            f"{str(folder / MANIFEST)!r} is not a manifest of format {FORMAT_VERSION}: {where}: {first['msg']}"
        ) from error
    if domains := read_domains(folder):
        names = ", ".join(str(folder / name) for name in list(domains)[:8]) + (", …" if len(domains) > 8 else "")
        raise HeadwaterError(f"{str(folder)!r} holds a prepared folder for each domain; name some of: {names}.")
    if (folder / JOURNAL).exists():
        raise HeadwaterError(f"{str(folder)!r} is not finished; run the same `headwater data prepare` again to go on.")
    if not folder.is_dir():
        raise HeadwaterError(f"There is no folder {str(folder)!r}; make it with `headwater data prepare`.")
    raise HeadwaterError(f"{str(folder)!r} has no {MANIFEST}; make it with `headwater data prepare`.")


def read_domains(folder: Path) -> dict[str, str]:
    """Folder name -> value of the column, of a corpus divided by a column; empty if `folder` is none."""
    try:
        return json.loads((folder / DOMAINS).read_bytes())["domains"]
    except (OSError, ValueError, KeyError):
        return {}


def check(prepared: Prepared) -> Iterator[str]:
    """Names of the files whose content has changed, in order; one after another, since it takes time."""
    for facts in (prepared.manifest.train, prepared.manifest.held_out):
        for shard in facts.shards:
            for file, digest in ((shard.file, shard.sha256), (shard.borders, shard.borders_sha256)):
                if sha256_of(prepared.folder / file) != digest:
                    yield file
    others = {EVALUATION: prepared.manifest.evaluation.sha256}
    others[f"{TOKENIZER}/tokenizer.json"] = prepared.manifest.tokenizer.sha256
    for file, digest in others.items():
        if sha256_of(prepared.folder / file) != digest:
            yield file


def _sizes(manifest: Manifest) -> Iterator[tuple[str, int]]:
    width = manifest.numpy_dtype.itemsize
    for facts in (manifest.train, manifest.held_out):
        for shard in facts.shards:
            yield shard.file, shard.tokens * width
            yield shard.borders, shard.documents * 8
