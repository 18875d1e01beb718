"""Continuing prompts: what is sampled from, and what a stream shows."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

from conftest import build
from headwater.models.decoding import Decoder
from headwater.util.errors import HeadwaterError
from headwater_lab.data.tokenizer import begin_texts, byte_tokenizer, find_begin, frame_text
from headwater_lab.serving.generation import _Stream, continue_prompts
from headwater_lab.serving.server import Continuation


@pytest.mark.parametrize(("top_k", "worst"), [(0, (200, 256)), (5, (1, 4))])
def test_no_token_is_left_out_unless_asked(top_k, worst):
    """At so high a temperature all tokens that are let through are equally likely."""
    model, tokenizer = build(vocab_size=257), begin_texts(byte_tokenizer())
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


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def test_a_chat_is_written_by_the_template_and_ends_with_the_turn(capsys):
    """Also where generation_config.json does not name the token that ends a turn."""
    model, tokenizer = build(vocab_size=259).eval(), chat_tokenizer()
    ended = torch.zeros(259).scatter(0, torch.tensor([257]), 1e4)  # the head's bias decides
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 259, dtype=model.dtype)
    asked = []
    original = model.generate
    model.generate = lambda ids, **options: asked.append(ids) or original(ids, **options)
    continued = continue_prompts(model, tokenizer, ["Hi", "Hello"], chat=True, max_new_tokens=3, temperature=0)
    texts = [tokenizer.decode(row[row != 256]) for row in asked[0]]
    assert texts == [f"user: {prompt}<|im_end|>assistant: " for prompt in ("Hi", "Hello")]
    with torch.no_grad():
        model.lm_head.bias.copy_(ended)
    continued = continue_prompts(model, tokenizer, ["Hi"], chat=True, max_new_tokens=3, temperature=0, stream=True)
    assert (continued.texts, continued.finished, continued.tokens) == ([""], [True], 0)
    assert capsys.readouterr().out == "\n"
    text = continue_prompts(model, tokenizer, ["Hi"], max_new_tokens=3, temperature=0)
    assert not text.finished[0]
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert Continuation(model, tokenizer, [1], request).ends == {257}
    with pytest.raises(HeadwaterError, match="no chat template; leave out --chat"):
        continue_prompts(model, byte_tokenizer(), ["Hi"], chat=True)


def test_a_model_of_transformers_continues_as_there(run, tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=256))
    llama.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    code, shown, _ = run("generate", tmp_path, "The line", "--temperature", 0, "--max-new-tokens", 6)
    ids = byte_tokenizer()("The line", return_tensors="pt").input_ids
    expected = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert (code, shown) == (0, byte_tokenizer().decode(expected[0], skip_special_tokens=True) + "\n")


def test_an_export_continues_as_the_model_it_was_made_of(run, tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter *= 5  # else the latest token alone decides
    llama.save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    assert run("retrofit", tmp_path / "llama", "--out", tmp_path / "ours")[0] == 0
    assert run("export", tmp_path / "ours", "--out", tmp_path / "exported")[0] == 0
    prompt = ("The line", "--temperature", 0, "--max-new-tokens", 8)
    assert run("generate", tmp_path / "exported", *prompt)[:2] == run("generate", tmp_path / "ours", *prompt)[:2]


def gpt2_tokenizer():
    return GPT2Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[])


def llama_tokenizer():
    """It puts a token before a text and another one behind it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<|endoftext|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A <|endoftext|>", special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, gpt2_tokenizer, llama_tokenizer])
def test_a_saved_tokenizer_begins_a_text_as_training_does(make, tmp_path):
    tokenizer = make()
    before = tokenizer("ab").input_ids
    begin = frame_text(tokenizer)[0]
    begin_texts(tokenizer).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("ab", add_special_tokens=False).input_ids
    assert loaded("ab").input_ids == begin + ids
    assert loaded("ab", "ab").input_ids == (begin + ids) * 2
    assert [find_begin(loaded)] == frame_text(loaded)[0] == begin
    assert begin_texts(loaded) is loaded
    assert tokenizer("ab").input_ids == before


def test_a_run_and_its_export_continue_alike_everywhere(run, recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    assert run("export", tmp_path / "run", "--out", tmp_path / "exported")[0] == 0
    prompt = ("The line", "--temperature", 0, "--max-new-tokens", 8)
    ours, exported = (run("generate", folder, *prompt) for folder in (tmp_path / "run", tmp_path / "exported"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    asked = tokenizer("The line", return_tensors="pt").input_ids
    assert asked.tolist() == [[256, *b"The line"]]
    answer = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=8, do_sample=False)
    shown = tokenizer.decode(answer[0], skip_special_tokens=True) + "\n"
    assert ours[:2] == exported[:2] == (0, shown)
