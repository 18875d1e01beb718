"""Prepared folders: the same tokens as the corpus, whatever interrupts, splits or packs them."""

import bz2
import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import processes
from headwater import HeadwaterConfig
from headwater.util.errors import HeadwaterError
from headwater_lab.data import corpus as corpora
from headwater_lab.data import prepare as preparing
from headwater_lab.data import reading
from headwater_lab.data.corpus import Document, cut_document
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.shards import DOMAINS, MANIFEST, WRITING, open_all, open_prepared, write_sealed
from headwater_lab.data.stream import Stream, TextSource, read_corpus
from headwater_lab.data.tokenizer import END_OF_TEXT, byte_tokenizer, load_tokenizer, local_size, train_tokenizer
from headwater_lab.data.tokenizer_files import find_tokenizer
from headwater_lab.util.endings import Interrupted

WORDS = [
    "alpha",
    "beta",
    "naïve",
    "世界",
    "the",
    "of",
    "gamma\r",
    "  indented",
    "€",
    "🙂",
    END_OF_TEXT,
    "x" * 40,
    "\t\t",
]
ODD = "\ud7ff\ue000\ufffd\U0010ffff e\u0301 \u200d\u2028 \x00\x01\x7f \ufeff ﷺ 👩‍👩‍👧 \r\n\r \t " + END_OF_TEXT
FORK = multiprocessing.get_context("fork")


def texts(count: int, seed: int = 0, most: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [
        f"{i} " + "".join(rng.choice(WORDS) + rng.choice(" \n") for _ in range(rng.randint(1, most)))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer(texts(200, seed=1), 400).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path) -> Path:
    """60 text files in folders, an empty one and two that are no text."""
    root = tmp_path / "corpus"
    for i, text in enumerate(texts(60)):
        path = root / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (root / "empty.txt").write_bytes(b"")
    (root / "zeros.bin").write_bytes(b"text\0")
    (root / "broken.txt").write_bytes(b"text \xff")
    return root


def source_of(kind: str, tmp_path: Path) -> str:
    rows = [{"text": text, "n": i} for i, text in enumerate(texts(60, most=400))]
    path = tmp_path / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    match kind:
        case "jsonl":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.bz2":
            path.write_bytes(bz2.compress(lines))
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            Dataset.from_list(rows).to_parquet(path)
        case "txt":
            path.write_bytes("\n".join(texts(3000, most=80)).encode())
    return str(path)


def reference(source: str, tokenizer: str, held_out: float = 0.2) -> dict[str, list[tuple[Document, list[int]]]]:
    """The documents of either split with their tokens, made one by one by transformers."""
    loaded = load_tokenizer(tokenizer)
    splits: dict[str, list] = {"train": [], "held_out": []}
    for document in read_corpus(source).documents:
        ids = loaded(document.text, add_special_tokens=False, split_special_tokens=True).input_ids
        name = "held_out" if document.hash_fraction() < held_out else "train"
        splits[name].append((document, [loaded.eos_token_id, *ids]))
    return splits


def make(source, out: Path, tokenizer: str = "bytes", **changes) -> list[Path]:
    how = {name: changes.pop(name) for name in list(changes) if name in ("local", "workers", "on_progress")}
    how |= {name: changes.pop(name) for name in list(changes) if name == "batch_bytes"}
    options = {"held_out": 0.2} | {n: changes.pop(n) for n in list(changes) if n in Options.__dataclass_fields__}
    return prepare(TextSource(str(source), **changes), out, tokenizer, Options(**options), **how)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        *((kind, "bytes") for kind in ("folder", "txt", "jsonl", "jsonl.gz", "jsonl.bz2", "json", "parquet")),
        *((kind, "bpe") for kind in ("folder", "jsonl")),
        *(
            pytest.param(kind, "bpe", marks=pytest.mark.slow)
            for kind in ("txt", "jsonl.gz", "jsonl.bz2", "json", "parquet")
        ),
    ],
)
def test_tokens_borders_and_hash_are_those_of_the_corpus(kind, tokenizer, folder, tmp_path, bpe):
    source = str(folder) if kind == "folder" else source_of(kind, tmp_path)
    tokenizer = bpe if tokenizer == "bpe" else tokenizer
    make(source, tmp_path / "out", tokenizer)
    prepared = open_prepared(tmp_path / "out")
    assert prepared.manifest.sha256 == read_corpus(source).facts["sha256"]
    assert prepared.manifest.documents == read_corpus(source).facts["documents"]
    assert prepared.manifest.bytes == read_corpus(source).facts["bytes"]
    for name, documents in reference(source, tokenizer).items():
        split = getattr(prepared, name)
        assert split.documents == len(documents) > 3
        assert split.read(0, split.tokens).tolist() == [token for _, ids in documents for token in ids]
        lengths = [len(ids) for _, ids in documents]
        assert split.starts(0, split.tokens).tolist() == [0, *np.cumsum(lengths)[:-1].tolist()]
        facts = getattr(prepared.manifest, name)
        assert facts.bytes == sum(len(document.text.encode()) for document, _ in documents)


