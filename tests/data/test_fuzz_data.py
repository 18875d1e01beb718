"""Damaged files, drawn from seeds: whatever is read, a sentence comes out or what was written, never anything else."""

import bz2
import gzip
import hashlib
import json
import os
import random
import shutil
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from headwater.util.errors import HeadwaterError
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.shards import check_all, open_all
from headwater_lab.data.stream import TextSource
from headwater_lab.data.text import TextSettings
from headwater_lab.data.tokenizer import Encoder, load_tokenizer, train_tokenizer
from headwater_lab.util.output_folder import LOCK

VALUES = [b"null", b"[]", b"{}", b"-1", b"true", b"1e999", b'""', b'"\\ud800"', b'"../../x"', b"9" * 5000, b"[" * 9999]
ROWS = [{"text": f"{i} naïve text € {i * i} \n" * (i % 9 + 1), "set": "AB"[i % 2], "n": i} for i in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(ROWS)).encode()
TEXT = "".join(f"{i} naïve text € {i * i}\n" for i in range(9_000)).encode()
PACKED = {
    "rows.jsonl.gz": gzip.compress(LINES[:3000]) + gzip.compress(LINES[3000:]),
    "rows.jsonl.bz2": bz2.compress(LINES[:3000]) + bz2.compress(LINES[3000:]),
    "text.txt.gz": gzip.compress(TEXT),
}
FILES = PACKED | {"text.txt": TEXT, "rows.jsonl": LINES}
KINDS = [*FILES, "rows.parquet"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """What reaches the disk, and when, is not what these tests are about."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same with something wrong in it."""
    place = rng.randrange(len(data)) if data else 0
    match rng.randrange(7):
        case 0 | 1:
            changed = bytearray(data or b"\0")
            for _ in range(rng.choice((1, 1, 1, 5))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 2:
            return data[:place]
        case 3:
            return data[:place] + bytes(min(4096, len(data) - place)) + data[place + 4096 :]
        case 4:
            return data[:place] + rng.randbytes(rng.choice((1, 3, 200))) + data[place:]
        case 5:
            return data[:place] + data[place + rng.choice((1, 2, 100)) :]
        case _:  # a value of another type
            ends = [i for i, byte in enumerate(data) if byte in b',}]\n"'] or [0]
            starts = [i for i, byte in enumerate(data) if byte in b':[,"'] or [0]
            start = rng.choice(starts) + 1
            end = next((i for i in ends if i > start), len(data))
            return data[:start] + rng.choice(VALUES) + data[end:]


def content_of(kind: str, tmp_path: Path) -> bytes:
    if kind in FILES:
        return FILES[kind]
    file = tmp_path / "whole.parquet"
    how = {"compression": "zstd", "data_page_version": "2.0"} if len(tmp_path.name) % 2 else {}
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=20, **how)
    return file.read_bytes()


def sums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


def contents(folder: Path) -> dict[str, object]:
    """What each file says: other white space in JSON is no damage."""
    return {name: read_content(folder / name) for name in sums(folder)}


def read_content(file: Path) -> object:
    try:
        return json.loads(file.read_bytes()) if file.suffix == ".json" else file.read_bytes()
    except (ValueError, RecursionError):
        return file.read_bytes()


def attempt(function, *arguments):
    """What it gives, None where it is refused; anything but a `HeadwaterError` fails the test."""
    try:
        return function(*arguments)
    except HeadwaterError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


def build(settings) -> dict:
    data = settings.build()
    for batch in islice(data.batches(0, 4, 0), 20):
        assert int(batch["input_ids"].max()) < data.vocab_size
    return data.description


def read_both(file: Path, out: Path, by: str | None) -> tuple[dict | None, list | None]:
    described = attempt(build, TextSettings(source=str(file), context=16))
    options = Options(held_out=0.5, shard_tokens=4000)
    made = attempt(lambda: prepare(TextSource(str(file), by=by), out, "bytes", options, workers=1))
    if made:
        check_all(open_all(out))
    return described, made


def damaged_sources(kind: str, cases: int, tmp_path: Path) -> None:
    rng = random.Random(f"source {kind}")
    content, refused = content_of(kind, tmp_path), 0
    file = tmp_path / (kind if kind in FILES else "rows.parquet")
    for case in range(cases + 1):
        file.write_bytes(mutated(content, rng) if case else content)
        out = tmp_path / f"out{case}"
        described, made = read_both(file, out, "set" if "rows" in kind and case % 3 == 0 else None)
        if not case:
            whole = described
            assert made
        refused += described is None
        if kind in PACKED and described and case:  # what is packed has checksums: nothing of it is lost silently
            assert described["sha256"] == whole["sha256"], case
        shutil.rmtree(out, ignore_errors=True)
    assert refused or kind == "text.txt"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_sources(kind, tmp_path):
    damaged_sources(kind, 12, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_sources(kind, tmp_path):
    damaged_sources(kind, 400, tmp_path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer([row["text"] for row in ROWS], 300).save_pretrained(folder)
    return folder


def preparation(tmp_path: Path, bpe: Path, by: str | None):
    """A function that prepares a folder."""
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    options = Options(held_out=0.3, evaluation_bytes=2000, shard_tokens=500)
    source = TextSource(str(tmp_path / "rows.jsonl"), by=by)
    return lambda out: prepare(source, out, str(bpe), options, workers=1, batch_bytes=200)


def damage(folder: Path, rng: random.Random) -> str:
    """Change one file of a folder; what was done."""
    before = contents(folder)
    while contents(folder) == before:
        name = rng.choice([name for name in before if (folder / name).exists()])
        file = folder / name
        match rng.randrange(6):
            case 0:
                file.unlink()
            case 1 if file.suffix == ".borders":
                file.write_bytes(bytes(8) * (len(file.read_bytes()) // 8))
            case 1 if file.suffix == ".tokens":
                file.write_bytes(b"\xff" * len(file.read_bytes()))
            case 2:
                file.unlink()
                file.mkdir()
            case _:
                file.write_bytes(mutated(file.read_bytes(), rng))
    return name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cases", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", [None, "set"])
def test_damaged_prepared_folders(cases, by, tmp_path, bpe):
    rng = random.Random(f"prepared {by}")
    run = preparation(tmp_path, bpe, by)
    folders = run(tmp_path / "whole")
    out = tmp_path / "out"
    names = [str(out / folder.relative_to(tmp_path / "whole")) for folder in folders]
    settings = PreparedSettings(source=dict.fromkeys(names, 1.0), context=8)
    for case in range(cases + 1):
        shutil.copytree(tmp_path / "whole", out)
        if not case:
            check_all(open_all(out))
            assert build(settings)
        else:
            what = damage(out, rng)
            after = sums(out)
            assert not attempt(lambda: check_all(open_all(out)) or "as they were"), (what, case)
            attempt(build, settings)
            with pytest.raises(HeadwaterError):
                run(out)
            assert sums(out) == after
        shutil.rmtree(out)


@pytest.mark.parametrize("cases", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_tokenizers(cases, tmp_path, bpe):
    rng = random.Random("tokenizer")
    refused = 0
    for _ in range(cases):
        shutil.copytree(bpe, tmp_path / "tokenizer")
        damage(tmp_path / "tokenizer", rng)
        encoded = attempt(lambda: Encoder(load_tokenizer(str(tmp_path / "tokenizer")))(["a naïve text", "€ 12 \n"]))
        refused += encoded is None
        shutil.rmtree(tmp_path / "tokenizer")
    assert refused
