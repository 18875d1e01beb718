"""A model with another vocabulary: the hashes of mechanisms stay, and tables by token id are refused."""

import copy

import pytest
import torch

from conftest import build, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM


@torch.no_grad()
def logits(model: HeadwaterForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("mechanisms", [{"ngram_memory": {}}, {"ngram_memory": {"rows": 101, "rank": 8}}], ids=str)
def test_old_tokens_give_what_they_gave(mechanisms, tmp_path):
    """Larger, larger again, smaller; and what is saved computes the same when it is loaded."""
    model, ids = build(mechanisms).float(), tokens(2, 9) % 60
    before = logits(model, ids)
    for size in (104, 61, 77):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
        same = min(size, 61)
        assert torch.equal(logits(model, ids)[..., :same], before[..., :same])
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert model.config.vocab_size == 80
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    for rows in (ids, torch.tensor([[76, 3, 76, 75]])):
        assert torch.equal(logits(loaded, rows), logits(model, rows))


def test_hashes_keep_the_vocabulary_they_were_made_for():
    model = build({"ngram_memory": {}})
    memory = model.model.layers[0].mechanisms["ngram_memory"].table
    rows = memory.found(memory.past(tokens(2, 9), None, None))
    model.resize_token_embeddings(200)
    made = HeadwaterForCausalLM(copy.deepcopy(model.config)).model.layers[0].mechanisms["ngram_memory"].table
    assert model.config.mechanisms["ngram_memory"]["vocab_size"] == 97
    assert (made.sizes, made.drawn) == (memory.sizes, memory.drawn)
    assert torch.equal(made.found(made.past(tokens(2, 9), None, None)), rows)
    at_once = made.found(made.past(torch.tensor([[199, 150, 199, 97]]), None, None))
    assert int(at_once.min()) >= 0
    assert int(at_once.max()) < sum(made.sizes)


@pytest.mark.parametrize(
    ("mechanisms", "size", "sentence"),
    [
        ({"value_embedding": {}}, 99, "'value_embedding' has a size that depends on the number of tokens"),
        (
            {"value_embedding": {"tables": 2}},
            99,
            "so the model cannot have 99 tokens; train it",
        ),
        ({"ngram_memory": {"end_of_text": 90}}, 64, "end_of_text must be a token's id, from 0 to 63"),
    ],
)
def test_a_size_that_does_not_fit_changes_nothing(mechanisms, size, sentence):
    model, ids = build(mechanisms), tokens(1, 5)
    before = logits(model, ids)
    for whole in (model, model.model):
        with pytest.raises(HeadwaterError, match=sentence):
            whole.resize_token_embeddings(size)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.config.vocab_size == 97
    assert torch.equal(logits(model, ids), before)