def test_the_saved_tokenizer_is_the_one_that_made_the_tokens(folder, tmp_path, bpe):
    for name in ("bytes", bpe):
        out = tmp_path / Path(name).name
        make(folder, out, name)
        prepared = open_prepared(out)
        assert prepared.manifest.tokenizer.vocab_size == len(prepared.tokenizer) == len(load_tokenizer(name))
        text = prepared.tokenizer.decode(prepared.train.read(0, prepared.train.tokens), skip_special_tokens=True)
        expected = "".join(document.text for document, _ in reference(str(folder), name)["train"])
        assert text.replace(END_OF_TEXT, "") == expected.replace(END_OF_TEXT, "")


def test_workers_and_batches_do_not_change_a_byte(folder, tmp_path, bpe):
    made = []
    for workers, batch_bytes in [(1, 2**20), (3, 100), (2, 1)]:
        out = tmp_path / f"{workers}"
        make(folder, out, bpe, workers=workers, batch_bytes=batch_bytes, shard_tokens=500)
        made.append(contents(out))
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 15


def test_reading_across_shards(folder, tmp_path, bpe):
    make(folder, tmp_path / "whole", bpe)
    make(folder, tmp_path / "cut", bpe, shard_tokens=300)
    whole, cut = open_prepared(tmp_path / "whole").train, open_prepared(tmp_path / "cut").train
    assert len(whole.facts.shards) == 1
    assert len(cut.facts.shards) > 5
    assert all(shard.tokens >= 300 for shard in cut.facts.shards[:-1])
    rng = np.random.default_rng(0)
    spans = [sorted(rng.integers(0, whole.tokens + 1, 2).tolist()) for _ in range(200)]
    spans += [[a, b] for edge in cut.offsets for a in (edge - 1, edge) for b in (edge, edge + 1) if a <= b]
    for start, stop in [(0, whole.tokens), *spans]:
        start, stop = max(start, 0), min(stop, whole.tokens)
        assert cut.read(start, stop).dtype == np.uint16
        assert np.array_equal(cut.read(start, stop), whole.read(start, stop))
        starts = cut.starts(start, stop)
        assert starts.dtype == np.int64
        assert np.array_equal(starts, whole.starts(start, stop))
        assert np.all((starts >= start) & (starts < stop))
    assert (whole.read(0, whole.tokens)[whole.starts(0, whole.tokens)] == 0).all()
    for start, stop in [(-1, 5), (3, 2), (0, whole.tokens + 1)]:
        with pytest.raises(IndexError):
            cut.read(start, stop)


def test_raw_files_are_little_endian_numbers(folder, tmp_path, bpe):
    make(folder, tmp_path / "out", bpe, shard_tokens=400)
    prepared = open_prepared(tmp_path / "out")
    first = prepared.manifest.train.shards[0]
    tokens = np.fromfile(tmp_path / "out" / "train-00000.tokens", dtype="<u2")
    borders = np.fromfile(tmp_path / "out" / "train-00000.borders", dtype="<i8")
    assert first.file == "train-00000.tokens"
    assert len(tokens) == first.tokens
    assert len(borders) == first.documents
    assert tokens.tolist() == prepared.train.read(0, first.tokens).tolist()
    assert (tokens[borders] == prepared.manifest.separator).all()


