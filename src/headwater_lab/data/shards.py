"""Prepared folders: token shards that are memory-mapped, and the manifest that describes them. See docs/data.md."""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from headwater.util.errors import HeadwaterError
from headwater.util.files import STAGING, explain_absence, read_bytes, replace_text, sha256_of
from headwater_lab.data.corpus import Document
from headwater_lab.data.tokenizer import load_tokenizer, separator_id, vocabulary_size

MANIFEST = "manifest.json"
# File in a folder that has one prepared folder per domain.
DOMAINS = "domains.json"
# Hidden folder that receives the files of a prepared folder until all are written.
WRITING = f"{STAGING}prepared"
EVALUATION = "evaluation.jsonl"
TOKENIZER = "tokenizer"
FORMAT_VERSION: Literal[2] = 2
# A manifest's field for detecting changes: the SHA-256 of the file in which this field is empty.
SEAL = "check"
SPLITS: tuple[Literal["train"], Literal["held_out"]] = ("train", "held_out")

ShardCount = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names in files become paths, and must not lead out of the folder.
Slug = Annotated[str, Field(pattern=r"^[a-z0-9-]*$")]
FileName = Annotated[str, Field(pattern=r"^(\w[\w.-]*/)*\w[\w.-]*$")]


class Facts(BaseModel):
    """A part of a file that describes others: typed, closed, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ShardFacts(Facts):
    """One shard: `file`.tokens and `file`.borders."""

    file: Annotated[str, Field(pattern=r"^(train|held_out)-[0-9]{5,9}\.tokens$")]
    """Name of the token file."""
    tokens: Annotated[int, Field(ge=1)]
    documents: Annotated[int, Field(ge=1)]
    sha256: Digest
    borders_sha256: Digest
    answers_sha256: Digest | None = None
    """SHA-256 of `answers`, for conversations."""

    @property
    def borders(self) -> str:
        """Name of the file with the start of each document."""
        return self.file.removesuffix(".tokens") + ".borders"

    @property
    def answers(self) -> str:
        """Name of the file that says which tokens of conversations are trained on."""
        return self.file.removesuffix(".tokens") + ".answers"


class SplitFacts(Facts):
    """One split."""

    documents: ShardCount
    bytes: ShardCount
    """UTF-8 bytes of text; for conversations, of their answers."""
    tokens: ShardCount
    """With one separator per document."""
    answer_tokens: ShardCount | None = None
    """For conversations, the tokens that are trained on."""
    shards: list[ShardFacts]

    @property
    def counted_tokens(self) -> int:
        """Tokens that are trained on."""
        return self.tokens if self.answer_tokens is None else self.answer_tokens

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError("its shards have a different number of tokens")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError("its shards have a different number of documents")
        return self


class TokenizerFacts(Facts):
    """The tokenizer that made the tokens; the folder holds a copy."""

    name: str
    sha256: Digest
    """SHA-256 of its tokenizer.json."""
    vocab_size: Annotated[int, Field(ge=1)]
    """One more than its largest id, including added tokens."""
    files: dict[FileName, Digest]
    """The SHA-256 of every copied file."""


class Skipped(Facts):
    """Content of the source that is not in the shards."""

    empty: ShardCount = 0
    """Documents without text."""
    none: ShardCount = 0
    """Rows without a text, and conversations without an answer."""
    files: ShardCount = 0
    """Files that are not UTF-8 text."""
    names: list[str] = []
    """The first of those files, 20 at most."""


class EvaluationFacts(Facts):
    """evaluation.jsonl."""

    documents: ShardCount
    bytes: ShardCount
    """UTF-8 bytes of text."""
    special: ShardCount = 0
    """Special tokens of held-out token files, which their text leaves out."""
    sha256: Digest


class Manifest(Facts):
    """The contents of a prepared folder, and what it was made from."""

    format_version: Literal[2] = FORMAT_VERSION
    headwater: str
    """The version that wrote it."""
    source: str
    domain: str | None = None
    """The value of the column that the corpus was split by."""
    settings: dict[str, Any]
    """Everything that affects the result."""
    tokenizer: TokenizerFacts
    separator: ShardCount
    """The token before each document."""
    dtype: Literal["uint16", "uint32"]
    """Data type of the token files, little-endian."""
    sha256: str
    """Hash of the documents' names and texts, as in the record of a run on the same source; of token files, of names
    and tokens."""
    skipped: Skipped
    """Counts for the whole source, whatever the domain."""
    train: SplitFacts
    held_out: SplitFacts
    evaluation: EvaluationFacts

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "tokenizer.json" not in self.tokenizer.files:
            raise ValueError("the tokenizer has no checksum")
        if self.separator >= self.tokenizer.vocab_size:
            raise ValueError("the separator is outside the vocabulary")
        return self

    @property
    def documents(self) -> int:
        return self.train.documents + self.held_out.documents

    @property
    def bytes(self) -> int:
        return self.train.bytes + self.held_out.bytes

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def checked_files(self) -> Iterator[tuple[str, int | None, Digest]]:
        """List (name, bytes if they are known, SHA-256) of each file but the tokenizer's."""
        for shard in (*self.train.shards, *self.held_out.shards):
            yield shard.file, shard.tokens * self.numpy_dtype.itemsize, shard.sha256
            yield shard.borders, shard.documents * 8, shard.borders_sha256
            if shard.answers_sha256 is not None:
                yield shard.answers, shard.tokens, shard.answers_sha256
        yield EVALUATION, None, self.evaluation.sha256


