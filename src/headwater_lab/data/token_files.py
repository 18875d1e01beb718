"""Token files of other programs, as documents: llm.c and modded-nanogpt, nanoGPT, Megatron, OLMo. See docs/data.md.

A reader maps a file to its token ids, and to the first token of each document if the format has an index. Without one,
a token between documents separates them, whether the program writes it before or after each. That token is left out
here, since every document of a prepared folder is given the tokenizer's own.
"""

import hashlib
import pickletools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headwater.util.errors import HeadwaterError, check_known, first_line
from headwater_lab.data.corpus import Document, local_files, name_in
from headwater_lab.data.stream import fingerprint_files
from headwater_lab.data.tokenizer import Encoder

# Tokens to search at a time for the ends of documents, and the most in a document. A longer one is cut.
CHUNK = 2**20
# The documents, and the tokens of each, that show whether the tokenizer is the right one.
TRIED, TRIED_TOKENS = 64, 1024
# Names of held-out files, if none are named: val.bin, fineweb_val_000000.bin, c4.val.bin, val/part-0.npy.
HELD_OUT = re.compile(r"(^|[_./-])val(id(ation)?)?\d*[_./-]", re.IGNORECASE)
LLM_C_HEADER = 256 * 4
# (magic number, version) -> type of the tokens.
LLM_C_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
MEGATRON_MAGIC, MEGATRON_HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Mapped = tuple[np.ndarray, np.ndarray | None]