@pytest.mark.slow
def test_a_large_vocabulary_takes_four_bytes(folder, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "large")
    file = tmp_path / "large" / "tokenizer.json"
    large = json.loads(file.read_text())
    large["model"]["vocab"] |= {f"unused {i}": 300 + i for i in range(2**16)}
    file.write_text(json.dumps(large))
    make(folder, tmp_path / "out", str(tmp_path / "large"))
    make(folder, tmp_path / "bytes")
    ours, bytewise = open_prepared(tmp_path / "out"), open_prepared(tmp_path / "bytes")
    assert (ours.manifest.dtype, bytewise.manifest.dtype) == ("uint32", "uint16")
    tokens, expected = ours.train.read(0, ours.train.tokens), bytewise.train.read(0, ours.train.tokens)
    assert np.array_equal(tokens == ours.manifest.separator, expected == 256)
    assert ours.manifest.separator > 2**16
    assert np.array_equal(tokens[expected < 256], expected[expected < 256])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_text_that_spells_the_separator_stays_text(tokenizer, tmp_path, bpe):
    rows = [f"{i} before{END_OF_TEXT}after" for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    make(tmp_path / "rows.jsonl", tmp_path / "out", bpe if tokenizer == "bpe" else "bytes")
    prepared = open_prepared(tmp_path / "out")
    for split in (prepared.train, prepared.held_out):
        found = np.flatnonzero(split.read(0, split.tokens) == prepared.manifest.separator)
        assert np.array_equal(found, split.starts(0, split.tokens))


def test_padding_and_truncation_of_a_tokenizer_are_left_out(folder, tmp_path, bpe):
    tokenizer = load_tokenizer(bpe)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.save(str(tmp_path / "plain.json"))
    load_tokenizer(bpe).save_pretrained(tmp_path / "set")
    (tmp_path / "set" / "tokenizer.json").write_bytes((tmp_path / "plain.json").read_bytes())
    make(folder, tmp_path / "out", str(tmp_path / "set"))
    make(folder, tmp_path / "usual", bpe)
    one, other = open_prepared(tmp_path / "out").train, open_prepared(tmp_path / "usual").train
    assert np.array_equal(one.read(0, one.tokens), other.read(0, other.tokens))


def slowly(source, out, tokenizer, **changes) -> None:
    """For a process to be killed."""
    make(source, out, tokenizer, on_progress=lambda *_: time.sleep(0.01), **changes)


@pytest.mark.slow
def test_killed_at_any_moment_it_starts_over(folder, tmp_path, bpe):
    how = dict(shard_tokens=2000, batch_bytes=600, workers=2, evaluation_bytes=3000)
    make(folder, tmp_path / "whole", bpe, **how)
    out, killed = tmp_path / "out", 0
    for seconds in (0.01, 0.05, 0.1, 0.2, 0.3):
        process = FORK.Process(target=slowly, args=(folder, out, bpe), kwargs=how)
        process.start()
        process.join(seconds)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join()
    assert killed >= 2
    make(folder, out, bpe, **how)
    assert contents(out) == contents(tmp_path / "whole")


def stopping(after: int, *arguments, **changes) -> None:
    """Code that kills the process when it is about to make rename number `after`."""
    renames, rename = iter(range(after)), Path.replace
    Path.replace = lambda self, target: rename(self, target) if next(renames, None) is not None else os._exit(1)
    make(*arguments, **changes)


@pytest.mark.parametrize("by", [None, "set"])
def test_killed_between_any_two_renames(by, tmp_path, bpe, monkeypatch):
    """Every rename of a run is the last thing that one attempt does."""
    how = dict(shard_tokens=2500, batch_bytes=3000, evaluation_bytes=3000, by=by)
    rows = [{"text": text, "set": "ab"[i % 2]} for i, text in enumerate(texts(60))]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make(source, tmp_path / "whole", bpe, **how)
    for after in range(100):
        process = FORK.Process(target=stopping, args=(after, source, tmp_path / str(after), bpe), kwargs=how)
        process.start()
        process.join()
        make(source, tmp_path / str(after), bpe, **how)
        assert contents(tmp_path / str(after)) == contents(tmp_path / "whole"), after
        if process.exitcode == 0:
            break
    assert 3 < after < 99


def test_a_killed_command_starts_over(tmp_path):
    source = source_of("txt", tmp_path)
    process = processes.Command("data", "prepare", source, "--out", tmp_path / "out", "--held-out", 0.2)
    while not (tmp_path / "out" / WRITING).exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    make(source, tmp_path / "out", held_out=0.2)
    make(source, tmp_path / "whole", held_out=0.2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_changes_while_it_is_read_is_told(folder, tmp_path):
    def change(*_) -> None:
        (folder / "part0" / "0.txt").write_text("changed")

    with pytest.raises(HeadwaterError, match="changed while they were read"):
        make(folder, tmp_path / "out", on_progress=change)


def limited(source, out, tokenizer, size) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        make(source, out, tokenizer, batch_bytes=1000)
    except HeadwaterError as error:
        (out.parent / "said").write_text(str(error)[:200])


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, bpe):
    source = source_of("jsonl", tmp_path)
    make(source, tmp_path / "whole", bpe)
    process = FORK.Process(target=limited, args=(source, tmp_path / "out", bpe, 20_000))
    process.start()
    process.join()
    assert "disk is full" in (tmp_path / "said").read_text()
    assert not (tmp_path / "out").exists()
    make(source, tmp_path / "out", bpe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_folder_is_left_alone(folder, tmp_path, bpe, monkeypatch):
    make(folder, tmp_path / "out", bpe)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != ".lock"}
    monkeypatch.setattr(preparing, "Stream", None)
    assert make(folder, tmp_path / "out", bpe) == [tmp_path / "out"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for changes, message in [
        ({"tokenizer": "bytes"}, "was prepared with another tokenizer"),
        ({"held_out": 0.3}, r"was prepared with held out 0\.2, not 0\.3"),
        ({"shard_tokens": 9}, "shard tokens"),
        ({"text_column": "body"}, "text column 'text', not 'body'"),
    ]:
        with pytest.raises(HeadwaterError, match=message):
            make(folder, tmp_path / "out", **({"tokenizer": bpe} | changes))


def test_what_was_stopped_is_removed_and_what_was_killed_is_not_finished(folder, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="Stopped; run the same command again to start over"):
        make(folder, tmp_path / "out", on_progress=stop)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / WRITING).mkdir(parents=True)
    (tmp_path / "out" / WRITING / "train-00000.tokens").write_bytes(b"x")
    with pytest.raises(HeadwaterError, match="not finished; run the same"):
        open_prepared(tmp_path / "out")
    make(folder, tmp_path / "out", held_out=0.1)
    make(folder, tmp_path / "whole", held_out=0.1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_at_once_are_refused(folder, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(HeadwaterError, match="Another command is writing"):
        make(folder, tmp_path / "out")


def test_other_peoples_folders_are_left_alone(folder, tmp_path):
    with pytest.raises(HeadwaterError, match="holds other files"):
        make(folder, folder)
    with pytest.raises(HeadwaterError, match="holds other files"):
        make(folder, folder / "part0" / "0.txt")
    before = sorted(folder.rglob("*"))
    with pytest.raises(HeadwaterError, match="holds other files"):
        make(folder, tmp_path / "new" / ".." / folder.relative_to(tmp_path))
    assert sorted(folder.rglob("*")) == before


def test_what_is_left_out_is_counted_and_named(folder, tmp_path):
    make(folder, tmp_path / "files")
    skipped = open_prepared(tmp_path / "files").manifest.skipped
    assert skipped.model_dump() == {"empty": 1, "none": 0, "files": 2, "names": ["broken.txt", "zeros.bin"]}
    rows = [{"text": text} for text in texts(40)] + [{"text": None}, {"text": ""}, {"other": 1}, {"text": ""}, {}]
    random.Random(0).shuffle(rows)
    rows.sort(key=lambda row: "text" not in row)  # the first row must tell the columns
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    make(tmp_path / "rows.jsonl", tmp_path / "rows")
    skipped = open_prepared(tmp_path / "rows").manifest.skipped
    assert skipped.model_dump() == {"empty": 2, "none": 3, "files": 0, "names": []}
    for i in range(30):
        (folder / f"{i}.bin").write_bytes(b"\xff")
    make(folder, tmp_path / "more")
    skipped = open_prepared(tmp_path / "more").manifest.skipped
    assert (skipped.files, len(skipped.names)) == (32, 20)


def test_evaluation_text_is_the_held_out_documents_of_smallest_hash(folder, tmp_path):
    held_out = [document for document, _ in reference(str(folder), "bytes")["held_out"]]
    held_out.sort(key=Document.hash_fraction)
    sizes = np.cumsum([len(document.text.encode()) for document in held_out])
    for count, limit in [(len(held_out), 10**7), (3, int(sizes[2])), (2, int(sizes[2]) - 1)]:
        out = tmp_path / str(limit)
        make(folder, out, evaluation_bytes=limit, batch_bytes=200)
        prepared = open_prepared(out)
        expected = sorted(held_out[:count], key=lambda document: document.id)
        assert [(d.id, d.text) for d in prepared.read_evaluation()] == [(d.id, d.text) for d in expected]
        facts = prepared.manifest.evaluation
        assert (facts.documents, facts.bytes) == (count, int(sizes[count - 1]))
    make(folder, tmp_path / "tiny", evaluation_bytes=7)
    (only,) = open_prepared(tmp_path / "tiny").read_evaluation()
    assert held_out[0].text.startswith(only.text)
    assert 4 <= len(only.text.encode()) <= 7


def test_a_folder_for_each_value_of_a_column(tmp_path, bpe):
    names = ["Wiki (en)", "wiki-EN", "Code", None]
    rows = [{"text": text, "meta": {"set": names[i % 4], "n": i}} for i, text in enumerate(texts(200))]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = dict(by="meta.set", held_out=0.1, batch_bytes=500)
    folders = make(path, tmp_path / "out", bpe, **how)
    assert [one.name for one in folders] == ["wiki-en", "wiki-en-2", "code", "none"]
    for index, (one, name) in enumerate(zip(folders, [*names[:3], "none"], strict=True)):
        prepared = open_prepared(one)
        assert prepared.manifest.domain == name
        mine = [row["text"] for row in rows[index::4]]
        assert prepared.train.documents + prepared.held_out.documents == len(mine)
        assert prepared.manifest.bytes == sum(len(text.encode()) for text in mine)
        decoded = prepared.tokenizer.decode(prepared.train.read(0, prepared.train.tokens))
        assert decoded.startswith(END_OF_TEXT + mine[0]) or decoded.startswith(END_OF_TEXT + mine[1])
    with pytest.raises(HeadwaterError, match=r"a prepared folder for each domain.*wiki-en-2"):
        open_prepared(tmp_path / "out")
    assert make(path, tmp_path / "out", bpe, **how) == folders
    with pytest.raises(HeadwaterError, match="was prepared with by"):
        make(path, tmp_path / "out", bpe, **how | {"by": "meta.n"})
    with pytest.raises(HeadwaterError, match="holds dict, not a name; its fields: set, n"):
        make(path, tmp_path / "bad", by="meta")
    with pytest.raises(HeadwaterError, match=r"no column 'nothing'.*--by to one of: text, meta"):
        make(path, tmp_path / "bad2", by="nothing")


def test_too_many_values(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "MOST_DOMAINS", 5)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts(40))))
    with pytest.raises(HeadwaterError, match="more than 5 values"):
        make(path, tmp_path / "out", by="n")


