"""The fields of requests, and texts that arrive in parts, without a server."""

import random
from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from conftest import build
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.serving.stops import UntilStop, before_stop

if find_spec("uvicorn") is None:
    pytest.skip("the server's packages are not installed", allow_module_level=True)

from headwater_lab.serving.requests import Chat, Completion, RequestError, read_fields
from headwater_lab.serving.server import Continuation


def test_what_changes_nothing_is_accepted():
    """null, and the one value of a field that asks for nothing, as clients send them."""
    neutral = dict(best_of=1, echo=False, suffix=None, logprobs=None, n=None, stop=None, temperature=None, user="me")
    neutral |= dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, store=False, metadata={"id": "1"})
    assert read_fields(Completion, neutral | {"prompt": "a"})["prompt"] == ["a"]
    answer = dict(role="assistant", content="a", refusal=None, audio=None, tool_calls=None, function_call=None)
    neutral = dict(logprobs=False, n=1, stream=None, tools=[], response_format={"type": "text"}, presence_penalty=0.0)
    neutral |= dict(tool_choice="none", parallel_tool_calls=True, top_logprobs=0, service_tier="auto")
    assert read_fields(Chat, neutral | {"messages": [answer]})["messages"] == [dict(role="assistant", content="a")]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nope": 1}, "nope: is not a field"),
        ({"n": 2}, "n: only 1 is supported"),
        ({"echo": True}, "echo: only False is supported"),
        ({"logprobs": 0}, "logprobs: is not a field"),
        ({"presence_penalty": 0.1}, "presence_penalty: should be less than or equal to 0, not 0.1"),
        ({"logit_bias": {"5": -100}}, "logit_bias: "),
        ({"temperature": float("inf")}, "temperature: "),
        ({"stream_options": {"nope": 1}, "stream": True}, r"stream_options\.nope: "),
        ({"prompt": ["a"] * 129}, "prompt: should have at most 128 texts"),
    ],
)
def test_a_wrong_field_is_named(fields, named):
    with pytest.raises(RequestError, match=f"^{named}"):
        read_fields(Completion, {"prompt": "a"} | fields)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize(
    "stops", [["END"], ["END", "xE"], ["d "], ["z"], ["EE", "END"], ["d END later", "dq"], ["EN", "END"]], ids=str
)
def test_a_text_in_pieces_ends_where_the_whole_does(size, stops):
    text = "beforexd ENEEND later d"
    until = UntilStop(stops)
    pieces = [until.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join([*pieces, until.feed("", end=True)]) == before_stop(text, stops)
    assert until.stopped == any(stop in text for stop in stops)


def test_parts_of_a_text_are_lines():
    parts = [{"type": "text", "text": "def f():"}, {"type": "text", "text": "    return 1"}]
    (message,) = read_fields(Chat, {"messages": [{"role": "user", "content": parts}]})["messages"]
    assert message["content"] == "def f():\n    return 1"


def spoken(tokenizer, ids, stored=None, **fields):
    """What a server's continuation passes on and answers where the model says these ids."""
    ids = [*ids, 0]
    model = build({}, vocab_size=len(tokenizer))
    model.generation_config = GenerationConfig(**(stored or {}))
    continuation = Continuation(model, tokenizer, [1], {"prompt": "a", "max_tokens": len(ids)} | fields)
    pieces = []
    continuation.pass_on = pieces.append

    def generate(prompt, **options):
        for end in range(1, len(ids) + 1):
            options["stopping_criteria"](torch.tensor([[1, *ids[:end]]]), None)

    model.generate = generate
    continuation.generate()
    return "".join(pieces), continuation.text, continuation.config


def test_a_stream_is_the_answer_whatever_the_bytes():
    """Also where a byte-fallback tokenizer makes no text of them, and where the last character is cut."""
    words = {"<unk>": 0, "\u2581hello": 1, "\u2581D": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    fallback = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fallback, unk_token="<unk>")
    draws = random.Random(0)
    cases = [[3 + 0x0A, 3 + 0xF0, 1], [2, 3 + 0xC3, 3 + 0xA9, 1], [1, 3 + 0xC3]]
    cases += [draws.choices([1, 2, 13, 0xF3, 0xC6, 0xAC, 0x43], k=12) for _ in range(50)]
    for ids in cases:
        streamed, text, _ = spoken(tokenizer, ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
        # What has been sent cannot be taken back where later bytes turn a character into broken ones.
        assert streamed == text or "\ufffd" in text
    assert spoken(tokenizer, cases[0])[0].endswith(" hello")
    assert spoken(tokenizer, cases[2])[0] == spoken(tokenizer, cases[2])[1] == "hello\ufffd"


def test_settings_are_the_requests_or_the_models_or_openais():
    stored = dict(do_sample=True, top_k=20, top_p=0.9, temperature=0.6, repetition_penalty=1.1, num_beams=4)
    tokenizer = byte_tokenizer()

    def settings(stored, **fields):
        config = spoken(tokenizer, [65], stored, **fields)[2]
        return config.do_sample, config.temperature, config.top_k, config.top_p, config.repetition_penalty

    assert settings(stored) == (True, 0.6, 20, 0.9, 1.1)
    assert settings(stored, top_k=5, temperature=1.5) == (True, 1.5, 5, 0.9, 1.1)
    assert settings(stored, temperature=0) == (False, None, None, None, 1.1)
    assert settings(stored | {"do_sample": False}) == (True, 1.0, 0, None, 1.1)
    assert settings({}) == (True, 1.0, 0, None, None)
    assert spoken(tokenizer, [65], stored)[2].num_beams is None
