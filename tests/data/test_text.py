"""Corpora, tokenizers and rows."""

import bz2
import codecs
import glob
import gzip
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headwater.util.errors import HeadwaterError
from headwater_lab.data import reading
from headwater_lab.data.base import shuffle_rows
from headwater_lab.data.corpus import STDLIB, Document, local_files
from headwater_lab.data.stream import Stream, TextSource, read_corpus
from headwater_lab.data.text import TextSettings
from headwater_lab.data.tokenizer import Encoder, byte_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(30):
        path = tmp_path / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(rng.choice(WORDS, size=int(rng.integers(3, 60)))) + "\n")
    return tmp_path


def make(source, **settings):
    return TextSettings(source=str(source), **({"context": 16} | settings)).build()


def stream(data):
    """All training tokens in order."""
    tokens = data.train.streams[0]
    return tokens.read(0, tokens.tokens).astype(np.int64)


def test_byte_tokenizer_gives_each_byte_its_own_number_and_back():
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界! \t\r\n\0 <|x|>" + "".join(map(chr, range(256)))
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == 256


def test_excerpts_end_with_their_text(folder, tmp_path):
    """A tokenizer that puts an end token after a document scores as many tokens as one that does not."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "begins")
    for name, first in (("bytes", 256), (str(tmp_path / "begins"), 257)):
        data = make(folder / "**/*.txt", tokenizer=name, held_out_bytes=100)
        assert {int(excerpt.ids[0]) for excerpt in data.held_out} == {first}
        assert sum(excerpt.tokens for excerpt in data.held_out) == data.description["held_out_bytes"]


def test_text_that_the_tokenizer_does_not_know_is_noticed(folder, tmp_path):
    words = Tokenizer(models.WordLevel({"alpha": 0, "?": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="</s>").save_pretrained(tmp_path / "few")
    (notice,) = make(folder / "**/*.txt", tokenizer=str(tmp_path / "few")).notices
    assert re.match(r"8\d\.\d\d% of the held-out tokens are the tokenizer's '\?'", notice)
    assert not make(folder / "**/*.txt").notices


def test_byte_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("naïve").input_ids == list("naïve".encode())
    assert loaded.eos_token_id == 256


@pytest.mark.parametrize(("begin", "expected"), [("", [256, 104, 105]), ("<s>", [257, 104, 105, 256])])
def test_documents_begin_as_the_tokenizer_begins_a_text(begin, expected):
    """One that puts BOS before a text, as Llama's and Gemma's do, gets it before each document and EOS after it."""
    tokenizer = byte_tokenizer()
    if begin:
        tokenizer.add_special_tokens({"bos_token": begin})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 257)])
    (encoded,) = Encoder(tokenizer).encode_documents([Document("a", "hi", "a")])
    assert encoded.ids.tolist() == expected


def test_split_depends_on_the_path_alone(folder):
    before = {d.id for d in make(folder, held_out=0.5).held_out}
    (folder / "a_new_first_file.txt").write_text("something else entirely, long enough to count\n")
    after = {d.id for d in make(folder, held_out=0.5).held_out}
    assert 3 < len(before) < 25
    assert before - {"a_new_first_file.txt"} <= after | {"a_new_first_file.txt"}
    assert after - before <= {"a_new_first_file.txt"}


def test_held_out_and_training_text_are_disjoint_and_complete(folder):
    data = make(folder, held_out=0.3, held_out_bytes=None)
    held_out = sum(d.bytes for d in data.held_out)
    separators = int((stream(data) == data.encoder.separator).sum())
    assert held_out + len(stream(data)) - separators == sum(f.stat().st_size for f in folder.rglob("*.txt"))
    assert separators + len(data.held_out) == 30


def test_rows_cover_the_stream_once_an_epoch(folder):
    data = make(folder)
    batches = data.batches(seed=3, batch_size=1, start=0)
    rows = [next(batches)["input_ids"][0] for _ in range(data.train.counts[0])]
    assert not torch.equal(torch.cat(rows), torch.from_numpy(stream(data)[: data.train.counts[0] * data.context]))
    assert sorted(torch.cat(rows).tolist()) == sorted(stream(data)[: data.train.counts[0] * data.context].tolist())


def test_labels_are_the_next_tokens(folder):
    batch = next(make(folder).batches(seed=0, batch_size=4, start=0))
    assert torch.equal(batch["input_ids"][:, 1:], batch["shift_labels"][:, :-1])


def test_positions_restart_at_documents(folder):
    data = make(folder, context=64)
    batch = next(data.batches(seed=0, batch_size=8, start=0))
    for row, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        expected = -1
        for token, position in zip(row, positions, strict=True):
            expected = 0 if token == data.encoder.separator else expected + 1
            assert position == expected


def test_batches_go_on_where_they_stopped(folder):
    data = make(folder)
    whole = data.batches(seed=1, batch_size=3, start=0)
    first = [next(whole)["input_ids"] for _ in range(2 * data.train.counts[0] // 3)]
    for skip in (0, 1, 5, len(first) - 1):
        again = data.batches(seed=1, batch_size=3, start=3 * skip)
        assert torch.equal(next(again)["input_ids"], first[skip])


def test_order_depends_on_seed_and_epoch():
    def epoch(seed, start):
        order = shuffle_rows(20, seed, start)
        return [next(order) for _ in range(20)]

    assert sorted(epoch(0, 0)) == list(range(20))
    assert epoch(0, 0) == epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 20) != epoch(0, 0)


def uniform(batch):
    return torch.zeros(*batch["input_ids"].shape, 257)


def test_a_uniform_model_has_log2_of_the_vocabulary_bits_per_byte(folder):
    evaluation = make(folder).evaluate(uniform)
    assert evaluation.metrics["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-6)


def test_evaluation_scores_every_byte_once_with_its_own_context(folder):
    data = make(folder, context=7, held_out_bytes=None)

    def peeking(batch):
        # Knows the bytes by their number modulo 3 from the token before: scores depend on content and place.
        scores = torch.zeros(*batch["input_ids"].shape, 257)
        return scores.scatter(2, ((batch["input_ids"] * 7 + 3) % 257)[..., None], 2.0)

    evaluation = data.evaluate(peeking)
    for document, one in zip(evaluation.documents, data.held_out, strict=True):
        size, ids, nats = one.bytes, one.ids, 0.0
        for before, byte in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
            hit = (before * 7 + 3) % 257 == byte
            nats += math.log(256 + math.exp(2.0)) - (2.0 if hit else 0.0)
        assert document["bytes"] == size == len(ids) - 1
        assert document["nats"] == pytest.approx(nats, rel=1e-5)


def test_held_out_budget_is_shared_and_kept(folder):
    data = make(folder, held_out=0.4, held_out_bytes=500)
    whole = make(folder, held_out=0.4, held_out_bytes=None)
    assert 480 <= sum(d.bytes for d in data.held_out) <= 500
    assert len(data.held_out) == len(whole.held_out)


@pytest.mark.parametrize("rows", [1, 3, 8, 1000])
def test_a_few_rows_are_measured_as_part_of_all(folder, rows):
    """Against the losses of the chosen tokens, read one document at a time."""
    few, whole = (make(folder, held_out=0.4, held_out_bytes=None, held_out_rows=n) for n in (rows, None))
    assert min(rows, whole.held_out_rows) / 2 < few.held_out_rows <= rows
    assert (few.held_out_rows == whole.held_out_rows) == (rows == 1000)
    sizes = {excerpt.id: excerpt for excerpt in whole.held_out}
    for excerpt in few.held_out:
        other = sizes[excerpt.id]
        assert excerpt.ids.tolist() == other.ids[: len(excerpt.ids)].tolist()
        assert excerpt.bytes == excerpt.tokens == len(excerpt.ids) - 1, "tokens are bytes"
    table = torch.linspace(-1, 1, few.vocab_size).expand(few.vocab_size, -1) * torch.arange(few.vocab_size)[:, None]
    nats = [
        torch.nn.functional.cross_entropy(table[excerpt.ids[:-1]], torch.from_numpy(excerpt.ids[1:]), reduction="sum")
        for excerpt in few.held_out
    ]
    expected = float(sum(nats)) / sum(excerpt.tokens for excerpt in few.held_out)
    evaluation = few.evaluate(lambda batch: table[batch["input_ids"]])
    assert evaluation.metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_budget_never_cuts_a_character(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("äöü€" * 20)
    for one in make(tmp_path, held_out_bytes=101).held_out:
        size, ids = one.bytes, one.ids
        assert bytes(ids[1:].tolist()).decode().strip("äöü€") == ""
        assert len(ids) - 1 == size


def test_one_long_file_is_cut_into_pieces_so_that_some_can_be_held_out(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("\n".join(f"line {i} of a long file" for i in range(9000)))
    corpus = read_corpus(str(file))
    assert len(corpus.documents) > 5
    assert "".join(d.text for d in corpus.documents) == file.read_text()
    data = make(file, held_out_bytes=None)
    assert data.held_out


def test_jsonl_and_parquet_give_the_same_documents(tmp_path):
    from datasets import Dataset

    rows = [{"body": f"document {i}: " + "x" * i, "n": i} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    texts = [
        [d.text for d in read_corpus(str(tmp_path / f"rows.{kind}"), "body").documents] for kind in ("jsonl", "parquet")
    ]
    assert texts[0] == texts[1] == [row["body"] for row in rows]
    with pytest.raises(HeadwaterError, match=r"no column 'text'.*body, n"):
        read_corpus(str(tmp_path / "rows.jsonl"))


def test_globs_choose_files(folder):
    assert len(read_corpus(str(folder / "part1" / "*.txt")).documents) == 10
    assert len(read_corpus(str(folder / "**" / "*.txt")).documents) == 30


def test_home_is_a_folder_too(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert len(read_corpus("~/part1").documents) == 10
    assert {d.id for d in read_corpus("~/part1/*.txt").documents} == {d.id for d in read_corpus("~/part1").documents}


def test_files_that_are_not_text_are_counted_and_left_out(folder):
    (folder / "picture.png").write_bytes(bytes(range(256)) * 4)
    (folder / "zeros.bin").write_bytes(bytes(100))
    facts = read_corpus(str(folder)).facts
    assert facts["skipped_not_utf8"] == 2
    assert facts["documents"] == 30


def test_corpus_hash_follows_the_content(folder):
    before = read_corpus(str(folder)).facts["sha256"]
    assert read_corpus(str(folder)).facts["sha256"] == before
    (folder / "part0" / "0.txt").write_text("changed")
    assert read_corpus(str(folder)).facts["sha256"] != before


@pytest.mark.slow
def test_standard_library_holds_sources_only():
    corpus = read_corpus(STDLIB)
    names = {d.id for d in corpus.documents}
    assert {"argparse.py", "json/decoder.py", "encodings/utf_8.py"} <= names
    assert not [n for n in names if "site-packages" in n or "test" in n.split("/")[:-1] or n.startswith("pydoc_data")]
    assert "encodings/cp1252.py" not in names
    assert corpus.facts["python"].count(".") >= 2
    assert corpus.facts["bytes"] > 3_000_000


@pytest.mark.parametrize(
    ("prepare", "source", "message"),
    [
        (lambda p: None, "nothing.txt", "no file or folder"),
        (lambda p: (p / "e").mkdir(), "e", "holds no files"),
        (lambda p: (p / "e.txt").write_text(""), "e.txt", "no text"),
        (lambda p: (p / "b.dat").write_bytes(bytes(range(256))), "b.dat", "no text"),
        (lambda p: (p / "t.txt").write_text("tiny"), "t.txt", "one document of 4 bytes, too short"),
        (lambda p: (p / "x.parquet").write_text("not parquet"), "x.parquet", "cannot be read as parquet"),
        (lambda p: (p / "x.jsonl").write_text("{not json"), "x.jsonl", "cannot be read as jsonl"),
        (lambda p: None, "*.nope", "No file matches"),
        (lambda p: None, "missing.csv", "no file or folder"),
    ],
)
def test_bad_sources_get_one_sentence(tmp_path, prepare, source, message):
    prepare(tmp_path)
    with pytest.raises(HeadwaterError, match=message) as error:
        make(tmp_path / source)
    assert "\n" not in str(error.value)


ROWS = "".join(json.dumps({"text": f"row {i} " * 20}) + "\n" for i in range(40)).encode()
NESTED = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl.gz", gzip.compress(ROWS)[:-20], "is truncated"),
        ("x.jsonl.xz", b"\xfd7zXZ", "is packed with xz"),
        ("x.jsonl.bz2", bz2.compress(ROWS)[:-20], "is truncated"),
        ("x.txt.gz", gzip.compress(ROWS)[:-20], "is truncated"),
        ("x.jsonl.gz", b"", "is truncated"),
        ("x.jsonl.bz2", bz2.compress(ROWS) + b"BZh9" + bz2.compress(ROWS)[5:], "cannot be read as bz2"),
        ("x.jsonl", ROWS + b'{"text": "\xff"}\n', "line 41: 'utf-8' codec"),
        ("x.jsonl", ROWS + NESTED, "line 41: it is nested too deep"),
        ("x.jsonl", b"", "There is no text"),
        ("x.json", b"[" * 100_000, "line 1: it is nested too deep"),
        ("x.json", b"[]", "There is no text"),
        ("x.json", b'[{"text": "a"}]\n[{"text": "b"}]', "line 1: Extra data"),
        ("x.json", b'[{"text": "a"}, "b"]', "Item 2 of .* is not a JSON object"),
        ("x.jsonl", b"\n \n", "There is no text"),
        ("x.jsonl", ROWS + b"7\n", "Line 41 of .* is not a JSON object"),
        ("x.jsonl", ROWS + b'{"text": ["a"]}\n', "holds list, not text, in row 40"),
        ("x.jsonl", ROWS + b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
        ("x.jsonl", ROWS + b"\0\0\n", "line 41"),
    ],
)
def test_damaged_tables_get_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadwaterError, match=message) as error:
        make(tmp_path / name)
    assert "\n" not in str(error.value)


def test_parquet_that_is_not_utf8_gets_one_sentence(tmp_path):
    offsets = pa.array(range(0, 164, 4), pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 40, [None, offsets, pa.py_buffer(b"ab\xff " * 41)])
    parquet.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    with pytest.raises(HeadwaterError, match="cannot be read as parquet: 'utf-8' codec"):
        make(tmp_path / "x.parquet")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_packed_text_is_text(pack, tmp_path):
    """Of several streams too, as parallel packers write them."""
    suffix = {"gzip": "gz", "bz2": "bz2"}[pack.__module__]
    file = tmp_path / f"text.txt.{suffix}"
    lines = "".join(f"line {i} of a text\n" for i in range(9000))
    file.write_bytes(pack(lines[:50_000].encode()) + pack(lines[50_000:].encode()))
    assert "".join(document.text for document in read_corpus(str(file)).documents) == lines
    assert "".join(part.text for part in Stream(TextSource(str(file)))) == lines


def zstd(content):
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(content)
    return packed.getvalue().to_pybytes()


def test_zstandard(tmp_path):
    """A cut file is told, which the library's own readers do not."""
    file = tmp_path / "x.jsonl.zst"
    file.write_bytes(zstd(ROWS) + zstd(ROWS))
    assert len(read_corpus(str(file)).documents) == 80
    file.write_bytes((zstd(ROWS) + zstd(ROWS))[:-9])
    with pytest.raises(HeadwaterError, match="is truncated"):
        read_corpus(str(file))