def test_wikitext_rows_are_joined_to_articles(tmp_path):
    articles = [
        f" = Title {i} = \n" + " \n" + f" Text of {i} with = signs = \n" + " = = Part = = \n" + " More . \n" + " \n"
        for i in range(50)
    ]
    rows = [
        {"text": "" if line == " \n" else line} for article in articles for line in article.splitlines(keepends=True)
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "local.parquet")
    source = TextSource(str(tmp_path / "local.parquet"), begins=r"^ = [^=]+(=[^=]+)* = $")
    assert [document.text for document in Stream(source)] == articles
    with pytest.raises(HeadwaterError, match=r"--begins '\(' is not a valid regular expression: missing \)"):
        Stream(TextSource(str(tmp_path / "local.parquet"), begins="("))


def test_enwik8_is_cut_at_its_pages(tmp_path):
    pages = [f"  <page>\n    <title>{i}</title>\n    <text>  <page>x {ODD[3:8]}</text>\n  </page>\n" for i in range(30)]
    (tmp_path / "enwik8").write_text("<mediawiki>\n" + "".join(pages))
    documents = list(Stream(TextSource(str(tmp_path / "enwik8"), begins="^  <page>")))
    assert [document.text for document in documents] == ["<mediawiki>\n", *pages]
    assert [document.id for document in documents[:2]] == ["enwik8#0", "enwik8#1"]


