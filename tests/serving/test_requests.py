"""The fields of requests, and stop texts that arrive in parts, without a server."""

from importlib.util import find_spec

import pytest

from headwater_lab.serving.stops import UntilStop, before_stop

if find_spec("pydantic") is None:
    pytest.skip("the server's packages are not installed", allow_module_level=True)

from headwater_lab.serving.requests import Chat, Completion, RequestError, read_fields


def test_what_changes_nothing_is_accepted():
    """null, and the one value of a field that asks for nothing, as clients send them."""
    neutral = dict(best_of=1, echo=False, suffix=None, logprobs=None, n=None, stop=None, temperature=None, user="me")
    neutral |= dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    assert read_fields(Completion, neutral | {"prompt": "a"})["prompt"] == ["a"]
    answer = dict(role="assistant", content="a", refusal=None, audio=None, tool_calls=None, function_call=None)
    neutral = dict(logprobs=False, n=1, stream=None, tools=[], response_format={"type": "text"}, presence_penalty=0.0)
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
