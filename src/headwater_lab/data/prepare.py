"""Documents → token shards: streamed and parallel. See docs/data.md.

Threads, not processes: the tokenizer runs outside Python's lock, and nothing is copied or imported a second time.
Everything is written by the main thread, in the order of the source, to a hidden folder in the new one. Its contents
move up once all is written, the manifest last. If a run is killed, the next one removes its hidden folder.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headwater import __version__
from headwater.util.errors import HeadwaterError
from headwater.util.files import STAGING, explain_disk_errors, flush_path, replace_text, settle_path, sha256_of
from headwater_lab.data import shards
from headwater_lab.data.chat import Encoded
from headwater_lab.data.corpus import Document, no_text, too_short
from headwater_lab.data.reading import check_name, escape_name
from headwater_lab.data.stream import Stream, TextSource
from headwater_lab.data.token_files import TokenSource, TokenStream
from headwater_lab.data.tokenizer import Encoder, load_tokenizer
from headwater_lab.util.endings import Interrupted
from headwater_lab.util.machine import cores
from headwater_lab.util.output_folder import LOCK, occupy_folder

# Bytes to buffer per file before writing. Each domain has four files, or six with conversations.
WRITTEN = 2**17
MOST_DOMAINS = 256
# Maximum characters of a domain's name in its folder's name.
MOST_NAME = 64
# Maximum number of skipped files to list.
NAMED = 20
MOST_WORKERS = 16
# The counts kept for each split.
COUNTS = ("documents", "bytes", "tokens")

OnProgress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Options:
    """Options that affect the result, in addition to the source and the tokenizer."""

    held_out: float = 0.01
    """Share of the documents that is held out, by hash."""
    evaluation_bytes: int = 10_000_000
    """Maximum held-out text to keep as text, in bytes of UTF-8."""
    shard_tokens: int = 2**27
    """A shard ends after the document that reaches this."""


def prepare(
    source: TextSource | TokenSource,
    out: Path,
    tokenizer: str = "bytes",
    options: Options = Options(),
    *,
    workers: int | None = None,
    batch_bytes: int = 2**18,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Write prepared folders, and return them; if a run with the same settings has finished, only check its folders.

    There is one folder, `out`, unless the source is split by a column. A run that is stopped leaves nothing.
    Token files keep their tokens; `tokenizer` is the one that made them.

    Raises `HeadwaterError` for errors that the user can fix, `Interrupted` after Ctrl-C.
    workers: threads that tokenize; default one per core, 16 at most.
    batch_bytes: text tokenized at a time.
    on_progress: called with (documents, bytes of text, tokens) so far.
    """
    if not 0 < options.held_out < 1:
        raise HeadwaterError(f"--held-out must be between 0 and 1, not {options.held_out}.")
    check_name(out)
    encoder = Encoder(load_tokenizer(tokenizer))
    if encoder.backend is None:
        kind = type(encoder.tokenizer).__name__
        raise HeadwaterError(f"{kind} has no tokenizer.json; data prepare needs a fast tokenizer.")
    settings = _collect_settings(source, encoder, options)
    try:
        advice = "fix that and run the same command again"
        with explain_disk_errors(lambda problem: f"{str(out)!r} could not be written: {problem}; {advice}."):
            out = settle_path(out)
            if out.exists() and not out.is_dir():
                raise _describe_foreign(out)
            with occupy_folder(out):
                names = {path.name for path in out.iterdir() if not path.name.startswith(STAGING)} - {LOCK}
                if names & {shards.MANIFEST, shards.DOMAINS}:
                    return _check_finished(out, settings, encoder.separator)
                if names and not (out / shards.WRITING).exists():
                    raise _describe_foreign(out)
                stream = Stream(source) if isinstance(source, TextSource) else TokenStream(source, encoder)
                moved = moved_document(stream, options.held_out, encoder)
                shutil.rmtree(out / shards.WRITING, ignore_errors=True)
                (out / shards.WRITING).mkdir()
                run = _Run(out / shards.WRITING, settings, stream, escape_name(tokenizer), encoder, moved)
                try:
                    threads = workers or min(cores(), MOST_WORKERS)
                    run.tokenize_stream(threads, batch_bytes, on_progress or (lambda *_: None))
                    run.write_manifests()
                    _publish_folder(out / shards.WRITING, out)
                finally:
                    run.close_files()
                    shutil.rmtree(out / shards.WRITING, ignore_errors=True)
                return [prepared.folder for prepared in shards.open_all(out)]
    except KeyboardInterrupt:
        raise Interrupted("Stopped; run the same command again to start over.") from None