def test_a_separator_line_divides_text_files(tmp_path):
    documents = [f"{i}\n{END_OF_TEXT} within a line\n" for i in range(40)]
    (tmp_path / "a.txt").write_text(f"{END_OF_TEXT}\n".join(documents[:20]))
    (tmp_path / "b.txt").write_bytes(f"{END_OF_TEXT}\r\n".join([*documents[20:], ""]).encode())
    stream = Stream(TextSource(str(tmp_path), separator=END_OF_TEXT))
    assert [part.text for part in stream] == documents
    assert stream.empty == 0
    (tmp_path / "a.txt").write_text(f"{END_OF_TEXT}\n{END_OF_TEXT}\none\n{END_OF_TEXT}")
    stream = Stream(TextSource(str(tmp_path / "a.txt"), separator=END_OF_TEXT))
    assert [part.text for part in stream] == ["one\n"]
    assert stream.empty == 2


def hub(monkeypatch, folder: Path, shards: int = 3) -> TextSource:
    """A dataset that load_dataset finds by its name."""
    rows = [{"text": text or "x", "n": i} for i, text in enumerate(texts(200))]
    for shard in range(shards):
        part = rows[200 * shard // shards : 200 * (shard + 1) // shards]
        Dataset.from_list(part).to_parquet(folder / "owner" / "name" / f"train-{shard}.parquet")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(corpora, "local_files", lambda source: None)
    monkeypatch.setattr(corpora, "check_reachable", lambda *_: None)
    return TextSource("owner/name")


def test_datasets_of_the_hub_are_streamed_shard_by_shard(tmp_path, monkeypatch):
    source = hub(monkeypatch, tmp_path)
    parts = list(Stream(source))
    assert [part.text for part in parts] == texts(200)
    assert [part.id for part in parts] == [f"owner/name:{i}" for i in range(200)]
    prepare(source, tmp_path / "out", options=Options(held_out=0.1))
    assert open_prepared(tmp_path / "out").manifest.documents == 200


@pytest.mark.parametrize("kind", ["folder", "txt", "separator", "begins", "line"])
def test_how_much_is_read_at_a_time_does_not_matter(kind, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "PIECE", 50)
    monkeypatch.setattr(corpora, "LONGEST_PIECE", 100)
    source = TextSource(str(folder))
    if kind in ("txt", "line"):
        text = "\n".join(texts(80)) if kind == "txt" else "a line without an end " * 400 + "x" * 1000
        (tmp_path / "a.txt").write_text(text)
        source = TextSource(str(tmp_path / "a.txt"))
    elif kind != "folder":
        (tmp_path / "a.txt").write_text("".join(f"# {i}\n{text}\n##\n" for i, text in enumerate(texts(50))))
        marks = {"separator": "##"} if kind == "separator" else {"begins": "^# "}
        source = TextSource(str(tmp_path / "a.txt"), **marks)
    streams = []
    for size in (2**22, 1000, 37, 5):
        monkeypatch.setattr(reading, "CHUNK", size)
        streams.append(list(Stream(source)))
    assert streams[0] == streams[1] == streams[2] == streams[3]
    assert len(streams[0]) >= 30
    if kind in ("txt", "line"):
        assert [part.text for part in streams[0]] == [piece.text for piece in cut_document(Document("", text, ""))]
        assert "".join(part.text for part in streams[0]) == text


@pytest.mark.slow
def test_a_long_document_has_the_tokens_of_the_whole(tmp_path, bpe, monkeypatch):
    rows = ["\n".join(texts(200, seed)) + "\n\n  end" for seed in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    make(path, tmp_path / "out", bpe, batch_bytes=1, evaluation_bytes=1500)
    prepared = open_prepared(tmp_path / "out")
    assert prepared.manifest.sha256 == read_corpus(str(path)).facts["sha256"]
    for name, documents in reference(str(path), bpe).items():
        split = getattr(prepared, name)
        assert split.read(0, split.tokens).tolist() == [token for _, ids in documents for token in ids]
    (only,) = prepared.read_evaluation()
    assert 1490 < len(only.text.encode()) <= 1500


@pytest.mark.slow
def test_long_documents_lie_in_one_shard(tmp_path, bpe, monkeypatch):
    (tmp_path / "a.txt").write_text("\n##\n".join("\n".join(texts(20, seed)) for seed in range(30)))
    how = dict(separator="##", shard_tokens=600, batch_bytes=400, evaluation_bytes=3000)
    make(tmp_path / "a.txt", tmp_path / "whole", bpe, **how)
    prepared = open_prepared(tmp_path / "whole")
    assert len(prepared.train.facts.shards) > 8
    for shard in prepared.train.facts.shards:
        assert np.fromfile(tmp_path / "whole" / shard.borders, dtype="<i8")[0] == 0
    assert prepared.train.documents + prepared.held_out.documents == 30


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        ({}, {}, "There is no file or folder"),
        ({"s/e.txt": b""}, {}, "There is no text in .*only empty documents"),
        ({"s/b.dat": bytes(range(256))}, {}, "none of its 1 files is UTF-8"),
        ({"s/t.txt": b"tiny"}, {}, "one document of 4 bytes, too short to hold out part of it"),
        ({"s/x.jsonl": b'{"text": "a row"}\n' * 50}, {}, "one text, repeated"),
        ({"s/x.parquet": b"not parquet"}, {}, "cannot be read as parquet"),
        ({"s/x.jsonl": b'{"text": "a"}\n{not json'}, {}, "cannot be read as jsonl: line 2"),
        ({"s/x.jsonl": b"[1]\n"}, {}, "Item 1 of .* is not a JSON object"),
        ({"s/x.jsonl": b'{"text": "a"}\n{"text": 3}\n'}, {}, "holds int, not text, in row 1"),
        ({"s/x.jsonl": b'{"body": "a"}\n'}, {}, "no column 'text'; set --text-column to one of: body"),
        ({"s/x.jsonl": b'{"text": "\\ud800"}\n'}, {}, "half of a surrogate pair"),
        ({"s/x.jsonl.gz": b"no gzip"}, {}, "cannot be read as"),
        ({"s/x.jsonl.zst": b"(\xb5/\xfd"}, {}, "cannot be read as zst"),
        ({"s/t.txt": b"x\n" * 99}, {"held_out": 0.0}, "--held-out must be between 0 and 1"),
        ({"s/t.txt": b"x\n" * 99}, {"separator": ""}, "--separator is empty"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, files, changes, message):
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(HeadwaterError, match=message) as error:
        make(tmp_path / "s", tmp_path / "out", **changes)
    assert "\n" not in str(error.value)


def test_a_column_of_numbers_is_refused(tmp_path):
    Dataset.from_list([{"text": i} for i in range(9)]).to_parquet(tmp_path / "n.parquet")
    with pytest.raises(HeadwaterError, match="holds int, not text, in row 0"):
        make(tmp_path / "n.parquet", tmp_path / "out")


def test_damaged_folders_are_named(folder, tmp_path, run):
    out = tmp_path / "out"
    make(folder, out, shard_tokens=2000)
    assert run("data", "show", out, "--check")[0] == 0
    tokens = out / "train-00001.tokens"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:50] + b"zz" + data[52:])
    code, _, stderr = run("data", "show", out, "--check")
    assert code == 2
    assert "since they were written" in stderr
    assert "train-00001.tokens" in stderr
    tokens.write_bytes(data[:-2])
    with pytest.raises(HeadwaterError, match=r"train-00001\.tokens' has \d+ bytes, not \d+"):
        open_prepared(out)
    tokens.unlink()
    with pytest.raises(HeadwaterError, match=r"train-00001\.tokens' is missing"):
        open_prepared(out)
    write_sealed(out / MANIFEST, {})
    with pytest.raises(HeadwaterError, match="does not match format 2"):
        open_prepared(out)
    with pytest.raises(HeadwaterError, match=r"has no manifest\.json; make it with"):
        open_prepared(folder)
    with pytest.raises(HeadwaterError, match="There is no folder"):
        open_prepared(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_sums_cover_the_whole_tokenizer(name, folder, tmp_path, bpe):
    make(folder, tmp_path / "out", bpe)
    file = tmp_path / "out" / "tokenizer" / name
    file.write_text(file.read_text().replace("false", "true", 1))
    with pytest.raises(HeadwaterError, match=f"{name}.*since it was written"):
        PreparedSettings(source=str(tmp_path / "out"), context=8).build()
    with pytest.raises(HeadwaterError, match=f"{name}.*since it was written"):
        make(folder, tmp_path / "out", bpe)
    make(folder, tmp_path / "other", bpe)
    (tmp_path / "other" / "tokenizer" / "added_tokens.json").write_text("{}")
    with pytest.raises(HeadwaterError, match=r"added_tokens\.json.*since it was written"):
        open_prepared(tmp_path / "other")


def test_names_in_files_never_lead_out_of_the_folder(folder, tmp_path, bpe):
    for number, name in enumerate(("../elsewhere.tokens", "/etc/train-00000.tokens", "sub/train-00000.tokens")):
        out = tmp_path / f"out{number}"
        make(folder, out, bpe)
        manifest = json.loads((out / MANIFEST).read_text())
        manifest["train"]["shards"][0]["file"] = name
        del manifest["check"]
        write_sealed(out / MANIFEST, manifest)
        with pytest.raises(HeadwaterError, match=r"manifest\.json.*train\.shards\.0\.file"):
            open_prepared(out)
        (tmp_path / "by").mkdir(exist_ok=True)
        write_sealed(tmp_path / "by" / DOMAINS, {"settings": {}, "domains": {name: "x"}})
        with pytest.raises(HeadwaterError, match=r"domains\.json.*domains"):
            open_all(tmp_path / "by")


def test_a_copy_that_lacks_a_domain_or_has_another_in_its_folder_is_refused(tmp_path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"{i}: a line", "set": "abc"[i % 3]}) + "\n" for i in range(300)))
    make(path, out, by="set")
    assert [prepared.manifest.domain for prepared in open_all(out)] == ["a", "b", "c"]
    shutil.rmtree(out / "b")
    for read in (open_all, lambda folder: make(path, folder, by="set")):
        with pytest.raises(HeadwaterError, match="out/b"):
            read(out)
    shutil.copytree(out / "a", out / "b")
    with pytest.raises(HeadwaterError, match="holds 'a', not 'b'; copy it again"):
        open_all(out)


