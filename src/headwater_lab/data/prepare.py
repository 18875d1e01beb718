"""Documents → token shards: streamed, parallel, resumable with the same result. See docs/data.md.

Threads, not processes: the tokenizer runs outside Python's lock, and nothing is copied or imported a second time.
Everything is written by the main thread, in the order of the source. At a commit point the files are as long as the
journal says; what an interrupted run wrote beyond it is cut off when the next one resumes.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from headwater import __version__
from headwater.cost.hardware import cores
from headwater.util.errors import HeadwaterError, Interrupted
from headwater.util.files import STAGING, disk_problem, flush, replace_text, settled, sha256_of
from headwater.util.output_folder import LOCK, keep, occupied
from headwater_lab.data import shards
from headwater_lab.data.chat import Encoded, as_fields
from headwater_lab.data.known import resolve
from headwater_lab.data.reading import check_name, printable
from headwater_lab.data.sealed import read_sealed, write_sealed
from headwater_lab.data.shards import (
    DOMAINS,
    EVALUATION,
    FORMAT_VERSION,
    JOURNAL,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Digest,
    EvaluationFacts,
    Facts,
    Manifest,
    ShardCount,
    ShardFacts,
    Skipped,
    Slug,
    SplitFacts,
    TokenizerFacts,
)
from headwater_lab.data.stream import DocumentPart, Stream, StreamPosition, TextSource
from headwater_lab.data.tokenizer import Encoder, load_tokenizer

# Files of an unfinished folder: a line for each document, and the candidates for evaluation.jsonl.
CONTENT, CANDIDATES = "content.part", "candidates.part"
# Tokens a split buffers before it writes them.
HELD = 2**21
MOST_DOMAINS = 256
# Characters of a domain's name that its folder's name keeps.
MOST_NAME = 64
MOST_WORKERS = 16

OnProgress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Options:
    """Options that affect the result, besides the source and the tokenizer."""

    held_out: float = 0.01
    """Share of the documents that is held out, by hash."""
    evaluation_bytes: int = 10_000_000
    """Maximum held-out text to keep as text, in bytes of UTF-8."""
    shard_tokens: int = 2**27
    """A shard ends after the document that reaches this."""


def prepare(
    source: TextSource,
    out: Path,
    tokenizer: str = "bytes",
    options: Options = Options(),
    *,
    local: str | None = None,
    workers: int | None = None,
    batch_bytes: int = 2**18,
    commit_bytes: int = 2**26,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Write prepared folders, or resume writing them; return the folders.

    There is one, `out`, unless the source is split by a column.

    Raises `HeadwaterError` for errors that the user can fix, `Interrupted` after Ctrl-C.
    local: files to read in place of a named corpus.
    workers: threads that tokenize; default one per core, 16 at most.
    batch_bytes: text tokenized at a time. commit_bytes: text between two commit points.
    on_progress: called with (documents, bytes of text, tokens) so far.
    """
    if not 0 < options.held_out < 1:
        raise HeadwaterError(f"--held-out must be between 0 and 1, not {options.held_out}.")
    if source.separator == "":
        raise HeadwaterError("--separator is empty; pass the line that separates two documents.")
    check_name(out)
    encode = _Tokenize(loaded := load_tokenizer(tokenizer))
    settings: dict[str, Any] = {"format_version": FORMAT_VERSION, **asdict(source), "local": local}
    settings |= {"tokenizer": encode.sha256, **asdict(options)}
    if loaded.chat_template:
        settings["chat_template"] = hashlib.sha256(json.dumps(loaded.chat_template).encode()).hexdigest()
    settings = {name: printable(value) if isinstance(value, str) else value for name, value in settings.items()}
    try:
        out = settled(out)
        if (out.exists() and not out.is_dir()) or (out.is_dir() and _foreign(out)):
            raise HeadwaterError(f"{str(out)!r} holds other files; name a new folder.")
        moved = None
        if not any((out / name).exists() for name in (JOURNAL, MANIFEST, DOMAINS)):  # nothing is left of what cannot be
            moved = moved_document(Stream(resolve(source, local)), options.held_out, encode)
        with occupied(out, patience=0, busy="process is preparing"):
            if _foreign(out):  # another command was faster
                raise HeadwaterError(f"{str(out)!r} holds other files; name a new folder.")
            if (done := _finished(out, settings, encode.separator)) is not None:
                return done
            stream = resolve(source, local)
            run = _Run(out, settings, stream, printable(tokenizer), encode, options, moved)
            try:
                run.work(
                    workers or min(cores(), MOST_WORKERS), batch_bytes, commit_bytes, on_progress or (lambda *_: None)
                )
                return run.finish()
            finally:
                run.close()
    except HeadwaterError:
        raise
    except KeyboardInterrupt:
        raise Interrupted("Stopped; run the same command again to resume.") from None
    except Exception as error:
        if (problem := disk_problem(error)) is None:
            raise
        raise HeadwaterError(
            f"{str(out)!r} could not be written: {problem}; fix that and run the same command again to resume."
        ) from error