def _collect_settings(source: TextSource | TokenSource, encoder: Encoder, options: Options) -> dict[str, Any]:
    """Collect everything that affects the result, for the manifest."""
    # The tokenizer as save_pretrained writes it.
    content = encoder.tokenizer.backend_tokenizer.to_str(pretty=True)
    settings: dict[str, Any] = {"format_version": shards.FORMAT_VERSION, **asdict(source)}
    settings |= {"tokenizer": hashlib.sha256(content.encode()).hexdigest(), **asdict(options)}
    if template := encoder.tokenizer.chat_template:
        settings["chat_template"] = hashlib.sha256(json.dumps(template).encode()).hexdigest()
    return {name: escape_name(value) if isinstance(value, str) else value for name, value in settings.items()}


def moved_document(stream: Stream | TokenStream, share: float, encoder: Encoder) -> float | None:
    """Return the fraction of the document to move to the side of the split that would be empty; None if neither is, as
    in a large corpus, of which only the beginning is read, or if the source states the split.

    It is the document closest to the border of those whose text occurs least often, so that no text is on both sides.
    encoder: called with the first document, for its errors. Raises `HeadwaterError` for fewer than two texts.
    """
    counts = Counter[float]()
    for document in stream:
        if not counts:
            encoder.encode_documents([document])
        counts[document.hash_fraction()] += 1
        if document.is_held_out is not None or len({fraction < share for fraction in counts}) > 1:
            return None
    source = stream.source.source
    if not counts:
        raise no_text(source, stream.skipped)
    if len(counts) < 2:
        content = f"one document of {len(document.data)} bytes" if counts.total() == 1 else "one text, repeated"
        raise too_short(source, content)
    rarest = min(counts.values())
    return min((value for value in counts if counts[value] == rarest), key=lambda fraction: abs(fraction - share))