def test_what_a_damaged_shard_would_feed_a_model_is_refused(folder, tmp_path, bpe):
    for file, content, message in [
        ("train-00000.tokens", lambda size: b"\xff" * size, "holds token 65535, but its tokenizer has only 400"),
        ("train-00000.borders", lambda size: bytes(size), "borders.*since it was written"),
        ("train-00000.borders", lambda size: bytes(size - 1) + b"\x7f", "borders.*since it was written"),
    ]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        make(folder, tmp_path / "out", bpe)
        path = tmp_path / "out" / file
        path.write_bytes(content(path.stat().st_size))
        with pytest.raises(HeadwaterError, match=message):
            next(PreparedSettings(source=str(tmp_path / "out"), context=8).build().batches(0, 4, 0))


@pytest.mark.parametrize("name", [MANIFEST, "evaluation.jsonl", "train-00000.tokens", "tokenizer/tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, folder, tmp_path, bpe):
    make(folder, tmp_path / "out", bpe)
    (tmp_path / "out" / name).unlink()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(HeadwaterError, match=name):
        open_prepared(tmp_path / "out").read_evaluation()


def test_a_vocabulary_with_holes_is_as_large_as_its_largest_id(folder, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "holes")
    file = tmp_path / "holes" / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"] |= {"far": 2**16 + 10}
    file.write_text(json.dumps(values))
    make(folder, tmp_path / "out", str(tmp_path / "holes"))
    manifest = open_prepared(tmp_path / "out").manifest
    assert (manifest.tokenizer.vocab_size, manifest.dtype) == (2**16 + 11, "uint32")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", "null"),
    ],
)
def test_a_tokenizer_of_broken_files_is_a_sentence(name, content, tmp_path, bpe):
    shutil.copytree(bpe, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / name).write_text(content)
    with pytest.raises(HeadwaterError, match=r"No tokenizer could be loaded|does not contain a JSON object"):
        load_tokenizer(str(tmp_path / "tokenizer"))