@dataclass(frozen=True)
class _HoldsOut:
    """Whether a document is held out, by its fraction. moved: see `moved_document`."""

    share: float
    moved: float | None

    def __call__(self, fraction: float) -> bool:
        return (fraction < self.share) != (fraction == self.moved)


def moved_document(stream: Stream, share: float, encode: Callable[[Sequence[DocumentPart]], object]) -> float | None:
    """The fraction of the document to put on the other side than its hash says, since that side would be empty; None
    if neither is, as in any large corpus, of which only the beginning is read.

    The document is one whose text occurs least often, so that no text is on both sides; among them the one that is
    closest to the border. encode: called with the first document, for its errors.
    Raises `HeadwaterError` if there are fewer than two texts.
    """
    counts = Counter[float]()
    first: DocumentPart | None = None
    for part in stream:
        if not part.first:
            continue
        if first is None:
            first = part
            encode([part])
        counts[part.document.fraction()] += 1
        if len({fraction < share for fraction in counts}) > 1:
            return None
    source = stream.source.source
    if first is None:
        skipped = stream.place.skipped
        tail = f": none of its {skipped} files is UTF-8 text" if skipped else ", or only empty documents"
        raise HeadwaterError(f"There is no text in {source!r}{tail}; give a file or folder with text.")
    if len(counts) < 2:
        what = f"one document of {len(first.data)} bytes" if counts.total() == 1 else "one text, again and again"
        raise HeadwaterError(f"{source!r} is {what}, too short to hold out part of it; use more text.")
    rarest = min(counts.values())
    return min((one for one in counts if counts[one] == rarest), key=lambda one: abs(one - share))


class _Tokenize:
    """Token ids of parts of documents, with the separator before each first part."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encoder = Encoder(tokenizer)
        if self.encoder.backend is None:
            raise HeadwaterError(
                f"{type(tokenizer).__name__} has no tokenizer.json; data prepare needs a fast tokenizer."
            )
        self.tokenizer, self.separator = tokenizer, self.encoder.separator
        self.vocabulary, self.dtype = self.encoder.vocabulary, self.encoder.dtype
        # In the form that save_pretrained writes.
        self.sha256 = hashlib.sha256(tokenizer.backend_tokenizer.to_str(pretty=True).encode()).hexdigest()

    def __call__(self, parts: Sequence[DocumentPart]) -> list[Encoded]:
        encoded = self.encoder.documents([part.document for part in parts])
        return [
            one if part.first else replace(one, ids=one.ids[1:])  # the separator is before the document's first part
            for part, one in zip(parts, encoded, strict=True)
        ]


class _Written(Facts):
    """How much of a file was written, and its SHA-256."""

    length: ShardCount = 0
    sha256: Digest = hashlib.sha256().hexdigest()


class _SplitState(Facts):
    """The finished shards of a split, and the open one: its documents and tokens, its files."""

    documents: ShardCount = 0
    bytes: ShardCount = 0
    tokens: ShardCount = 0
    shards: list[ShardFacts] = []
    answer_tokens: ShardCount | None = None
    open_tokens: ShardCount = 0
    open_documents: ShardCount = 0
    files: list[_Written] = [_Written(), _Written()]


class _FolderState(Facts):
    domain: str | None
    splits: dict[Literal["train", "held_out"], _SplitState]
    content: _Written
    candidates: _Written


class _Journal(Facts):
    """What a run resumes from: its settings, its position in the source, and the length and hash of every file."""

    settings: dict[str, Any]
    separator: int
    files: Digest
    """Hash of the names, sizes and times of the source's files."""
    place: StreamPosition
    moved: float | None
    """See `moved_document`."""
    folders: dict[Slug, _FolderState]
    check: Digest