def write_sealed(file: Path, values: dict[str, Any]) -> None:
    """Write `values` as JSON with their seal, atomically."""
    replace_text(file, json.dumps({**values, SEAL: _compute_seal(values)}, indent=1))


def _compute_seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps({**values, SEAL: ""}, indent=1).encode()).hexdigest()


def read_sealed(file: Path) -> dict[str, Any] | None:
    """Read a sealed file, without the seal; None if there is none. Raises `HeadwaterError` if it is damaged."""
    try:
        values = json.loads(read_bytes(file))
        if values.pop(SEAL) == _compute_seal(values):
            return values
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise describe_damage(file) from error
    raise describe_damage(file)


def describe_damage(file: Path) -> HeadwaterError:
    """Make the error for a file of a prepared folder that has changed."""
    return HeadwaterError(f"{str(file)!r} has changed since it was written; copy or prepare the folder again.")


class Shards:
    """One split of a prepared folder as one stream of tokens, memory-mapped; a shard is opened when first read."""

    def __init__(self, folder: Path, facts: SplitFacts, dtype: np.dtype, vocab_size: int) -> None:
        self.folder, self.facts, self.dtype, self.vocab_size = folder, facts, dtype, vocab_size
        self.tokens, self.documents = facts.tokens, facts.documents
        # Position of each shard's first token in the stream, and of the end.
        self.offsets = list(itertools.accumulate((shard.tokens for shard in facts.shards), initial=0))
        self._open: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the tokens [start, stop), in the folder's dtype; a view of the file if one shard has them all.

        Raises `HeadwaterError` for a token beyond the vocabulary: a model would read past the end of its embedding.
        """
        pieces = [self._open_shard(i)[0][a:b] for i, a, b in self._find_spans(start, stop)]
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise HeadwaterError(
                f"{str(self.folder)!r} holds token {largest}, but its tokenizer has only {self.vocab_size}; find the "
                f"damaged file with `headwater data show --check`."
            )
        return tokens

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Find the positions in [start, stop) at which a document begins, int64 and sorted."""
        starts = [np.empty(0, np.int64)]
        for i, a, b in self._find_spans(start, stop):
            borders = self._open_shard(i)[1]
            low, high = np.searchsorted(borders, (a, b))
            starts.append(borders[low:high].astype(np.int64) + self.offsets[i])
        return np.concatenate(starts)

    def counts(self, start: int, stop: int) -> np.ndarray | None:
        """Mark which of the tokens [start, stop) are trained on, bool; None: the whole stream is."""
        if self.facts.answer_tokens is None:
            return None
        files = [(self._open_shard(i)[2], a, b) for i, a, b in self._find_spans(start, stop)]
        pieces = [np.ones(b - a, bool) if answers is None else answers[a:b] != 0 for answers, a, b in files]
        return np.concatenate([np.empty(0, bool), *pieces])

    def _find_spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, first, last + 1) for each shard that has some of [start, stop)."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"[{start}, {stop}) is not within {self.tokens} tokens")
        index = bisect.bisect_right(self.offsets, start) - 1
        while start < stop:
            end = min(stop, self.offsets[index + 1])
            yield index, start - self.offsets[index], end - self.offsets[index]
            start, index = end, index + 1

    def _open_shard(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if index not in self._open:
            shard = self.facts.shards[index]
            tokens = self._map_file(shard.file, self.dtype, shard.tokens)
            borders = self._map_file(shard.borders, np.dtype("<i8"), shard.documents)
            if borders[0] != 0 or borders[-1] >= len(tokens) or (borders[1:] <= borders[:-1]).any():
                raise describe_damage(self.folder / shard.borders)
            answers = None
            if shard.answers_sha256 is not None:
                answers = self._map_file(shard.answers, np.dtype("u1"), shard.tokens)
            self._open[index] = tokens, borders, answers
        return self._open[index]

    def _map_file(self, name: str, dtype: np.dtype, length: int) -> np.ndarray:
        try:
            return np.memmap(self.folder / name, dtype, "r", shape=(length,))
        except (OSError, ValueError) as error:
            raise describe_damage(self.folder / name) from error


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    folder: Path
    manifest: Manifest
    train: Shards
    held_out: Shards

    def read_evaluation(self) -> list[Document]:
        """Read the documents kept as text for evaluation, sorted by id. Raises `HeadwaterError` if they changed."""
        file = self.folder / EVALUATION
        try:
            data = read_bytes(file)
            rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
            documents = [
                Document(
                    row["id"],
                    json.dumps(row["messages"], ensure_ascii=False) if "messages" in row else row["text"],
                    key=row["id"],
                    is_chat="messages" in row,
                )
                for row in rows
            ]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise describe_damage(file) from error
        if hashlib.sha256(data).hexdigest() != self.manifest.evaluation.sha256:
            raise describe_damage(file)
        return documents

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's copy of the tokenizer. Raises `HeadwaterError` if it is not the one that made the tokens."""
        folder, facts = self.folder / TOKENIZER, self.manifest.tokenizer
        tokenizer = load_tokenizer(str(folder))
        if facts.vocab_size != vocabulary_size(tokenizer) or separator_id(tokenizer) != self.manifest.separator:
            raise describe_damage(folder)
        return tokenizer


def open_all(folder: Path) -> list[Prepared]:
    """Open a prepared folder, or the folders of all domains. Raises `HeadwaterError` as `open_prepared` does."""
    for name, domain in (domains := read_domains(folder)).items():
        if (manifest := read_manifest(folder / name)).domain != domain:
            raise HeadwaterError(f"{str(folder / name)!r} holds {manifest.domain!r}, not {domain!r}; copy it again.")
    return [open_prepared(folder / name) for name in domains] or [open_prepared(folder)]


def prepared_folder(path: Path) -> Path | None:
    """Find the folder of prepared data, or of all its domains, from its path or the path of its manifest."""
    folder = path.parent if path.name in (MANIFEST, DOMAINS) else path
    with suppress(HeadwaterError):  # the file belongs to another program
        if any(read_sealed(folder / name) is not None for name in (MANIFEST, DOMAINS)):
            return folder
    return None


def open_prepared(folder: Path) -> Prepared:
    """Open a prepared folder; of its shards, only the sizes are checked.

    Raises `HeadwaterError` if it is not prepared or unfinished, or a file is missing or has the wrong size.
    """
    manifest = read_manifest(folder)
    for file, size, _ in manifest.checked_files:
        path = folder / file
        if not path.is_file():
            raise HeadwaterError(f"{str(path)!r} is missing; copy it again, or prepare the folder again.")
        if size not in (None, path.stat().st_size):
            raise HeadwaterError(
                f"{str(path)!r} has {path.stat().st_size} bytes, not {size}; copy or prepare it again."
            )
    expected, sums = manifest.tokenizer.files, hash_tokenizer(folder)
    for name in expected | sums:  # an added file would be read too
        if sums.get(name) != expected.get(name):
            raise describe_damage(folder / TOKENIZER / name)
    dtype, vocab_size = manifest.numpy_dtype, manifest.tokenizer.vocab_size
    splits = (Shards(folder, facts, dtype, vocab_size) for facts in (manifest.train, manifest.held_out))
    return Prepared(folder, manifest, *splits)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raises `HeadwaterError` if there is none, or it is damaged."""
    if (manifest := read_facts(Manifest, folder / MANIFEST)) is not None:
        return manifest
    if domains := read_domains(folder):
        names = ", ".join(str(folder / name) for name in list(domains)[:8]) + (", …" if len(domains) > 8 else "")
        raise HeadwaterError(f"{str(folder)!r} holds a prepared folder for each domain; name one or more of: {names}.")
    if (folder / WRITING).exists():
        raise HeadwaterError(f"{str(folder)!r} is not finished; run the same `headwater data prepare` again.")
    if not folder.is_dir():
        raise HeadwaterError(f"{explain_absence(folder, 'folder')}; make it with `headwater data prepare`.")
    raise HeadwaterError(f"{str(folder)!r} has no {MANIFEST}; make it with `headwater data prepare`.")


class Domains(Facts):
    """domains.json: the settings of the split, and the value of the column for each folder."""

    settings: dict[str, Any]
    domains: dict[Slug, str]


def read_domains(folder: Path) -> dict[str, str]:
    """Read folder name -> value of the column that split the corpus; empty without a domains.json."""
    facts = read_facts(Domains, folder / DOMAINS)
    return {} if facts is None else facts.domains


M = TypeVar("M", bound=Facts)


def read_facts(kind: type[M], file: Path) -> M | None:
    """Read a sealed file; None if there is none. Raises `HeadwaterError` if it is damaged or invalid."""
    try:
        return None if (values := read_sealed(file)) is None else kind.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(map(str, detail["loc"]))
        raise HeadwaterError(
            f"{str(file)!r} does not match format {FORMAT_VERSION}: {where}: {detail['msg']}"
        ) from error


def check_all(prepared: list[Prepared]) -> None:
    """Check every file that was not checked when a folder was opened, as the manifest and the tokenizer were.

    Raises `HeadwaterError` with the names of those whose content has changed.
    """
    files = ((folder.folder / name, digest) for folder in prepared for name, _, digest in folder.manifest.checked_files)
    wrong = [str(file) for file, digest in files if not file.is_file() or sha256_of(file) != digest]
    if wrong:
        raise HeadwaterError(f"Changed since they were written: {', '.join(wrong)}; copy or prepare the folder again.")


def hash_tokenizer(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of each file of a prepared folder's tokenizer, but hidden ones; "" if it is not regular."""
    root = folder / TOKENIZER
    files = sorted(file for file in root.rglob("[!.]*") if not file.is_dir())
    return {file.relative_to(root).as_posix(): sha256_of(file) if file.is_file() else "" for file in files}
