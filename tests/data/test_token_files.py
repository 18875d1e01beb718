"""Token files of other programs: the documents that went in come out, and damaged files are refused in a sentence."""

import pickle
import random
import shutil
import struct
from array import array
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from headwater.util.errors import HeadwaterError
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.shards import Shards, open_prepared
from headwater_lab.data.token_files import CHUNK, HELD_OUT, TokenSource, read_characters
from headwater_lab.data.tokenizer import (
    byte_tokenizer,
    character_tokenizer,
    encode_texts,
    load_tokenizer,
    train_tokenizer,
    warn_of_unknown,
)
from headwater_lab.training.records import read_record

WORDS = ["alpha", "naïve", "世界", "the", "of", "gamma\r", "  indented", "🙂", "x" * 40]


def texts(count: int) -> list[str]:
    draw = random.Random(count)
    return [f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + "\n" for i in range(count)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer(texts(200), 400).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def documents(bpe) -> list[list[int]]:
    tokenizer = load_tokenizer(bpe)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts(60)]


def pack(kind: str, values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


def write_llm_c(file: Path, documents: list[list[int]], end: int, wide: bool = False) -> None:
    """The token stands before each document."""
    ids = [token for document in documents for token in (end, *document)]
    header = [*((20240801, 7) if wide else (20240520, 1)), len(ids)]
    file.write_bytes(pack("i", header + [0] * (256 - len(header))) + pack("I" if wide else "H", ids))


def write_nanogpt(file: Path, documents: list[list[int]], end: int) -> None:
    """The token stands behind each document."""
    file.write_bytes(array("H", [token for document in documents for token in (*document, end)]).tobytes())


def write_olmo(file: Path, documents: list[list[int]], end: int, wide: bool = False) -> None:
    ids = [token for document in documents for token in (*document, end)]
    memory = np.memmap(file, mode="w+", dtype=np.uint32 if wide else np.uint16, shape=(len(ids),))
    memory[:] = ids
    memory.flush()


def write_npy(file: Path, documents: list[list[int]], end: int) -> None:
    np.save(file, np.array([token for document in documents for token in (*document, end)], np.int64))


def write_megatron(file: Path, documents: list[list[int]], end: int, code: int = 8, halves: bool = True) -> None:
    """Each document is two sequences, or one; every second one ends with the token."""
    documents = [[*document, end] if i % 2 else document for i, document in enumerate(documents)]
    cuts = [len(document) // 2 if halves else len(document) for document in documents]
    pieces = [p for d, cut in zip(documents, cuts, strict=True) for p in ([d[:cut], d[cut:]] if halves else [d])]
    size, kind = {8: (2, "H"), 4: (4, "i")}[code]
    places = [0, *accumulate(size * len(piece) for piece in pieces)][:-1]
    firsts = [i * (2 if halves else 1) for i in range(len(documents) + 1)]
    file.write_bytes(b"".join(pack(kind, piece) for piece in pieces))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(pieces), len(firsts))
    index += pack("i", [len(piece) for piece in pieces]) + pack("q", places) + pack("q", firsts)
    file.with_suffix(".idx").write_bytes(index)


FORMATS = {
    "llm.c": ("llm.c", "a.bin", write_llm_c),
    "llm.c of llama3": ("llm.c", "a.bin", lambda *content: write_llm_c(*content, wide=True)),
    "nanoGPT": ("nanogpt", "a.bin", write_nanogpt),
    "OLMo": ("olmo", "a.npy", write_olmo),
    "npy": ("olmo", "a.npy", write_npy),
    "Megatron": ("megatron", "a.bin", write_megatron),
    "Megatron, int32": ("megatron", "a.bin", lambda *content: write_megatron(*content, code=4, halves=False)),
}


def read_all(shards: Shards) -> list[list[int]]:
    starts = [*shards.starts(0, shards.tokens).tolist(), shards.tokens]
    return [shards.read(a, b).tolist() for a, b in pairwise(starts)]


@pytest.mark.parametrize(("name", "file", "write"), FORMATS.values(), ids=FORMATS)
def test_documents_come_out_as_they_went_in(tmp_path, bpe, documents, name, file, write):
    """Each document keeps its tokens behind the tokenizer's end of text, is on one side, and can be decoded."""
    end = load_tokenizer(bpe).eos_token_id
    write(tmp_path / file, documents, end)
    (out,) = prepare(TokenSource(str(tmp_path / file), name), tmp_path / "out", bpe, Options(held_out=0.2))
    prepared = open_prepared(out)
    train, held_out = read_all(prepared.train), read_all(prepared.held_out)
    expected = [[end, *document] for document in documents]
    assert sorted(train + held_out) == sorted(expected)
    assert train == [document for document in expected if document in train]
    assert held_out
    decoded = {load_tokenizer(bpe).decode(document[1:]) for document in held_out}
    assert {document.text for document in prepared.read_evaluation()} == decoded <= set(texts(60))
    assert prepared.manifest.bytes == sum(len(text.encode()) for text in texts(60))
    data = PreparedSettings(source=str(out), context=16).build()
    batch = next(data.batches(seed=0, batch_size=2, start=0))
    assert batch["input_ids"].shape == (2, 16)
    assert data.vocab_size == 400


def test_the_split_depends_on_the_tokens_alone(tmp_path, bpe, documents):
    """The same documents are held out whatever the format, its integers, and the order."""
    sides = set()
    for i, (name, file, write) in enumerate(FORMATS.values()):
        (folder := tmp_path / str(i)).mkdir()
        write(folder / file, documents[:: -1 if i % 2 else 1], load_tokenizer(bpe).eos_token_id)
        prepare(TokenSource(str(folder / file), name), folder / "out", bpe, Options(held_out=0.2))
        sides.add(str(sorted(read_all(open_prepared(folder / "out").held_out))))
    assert len(sides) == 1


@pytest.mark.parametrize("stated", [None, "other.bin"])
def test_a_shard_is_held_out(tmp_path, bpe, documents, stated):
    """Files with val in their names, or those that are named."""
    end = load_tokenizer(bpe).eos_token_id
    (tmp_path / "in").mkdir()
    write_llm_c(tmp_path / "in/fineweb_train_000001.bin", documents[:30], end)
    write_llm_c(tmp_path / "in/fineweb_train_000002.bin", documents[30:50], end)
    held_out = tmp_path / "in" / (stated or "fineweb_val_000000.bin")
    write_llm_c(held_out, documents[50:], end)
    source = TokenSource(str(tmp_path / "in"), "llm.c", str(held_out) if stated else None)
    prepare(source, tmp_path / "out", bpe)
    prepared = open_prepared(tmp_path / "out")
    assert read_all(prepared.train) == [[end, *document] for document in documents[:50]]
    assert read_all(prepared.held_out) == [[end, *document] for document in documents[50:]]
    with pytest.raises(HeadwaterError, match="only held-out files"):
        prepare(TokenSource(str(held_out), "llm.c", str(held_out)), tmp_path / "again", bpe)


def test_held_out_files_are_never_trained_on(tmp_path, bpe, documents, monkeypatch):
    """However their path is written; and a folder's name counts as well as a file's."""
    end = load_tokenizer(bpe).eos_token_id
    for folder in ("in/val", "in/train", "in/interval"):
        (tmp_path / folder).mkdir(parents=True)
    write_olmo(tmp_path / "in/train/a.npy", documents[:30], end)
    write_olmo(tmp_path / "in/interval/a.npy", documents[30:40], end)
    write_olmo(tmp_path / "in/val/a.npy", documents[40:], end)
    monkeypatch.chdir(tmp_path)
    for number, held_out in enumerate((None, "in/val", str(tmp_path / "in/val"), "in/train/../val")):
        prepare(TokenSource("in", "olmo", held_out), tmp_path / f"out-{number}", bpe)
        prepared = open_prepared(tmp_path / f"out-{number}")
        assert sorted(read_all(prepared.train)) == sorted([end, *document] for document in documents[:40])
        assert read_all(prepared.held_out) == [[end, *document] for document in documents[40:]]
    held_out_names = {
        "valid.bin": True,
        "x_valid_0.bin": True,
        "validation.bin": True,
        "valley.bin": False,
        "Val1.bin": True,
        "c4.val.bin": True,
        "c4.validation.00000.npy": True,
        "c4.eval.bin": False,
    }
    for name, is_held_out in held_out_names.items():
        assert bool(HELD_OUT.search(name)) == is_held_out


ENDINGS = {"nanogpt": ".bin", "olmo": ".npy"}


@pytest.mark.parametrize("name", ENDINGS)
def test_wider_tokens_without_a_header_are_refused(tmp_path, documents, name):
    """Where token 0 separates documents, every token would be a document of its own."""
    tokenizer = train_tokenizer(texts(200), 400)
    assert tokenizer.eos_token_id == 0
    tokenizer.save_pretrained(tmp_path / "bpe")
    ids = [token for document in documents for token in (*document, 0)]
    (tmp_path / f"a{ENDINGS[name]}").write_bytes(np.array(ids, "<u4").tobytes())
    with pytest.raises(HeadwaterError, match="Every second number"):
        prepare(TokenSource(str(tmp_path / f"a{ENDINGS[name]}"), name), tmp_path / "out", str(tmp_path / "bpe"))


def test_a_document_is_framed_as_text_is(tmp_path):
    """Tokenizers such as Llama's begin a text with another token than the one that ends it."""
    tokenizer = train_tokenizer(texts(200), 400)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    tokenizer.save_pretrained(tmp_path / "bpe")
    plain = [tokenizer(text, add_special_tokens=False).input_ids for text in texts(60)]
    write_megatron(tmp_path / "a.bin", [[first, *ids] for ids in plain], end)
    write_nanogpt(tmp_path / "b.bin", [[first, *ids] for ids in plain], end)
    write_llm_c(tmp_path / "c.bin", plain, first)
    expected = sorted([first, *ids, end] for ids in plain)
    sources = {"a": ("megatron", None), "b": ("nanogpt", None), "c": ("llm.c", first)}
    for stem, (name, border) in sources.items():
        source = TokenSource(str(tmp_path / f"{stem}.bin"), name, border=border)
        prepare(source, tmp_path / stem, str(tmp_path / "bpe"), Options(held_out=0.2))
        prepared = open_prepared(tmp_path / stem)
        assert sorted(read_all(prepared.train) + read_all(prepared.held_out)) == expected
        assert {document.text for document in prepared.read_evaluation()} <= set(texts(60))


def test_special_tokens_that_are_not_evaluated_on_are_counted(tmp_path, bpe, documents, run):
    tokenizer = load_tokenizer(bpe)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(tmp_path / "chat")
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    for name, part in (("train.bin", documents[:40]), ("val.bin", documents[40:])):
        write_nanogpt(tmp_path / name, [[user, *document] for document in part], tokenizer.eos_token_id)
    words = (
        "data",
        "prepare",
        tmp_path,
        "--tokens",
        "nanogpt",
        "--tokenizer",
        tmp_path / "chat",
        "--out",
        tmp_path / "out",
    )
    code, stdout, _ = run(*words)
    assert (code, f"without their {len(documents) - 40} special tokens" in " ".join(stdout.split())) == (0, True)
    prepared = open_prepared(tmp_path / "out")
    assert prepared.manifest.evaluation.special == len(documents) - 40
    assert all(user in row for row in read_all(prepared.held_out))


def test_another_token_can_separate_documents(tmp_path, bpe, documents):
    write_nanogpt(tmp_path / "a.bin", documents, border := load_tokenizer(bpe).convert_tokens_to_ids("q"))
    assert not any(border in document for document in documents)
    prepare(TokenSource(str(tmp_path / "a.bin"), "nanogpt", border=border), tmp_path / "out", bpe)
    assert open_prepared(tmp_path / "out").manifest.documents == len(documents)


def test_nanogpts_characters(tmp_path):
    """A folder as nanoGPT's prepare.py writes it: one text, its last tenth held out, and a pickle that is not read."""
    text = "".join(texts(3000))
    characters = sorted(set(text))
    ids = [characters.index(character) for character in text]
    cut = len(ids) * 9 // 10
    (tmp_path / "train.bin").write_bytes(pack("H", ids[:cut]))
    (tmp_path / "val.bin").write_bytes(pack("H", ids[cut:]))
    meta = tmp_path / "meta.pkl"
    meta.write_bytes(b"c__builtin__\nexit\n(tR.")
    source = TokenSource(str(tmp_path), "nanogpt")
    with pytest.raises(HeadwaterError, match=r"meta\.pkl.*data tokenizer .*input.txt --characters"):
        prepare(source, tmp_path / "bytes", "bytes")
    character_tokenizer([text[:cut], text[cut:]]).save_pretrained(tmp_path / "characters")
    prepare(source, tmp_path / "out", str(tmp_path / "characters"))
    prepared = open_prepared(tmp_path / "out")
    (train,), (held_out,) = read_all(prepared.train), read_all(prepared.held_out)
    assert (train[1:], held_out[1:]) == (ids[:cut], ids[cut:])
    assert [document.text for document in prepared.read_evaluation()] == [text[cut:]]
    assert prepared.manifest.tokenizer.vocab_size == len(characters) + 2
    # As nanoGPT's prepare.py writes it. The tokenizer of a text with another character is not its.
    numbers = dict(enumerate(characters))
    table = {"vocab_size": len(numbers), "itos": numbers, "stoi": {name: number for number, name in numbers.items()}}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        meta.write_bytes(pickle.dumps(table, protocol))
        assert read_characters(meta) == table["stoi"]
    prepare(source, tmp_path / "again", str(tmp_path / "characters"))
    character_tokenizer(["\t" + text]).save_pretrained(tmp_path / "dos")
    with pytest.raises(HeadwaterError, match=r"as \d+, and the tokenizer as .*convert them in the text first"):
        prepare(source, tmp_path / "dos-out", str(tmp_path / "dos"))
    meta.write_bytes(b"\x80\x04]")
    with pytest.raises(HeadwaterError, match="not a table of nanoGPT's"):
        prepare(source, tmp_path / "cut", str(tmp_path / "characters"))


def test_characters_that_are_not_in_the_text(capsys):
    """They are no part of a continuation, and a prompt with them is reported."""
    tokenizer = character_tokenizer(["abc\n"])
    ids = encode_texts(tokenizer, ["aéb"], plain=True)[0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    warn_of_unknown(tokenizer, ["abc", "\ncba"])
    warn_of_unknown(byte_tokenizer(), ["é"])
    assert capsys.readouterr().err == ""
    warn_of_unknown(tokenizer, ["aé", "zéb"])
    assert capsys.readouterr().err == "The tokenizer has no 'zé'; the model reads <|unknown|> instead.\n"


def test_a_long_document_is_cut(tmp_path, bpe):
    """Memory does not grow with it."""
    tokenizer = load_tokenizer(bpe)
    unit = tokenizer("the alpha of gamma\n", add_special_tokens=False).input_ids
    ids = unit * (CHUNK // len(unit) + 10)
    (tmp_path / "train.bin").write_bytes(pack("H", ids))
    (tmp_path / "val.bin").write_bytes(pack("H", unit))
    prepare(TokenSource(str(tmp_path), "nanogpt"), tmp_path / "out", bpe)
    end = tokenizer.eos_token_id
    assert read_all(open_prepared(tmp_path / "out").train) == [[end, *ids[:CHUNK]], [end, *ids[CHUNK:]]]


def change(at: int, new: bytes):
    return lambda content: content[:at] + new + content[at + len(new) :]


HOSTILE = {
    "magic": ("llm.c", "a.bin", change(0, pack("i", [20240519])), "begins with 20240519, version 1, not with"),
    "version": ("llm.c", "a.bin", change(4, pack("i", [9])), "version 9"),
    "no header": ("llm.c", "a.bin", lambda content: content[:7], "shorter than the header of llm.c"),
    "half a header": ("llm.c", "a.bin", lambda content: content[:500], "shorter than the header of llm.c"),
    "truncated": ("llm.c", "a.bin", lambda content: content[:-200], "its header says"),
    "longer": ("llm.c", "a.bin", lambda content: content + b"ab", "its header says"),
    "count": ("llm.c", "a.bin", change(8, pack("i", [-5])), "its header says -5"),
    "no tokens": ("llm.c", "a.bin", lambda content: content[:1024], "holds no tokens"),
    "odd": ("nanoGPT", "a.bin", lambda content: content + b"x", "2 bytes a token do not divide"),
    "empty": ("nanoGPT", "a.bin", lambda content: b"", "holds no tokens"),
    "vocabulary": ("nanoGPT", "a.bin", change(10, pack("H", [400])), "has token 400 at position 5, but .* only 400"),
    "another format": ("llm.c", "a.bin", None, "has token .* --tokens"),
    "odd npy": ("OLMo", "a.npy", lambda content: content[:-1], "do not divide"),
    "npy truncated": ("npy", "a.npy", lambda content: content[:-9], "is damaged"),
    "npy of objects": ("npy", "a.npy", lambda content: content.replace(b"'<i8'", b"'|O' "), "has no numbers"),
    "npy of floats": ("npy", "a.npy", lambda content: content.replace(b"'<i8'", b"'<f8'"), "an array of float64"),
    "npy header": ("npy", "a.npy", lambda content: content.replace(b"'shape': (", b"'shape': [", 1), "is damaged"),
    "npy longer": ("npy", "a.npy", lambda content: content + b"1234", "bytes, not"),
    "negative": ("npy", "a.npy", lambda content: content[:-8] + pack("q", [-1]), "has token -1"),
    "index": ("Megatron", "a.idx", change(0, b"TNTIDX"), "is no index of Megatron"),
    "index's version": ("Megatron", "a.idx", change(9, b"\2"), "is no index of Megatron"),
    "type": ("Megatron", "a.idx", change(17, b"\7"), "has the type 7"),
    "index's end": ("Megatron", "a.idx", lambda content: content[:-1], "bytes, not"),
    "index's header": ("Megatron", "a.idx", lambda content: content[:20], "shorter than the header"),
    "sequences": ("Megatron", "a.idx", change(18, b"\xff" * 8), "bytes, not"),
    "documents": ("Megatron", "a.idx", lambda content: content[:-8] + b"\xff" * 8, "all documents in order"),
    "documents stop early": (
        "Megatron",
        "a.idx",
        lambda content: content[:-8] + pack("q", [119]),
        "all documents in order",
    ),
    "another place": ("Megatron", "a.idx", change(34 + 4 * 120 + 8, pack("q", [1])), "one after another"),
    "order": ("Megatron", "a.idx", lambda content: content[:-24] + pack("q", [0, 0, 0]), "in order"),
    "tokens of the index": ("Megatron", "a.bin", lambda content: content[:-2], "its index says"),
}


@pytest.mark.parametrize(("kind", "file", "damage", "message"), HOSTILE.values(), ids=HOSTILE)
def test_damaged_files_are_refused(tmp_path, bpe, documents, kind, file, damage, message):
    """In a sentence that names the file; nothing is written."""
    name, tokens, write = FORMATS[kind]
    write(tmp_path / tokens, documents, load_tokenizer(bpe).eos_token_id)
    if damage is None:
        name = "nanogpt"
    else:
        (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(HeadwaterError, match=message) as error:
        prepare(TokenSource(str(tmp_path / tokens), name), tmp_path / "out", bpe, Options(held_out=0.2))
    assert str(tmp_path / file) in str(error.value)
    assert "\n" not in str(error.value)
    assert not any((tmp_path / "out").glob("*.tokens"))


def test_the_wrong_tokenizer_is_refused(tmp_path, bpe, documents):
    """Its vocabulary is as large, so only the text shows it."""
    train_tokenizer((text[::-1] for text in texts(300)), 400).save_pretrained(tmp_path / "other")
    write_llm_c(tmp_path / "a.bin", documents, load_tokenizer(bpe).eos_token_id)
    with pytest.raises(HeadwaterError, match="does not restore the tokens"):
        prepare(TokenSource(str(tmp_path / "a.bin"), "llm.c"), tmp_path / "out", str(tmp_path / "other"))


def test_a_border_that_does_not_occur_is_refused(tmp_path, bpe, documents):
    write_llm_c(tmp_path / "a.bin", documents, load_tokenizer(bpe).eos_token_id)
    with pytest.raises(HeadwaterError, match=r"Token 399 occurs nowhere in .*a\.bin.*--border"):
        prepare(TokenSource(str(tmp_path / "a.bin"), "llm.c", border=399), tmp_path / "out", bpe)


def test_from_nanogpts_folder_to_a_run(tmp_path, run, monkeypatch):
    """By the command line, in a shipped recipe; a run that stops and goes on is the same run."""
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(text := "".join(texts(300)).replace("\r", ""))
    ids = [sorted(set(text)).index(character) for character in text]
    Path("bins").mkdir()
    for name, part in (("train.bin", ids[:-3000]), ("val.bin", ids[-3000:])):
        (Path("bins") / name).write_bytes(pack("H", part))
    assert run("data", "tokenizer", "input.txt", "--characters", "--out", "characters")[0] == 0
    take = ["data", "prepare", "bins", "--tokens", "nanogpt", "--tokenizer", "characters", "--out", "folder"]
    assert "--by has no effect with --tokens" in run(*take, "--by", "x")[2]
    assert "--border has no effect without --tokens" in run("data", "prepare", "bins", "--out", "x", "--border", 3)[2]
    assert "--held-out has no effect beside the held-out file 'val.bin'" in run(*take, "--held-out", 0.1)[2]
    assert run(*take)[0] == 0
    assert run(*take, "--border", 3)[2].rstrip().endswith("use the same, or name another folder.")
    assert "all checksums match" in run("data", "show", "folder", "--check")[1]
    train = ["train", "shakespeare", "data.context=16", "training.batch_size=2", "training.warmup_steps=1"]
    train += ["model={hidden_size: 16, num_attention_heads: 2, num_hidden_layers: 2}", "reporting.save_every=2"]
    train += ["training.steps=4"]
    code, _, err = run(*train, "data.source=bins", "--out", "refused")
    assert code == 2
    assert "data prepare bins --tokens nanogpt --tokenizer NAME --out FOLDER" in err
    code, _, err = run(*train, "data.source=folder", "--out", "whole")
    assert code == 0, err
    _, (checkpoint,) = run(*train, "data.source=folder", "--out", "halves"), Path("halves").glob("checkpoints/*4")
    shutil.rmtree(checkpoint)
    assert run(*train, "data.source=folder", "--out", "halves", "--resume")[0] == 0
    records = [read_record(Path(name)) for name in ("whole", "halves")]
    assert records[0].data_order == records[1].data_order
    assert records[0].result == records[1].result
    assert records[0].recipe["data"]["kind"] == "prepared"
    assert "tokenizer" not in records[0].recipe["data"]
    code, _, err = run(*train, "data.source=folder", "data.tokenizer=bytes", "--out", "refused")
    assert code == 2
    assert "data has no field 'tokenizer'" in err