class _Run:
    """One run on a folder, from its journal or from scratch."""

    def __init__(
        self,
        out: Path,
        settings: dict[str, Any],
        source: TextSource,
        tokenizer: str,
        encode: _Tokenize,
        options: Options,
        moved: float | None,
    ) -> None:
        self.out, self.settings, self.options = out, settings, options
        self.name, self.encode = tokenizer, encode
        self.folders: dict[str, _Folder] = {}
        # Those whose names are synced to the disk.
        self.named = set[str]()
        journal = _read_journal(out)
        if journal:
            _check_same(out, settings, encode.separator, journal.settings, journal.separator, "was begun")
        self.place = journal.place if journal else StreamPosition()
        self.holds_out = _HoldsOut(options.held_out, journal.moved if journal else moved)
        self.stream = Stream(source, self.place)
        self.files = self._fingerprint()
        if journal and journal.files != self.files:
            raise HeadwaterError(
                f"The files of {source.source!r} have changed since {str(out)!r} was started; remove that folder to "
                f"start again."
            )
        for slug, folder in (journal.folders if journal else {}).items():
            self.folders[slug] = _Folder(self._path(slug), folder.domain, encode.dtype, options, self.holds_out, folder)
        self.by_domain = {folder.domain: folder for folder in self.folders.values()}
        if not journal:
            self.commit()
            flush(out.absolute().parent)

    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.stream.fingerprint).encode()).hexdigest()

    def work(self, workers: int, batch_bytes: int, commit_bytes: int, on_progress: OnProgress) -> None:
        """Tokenize and write the rest of the stream."""
        pending: deque[tuple[list[DocumentPart], Future]] = deque()
        uncommitted = 0
        with _serial_batches(), ThreadPoolExecutor(workers) as pool:
            try:
                for batch in self._ahead(pool, pending, batch_bytes, 2 * workers):
                    parts, tokens = batch[0], batch[1].result()
                    for part, row in zip(parts, tokens, strict=True):
                        self._folder(part.domain).add(part, row)
                    uncommitted += sum(len(part.data) for part in parts)
                    if parts[-1].last:  # a run cannot resume in the middle of a document
                        self.place = parts[-1].after
                        if uncommitted >= commit_bytes:
                            self.commit()
                            keep(self.out)
                            uncommitted = 0
                    on_progress(*self.totals())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.place = self.stream.place
        self.commit()

    def _ahead(
        self, pool: ThreadPoolExecutor, pending: deque, batch_bytes: int, depth: int
    ) -> Iterator[tuple[list[DocumentPart], Future]]:
        """Batches in order, with up to `depth` of them in flight."""
        for parts in _batches(self.stream, batch_bytes):
            pending.append((parts, pool.submit(self.encode, parts)))
            if len(pending) >= depth:
                yield pending.popleft()
        while pending:
            yield pending.popleft()

    def totals(self) -> tuple[int, int, int]:
        splits = [split for folder in self.folders.values() for split in folder.splits.values()]
        return sum(s.documents for s in splits), sum(s.bytes for s in splits), sum(s.tokens for s in splits)

    def commit(self) -> None:
        """Commit what is written so far as the point to resume from: first files and their names, then the journal."""
        folders = {slug: folder.commit().model_dump() for slug, folder in self.folders.items()}
        if folders.keys() != self.named:
            flush(self.out)
        state = {"settings": self.settings, "separator": self.encode.separator, "files": self.files}
        state |= {"moved": self.holds_out.moved}
        write_sealed(self.out / JOURNAL, state | {"place": self.place._asdict(), "folders": folders})
        if not self.named:
            flush(self.out)
        self.named = set(folders)

    def finish(self) -> list[Path]:
        """Close the shards, write the manifest, and remove temporary files."""
        if self._fingerprint() != self.files:
            raise HeadwaterError(
                f"The files of {self.settings['source']!r} changed while they were being read; remove "
                f"{str(self.out)!r} and start again."
            )
        domains = {slug: folder.domain for slug, folder in self.folders.items()}
        for folder in self.folders.values():
            self._write_manifest(folder)
        if self.settings["by"]:
            write_sealed(self.out / DOMAINS, {"settings": self.settings, "domains": domains})
        self.close()
        flush(self.out)
        (self.out / JOURNAL).unlink()
        flush(self.out)  # before the files that the journal lists are removed
        _tidy(paths := [folder.path for folder in self.folders.values()])
        return paths

    def _write_manifest(self, folder: _Folder) -> None:
        shutil.rmtree(place := folder.path / TOKENIZER, ignore_errors=True)
        self.encode.tokenizer.save_pretrained(place)
        files = shards.tokenizer_files(folder.path)
        for path in (*files, *{file.parent for file in files}):
            flush(path)
        evaluation = folder.write_evaluation()
        manifest = Manifest(
            headwater=__version__,
            source=self.settings["source"],
            domain=folder.domain,
            settings=self.settings,
            tokenizer=TokenizerFacts(
                name=self.name,
                sha256=sha256_of(place / "tokenizer.json"),
                vocabulary=self.encode.vocabulary,
                files={file.relative_to(place).as_posix(): sha256_of(file) for file in files},
            ),
            separator=self.encode.separator,
            dtype="uint16" if self.encode.dtype.itemsize == 2 else "uint32",
            sha256=folder.content.hexdigest(),
            skipped=Skipped(
                empty=self.place.empty, none=self.place.none, files=self.place.skipped, names=list(self.place.names)
            ),
            train=folder.splits["train"].finish(),
            held_out=folder.splits["held_out"].finish(),
            evaluation=evaluation,
            check="0" * 64,  # is written in its place
        )
        write_sealed(folder.path / MANIFEST, manifest.model_dump())
        flush(folder.path)

    def _folder(self, domain: str | None) -> _Folder:
        if (known := self.by_domain.get(domain)) is not None:
            return known
        if len(self.folders) >= MOST_DOMAINS:
            raise HeadwaterError(
                f"Column {self.settings['by']!r} has more than {MOST_DOMAINS} values; --by is for the few domains of a "
                "mixture."
            )
        plain = re.sub(r"[^a-z0-9]+", "-", (domain or "").lower())[:MOST_NAME].strip("-") or "other"
        names = (plain if n == 1 else f"{plain}-{n}" for n in range(1, MOST_DOMAINS + 2))
        slug = "" if domain is None else next(name for name in names if name not in self.folders)
        folder = _Folder(self._path(slug), domain, self.encode.dtype, self.options, self.holds_out)
        self.folders[slug] = self.by_domain[domain] = folder
        return folder

    def _path(self, slug: str) -> Path:
        return self.out / slug if slug else self.out

    def close(self) -> None:
        for folder in self.folders.values():
            folder.close()