def test_what_is_packed_is_unpacked_in_pieces(tmp_path):
    """However small the file: of what repeats, eight kilobytes hold gigabytes."""
    for suffix, pack in {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}.items():
        file = tmp_path / f"x.txt{suffix}"
        file.write_bytes(pack(bytes(2**27)) + pack(b"end"))
        used = arrow_memory = 0
        with reading.open_file(file) as unpacked:
            while data := unpacked.read(2**20):
                used += len(data)
                arrow_memory = max(arrow_memory, pa.total_allocated_bytes())
        assert used == 2**27 + 3, suffix
        assert arrow_memory < 2**25, suffix


def test_an_array_is_read_whole_and_so_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 2**20)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b"[" + b" " * 2**20))
    with pytest.raises(HeadwaterError, match="one JSON array of more than 1 MB; write one object a line"):
        read_corpus(str(tmp_path / "x.json.gz"))


def test_a_text_without_borders_is_refused_where_it_is_too_long_for_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    (tmp_path / "x.txt").write_text("a line\n" * 200)
    with pytest.raises(HeadwaterError, match=r"A document in 'x\.txt' is longer than"):
        list(Stream(TextSource(str(tmp_path / "x.txt"), separator="##")))


def test_marks_and_line_ends_of_other_systems(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(codecs.BOM_UTF8 + ROWS.replace(b"\n", b"\r\n"))
    assert len(read_corpus(str(tmp_path / "x.jsonl")).documents) == 40


def test_one_long_line_is_cut_into_pieces(tmp_path):
    file = tmp_path / "line.txt"
    for text in ("".join(f"word{i} " for i in range(50_000)), "x" * 392_000):
        file.write_text(text)
        documents = [document.text for document in read_corpus(str(file)).documents]
        assert "".join(documents) == text
        assert len(documents) > 5
        assert max(map(len, documents)) <= 65_536
        assert [part.text for part in Stream(TextSource(str(file)))] == documents
        make(file)


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    (tmp_path / "x.jsonl").write_bytes(ROWS + b'{"text": "' + b"x" * 2000 + b'"}\n')
    with pytest.raises(HeadwaterError, match=r"Line 41 of .* is longer than"):
        make(tmp_path / "x.jsonl")


@pytest.mark.parametrize("source", ["", "*.txt", "**/*.txt"])
def test_a_link_to_nothing_is_refused(folder, source):
    """Its text would be missing from the corpus without a word. Hidden links are passed over, as hidden files are."""
    (folder / "first.txt").write_text("first")
    (folder / ".#lock").symlink_to("somebody@somewhere.1")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.txt").symlink_to("nowhere")
    assert read_corpus(str(folder / source)).documents
    (folder / "last.txt").symlink_to("unmounted/last.txt")
    with pytest.raises(HeadwaterError, match=r"last\.txt' is a link to 'unmounted/last\.txt', which does not exist"):
        read_corpus(str(folder / source))


def test_odd_things_in_a_folder_are_passed_over(folder, run):
    """Pipes are not waited for, links not followed in circles, and names need not be UTF-8."""
    os.mkfifo(folder / "pipe.txt")
    for name in ("loop", "loop2"):
        (folder / name).symlink_to(folder)
    (folder / "self.txt").symlink_to("self.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt"))
    odd.write_text("a text with an odd name " * 9)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff[b].bin")).write_bytes(b"\0")
    corpus = read_corpus(str(folder))
    assert len(corpus.documents) == 31
    assert corpus.facts["skipped_not_utf8"] == 1
    assert "caf\\udce9.txt" in {document.id for document in corpus.documents}
    assert len(read_corpus(str(folder / "**" / "*.txt")).documents) == 31
    code, _, stderr = run("data", "prepare", folder, "--out", folder / "out", "--held-out", 0.5)
    assert code == 0, stderr
    code, printed, stderr = run("data", "show", folder / "out", "--check")
    assert code == 0, stderr
    assert "\\udcff[b].bin" in printed
    assert run("data", "prepare", odd, "--out", folder / "odd", "--held-out", 0.5)[0] in (0, 2)
    assert run("data", "prepare", folder, "--out", os.fsdecode(os.fsencode(folder) + b"/\xe9"))[0] == 2


