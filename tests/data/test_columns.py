"""Tables read by column, whatever their kind, and text in any Unicode form, without byte order marks."""

import gzip
import json
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from headwater import HeadwaterConfig
from headwater.util.errors import HeadwaterError
from headwater_lab.data.corpus import check_column_is_read
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.shards import open_prepared
from headwater_lab.data.stream import Stream, TextSource, read_corpus
from headwater_lab.data.text import TextSettings
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.evaluation.evaluation import evaluate
from headwater_lab.evaluation.text_likelihood import read_text
from headwater_lab.training.trained_models import sample_rows

MARK = "\ufeff"
TEXTS = [f'row {i}, "so\tto speak";\nof two lines | é' for i in range(30)]


def texts_of(file, column="text"):
    """The texts of a source, which both readers agree on."""
    documents = [document.text for document in read_corpus(str(file), column).documents]
    assert [part.text for part in Stream(TextSource(str(file), column))] == documents
    return documents


def quoted(delimiter, line_end="\n"):
    rows = [["id", "text"], *([str(i), f'"{text.replace(chr(34), chr(34) * 2)}"'] for i, text in enumerate(TEXTS))]
    return line_end.join(map(delimiter.join, rows))


def table(kind):
    match kind.split(".")[0]:
        case "csv":
            return quoted(",").encode()
        case "tsv":
            return quoted("\t").encode()
        case "mac":
            return quoted(",", "\r").encode()
        case "windows":
            return (MARK + quoted(",", "\r\n")).encode()
        case "lines":
            return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
        case _:
            return (MARK + json.dumps([{"text": text} for text in TEXTS], indent=1)).encode()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("csv", "a.csv"),
        ("csv", "A.CSV"),
        ("tsv", "a.tsv"),
        ("mac", "a.csv"),
        ("windows", "a.csv"),
        ("lines", "a.ndjson"),
        ("lines", "a.JSONL"),
        ("lines", "a.json"),
        ("array", "a.json"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_tables_are_read_by_column(kind, name, packed, tmp_path):
    file = tmp_path / (name + (".gz" if packed else ""))
    content = table(kind)
    file.write_bytes(gzip.compress(content) if packed else content)
    assert texts_of(file) == texts_of(tmp_path) == TEXTS
    assert [document.text for document in read_text(str(tmp_path / "*")).documents] == TEXTS


def test_a_sample_of_a_table_is_of_its_texts(tmp_path):
    (tmp_path / "a.csv").write_bytes(table("windows"))
    trained = SimpleNamespace(
        model=SimpleNamespace(config=HeadwaterConfig()), tokenizer=byte_tokenizer(), source="a model"
    )
    rows = sample_rows(trained, tmp_path / "a.csv", 4)
    assert trained.tokenizer.decode(rows[0])[:80] == "\n".join(TEXTS)[:80]
    (tmp_path / "b.csv").write_text("body\na\n")
    with pytest.raises(HeadwaterError, match="no column 'text'; rename one of its columns: body"):
        sample_rows(trained, tmp_path / "b.csv", 4)


def test_a_field_may_be_as_long_as_a_document(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "word " * 60_000)
    assert "".join(texts_of(tmp_path / "a.csv")) == "word " * 60_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,text\n1,a,b\n", "Line 2 of .* has 3 fields, and the first line names 2 columns"),
        ("a.csv", "text,text\na,b\n", "two columns 'text'"),
        ("a.csv", 'text\n"a\n', "cannot be read as csv: line 2: unexpected end"),
        ("a.tsv", 'text\tid\n"a" b\t1\n', "cannot be read as tsv: line 2: '\t' expected"),
        ("a.csv", "id,body\n1,a\n", r"no column 'text'; set data\.text_column to one of: id, body\.$"),
        ("a.csv", "id;text\n1;a\n", r"no column 'text'; set data\.text_column to one of: id;text\.$"),
        ("a.csv", "", "no text"),
        ("a.jsonl", '{"id": 1}\n{"a": {"b": 2}}\n', r"no column 'text'; set data\.text_column to one of: id, a\.b\.$"),
        ("a.jsonl", '{"text": 3}\n', "holds int, not text, in row 0"),
    ],
)
def test_tables_that_cannot_be_read_get_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(HeadwaterError, match=message):
        read_corpus(str(tmp_path / name))