class _Folder:
    """A prepared folder that is being written."""

    def __init__(
        self,
        path: Path,
        domain: str | None,
        dtype: np.dtype,
        options: Options,
        holds_out: _HoldsOut,
        state: _FolderState | None = None,
    ) -> None:
        self.path, self.domain, self.options, self.holds_out = path, domain, options, holds_out
        # Files whose names are synced to the disk.
        self.named = set[Path]()
        path.mkdir(exist_ok=True)
        splits = state.splits if state else {}
        self.splits = {name: _Split(path, name, dtype, options, splits.get(name, _SplitState())) for name in SPLITS}
        self.content = _File(path / CONTENT, state.content if state else _Written())
        self.candidates = _File(path / CANDIDATES, state.candidates if state else _Written())
        self.chosen = _Smallest(options.evaluation_bytes)
        self.is_chat = False
        with (path / CANDIDATES).open("rb") as lines:
            for line in lines:
                row = json.loads(line)
                self.chosen.offer(row["fraction"], row["id"], row["text"])
                self.is_chat = row["chat"]

    def add(self, part: DocumentPart, tokens: Encoded) -> None:
        if part.first:
            self.fraction = part.document.fraction()
            self.split = self.splits["held_out" if self.holds_out(self.fraction) else "train"]
            self.digest, self.kept, self.size = hashlib.sha256(), list[str](), 0
        self.digest.update(part.data)
        if self.split is self.splits["held_out"] and self.size < self.options.evaluation_bytes:
            self.kept.append(part.text)
            self.size += len(part.data)
        self.split.add(part, tokens)
        if part.last:
            self.content.write(f"{part.id}\0{self.digest.hexdigest()}\n".encode())
            if self.kept and part.is_chat:
                if self.size <= self.options.evaluation_bytes:  # else it would have to be cut
                    self._keep(part, part.text)
            elif self.kept:
                data = "".join(self.kept).encode()[: self.options.evaluation_bytes]
                text = data.decode(errors="ignore")  # cut between characters
                self._keep(part, text)

    def _keep(self, part: DocumentPart, text: str) -> None:
        """Offer a held-out text, or a conversation in JSON, for evaluation."""
        self.is_chat = part.is_chat
        if self.chosen.offer(self.fraction, part.id, text):
            row = {"fraction": self.fraction, "id": part.id, "text": text, "chat": part.is_chat}
            self.candidates.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def commit(self) -> _FolderState:
        state = _FolderState(
            domain=self.domain,
            splits={name: split.commit() for name, split in self.splits.items()},
            content=self.content.commit(),
            candidates=self.candidates.commit(),
        )
        names = {file.path for file in self._files()}
        if names != self.named:
            flush(self.path)
            self.named = names
        return state

    def _files(self) -> list[_File]:
        return [self.content, self.candidates, *(file for split in self.splits.values() for file in split.files)]

    def write_evaluation(self) -> EvaluationFacts:
        documents = sorted(self.chosen.result())
        contents = (as_fields(text) if self.is_chat else {"text": text} for _, text in documents)
        rows = ({"id": name, **content} for (name, _), content in zip(documents, contents, strict=True))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        replace_text(self.path / EVALUATION, "".join(lines))
        size = sum(len(text.encode()) for _, text in documents)
        return EvaluationFacts(documents=len(documents), bytes=size, sha256=sha256_of(self.path / EVALUATION))

    def close(self) -> None:
        for file in self._files():
            file.close()