@pytest.mark.parametrize("source", ["~alice/x", "~alice/*.txt", "", "x" * 5000, "/dev/zero", "a\0b", "caf\udce9.txt"])
def test_names_that_cannot_be_paths_get_one_sentence(source):
    with pytest.raises(ValueError, match=r"\w+ .*\."):
        make(source)


def test_globs_mean_what_a_shell_means(folder):
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text("hidden")
    (folder / "part0" / "deep").mkdir()
    (folder / "part0" / "deep" / "b.txt").write_text("deep")
    for pattern in (
        "**/*.txt",
        "*/*.txt",
        "part?/**/*",
        "**",
        "part0/**",
        "**/deep/*",
        ".*/**/*.txt",
        "**/[!1-8]*",
        "**.t",
    ):
        found = {Path(name) for name in glob.glob(str(folder / pattern), recursive=True) if Path(name).is_file()}
        if found:
            assert set(local_files(str(folder / pattern))[1]) == found, pattern
        else:
            with pytest.raises(HeadwaterError, match="No file matches"):
                local_files(str(folder / pattern))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become somebody else")
def test_what_may_not_be_read_is_told(folder):
    secret = folder / "part0"
    secret.chmod(0)
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and re.search("pytest", str(parent)):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(HeadwaterError, match=r"part0.*Permission denied"):
            read_corpus(str(folder))
    finally:
        os.seteuid(0)


