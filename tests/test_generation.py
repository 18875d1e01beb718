"""Continuing prompts: what is sampled from, and what a stream shows."""

import pytest
import torch

from conftest import build
from headwater.models.decoding import Decoder
from headwater.util.errors import HeadwaterError
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.serving.generation import _Stream, continue_prompts


@pytest.mark.parametrize(("top_k", "worst"), [(0, (200, 256)), (5, (1, 4))])
def test_no_token_is_left_out_unless_asked(top_k, worst):
    """At so high a temperature all tokens that are let through are equally likely."""
    model, tokenizer = build(vocab_size=257), byte_tokenizer()
    made = []
    original = model.generate
    model.generate = lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1]
    continue_prompts(model, tokenizer, ["ab"] * 8, max_new_tokens=20, temperature=1e6, top_p=1.0, top_k=top_k)
    with torch.no_grad():
        logits = model(made[0][:, :-1], use_cache=False).logits[:, 2:]
    chosen = logits.gather(2, made[0][:, 3:, None])
    first_end = (made[0][:, 3:] == 256).int().cumsum(1).cumsum(1) <= 1  # what follows the end is padding
    rank = ((logits > chosen).sum(2) * first_end).max().item()
    assert worst[0] <= rank <= worst[1]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["abcxE", "N", "DE more E"], "abcx"),
        (["abcxE", "N", "ope"], "abcxENope"),
        (["EN", "DxEND"], "ENDx"),  # the prompt may say it
        (["abc", "xE", "N"], "abcxEN"),
        (["abcEND"], "abc"),
        (["abcxEND", "y", "z"], "abcx"),
    ],
)
def test_a_stream_holds_back_what_may_be_the_end(pieces, shown, capsys):
    stream = _Stream(byte_tokenizer(), ["END", "STOP"])
    stream.prompt = 3
    for number, piece in enumerate(pieces, 1):
        stream.on_finalized_text(piece, stream_end=number == len(pieces))
    assert capsys.readouterr().out.removesuffix("\n") == shown


@pytest.mark.parametrize(("prompt", "stop"), [("a\ud800", ()), ("a", ["\udfff"]), ("a", [""])])
def test_what_is_no_text_is_refused(prompt, stop):
    with pytest.raises(HeadwaterError, match=r"surrogate|empty"):
        continue_prompts(build(vocab_size=257), byte_tokenizer(), [prompt], stop=stop)


@pytest.mark.parametrize("static", [False, True])
def test_a_text_ends_at_every_stop_token_of_the_model(static):
    model, tokenizer = build(vocab_size=257).eval(), byte_tokenizer()
    decoder = Decoder(model) if static else None
    options = {"max_new_tokens": 12, "temperature": 0, "decoder": decoder}
    free = continue_prompts(model, tokenizer, ["ab", "cde"], **options)
    assert not any(free.finished)
    model.generation_config.eos_token_id = list(range(256))
    ended = continue_prompts(model, tokenizer, ["ab", "cde"], **options)
    assert all(ended.finished)
    assert ended.tokens == 0
    assert all(len(text) <= 1 for text in ended.texts)