class _Split:
    """The shards of one split that are being written; the last one is open."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, options: Options, state: _SplitState) -> None:
        self.folder, self.name, self.dtype, self.most = folder, name, dtype, options.shard_tokens
        self.documents, self.bytes, self.tokens = state.documents, state.bytes, state.tokens
        self.answer_tokens = state.answer_tokens
        self.shards = list(state.shards)
        for shard in self.shards:
            for file, digest in shard.sums.items():
                if not (folder / file).is_file() or sha256_of(folder / file) != digest:
                    raise _damaged(folder / file)
        self.open_tokens, self.open_documents = state.open_tokens, state.open_documents
        self.held: list[Encoded] = []
        self.starts: list[int] = []
        self.held_tokens = 0
        self.files = self._open(state.files)

    def _open(self, state: Sequence[_Written] = ()) -> list[_File]:
        """The files of the shard that is being written; those of conversations have one more."""
        stem = self.folder / f"{self.name}-{len(self.shards):05d}"
        kinds = ("tokens", "borders", *(() if self.answer_tokens is None else ("answers",)))
        written = [*state, *[_Written()] * (len(kinds) - len(state))]
        return [_File(stem.with_suffix(f".{kind}"), one) for kind, one in zip(kinds, written, strict=True)]

    def add(self, part: DocumentPart, tokens: Encoded) -> None:
        if tokens.counts is not None and self.answer_tokens is None:
            self.answer_tokens = 0
            self.close()
            self.files = self._open()  # nothing was written yet
        if part.first:
            self.starts.append(self.open_tokens)
            self.documents += 1
            self.open_documents += 1
        size = len(tokens.ids)
        self.held.append(tokens)
        self.held_tokens += size
        self.open_tokens += size
        self.tokens += size
        self.bytes += tokens.bytes
        if tokens.counts is not None:
            self.answer_tokens = int(tokens.counts.sum()) + (self.answer_tokens or 0)
        if part.last and self.open_tokens >= self.most:
            self._close_shard()
        elif self.held_tokens >= HELD:
            self._write()

    def _write(self) -> None:
        if self.held:
            self.files[0].write(np.concatenate([one.ids for one in self.held]).tobytes())
            self.files[1].write(np.array(self.starts, dtype="<i8").tobytes())
            if self.answer_tokens is not None:
                counts = [one.counts for one in self.held if one.counts is not None]
                self.files[2].write(np.concatenate(counts).astype("u1").tobytes())
            self.held, self.starts, self.held_tokens = [], [], 0

    def _close_shard(self) -> None:
        self._write()
        for file in self.files:
            file.commit()
            file.close()
        tokens, borders, *answers = self.files
        facts = ShardFacts(
            file=tokens.path.name,
            tokens=self.open_tokens,
            documents=self.open_documents,
            sha256=tokens.hexdigest(),
            borders_sha256=borders.hexdigest(),
            answers_sha256=answers[0].hexdigest() if answers else None,
        )
        self.shards.append(facts)
        self.open_tokens = self.open_documents = 0
        self.files = self._open()

    def commit(self) -> _SplitState:
        self._write()
        return _SplitState(
            documents=self.documents,
            bytes=self.bytes,
            tokens=self.tokens,
            shards=self.shards,
            answer_tokens=self.answer_tokens,
            open_tokens=self.open_tokens,
            open_documents=self.open_documents,
            files=[file.commit() for file in self.files],
        )

    def finish(self) -> SplitFacts:
        if self.open_tokens:
            self._close_shard()
        for file in self.files:
            file.close()
            file.path.unlink(missing_ok=True)  # the empty one after the last
        return SplitFacts(
            documents=self.documents,
            bytes=self.bytes,
            tokens=self.tokens,
            answer_tokens=self.answer_tokens,
            shards=self.shards,
        )

    def close(self) -> None:
        for file in self.files:
            file.close()


class _File:
    """An append-only file, with the hash of its content. When reopened, it is cut to the length in `written`.

    Raises `HeadwaterError` if the file does not begin with what was written.
    """

    def __init__(self, path: Path, written: _Written) -> None:
        self.path, self.length, self.hash = path, written.length, hashlib.sha256()
        left = self.length
        if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
            raise _damaged(path)
        if left and path.exists():
            with path.open("rb") as stream:
                while left and (data := stream.read(min(left, 2**22))):
                    self.hash.update(data)
                    left -= len(data)
        if left or self.hash.hexdigest() != written.sha256:
            raise _damaged(path)
        # Unbuffered, so that closing does not repeat a failed write.
        self.stream = path.open("ab", buffering=0)
        self.stream.truncate(self.length)
        self.unsynced = True
        self.waiting: list[bytes] = []
        self.waiting_bytes = 0

    def write(self, data: bytes) -> None:
        self.waiting.append(data)
        self.waiting_bytes += len(data)
        if self.waiting_bytes >= 2**20:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self.waiting)
        self.waiting, self.waiting_bytes = [], 0
        self.hash.update(data)
        self.length += len(data)
        self.unsynced = True
        view = memoryview(data)
        while view:
            view = view[self.stream.write(view) :]

    def commit(self) -> _Written:
        """Sync everything, and return what is on the disk."""
        if self.waiting:
            self.flush()
        if self.unsynced:
            os.fsync(self.stream.fileno())
            self.unsynced = False
        return _Written(length=self.length, sha256=self.hexdigest())

    def hexdigest(self) -> str:
        return self.hash.hexdigest()

    def close(self) -> None:
        self.stream.close()


class _Smallest:
    """The texts with the smallest fractions, up to a total number of bytes, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.kept: list[tuple[float, str, str]] = []

    def offer(self, fraction: float, name: str, text: str) -> bool:
        """Return whether it is kept for now."""
        entry = (fraction, name, text)
        if self.size >= self.limit and entry >= self.kept[-1]:
            return False
        bisect.insort(self.kept, entry)
        self.size += len(text.encode())
        # One more than fits is kept, to mark where the choice ends.
        while self.kept and self.size - (last := len(self.kept[-1][2].encode())) >= self.limit:
            self.size -= last
            self.kept.pop()
        return True

    def result(self) -> Iterator[tuple[str, str]]:
        """(id, text) up to the first that does not fit; each offered text is no longer than the limit."""
        size = 0
        for _, name, text in self.kept:
            size += len(text.encode())
            if size > self.limit:
                return
            yield name, text