@dataclass
class _Run:
    """One run on a folder. name: of the tokenizer. moved: see `moved_document`. folders: by domain."""

    out: Path
    settings: dict[str, Any]
    stream: Stream | TokenStream
    name: str
    encoder: Encoder
    moved: float | None
    folders: dict[str | None, _Folder] = field(default_factory=dict)

    def tokenize_stream(self, workers: int, batch_bytes: int, on_progress: OnProgress) -> None:
        """Tokenize and write the stream. Raises `HeadwaterError` if its files change meanwhile."""
        files = self.stream.fingerprint
        pending: deque[tuple[list[Document], Future]] = deque()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches already run in parallel
        with ThreadPoolExecutor(workers) as pool:
            try:
                for documents in chain(_make_batches(self.stream, batch_bytes), [None]):
                    if documents is not None:
                        pending.append((documents, pool.submit(self.encoder.encode_documents, documents)))
                    while len(pending) >= (1 if documents is None else 2 * workers):
                        done, tokens = pending.popleft()
                        for document, row in zip(done, tokens.result(), strict=True):
                            self._open_folder(document.domain).add_document(document, row)
                        splits = [split for folder in self.folders.values() for split in folder.splits.values()]
                        on_progress(*(sum(getattr(split, name) for split in splits) for name in COUNTS))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if self.stream.fingerprint != files:
            raise HeadwaterError(f"The files of {self.settings['source']!r} changed while they were read; start again.")

    def write_manifests(self) -> None:
        """Close the shards, and write the manifest."""
        for folder in self.folders.values():
            self._write_manifest(folder)
        if self.settings.get("by"):
            domains = {folder.path.name: domain for domain, folder in self.folders.items()}
            shards.write_sealed(self.out / shards.DOMAINS, {"settings": self.settings, "domains": domains})

    def _write_manifest(self, folder: _Folder) -> None:
        tokenizer_folder = folder.path / shards.TOKENIZER
        self.encoder.tokenizer.save_pretrained(tokenizer_folder)
        sums = shards.hash_tokenizer(folder.path)
        files = [tokenizer_folder / name for name in sums]
        for path in (*files, *{file.parent for file in files}):
            flush_path(path)
        evaluation = folder.write_evaluation()
        manifest = shards.Manifest(
            headwater=__version__,
            source=self.settings["source"],
            domain=folder.domain,
            settings=self.settings,
            tokenizer=shards.TokenizerFacts(
                name=self.name,
                sha256=sums["tokenizer.json"],
                vocab_size=self.encoder.vocab_size,
                files=sums,
            ),
            separator=self.encoder.separator,
            dtype="uint16" if self.encoder.dtype.itemsize == 2 else "uint32",
            sha256=folder.content.hexdigest(),
            skipped=shards.Skipped(
                empty=self.stream.empty,
                none=self.stream.none,
                files=len(self.stream.skipped),
                names=self.stream.skipped[:NAMED],
            ),
            train=folder.splits["train"].finish_split(),
            held_out=folder.splits["held_out"].finish_split(),
            evaluation=evaluation,
        )
        shards.write_sealed(folder.path / shards.MANIFEST, manifest.model_dump())
        flush_path(folder.path)

    def _open_folder(self, domain: str | None) -> _Folder:
        if (folder := self.folders.get(domain)) is not None:
            return folder
        if len(self.folders) >= MOST_DOMAINS:
            raise HeadwaterError(
                f"Column {self.settings['by']!r} has more than {MOST_DOMAINS} values; --by is for a few domains."
            )
        plain = re.sub(r"[^a-z0-9]+", "-", (domain or "").lower())[:MOST_NAME].strip("-") or "other"
        paths = (self.out / (plain if n == 1 else f"{plain}-{n}") for n in range(1, MOST_DOMAINS + 2))
        path = self.out if domain is None else next(path for path in paths if not path.exists())
        path.mkdir(exist_ok=True)
        folder = self.folders[domain] = _Folder(path, domain, self.settings, self.moved)
        return folder

    def close_files(self) -> None:
        splits = chain.from_iterable(folder.splits.values() for folder in self.folders.values())
        for file in chain.from_iterable(split.files.values() for split in splits):
            with contextlib.suppress(OSError):  # a full disk has already raised an error
                file.close()


class _Folder:
    """A prepared folder that is being written."""

    def __init__(self, path: Path, domain: str | None, settings: dict[str, Any], moved: float | None) -> None:
        self.path, self.domain, self.settings, self.moved = path, domain, settings, moved
        self.splits = {name: _Split(path, name, settings["shard_tokens"]) for name in shards.SPLITS}
        # Hash of one line per document.
        self.content = hashlib.sha256()
        # (fraction, name, text): texts to evaluate on with the smallest fractions, and their bytes.
        self.chosen: list[tuple[float, str, str]] = []
        self.chosen_bytes = self.special = 0
        self.is_chat = False

    def add_document(self, document: Document, tokens: Encoded) -> None:
        fraction = document.hash_fraction()
        is_held_out = document.is_held_out
        if is_held_out is None:
            is_held_out = (fraction < self.settings["held_out"]) != (fraction == self.moved)
        self.splits["held_out" if is_held_out else "train"].add_document(document, tokens)
        digest = document.key if len(document.ids) else hashlib.sha256(document.data).hexdigest()
        self.content.update(f"{document.id}\0{digest}\n".encode())
        most = self.settings["evaluation_bytes"]
        if is_held_out and not (document.is_chat and len(document.data) > most):  # conversations are never cut
            self.is_chat = document.is_chat
            self.special += document.special
            text = document.data[:most].decode(errors="ignore")  # ignore an incomplete last character
            bisect.insort(self.chosen, (fraction, document.id, text))
            self.chosen_bytes += len(text.encode())
            # Stop at the first text that does not fit.
            while self.chosen_bytes - (size := len(self.chosen[-1][-1].encode())) > most:
                self.chosen.pop()
                self.chosen_bytes -= size

    def write_evaluation(self) -> shards.EvaluationFacts:
        fits = self.chosen_bytes <= self.settings["evaluation_bytes"]
        documents = sorted((name, text) for _, name, text in (self.chosen if fits else self.chosen[:-1]))
        rows = [
            {"id": name} | ({"messages": json.loads(text)} if self.is_chat else {"text": text})
            for name, text in documents
        ]
        file = self.path / shards.EVALUATION
        replace_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        size = sum(len(text.encode()) for _, text in documents)
        facts = {"documents": len(documents), "bytes": size, "special": self.special}
        return shards.EvaluationFacts(**facts, sha256=sha256_of(file))