def test_a_column_is_refused_where_no_source_is_a_table(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "b.csv").write_text("body\nA text.\n")
    text, table = str(tmp_path / "a.txt"), str(tmp_path / "b.csv")
    for sources in ([text], [text, "python-topics"]):
        with pytest.raises(HeadwaterError, match=r"--text-column is for tables, and .*a\.txt' has none"):
            check_column_is_read("body", sources, "--text-column")
    for sources in ([table], [text, table], [str(tmp_path)], []):
        check_column_is_read("body", sources, "--text-column")
    check_column_is_read("text", [text], "--text-column")
    with pytest.raises(HeadwaterError, match=r"data\.text_column is for tables"):
        TextSettings(source=text, text_column="body").build()
    with pytest.raises(HeadwaterError, match="--text-column is for tables"):
        evaluate(["no model"], text=[text], text_column="body")


@pytest.mark.parametrize("where", [0, 15, 30])
def test_a_row_without_the_column_is_counted_wherever_it_is(where, tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[where:where] = ['{"id": 0}', '{"text": null}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert texts_of(tmp_path / "a.jsonl") == TEXTS
    assert read_corpus(str(tmp_path / "a.jsonl")).facts["skipped_without_text"] == 2
    prepare(TextSource(str(tmp_path / "a.jsonl")), tmp_path / "out", options=Options(held_out=0.3))
    manifest = open_prepared(tmp_path / "out").manifest
    assert (manifest.documents, manifest.skipped.none) == (30, 2)


def test_files_of_a_folder_may_lack_the_column(tmp_path):
    parquet.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("id\n1\n")
    (tmp_path / "c.csv").write_text("text,id\na text,1\n")
    stream = Stream(TextSource(str(tmp_path)))
    assert [part.text for part in stream] == ["a text"]
    assert stream.none == 3
    (tmp_path / "c.csv").unlink()
    with pytest.raises(HeadwaterError, match="no column 'text'; set --text-column to one of: id"):
        list(Stream(TextSource(str(tmp_path))))


def test_nested_columns_have_dotted_names(tmp_path):
    rows = [{"id": 1, "meta": {"text": "a", "n": 1}}, {"id": 2, "meta": None}, {"id": 3, "meta": {"text": "b", "n": 2}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("meta.text\na\nb\n")
    for kind in ("jsonl", "parquet", "csv"):
        assert texts_of(tmp_path / f"a.{kind}", "meta.text") == ["a", "b"]
    with pytest.raises(HeadwaterError, match=r"to one of: id, meta\.text, meta\.n\."):
        read_corpus(str(tmp_path / "a.parquet"))
    (tmp_path / "list.jsonl").write_text('{"turns": [{"text": "a"}]}\n')
    with pytest.raises(
        HeadwaterError, match=r"Column 'turns' .* is a list, so 'turns\.text' has several values in a row"
    ):
        read_corpus(str(tmp_path / "list.jsonl"), "turns.text")


def test_a_byte_order_mark_is_dropped_and_joined_tables_are_refused(tmp_path):
    line = '{"text": "a"}'
    (tmp_path / "a.jsonl").write_text(f"{MARK}{line}\n{line}\n")
    assert texts_of(tmp_path / "a.jsonl") == ["a"] * 2
    (tmp_path / "a.txt").write_text(f"{MARK}one\ntwo\n")
    assert "".join(texts_of(tmp_path / "a.txt")) == "one\ntwo\n"
    for rows in (f"a,1\n{MARK}text,id\na,2\n", f"a,1{MARK}text,id\na,2\n"):
        (tmp_path / "a.csv").write_text(f"{MARK}text,id\n{rows}")
        with pytest.raises(HeadwaterError, match=r"names the columns again|has 3 fields"):
            texts_of(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text(f"{MARK}text\na{MARK}text\nb\n")
    with pytest.raises(HeadwaterError, match=r"Line 2 of .* names the columns again"):
        texts_of(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text(f"{line}{MARK}{line}\n")
    with pytest.raises(HeadwaterError, match="line 1: Extra data"):
        texts_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_text_in_utf_16_is_told(name, tmp_path):
    (tmp_path / name).write_bytes("text\nline é\n".encode("utf-16"))
    with pytest.raises(HeadwaterError, match=r"none of its 1 files is UTF-8 text|codec can't decode byte 0xff"):
        read_corpus(str(tmp_path / name))