def test_the_language_reference_is_a_corpus_of_its_topics():
    from pydoc_data.topics import topics

    corpus = read_corpus("python-topics")
    assert {document.id: document.text for document in corpus.documents} == {f"{k}.rst": v for k, v in topics.items()}
    assert corpus.facts["python"]


def test_corpus_shorter_than_a_row(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("short")
    with pytest.raises(HeadwaterError, match=r"fewer than one row of data\.context=1000"):
        make(tmp_path, context=1000)


def test_any_hugging_face_tokenizer_from_a_folder(folder, tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    where = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(where)
    data = make(folder, tokenizer=str(where), held_out_bytes=None)
    byte_data = make(folder, held_out_bytes=None)
    assert data.vocab_size == len(bpe.get_vocab())
    assert len(stream(data)) < len(stream(byte_data)) / 2
    assert [(d.id, d.bytes) for d in data.held_out] == [(d.id, d.bytes) for d in byte_data.held_out]


def test_long_values_are_read_a_row_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_ROWS", 2**20)
    file = tmp_path / "x.parquet"
    texts = [chr(97 + i) * 2**20 for i in range(20)]
    parquet.write_table(pa.table({"text": texts}), file, compression="zstd")
    assert file.stat().st_size < 2**13
    columns = reading.Columns("text")
    with reading.open_file(file) as stream:
        assert all(len(table) == 1 for table in reading.parquet_tables(stream, columns))
    assert [text for text, _ in reading.table_rows(file, columns)] == texts