def bare(folder: Path, *special: str, name: str = "tokenizer.json") -> Path:
    """A tokenizer as the tokenizers library writes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(special), initial_alphabet=alphabet, vocab_size=300)
    tokenizer.train_from_iterator(texts(5), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / name))
    return folder / name


@pytest.mark.parametrize(
    ("special", "end"),
    [
        (["<|endoftext|>"], "<|endoftext|>"),
        (["<unk>", "<s>", "</s>"], "</s>"),
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (["<|im_start|>", "<|im_end|>", "<|end_of_text|>"], "<|end_of_text|>"),
    ],
)
def test_a_bare_tokenizer_is_taken_with_the_end_of_text_among_its_tokens(special, end, tmp_path):
    file = bare(tmp_path / "tok", *special)
    (tmp_path / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    other = bare(tmp_path / "tok2", *special, name="mine.json")
    for source in (file, file.parent, other):
        tokenizer = load_tokenizer(str(source))
        assert (tokenizer.eos_token, local_size(str(source))) == (end, 300)
    assert load_tokenizer(str(file)).chat_template == "{{ messages }}"
    HeadwaterConfig().save_pretrained(tmp_path / "tok")
    assert find_tokenizer(tmp_path / "tok").eos_token == end


def test_a_bare_tokenizer_that_says_too_little_is_a_sentence(tmp_path):
    several, none = bare(tmp_path / "several", "<|endoftext|>", "</s>"), bare(tmp_path / "none", "[MASK]")
    with pytest.raises(HeadwaterError, match=r"several tokens that could end a text, <\|endoftext\|> and </s>"):
        load_tokenizer(str(several))
    (tmp_path / "several" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(str(several.parent)).eos_token == "</s>"
    with pytest.raises(HeadwaterError, match=r"neither an end-of-text nor a begin-of-text token .*tokenizer_config"):
        load_tokenizer(str(none))
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadwaterError, match="empty' has no tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
    (tmp_path / "text.json").write_text("no tokenizer")
    with pytest.raises(HeadwaterError, match=r"text\.json' cannot be read"):
        load_tokenizer(str(tmp_path / "text.json"))


SMALL = {
    "one line": "a line of words " * 20,
    "a few lines": "".join(f"line {i}\n" for i in range(6)),
    "9 kB": "".join(f"line {i} of a text\n" for i in range(500)),
    "the same line": "a line\n" * 4321,
    "pieces": "".join(f"line {i} of a text, and words\n" for i in range(4000)),
}


@pytest.mark.parametrize("held_out", [0.001, 0.2, 0.999])
@pytest.mark.parametrize("text", SMALL.values(), ids=SMALL)
def test_something_of_every_text_is_held_out(text, held_out, tmp_path):
    (tmp_path / "input.txt").write_text(text)
    (tmp_path / "row.jsonl").write_text(json.dumps({"text": text}))
    for source in ("input.txt", "row.jsonl"):
        for out in ("a", "b"):
            make(tmp_path / source, tmp_path / out / source, held_out=held_out)
        assert contents(tmp_path / "a" / source) == contents(tmp_path / "b" / source)
        prepared = open_prepared(tmp_path / "a" / source)
        documents = [document.text for document in read_corpus(str(tmp_path / source)).documents]
        assert "".join(documents) == text
        sides = []
        for split in (prepared.train, prepared.held_out):
            assert split.documents > 0
            starts = [*split.starts(0, split.tokens).tolist(), split.tokens]
            sides.append([bytes(split.read(a + 1, b).tolist()).decode() for a, b in pairwise(starts)])
        assert sorted(sides[0] + sides[1]) == sorted(documents)
        assert not set(sides[0]) & set(sides[1])


def test_one_document_is_moved_only_if_a_side_would_be_empty(tmp_path):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts(60))
    (tmp_path / "a.jsonl").write_text(rows)
    documents = read_corpus(str(tmp_path / "a.jsonl")).documents
    fractions = sorted(document.hash_fraction() for document in documents)
    for share, held_out in ((fractions[0] / 2, 1), (fractions[3], 3), ((1 + fractions[-1]) / 2, 59)):
        make(tmp_path / "a.jsonl", tmp_path / str(held_out), held_out=share)
        assert open_prepared(tmp_path / str(held_out)).held_out.documents == held_out


def test_a_refused_text_leaves_no_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(HeadwaterError, match="no column 'text'"):
        make(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_killed_tokenizer_does_not_block_the_next(folder, tmp_path, run):
    def write() -> None:
        arguments = ["data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300]
        PreTrainedTokenizerFast.save_pretrained = lambda self, place: (place / "half").touch() or time.sleep(600)
        run(*arguments)

    process = FORK.Process(target=write)
    process.start()
    while not list(tmp_path.glob(".writing-tok-*/half")):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert run("data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300)[0] == 0


def test_a_tokenizer_on_a_full_disk_leaves_nothing(folder, tmp_path, run):
    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        (code, _, stderr) = run("data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300)
        (tmp_path / "said").write_text(f"{code} {stderr[-300:]}")

    process = FORK.Process(target=write)
    process.start()
    process.join()
    assert (tmp_path / "said").read_text().startswith("2 ")
    assert "disk is full" in (tmp_path / "said").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "said"}


def test_commands(folder, tmp_path, run):
    code, printed, stderr = run("data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300)
    assert code == 0, stderr
    assert "300 tokens learned from" in printed
    code, _, stderr = run("data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300)
    assert code == 2
    assert "already exists" in stderr
    arguments = (
        "data",
        "prepare",
        folder,
        "--out",
        tmp_path / "out",
        "--tokenizer",
        tmp_path / "tok",
        "--held-out",
        0.2,
    )
    code, printed, stderr = run(*arguments)
    assert code == 0, stderr
    assert "tokens/s" in stderr
    manifest = open_prepared(tmp_path / "out").manifest
    assert f"{manifest.train.tokens:,}" in printed
    assert run(*arguments)[1].startswith(f"{tmp_path / 'out'} is already finished")
    code, printed, _ = run("data", "show", tmp_path / "out")
    assert code == 0
    assert "1 empty documents, 0 rows without text, 2 files that are not UTF-8 text: broken.txt, zeros.bin" in printed
    code, _, stderr = run(*arguments, "--text-column", "x")
    assert code == 2
    assert "was prepared with text column" in stderr


def test_a_trained_tokenizer_is_lossless(bpe, tmp_path):
    tokenizer = load_tokenizer(bpe)
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == 0
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x3000 + 0xE000), *range(0x1F300, 0x1F700)]))
    for text in (ODD, every, " leading", "trailing  ", "\n\n\n", "a  b   c", ""):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.decode(ids) == text
        assert 0 not in ids
    assert len(tokenizer(" ".join(texts(5))).input_ids) < len(" ".join(texts(5)).encode()) / 2
    with pytest.raises(HeadwaterError, match="no room for 256 bytes"):
        train_tokenizer(["text"], 256)
    with pytest.raises(HeadwaterError, match="A vocabulary of 999,999,999 is too large"):
        train_tokenizer(["text"], 999_999_999)


def test_training_a_tokenizer_stops_at_its_sample(folder, tmp_path, run):
    code, printed, _ = run(
        "data", "tokenizer", folder, "--out", tmp_path / "tok", "--vocab-size", 300, "--max-bytes", 2000
    )
    assert code == 0
    assert "from 0.0 MB in " in printed
    documents = int(printed.split(" MB in ")[1].split()[0])
    assert 2 < documents < 30


def memory_of(arguments: list) -> int:
    """The most memory a command holds at a time, in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "headwater_lab", *map(str, arguments)], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        time.sleep(0.05)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "bpe"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path, bpe):
    block = ["".join(f"{text}\n" for text in texts(20, seed)) for seed in range(250)]
    size = sum(len(row.encode()) for row in block)
    small, large = (5_000_000, 60_000_000) if kind == "bpe" else (30_000_000, 300_000_000)
    peaks = []
    for goal in (small, large):
        path = tmp_path / f"{goal}.{kind if kind in ('jsonl', 'parquet') else 'txt'}"
        rows = (f"{i} {row}" for i in range(goal // size) for row in block)
        match kind:
            case "parquet":
                Dataset.from_generator(lambda rows=list(rows): ({"text": row} for row in rows)).to_parquet(path)
            case "jsonl":
                path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
            case _:
                path.write_text("".join(rows))
        command = [
            "data",
            "prepare",
            path,
            "--out",
            tmp_path / f"out{goal}",
            "--tokenizer",
            bpe if kind == "bpe" else "bytes",
        ]
        peaks.append(memory_of(command))
    assert peaks[1] < 1.2e9, peaks
    assert peaks[1] - peaks[0] < 2e8, peaks
    print(kind, [f"{peak / 1e6:.0f} MB" for peak in peaks])
