"""A model with another vocabulary: the tables of mechanisms follow the token embedding."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import assert_near, build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.conversion import add_mechanisms
from headwater.mechanisms.contract import Mechanism
from headwater.models.token_tables import token_tables
from headwater.plugins.mechanisms import MECHANISMS
from headwater_lab import grow
from headwater_lab.data.tokenizer import byte_tokenizer

MODELS: list[dict] = [
    {"value_embedding": {}},
    {"value_embedding": {"tables": 2}},
    {"value_embedding": {"tables": 2, "rank": 4, "layers": [1, 2]}},
    {"value_embedding": {"gate": "scalar", "rank": 3}},
    {"ngram_memory": {}},
    {"ngram_memory": {"rows": 101, "target": "values", "layers": [0, 2]}},
    {"value_embedding": {}, "ngram_memory": {"end_of_text": 5, "rank": 8}},
]
every_model = pytest.mark.parametrize("mechanisms", MODELS, ids=str)


@torch.no_grad()
def logits(model: HeadwaterForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@every_model
@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_old_tokens_give_what_they_gave(mechanisms, dtype, tied, tmp_path):
    """Larger, larger again, smaller; and what is saved computes the same when it is loaded."""
    model, ids = build(mechanisms, tie_word_embeddings=tied).to(dtype), tokens(2, 9) % 60
    before = logits(model, ids)
    for size in (104, 61, 77):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
        same = min(size, 61)
        assert torch.equal(logits(model, ids)[..., :same], before[..., :same])
        new = torch.tensor([[size - 1, 3, size - 1, size - 2]])
        assert bool(logits(model, new).isfinite().all())
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path).to(dtype)
    for rows in (ids, new):
        assert torch.equal(logits(loaded, rows), logits(model, rows))


@every_model
def test_tables_have_a_row_for_each_token_of_a_padded_vocabulary(mechanisms):
    model = build(mechanisms)
    model.resize_token_embeddings(101, pad_to_multiple_of=8)
    assert model.config.vocab_size == 104
    for parameter, count in token_tables(model).values():
        assert len(parameter) == 104 * count
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert all(len(parameter) == 112 * count for parameter, count in token_tables(model).values())
    assert model.resize_token_embeddings() is model.get_input_embeddings()


def test_new_rows_are_the_mean_of_the_old_ones_or_as_in_a_new_model():
    for options in ({}, {"tables": 2}):
        model = build({"value_embedding": options})
        drawn = copy.deepcopy(model)
        old = {name: (table.detach().clone(), count) for name, (table, count) in token_tables(model).items()}
        model.resize_token_embeddings(99)
        drawn.resize_token_embeddings(99, mean_resizing=False)
        for name, (table, count) in old.items():
            by_table = table.view(count, 97, -1)
            mean, random = (one.get_parameter(name).view(count, 99, -1) for one in (model, drawn))
            assert torch.equal(mean[:, :97], by_table)
            assert torch.equal(random[:, :97], by_table)
            assert_near(mean[:, 97:], by_table.mean(1, keepdim=True).expand(-1, 2, -1), 1e-6)
            assert 0.3 < float(random[:, 97:].detach().std()) * 32**0.5 < 2


def test_tables_of_zeros_stay_zero():
    """A mechanism that adds nothing yet adds nothing to new tokens either."""
    plain = build()
    model = add_mechanisms(plain, {"value_embedding": {}, "ngram_memory": {}})
    for one in (plain, model):
        torch.manual_seed(0)
        one.resize_token_embeddings(99)
    ids = torch.tensor([[98, 3, 97, 98]])
    assert_near(logits(model, ids), logits(plain, ids))


def test_hashes_keep_the_vocabulary_they_were_made_for():
    model = build({"ngram_memory": {}})
    memory = model.model.layers[0].mechanisms["ngram_memory"].table
    rows = memory.find_rows(memory.list_previous_ids(tokens(2, 9), None, None))
    model.resize_token_embeddings(200)
    made = HeadwaterForCausalLM(copy.deepcopy(model.config)).model.layers[0].mechanisms["ngram_memory"].table
    assert model.config.mechanisms["ngram_memory"]["vocab_size"] == 97
    assert (made.sizes, made.multipliers) == (memory.sizes, memory.multipliers)
    assert torch.equal(made.find_rows(made.list_previous_ids(tokens(2, 9), None, None)), rows)
    at_once = made.find_rows(made.list_previous_ids(torch.tensor([[199, 150, 199, 97]]), None, None))
    assert int(at_once.min()) >= 0
    assert int(at_once.max()) < sum(made.sizes)


@pytest.mark.parametrize("mechanisms", [{"value_embedding": {}}, {"ngram_memory": {"rank": 8}}], ids=str)
def test_a_resized_model_grows_and_takes_mechanisms(mechanisms):
    model, ids = build(mechanisms), torch.tensor([[103, 3, 99, 98, 3]])
    model.resize_token_embeddings(104)
    expected = logits(model, ids)
    deeper = grow(model, num_hidden_layers=5)
    assert_near(logits(deeper, ids), expected)
    assert_near(logits(add_mechanisms(deeper, {"kv_shift": {"init": "identity"}}), ids), expected)


def test_a_size_that_does_not_fit_changes_nothing():
    model, ids = build({"value_embedding": {}, "ngram_memory": {"end_of_text": 90}}), tokens(1, 5)
    before = logits(model, ids)
    with pytest.raises(HeadwaterError, match="end_of_text must be a token's id, from 0 to 63"):
        model.resize_token_embeddings(64)
    assert model.config.vocab_size == 97
    assert torch.equal(logits(model, ids), before)


class TokenScale(Mechanism):
    """An outside mechanism with a number for each token, as a parameter of its own."""

    needs_input_ids = True

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(vocabulary))

    def initial_value(self, parameter, generator=None):
        return torch.ones(self.factor.shape)

    def count_token_tables(self, parameter):
        return 1

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [plan.acting(cls, cls.update_residual) for plan in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls(config.vocab_size)

    def update_residual(self, x, context):
        return x * self.factor[context.ids][..., None].to(x.dtype)


@pytest.mark.parametrize("from_mean", [True, False])
def test_an_outside_mechanism_says_which_of_its_tables_follow(from_mean, monkeypatch):
    monkeypatch.setitem(MECHANISMS.added, "token_scale", TokenScale)
    model, ids = build({"token_scale": {}}), tokens(2, 9)
    before = logits(model, ids)
    model.resize_token_embeddings(101, mean_resizing=from_mean)
    assert_near(logits(model, ids)[..., :97], before)
    assert logits(model, torch.tensor([[100, 2]])).shape == (1, 2, 101)


def test_a_table_that_nobody_mentions_is_refused(monkeypatch):
    kind = type("Unmentioned", (TokenScale,), {"count_token_tables": None})
    monkeypatch.setitem(MECHANISMS.added, "token_scale", kind)
    model, ids = build({"token_scale": {}}), tokens(2, 9)
    before = logits(model, ids)
    with pytest.raises(HeadwaterError, match=r"factor' would have the shape \[101\].*define count_token_tables"):
        model.resize_token_embeddings(101)
    assert torch.equal(logits(model, ids), before)


def test_a_base_model_is_resized_too():
    model, ids = build({"value_embedding": {"tables": 2}}).model, tokens(2, 9)
    with torch.no_grad():
        before = model(ids, use_cache=False).last_hidden_state
        model.resize_token_embeddings(101)
        assert torch.equal(model(ids, use_cache=False).last_hidden_state, before)
    assert config({"value_embedding": {}}).vocab_size == 97


BOTH = {"value_embedding": {"tables": 2}, "ngram_memory": {"rows": 101}}


def adapted(model: HeadwaterForCausalLM, folder, **options) -> torch.nn.Module:
    """A model with an adapter of PEFT's that is not the identity, which is saved in a folder."""
    peft = pytest.importorskip("peft")
    given = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    made = peft.get_peft_model(model, given).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(1.0)
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["value_embedding.table", "embed_tokens", "lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [97, 98]}},
    ],
    ids=str,
)
def test_adapters_of_a_resized_model_fit_one_that_is_resized_again(options, tmp_path):
    """They hold the embedding of a resized model, and no rows of tables, unless these were trained."""
    build(BOTH).float().save_pretrained(tmp_path / "model")
    first, again = (AutoModelForCausalLM.from_pretrained(tmp_path / "model") for _ in range(2))
    for seed, one in enumerate((first, again)):
        torch.manual_seed(seed)
        one.resize_token_embeddings(99)
    tuned = adapted(first, tmp_path / "adapter", **options)
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    ids = torch.tensor([[97, 3, 98, 98, 5]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, tuned(input_ids=ids).logits)


@pytest.mark.slow
def test_trl_trains_with_a_chat_template(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = build(BOTH, vocab_size=257, pad_token_id=256, eos_token_id=256).float()
    tokenizer, chat = byte_tokenizer(), byte_tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    chat.eos_token = "<|end|>"
    chat.chat_template = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    chat.save_pretrained(tmp_path / "chat")
    model, tokenizer, _ = trl.clone_chat_template(model, tokenizer, str(tmp_path / "chat"))
    assert model.config.vocab_size >= 259
    turns = [{"role": "user", "content": "What rises?"}, {"role": "assistant", "content": "A river."}]
    given = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False, save_strategy="no")
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(tmp_path / "out", **given),
        train_dataset=datasets.Dataset.from_list([{"messages": turns}] * 4),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "tuned"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
    assert int(ids.max()) > 256
    assert torch.equal(logits(loaded, ids), logits(model.eval(), ids))
