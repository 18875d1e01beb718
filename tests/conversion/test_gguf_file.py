"""GGUF files, read back by transformers and by the gguf package."""

import copy

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from conftest import build, disturb, tokens
from headwater import HeadwaterError
from headwater.conversion import from_transformers
from headwater.conversion.gguf_file import _name_split, write_gguf
from headwater.conversion.latent import expand_latent, make_latent
from headwater_lab.data.tokenizer import begin_texts, byte_tokenizer, train_tokenizer

TEXT = "When it rains,\n\n  it pours: 12345 drops on Ünïcödé, didn't they? 🚀<|note|>"
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ROPE = dict(rope_theta=5000.0)
LLAMA3 = ROPE | dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer([TEXT * 20], 300)
    tokenizer.add_tokens(["<|note|>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def llama(tokenizer, dtype=torch.float32, **fields) -> LlamaForCausalLM:
    """A Llama with 5 more rows of embeddings than its tokenizer has tokens, none of whose weights is at its start."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"vocab_size": len(tokenizer) + 5, "rope_parameters": ROPE} | fields)
    model = disturb(LlamaForCausalLM(config)).eval()
    for parameter in model.parameters():  # the frequencies stay float32, as in models that are loaded
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.float32, {}),
        (torch.bfloat16, dict(tie_word_embeddings=True)),
        (torch.float16, dict(head_dim=8, num_key_value_heads=1)),
    ],
)
@torch.no_grad()
def test_transformers_reads_the_same_model_and_tokenizer(dtype, fields, tokenizer, tmp_path):
    model = llama(tokenizer, dtype, **fields)
    write_gguf(from_transformers(model), tmp_path / "tiny.gguf", tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=dtype)
    ids = tokens(2, 40)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert (read.eos_token, read.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


@torch.no_grad()
def test_a_latent_is_written_as_keys_and_values(tokenizer, tmp_path):
    model = make_latent(from_transformers(llama(tokenizer)), tokens(2, 40), 16)
    write_gguf(model, tmp_path / "tiny.gguf", tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ids = tokens(2, 40)
    torch.testing.assert_close(again(ids).logits, expand_latent(model)(ids).logits, atol=1e-5, rtol=1e-5)


def test_biases_and_scaled_frequencies(tokenizer, tmp_path):
    """transformers reads neither from a GGUF file; llama.cpp does, and divides frequencies by the factors."""
    model = llama(tokenizer, rope_parameters=LLAMA3, attention_bias=True)
    write_gguf(from_transformers(model), tmp_path / "tiny.gguf", tokenizer)
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    d = model.config.head_dim
    plain = ROPE["rope_theta"] ** -(torch.arange(0, d, 2) / d)
    inverse = model.model.rotary_emb.inv_freq
    assert not torch.allclose(plain, inverse)
    torch.testing.assert_close(plain / tensors["rope_freqs.weight"], inverse)
    bias = model.model.layers[1].self_attn.k_proj.bias
    # Neighbours rotate together: channels 0 and d/2 of each head come first.
    pairs = torch.stack(bias.unflatten(0, (-1, 2, d // 2)).unbind(1), dim=-1).flatten()
    assert torch.equal(tensors["blk.1.attn_k.bias"], pairs)


def read_field(file, name: str):
    return GGUFReader(file).fields[name].contents()


def test_kinds_of_tokens(tokenizer, tmp_path):
    write_gguf(from_transformers(llama(tokenizer)), tmp_path / "tiny.gguf", tokenizer)
    kinds = read_field(tmp_path / "tiny.gguf", "tokenizer.ggml.token_type")
    assert kinds[0] == 3  # control: the end of text
    assert kinds[len(tokenizer) - 1] == 4  # defined by the user: <|note|>
    assert set(kinds[1 : len(tokenizer) - 1]) == {1}
    assert kinds[len(tokenizer) :] == [5] * 5  # unused
    assert read_field(tmp_path / "tiny.gguf", "tokenizer.ggml.add_bos_token") is False


def test_a_token_that_the_tokenizer_adds_begins_a_text_in_llama_cpp_too(tokenizer, tmp_path):
    """Also where the tokenizer has no name for it."""
    plain = copy.deepcopy(tokenizer)
    plain.bos_token = None
    write_gguf(from_transformers(llama(tokenizer)), tmp_path / "tiny.gguf", begin_texts(plain))
    names = ("add_bos_token", "bos_token_id", "eos_token_id")
    assert [read_field(tmp_path / "tiny.gguf", f"tokenizer.ggml.{name}") for name in names] == [True, 0, 0]


def split_at(regex: str):
    return pre_tokenizers.Split(Regex(regex), "isolated")


BYTES, WORDS = pre_tokenizers.ByteLevel(False, use_regex=False), pre_tokenizers.ByteLevel(False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        ([WORDS], False, "gpt-2"),
        ([DIGITS, WORDS], False, "smollm"),
        ([split_at(PRETOKENIZE_REGEX), BYTES], False, "qwen2"),
        ([split_at(PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")), BYTES], True, "llama-bpe"),
        ([WORDS, DIGITS], False, None),
        ([pre_tokenizers.ByteLevel(True)], False, None),
        ([pre_tokenizers.Digits(individual_digits=False), WORDS], False, None),
        ([split_at(r"\s+"), BYTES], False, None),
        ([BYTES], False, None),
        ([WORDS], True, None),
        ([pre_tokenizers.Metaspace()], False, None),
    ],
)
def test_names_of_splits(steps, ignore_merges, name, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.backend_tokenizer.model.ignore_merges = ignore_merges
    if name is not None:
        assert _name_split(tokenizer) == name
    else:
        with pytest.raises(HeadwaterError, match=r"tokenizer as GGUF; export it with --family"):
            _name_split(tokenizer)


def test_what_cannot_be_written(tokenizer, tmp_path):
    file = tmp_path / "tiny.gguf"
    plain = from_transformers(llama(tokenizer))
    yarn = from_transformers(llama(tokenizer, rope_parameters=ROPE | dict(rope_type="yarn", factor=4.0)))
    shifted = build(mechanisms={"kv_shift": {}}, vocab_size=310)
    for model, preparer, message in (
        (shifted, tokenizer, "mechanisms"),
        (yarn, tokenizer, "RoPE of the type 'yarn'"),
        (plain, None, "needs a tokenizer"),
        (plain, byte_tokenizer(), "needs a BPE tokenizer"),
        (from_transformers(llama(tokenizer, vocab_size=299)), tokenizer, "has token 300, but the model only 299"),
        (from_transformers(llama(tokenizer, torch.float64)), tokenizer, "no torch.float64 weights"),
    ):
        with pytest.raises(HeadwaterError, match=message):
            write_gguf(model, file, preparer)
    assert not list(tmp_path.iterdir())


def test_another_activation_is_refused(tokenizer, tmp_path):
    with pytest.raises(HeadwaterError, match="has SiLU, not hidden_act='relu'"):
        write_gguf(from_transformers(llama(tokenizer, hidden_act="relu")), tmp_path / "relu.gguf", tokenizer)


def test_the_command(tokenizer, tmp_path, run):
    llama(tokenizer).save_pretrained(tmp_path / "model")  # of transformers, which need not be retrofitted first
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "tiny.gguf"
    code, out, _ = run("export", tmp_path / "model", "--out", file)
    assert (code, out) == (0, f"written to {file}\n`llama-cli -m {file}` runs it.\n")
    content = file.read_bytes()
    assert content.startswith(b"GGUF")
    for options, message in (
        ((), "is a file"),
        (("--out", tmp_path / "new.gguf", "--materialise"), "leave out --materialise, and any other --family"),
        (("--out", tmp_path / "new.gguf", "--family", "gpt2"), "leave out --materialise, and any other --family"),
        (("--out", tmp_path / "new.gguf", "--push", "ada/tiny"), "--push uploads a folder"),
    ):
        code, _, error = run("export", tmp_path / "model", "--out", file, *options)
        assert code != 0
        assert message in error
    assert file.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny.gguf"]