class _Split:
    """The shards of one split that are being written; the last one is open once tokens are written to it."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self.folder, self.name, self.most = folder, name, most
        self.documents = self.bytes = self.tokens = 0
        self.answer_tokens: int | None = None
        self.shards: list[shards.ShardFacts] = []
        # Files of the open shard, by suffix.
        self.files: dict[str, BinaryIO] = {}
        self.open_tokens = self.open_documents = 0

    def add_document(self, document: Document, tokens: Encoded) -> None:
        arrays = {"tokens": tokens.ids, "borders": np.array([self.open_tokens], dtype="<i8")}
        if tokens.counts is not None:
            arrays["answers"] = tokens.counts.astype("u1")
            self.answer_tokens = int(tokens.counts.sum()) + (self.answer_tokens or 0)
        if not self.files:
            stem = self.folder / f"{self.name}-{len(self.shards):05d}"
            self.files = {kind: stem.with_suffix(f".{kind}").open("xb", buffering=WRITTEN) for kind in arrays}
        for kind, array in arrays.items():
            self.files[kind].write(array.tobytes())
        self.documents += 1
        self.open_documents += 1
        self.open_tokens += len(tokens.ids)
        self.tokens += len(tokens.ids)
        self.bytes += tokens.bytes
        if self.open_tokens >= self.most:
            self._close_shard()

    def _close_shard(self) -> None:
        for file in self.files.values():
            file.close()
            flush_path(Path(file.name))
        sums = {kind: sha256_of(Path(file.name)) for kind, file in self.files.items()}
        facts = shards.ShardFacts(
            file=Path(self.files["tokens"].name).name,
            tokens=self.open_tokens,
            documents=self.open_documents,
            sha256=sums["tokens"],
            borders_sha256=sums["borders"],
            answers_sha256=sums.get("answers"),
        )
        self.shards.append(facts)
        self.open_tokens = self.open_documents = 0
        self.files = {}

    def finish_split(self) -> shards.SplitFacts:
        if self.files:
            self._close_shard()
        return shards.SplitFacts(**{name: getattr(self, name) for name in (*COUNTS, "answer_tokens", "shards")})


def _make_batches(stream: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield documents in groups of about `size` bytes."""
    group: list[Document] = []
    gathered = 0
    for document in stream:
        group.append(document)
        gathered += len(document.data)
        if gathered >= size:
            yield group
            group, gathered = [], 0
    if group:
        yield group


def _publish_folder(written: Path, out: Path) -> None:
    """Move what was written to its folder; the file that marks it as finished comes last."""
    for path in sorted(written.iterdir(), key=lambda path: path.name in (shards.MANIFEST, shards.DOMAINS)):
        if (target := out / path.name).is_dir():  # left by a run that was killed while moving files
            shutil.rmtree(target)
        flush_path(out)
        path.replace(target)
    flush_path(out)


def _describe_foreign(out: Path) -> HeadwaterError:
    return HeadwaterError(f"{str(out)!r} holds other files; name a new folder.")


def _check_finished(out: Path, settings: dict[str, Any], separator: int) -> list[Path]:
    """Return a finished run's folders, with all checksums verified. Raises `HeadwaterError` for other settings."""
    prepared = shards.open_all(out)
    for manifest in (folder.manifest for folder in prepared):
        earlier = manifest.settings
        name = next((name for name in {**earlier, **settings} if earlier.get(name) != settings.get(name)), None)
        if name == "tokenizer" or (name is None and separator != manifest.separator):
            raise HeadwaterError(f"{str(out)!r} was prepared with another tokenizer; use that, or name another folder.")
        if name is not None:
            raise HeadwaterError(
                f"{str(out)!r} was prepared with {name.replace('_', ' ')} {earlier.get(name)!r}, not "
                f"{settings.get(name)!r}; use the same, or name another folder."
            )
    shards.check_all(prepared)
    return [folder.folder for folder in prepared]
