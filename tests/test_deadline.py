"""Work that takes too long is given up; all other work is as without a limit."""

import threading
from time import sleep

import pytest

from headwater.util.errors import HeadwaterError
from headwater_lab.data import tokenizer as tokenizers
from headwater_lab.data.tokenizer import Encoder, byte_tokenizer, encode_in_time, encode_texts
from headwater_lab.util.deadline import within


@pytest.fixture
def busy():
    """Work that computes until the test is over."""
    over = threading.Event()

    def work(*_, **__):
        while not over.is_set():
            sum(range(1000))

    yield work
    over.set()


def test_what_takes_too_long_is_given_up(busy):
    with pytest.raises(HeadwaterError, match="It takes too long; use another tokenizer"):
        within(0.05, busy, "It takes too long")


def test_a_busy_machine_is_no_reason():
    """Only the clock goes on while this sleeps, as where others compute."""
    assert within(0.05, lambda: sleep(0.2) or 5, "It takes too long") == 5


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_errors_come_out(kind):
    def fail():
        raise kind("reason")

    with pytest.raises(kind, match="reason"):
        within(10, fail, "It")


def test_a_slow_tokenizer_is_noticed_in_the_first_part_of_a_large_corpus(monkeypatch, busy):
    monkeypatch.setattr(tokenizers, "SECONDS", 0.05)
    sizes = []
    slow = lambda texts: sizes.append(len(texts)) or busy()  # noqa: E731
    with pytest.raises(HeadwaterError, match=r"needs more than 0\.05 seconds"):
        encode_in_time(slow, ["a line"] * 10**5)
    assert sizes == [tokenizers.GROUP]
    assert encode_in_time(lambda texts: [[len(text)] for text in texts], ["a", "bc"] * 300) == [[1], [2]] * 300


def test_a_tokenizer_that_takes_too_long_is_refused(monkeypatch, busy):
    monkeypatch.setattr(tokenizers, "SECONDS", 0.05)
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer)
    encoder.is_bytes = False
    monkeypatch.setattr(encoder, "_encode_ids", busy)
    for encode in (lambda: encoder(["text"]), lambda: encode_texts(busy, ["text"])):
        with pytest.raises(HeadwaterError, match=r"needs more than 0\.05 seconds for this text"):
            encode()