def map_llm_c(file: Path, vocab_size: int) -> Mapped:
    """Map a file of llm.c or modded-nanogpt: 256 int32, of which the first three are magic, version and count."""
    header = np.fromfile(file, "<i4", LLM_C_HEADER // 4)
    if len(header) < LLM_C_HEADER // 4:
        raise HeadwaterError(
            f"{str(file)!r} is shorter than the header of llm.c's files; copy it again, or leave it out."
        )
    magic, version, count = header[:3].tolist()
    if (magic, version) not in LLM_C_TYPES:
        known = " or ".join(f"{magic}, version {version}" for magic, version in LLM_C_TYPES)
        raise HeadwaterError(
            f"{str(file)!r} begins with {magic}, version {version}, not with {known}, so it is no token file of llm.c; "
            "name its format with --tokens."
        )
    ids = _map_array(file, LLM_C_TYPES[magic, version], LLM_C_HEADER)
    if len(ids) != count:
        raise HeadwaterError(f"{str(file)!r} has {len(ids):,} tokens, but its header says {count:,}; copy it again.")
    return ids, None


def read_characters(file: Path) -> dict[str, int]:
    """Read the numbers of characters in nanoGPT's meta.pkl, without unpickling it, which could run code."""
    table: dict[str, int] = {}
    number = None
    try:
        for operation, value, _ in pickletools.genops(file.read_bytes()):
            if operation.name.startswith(("BININT", "INT", "LONG")):
                number = value
            elif isinstance(value, str) and "UNICODE" in operation.name:
                if number is not None and len(value) == 1:
                    table[value] = number
                number = None
    except ValueError as error:
        raise HeadwaterError(
            f"{str(file)!r} is not a table of nanoGPT's: {first_line(error)}; copy it again."
        ) from error
    return table


def map_nanogpt(file: Path, vocab_size: int) -> Mapped:
    """Map a file of nanoGPT: uint16 without a header, or uint32 for a larger vocabulary."""
    return _map_plain(file, "<u2" if vocab_size <= 2**16 else "<u4"), None


def map_olmo(file: Path, vocab_size: int) -> Mapped:
    """Map a file of OLMo: the smallest unsigned integers for the vocabulary, without a header; or a real .npy file."""
    with file.open("rb") as start:
        has_header = start.read(6) == b"\x93NUMPY"
    if not has_header:
        return _map_plain(file, "<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4"), None
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy evaluates the header as Python, which can raise anything
        raise HeadwaterError(f"{str(file)!r} is damaged or has no numbers: {error}; copy it again.") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise HeadwaterError(f"{str(file)!r} is an array of {ids.dtype}, {ids.shape}; write a flat array of token ids.")
    if (size := ids.offset + ids.nbytes) != file.stat().st_size:
        raise HeadwaterError(f"{str(file)!r} has {file.stat().st_size:,} bytes, not {size:,}; copy it again.")
    return ids, None


def map_megatron(file: Path, vocab_size: int) -> Mapped:
    """Map a .bin file of Megatron by the .idx file next to it, its index.

    The index begins with a magic number, its version (1), a code for the type of the tokens, and two counts. It lists
    the length and the place of each sequence, then the first sequence of each document and the end.
    """
    index = file.with_suffix(".idx")
    if not index.is_file():
        raise HeadwaterError(f"{str(file)!r} has no {index.name} next to it; copy that too.")
    listed = _map_array(index, "<u1")
    if len(listed) < MEGATRON_HEADER.size:
        raise HeadwaterError(f"{str(index)!r} is shorter than the header of Megatron's index; copy it again.")
    magic, version, code, count, documents = MEGATRON_HEADER.unpack(listed[: MEGATRON_HEADER.size].tobytes())
    if (magic, version) != (MEGATRON_MAGIC, 1):
        raise HeadwaterError(f"{str(index)!r} is no index of Megatron, version 1; name its format with --tokens.")
    if code not in MEGATRON_TYPES:
        raise HeadwaterError(f"{str(index)!r} has the type {code}, which is not an integer's; name files of token ids.")
    sizes = np.array([0, 4 * count, 8 * count, 8 * documents]).cumsum() + MEGATRON_HEADER.size
    if len(listed) < sizes[-1]:
        raise HeadwaterError(f"{str(index)!r} has {len(listed):,} bytes, not {sizes[-1]:,}; copy it again.")
    lengths, places, firsts = (
        listed[start:stop].view(kind)
        for start, stop, kind in zip(sizes, sizes[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    ids = _map_array(file, MEGATRON_TYPES[code])
    if (total := int(lengths.sum(dtype=np.int64))) != len(ids):
        raise HeadwaterError(f"{str(file)!r} has {len(ids):,} tokens, but its index says {total:,}; copy both again.")
    ends = lengths.cumsum(dtype=np.int64)
    if (lengths < 0).any() or (places != (ends - lengths) * ids.itemsize).any():
        raise HeadwaterError(f"{str(index)!r} does not list its sequences one after another; copy it again.")
    if documents < 2 or (firsts[0], firsts[-1]) != (0, count) or (firsts[1:] < firsts[:-1]).any():
        raise HeadwaterError(f"{str(index)!r} does not list all documents in order; copy it again.")
    starts = places[firsts[firsts < count]] // ids.itemsize  # the last entry is the end
    return ids, starts[starts < len(ids)]


# The format's name for --tokens -> the ending of its files, and its reader.
FORMATS = {
    "llm.c": (".bin", map_llm_c),
    "nanogpt": (".bin", map_nanogpt),
    "megatron": (".bin", map_megatron),
    "olmo": (".npy", map_olmo),
}


def _map_plain(file: Path, kind: str) -> np.ndarray:
    """Map a file without a header as `_map_array`. Raises `HeadwaterError` if its tokens have twice as many bytes."""
    ids = _map_array(file, kind)
    if len(ids) > 3 and not ids[1 : 2 * CHUNK : 2].any():
        raise HeadwaterError(
            f"Every second number of {str(file)!r} is 0, so its tokens have more than {ids.itemsize} bytes; write "
            f"{ids.itemsize} bytes a token, or name the tokenizer that made it with --tokenizer."
        )
    return ids


def _map_array(file: Path, kind: str, start: int = 0) -> np.ndarray:
    """Map the numbers in a file from byte `start` on. Raises `HeadwaterError` if there are none, or no whole number."""
    size, itemsize = file.stat().st_size - start, np.dtype(kind).itemsize
    if size <= 0:
        raise HeadwaterError(f"{str(file)!r} holds no tokens; copy it again, or leave it out.")
    if size % itemsize:
        raise HeadwaterError(
            f"{str(file)!r} has {size:,} bytes of tokens, which {itemsize} bytes a token do not divide; copy it again, "
            "or name its format with --tokens."
        )
    return np.memmap(file, kind, "r", start)


@dataclass(frozen=True)
class TokenSource:
    """Token files of another program."""

    source: str
    """A file, folder or glob. Files named val, valid or validation, or in such a folder, are held out, unless others
    are named."""
    tokens: str
    """Their format, of `FORMATS`."""
    held_out_source: str | None = None
    """The held-out files; a share of the documents if there are none."""
    border: int | None = None
    """The token between documents; default: the tokenizer's end of text. Megatron's index lists them instead."""

    def list_files(self, source: str) -> dict[Path, str]:
        """List files of this format with their names in records. Raises `HeadwaterError` if there are none."""
        check_known("--tokens has no format", self.tokens, FORMATS)
        suffix, _ = FORMATS[self.tokens]
        if (local := local_files(source)) is None:
            raise HeadwaterError(f"There is no file {source!r}; --tokens is for files on this machine.")
        root, files = local
        names = {file: name_in(file, root) for file in files if file.suffix == suffix}
        if not names:
            raise HeadwaterError(f"There is no {suffix} file in {source!r}; name others, or another --tokens.")
        return names

    def list_held_out(self) -> dict[Path, str]:
        """List the held-out files with their names; none if a share of the documents is held out."""
        if self.held_out_source:
            return self.list_files(self.held_out_source)
        return {file: name for file, name in self.list_files(self.source).items() if HELD_OUT.search(name)}


class TokenStream:
    """An iterator over the documents of token files, as `headwater_lab.data.stream.Stream` is over texts.

    Raises `HeadwaterError` for damaged files, and for ids that the tokenizer does not make of their text.
    """

    def __init__(self, source: TokenSource, encoder: Encoder) -> None:
        files, held_out = source.list_files(source.source), source.list_held_out()
        self.source, self.encoder = source, encoder
        self.empty = self.none = 0
        self.skipped: list[str] = []
        self.border = encoder.separator if source.border is None else source.border
        self.special = encoder.tokenizer.all_special_ids
        _, self.reader = FORMATS[source.tokens]
        aside = {file.resolve() for file in held_out}
        train = {file: name for file, name in files.items() if file.resolve() not in aside}
        if not train:
            raise HeadwaterError(f"{source.source!r} has only held-out files; name files to train on too.")
        self._check_characters({file.with_name("meta.pkl") for file in files})
        in_train = False if held_out else None
        self.files = [*((*item, in_train) for item in train.items()), *((*item, True) for item in held_out.items())]

    @property
    def fingerprint(self) -> list[Any]:
        """Return names, sizes and times of the files, which must not change meanwhile."""
        files = {name: file for file, name, _ in self.files}
        if self.source.tokens == "megatron":
            files |= {f"index of {name}": file.with_suffix(".idx") for name, file in files.items()}
        return fingerprint_files([*files], [*files.values()])

    def __iter__(self) -> Iterator[Document]:
        restored: list[bool] = []
        for file, name, is_held_out in self.files:
            for index, ids in enumerate(self._read_documents(file)):
                if len(restored) < TRIED and len(ids) > 1:  # single tokens of any file are restored
                    restored.append(self._is_restored(ids, file))
                    if len(restored) == TRIED:
                        self._check_tokenizer(restored)
                text = self._decode_ids(ids)
                key = hashlib.sha256(ids.tobytes()).hexdigest()
                special = int(np.isin(ids, self.special).sum())
                yield Document(f"{name}#{index}", text, key, ids=ids, special=special, is_held_out=is_held_out)
        self._check_tokenizer(restored)

    def _read_documents(self, file: Path) -> Iterator[np.ndarray]:
        """Yield the ids of each document, uint32, with text and without what separates it from others."""
        ids, starts = self.reader(file, self.encoder.vocab_size)
        borders = 0
        for start, stop in _split_at(ids, self.border) if starts is None else pairwise(chain(starts, [len(ids)])):
            borders += start > 0 or stop < len(ids)
            for piece in range(start, stop, CHUNK):
                document = ids[piece : min(piece + CHUNK, stop)]
                self._check_range(document, piece, file)
                if starts is not None and document[-1] == self.border:  # some programs end every document with it
                    document = document[:-1]
                if len(document := self._strip_frame(document)):
                    yield document.astype("<u4")
        is_optional = self.source.tokens == "nanogpt" and self.source.border is None
        if starts is None and not borders and not is_optional:
            raise HeadwaterError(
                f"Token {self.border} occurs nowhere in {str(file)!r}; name the token between documents with --border."
            )

    def _strip_frame(self, ids: np.ndarray) -> np.ndarray:
        """Leave out the tokens that every document is given anyway, at its begin and end."""
        head, tail = self.encoder.frame
        if len(head) and np.array_equal(ids[: len(head)], head):
            ids = ids[len(head) :]
        if len(tail) and np.array_equal(ids[-len(tail) :], tail):
            ids = ids[: -len(tail)]
        return ids

    def _check_range(self, ids: np.ndarray, position: int, file: Path) -> None:
        """Raise `HeadwaterError` if one of the ids, which begin at `position` of the file, is beyond the vocabulary."""
        wrong = np.flatnonzero((ids < 0) | (ids >= self.encoder.vocab_size))
        if len(wrong):
            raise HeadwaterError(
                f"{str(file)!r} has token {ids[wrong[0]]} at position {position + wrong[0]}, but the tokenizer has "
                f"only {self.encoder.vocab_size}; {self._advise(file)}."
            )

    def _is_restored(self, ids: np.ndarray, file: Path) -> bool:
        """Whether the tokenizer makes these ids of their own text, special tokens aside."""
        if self.encoder.is_bytes and (file.parent / "meta.pkl").exists():  # characters' numbers also are bytes
            return False
        ids = ids[~np.isin(ids, self.special)][:TRIED_TOKENS]
        again = self.encoder([self._decode_ids(ids)])[0]
        half = -(-len(ids) // 2)  # the end may be cut within a word
        return len(ids) > 0 and np.array_equal(again[:half], ids[:half])

    def _decode_ids(self, ids: np.ndarray) -> str:
        decode = self.encoder.tokenizer.decode
        return str(decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _check_characters(self, tables: Iterable[Path]) -> None:
        """Raise `HeadwaterError` if the tokenizer numbers characters otherwise than nanoGPT's tables: any ids of
        characters are restored.
        """
        for file in tables:
            for character, number in read_characters(file).items() if file.exists() else ():
                if (ids := self.encoder([character])[0].tolist()) != [number]:
                    raise HeadwaterError(
                        f"{str(file)!r} has {character!r} as {number}, and the tokenizer as {ids}; "
                        f"{self._advise(file)}. nanoGPT reads line ends as \\n: convert them in the text first."
                    )

    def _check_tokenizer(self, restored: Sequence[bool]) -> None:
        """Raise `HeadwaterError` unless the tokenizer restores most documents; a few begin within a word."""
        if 2 * sum(restored) <= len(restored):
            file = self.files[0][0]
            raise HeadwaterError(f"The tokenizer does not restore the tokens in {str(file)!r}; {self._advise(file)}.")

    def _advise(self, file: Path) -> str:
        if (file.parent / "meta.pkl").exists():
            return (
                f"meta.pkl lists characters, so make the tokenizer with "
                f"`headwater data tokenizer {file.parent / 'input.txt'} --characters --out FOLDER`, and pass "
                "--tokenizer FOLDER"
            )
        return "name the tokenizer that made the file with --tokenizer, or the file's format with --tokens"


def _split_at(ids: np.ndarray, border: int) -> Iterator[tuple[int, int]]:
    """Yield the first position of each document and the one after its last, which the border separates."""
    start = 0
    for position in range(0, len(ids), CHUNK):
        for stop in (np.flatnonzero(ids[position : position + CHUNK] == border) + position).tolist():
            yield start, stop
            start = stop + 1
    yield start, len(ids)
