"""Conversations: the tokens that the chat template gives, with labels on the answers alone."""

import json
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from headwater.util.errors import HeadwaterError
from headwater_lab.data import chat
from headwater_lab.data.chat import ChatEncoder
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.shards import open_prepared
from headwater_lab.data.stream import TextSource, read_corpus
from headwater_lab.data.text import TextSettings
from headwater_lab.data.tokenizer import byte_tokenizer, train_tokenizer
from headwater_lab.evaluation.text_likelihood import read_text
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.util.endings import Interrupted

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
ANSWER = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}" + ANSWER + "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPTED = PLAIN + "{% if add_generation_prompt %}assistant: {% endif %}"
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ENDS = {"chatml": "<|im_end|>", "marked": "<|im_end|>", "plain": "\n", "prompted": "\n", "inst": "<|endoftext|>"}
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "plain": PLAIN, "prompted": PROMPTED, "inst": INST}


def conversation(i):
    messages = ["Be kind.", f"Question {i}, é?", f"Answer {i} 世界.", "And then?", f"More words, {i * i}."]
    return [{"role": r, "content": c} for r, c in zip(["system", *["user", "assistant"] * 2], messages, strict=True)]


CONVERSATIONS = [conversation(i) for i in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """c.jsonl, and tokenizers of bytes and of BPE with each template."""
    root = tmp_path_factory.mktemp("chat")
    (root / "c.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in CONVERSATIONS))
    bpe = train_tokenizer([PROMPTED, *(m["content"] for one in CONVERSATIONS for m in one)], 300)
    bpe.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    for kind, tokenizer in (("bytes", byte_tokenizer()), ("bpe", bpe)):
        tokenizer.save_pretrained(root / kind)
        for name, template in TEMPLATES.items():
            tokenizer.chat_template = template
            tokenizer.save_pretrained(root / f"{kind}-{name}")
    return root


def make(folder, tokenizer, **changes):
    settings = {"source": str(folder / "c.jsonl"), "tokenizer": str(folder / tokenizer), "context": 64} | changes
    return TextSettings(**settings).build()


def answers(tokenizer, ids, counted):
    """The text of each run of counted tokens."""
    runs = np.split(ids, np.flatnonzero(np.diff(counted)) + 1)
    return [tokenizer.decode(run) for run in runs[int(not counted[0]) :: 2]]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_labels_are_the_answers_and_what_ends_them(kind, name, folder):
    data = make(folder, f"{kind}-{name}")
    stream, tokenizer = data.train.streams[0], data.tokenizer
    held_out = {one.id for one in data.held_out}
    assert 0 < len(held_out) < 10
    trained = [one for i, one in enumerate(CONVERSATIONS) if f"c.jsonl:{i}" not in held_out]
    bounds = [*stream.borders, stream.tokens]
    found = {}
    for first, last in pairwise(bounds):
        ids, counted = stream.read(first, last), stream.counts(first, last)
        found[tokenizer.decode(ids)] = answers(tokenizer, ids, counted)
    expected = {}
    for one in trained:
        messages = [m["content"] + ENDS[name] for m in one if m["role"] == "assistant"]
        expected[tokenizer.apply_chat_template(one, tokenize=False)] = messages
    assert found == expected


def test_tokens_are_those_of_the_template(folder):
    data = make(folder, "bpe-chatml")
    stream = data.train.streams[0]
    first = stream.read(0, stream.borders[1]).tolist()
    again = data.tokenizer.apply_chat_template(CONVERSATIONS, tokenize=True, return_dict=True)["input_ids"]
    assert first in again


def test_rows_and_evaluation_count_answers_alone(folder):
    data = make(folder, "bpe-chatml", held_out_bytes=None)
    stream = data.train.streams[0]
    batch = data.train.make_batch([(0, row) for row in range(data.train.counts[0])])
    labels = batch["shift_labels"]
    following = torch.from_numpy(stream.read(1, labels.numel() + 1).astype(np.int64)).view_as(labels)
    counted = torch.from_numpy(stream.counts(1, labels.numel() + 1)).view_as(labels)
    assert torch.equal(labels, torch.where(counted, following, -100))
    assert (batch["position_ids"] == 0).any(0)[1:].any(), "rows are packed"
    held_out = [CONVERSATIONS[int(one.id.partition(":")[2])] for one in data.held_out]
    messages = [m["content"] for one in held_out for m in one if m["role"] == "assistant"]
    sizes = [sum(len(m["content"].encode()) for m in one if m["role"] == "assistant") for one in held_out]
    assert [one.bytes for one in data.held_out] == sizes
    tokens = sum(len(data.tokenizer(text + "<|im_end|>").input_ids) for text in messages)
    assert sum(one.tokens for one in data.held_out) == tokens
    measures = data.evaluate(lambda batch: torch.zeros(*batch["input_ids"].shape, 512)).metrics
    assert measures["loss"] == pytest.approx(math.log(512))
    assert measures["bits_per_byte"] == pytest.approx(9 * tokens / sum(sizes))


def test_few_bytes_to_evaluate_on_are_whole_conversations(folder):
    few, every = (make(folder, "bpe-chatml", held_out=0.5, held_out_bytes=n).held_out for n in (1000, None))
    assert 0 < len(few) < len(every)
    assert all(any(np.array_equal(one.ids, other.ids) for other in every) for one in few)


@pytest.mark.parametrize("shard_tokens", [2**27, 300])
def test_prepared_conversations_are_those_of_text(shard_tokens, folder, tmp_path):
    options = Options(held_out=0.1, shard_tokens=shard_tokens)
    prepare(TextSource(str(folder / "c.jsonl")), tmp_path / "out", str(folder / "bpe-chatml"), options)
    prepared, text = open_prepared(tmp_path / "out"), make(folder, "bpe-chatml", held_out=0.1)
    stream, facts = prepared.train, prepared.manifest.train
    pairs = set()
    for one in (stream, text.train.streams[0]):
        borders = [*one.starts(0, one.tokens).tolist(), one.tokens]
        spans = list(pairwise(borders))
        pairs.add(frozenset((one.read(*s).astype(int).tobytes(), one.counts(*s).tobytes()) for s in spans))
    assert len(pairs) == 1
    assert facts.answer_tokens == stream.counts(0, stream.tokens).sum() == text.train.streams[0].counted.sum()
    data = PreparedSettings(source=str(tmp_path / "out"), context=64).build()
    assert {one.ids.tobytes() for one in data.held_out} == {one.ids.tobytes() for one in text.held_out}
    assert {one.tokens for one in data.held_out} == {one.tokens for one in text.held_out}
    assert (next(data.batches(0, 4, 0))["shift_labels"] == -100).any()
    answers_file = next((tmp_path / "out").glob("*.answers"))
    answers_file.write_bytes(answers_file.read_bytes()[:-1])
    with pytest.raises(HeadwaterError, match=r"\.answers' has"):
        open_prepared(tmp_path / "out")


def test_an_interrupted_preparation_of_conversations_starts_over(folder, tmp_path):
    def stop(documents, *_):
        if documents > 12:
            raise KeyboardInterrupt

    source, tokenizer = TextSource(str(folder / "c.jsonl")), str(folder / "bpe-chatml")
    how = {"batch_bytes": 500}
    prepare(source, tmp_path / "whole", tokenizer, Options(0.2), **how)
    with pytest.raises(Interrupted):
        prepare(source, tmp_path / "out", tokenizer, Options(0.2), **how, on_progress=stop)
    prepare(source, tmp_path / "out", tokenizer, Options(0.2), **how)
    for file in (tmp_path / "whole").glob("*.*"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_other_ways_to_write_conversations(folder, tmp_path):
    usual = [document.text for document in read_corpus(str(folder / "c.jsonl")).documents]
    names = {"user": "human", "assistant": "gpt"}
    shared = [[{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in c] for c in CONVERSATIONS]
    parts = [[m | {"content": [{"type": "text", "text": m["content"]}]} for m in c] for c in CONVERSATIONS]
    for name, column, rows in (("a", "conversations", shared), ("b", "messages", parts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({column: one}) + "\n" for one in rows))
        parquet.write_table(pa.table({column: rows}), tmp_path / f"{name}.parquet")
        for kind in ("jsonl", "parquet"):
            texts = [document.text for document in read_corpus(str(tmp_path / f"{name}.{kind}"), column).documents]
            assert texts == usual


def test_a_first_token_is_no_label_since_the_conversation_before_would_predict_it(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    encoded = ChatEncoder(tokenizer, np.dtype("<u2"))('[{"role": "assistant", "content": "abc"}]', "a")
    assert encoded.ids.tolist() == [*b"abc", 256]
    assert encoded.counts.tolist() == [False, True, True, True]


def test_rows_without_an_answer_are_counted(folder, tmp_path):
    rows = [None, CONVERSATIONS[0][:2], [{"role": "user", "content": None}, *CONVERSATIONS[0][2:]]]
    lines = [json.dumps({"messages": row}) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text((folder / "c.jsonl").read_text() + "".join(lines))
    facts = read_corpus(str(tmp_path / "a.jsonl")).facts
    assert (facts["documents"], facts["skipped_without_text"]) == (30, 3)


UNSTABLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}<END>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({}, None, "the tokenizer has no chat template .*set tokenizer.chat_template"),
        ({}, UNSTABLE, "answers cannot be found; mark them in the template"),
        ({}, "{{ raise_exception('no system prompts') }}", "cannot write 'c.jsonl:.*no system prompts"),
        ({}, "{% for a in range(4000) %}{% for b in range(4000) %}{% endfor %}{% endfor %}", "needs more than 0.1 s"),
        ({}, "{{ 'a' * 2000000 }}", "writes 2,000,000 characters for 'c.jsonl:"),
        ({}, "the same for all", "leaves out the answers of 'c.jsonl:"),
        ({}, "{{ '' }}", "leaves out the answers of 'c.jsonl:"),
        ({"messages": [{"content": "a"}]}, CHATML, "a message has no role"),
        ({"messages": [{"role": "assistant", "content": 3}]}, CHATML, "content of a message is int, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, CHATML, "a part of type image"),
        ({"messages": CONVERSATIONS[0], "tools": [{"name": "f"}]}, CHATML, "Column 'tools' .*is not read by training"),
        ({"messages": json.dumps(CONVERSATIONS[0]), "tools": "f"}, CHATML, "Column 'tools' .*is not read by training"),
        ({"text": "plain"}, CHATML, "both conversations and plain text"),
    ],
)
def test_what_cannot_be_trained_on_gets_one_sentence(row, template, message, folder, tmp_path, monkeypatch):
    if "4000" in str(template):  # loops that end, so that no thread is left behind for long
        monkeypatch.setattr(chat, "SECONDS", 0.1)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    lines = (folder / "c.jsonl").read_text() + (json.dumps(row) + "\n" if row else "")
    (tmp_path / "c.jsonl").write_text(lines)
    for run in (
        lambda: make(tmp_path, "tokenizer"),
        lambda: prepare(TextSource(str(tmp_path / "c.jsonl")), tmp_path / "out", str(tmp_path / "tokenizer")),
    ):
        with pytest.raises(HeadwaterError, match=message) as error:
            run()
        assert "\n" not in str(error.value)


def test_models_are_not_compared_on_conversations(folder):
    with pytest.raises(HeadwaterError, match="holds conversations"):
        read_text(str(folder / "c.jsonl"))


def test_a_run_trains_on_answers_and_goes_on_where_there_is_none(folder, tmp_path):
    long = [[{"role": "user", "content": f"{i} " + "word " * 20}, *one[2:3]] for i, one in enumerate(CONVERSATIONS)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in long))
    data = {"kind": "text", "source": str(tmp_path / "c.jsonl"), "tokenizer": str(folder / "bytes-chatml")}
    recipe = parse(
        {
            "name": "chat",
            "data": data | {"context": 32},
            "model": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32},
            "training": {"steps": 12, "batch_size": 1, "threads": 1, "warmup_steps": 1},
            "reporting": {"log_every": 1, "evaluate_every": None, "save_every": None, "tensorboard": False},
        },
        "chat",
    )
    record = train(recipe, tmp_path / "run")
    losses = [point.loss for point in record.curve]
    assert record.status == "finished"
    assert 0.0 in losses, "some rows have no answer"
    assert max(losses) > 1
    assert record.skipped_steps == 0