def _batches(stream: Stream, size: int) -> Iterator[list[DocumentPart]]:
    """Parts in groups of about `size` bytes."""
    group: list[DocumentPart] = []
    held = 0
    for part in stream:
        group.append(part)
        held += len(part.data)
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


@contextlib.contextmanager
def _serial_batches() -> Iterator[None]:
    """Use one thread per batch in the tokenizers library, since batches already run in parallel."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _foreign(out: Path) -> bool:
    """Whether a folder holds files that no headwater run writes."""
    names = {path.name for path in out.iterdir() if not path.name.startswith(STAGING)} - {LOCK}
    return bool(names) and not names & {JOURNAL, MANIFEST, DOMAINS}


def _read_journal(out: Path) -> _Journal | None:
    values = read_sealed(out / JOURNAL)
    return None if values is None else shards.validated(_Journal, values, out / JOURNAL)


def _damaged(file: Path) -> HeadwaterError:
    return HeadwaterError(f"{str(file)!r} does not match its journal; remove {str(file.parent)!r} to start again.")


def _finished(out: Path, settings: dict[str, Any], separator: int) -> list[Path] | None:
    """The prepared folders of a finished run with the same settings, with all checksums verified."""
    if (out / JOURNAL).exists() or not ((out / DOMAINS).exists() or (out / MANIFEST).exists()):
        return None
    prepared = shards.open_all(out)
    for one in prepared:
        _check_same(out, settings, separator, one.manifest.settings, one.manifest.separator, "was prepared")
    shards.check_all(prepared)
    folders = [one.folder for one in prepared]
    _tidy(folders)  # an earlier run may have stopped just before this
    return folders


def _tidy(folders: list[Path]) -> None:
    for folder in folders:
        for name in (CONTENT, CANDIDATES):
            (folder / name).unlink(missing_ok=True)


def _check_same(
    out: Path, now: dict[str, Any], separator: int, before: dict[str, Any], separator_before: int, what: str
) -> None:
    """Raise `HeadwaterError` if a folder was made with other settings."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if (names and names[0] == "tokenizer") or (not names and separator != separator_before):
        raise HeadwaterError(f"{str(out)!r} {what} with another tokenizer; use that one, or name another folder.")
    if names:
        first = names[0]
        raise HeadwaterError(
            f"{str(out)!r} {what} with {first.replace('_', ' ')} {before.get(first)!r}, not {now.get(first)!r}; use "
            f"the same, or name another folder."
        )
