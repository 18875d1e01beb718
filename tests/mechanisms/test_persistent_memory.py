"""Learned pairs in addition to the tokens'."""

import pytest
import torch

from conftest import assert_near, build, config, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater.mechanisms import PersistentMemory
from headwater.nn import attention_kernel
from headwater.nn.attention_kernel import supported_kernels
from headwater.testing.naive import Reference

MEMORY = {"persistent_memory": {"pairs": 3}}


def test_outside_a_model_keys_and_values_start_with_the_standard_deviation_of_the_paper():
    memory = PersistentMemory(heads=8, pairs=50, width=64)
    assert abs(memory.key.std() * 8 - 1) < 0.05
    assert abs(memory.value.std() * 50**0.5 - 1) < 0.05
    for part in memory():
        assert part.shape == (8, 50, 64)
        assert abs(part.std() - 1) < 0.05


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({"initializer_range": 0.02}, {}, None),
        ({"initializer_range": 0.1}, {}, None),
        ({"linear_init": "fan_in"}, {}, None),
        ({"qk_norm": True, "initializer_range": 0.02}, {}, None),
        ({"initializer_range": 0.02}, {"init_std": 1}, 1.0),
    ],
    ids=str,
)
@torch.no_grad()
def test_pairs_start_with_the_size_of_tokens_keys_and_values_or_the_one_asked_for(settings, options, expected):
    """Measured where attention reads them: the first layer's keys and values of a model of the settings."""
    torch.manual_seed(0)
    mechanisms = {"persistent_memory": {"pairs": 400} | options}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 200}
    model = HeadwaterForCausalLM(HeadwaterConfig(**sizes, **settings, mechanisms=mechanisms))
    cache = model(torch.randint(0, 200, (4, 50)), use_cache=True).past_key_values
    pairs = model.model.layers[0].self_attn.mechanisms["persistent_memory"]()
    for pair, token in zip(pairs, (cache.layers[0].keys, cache.layers[0].values), strict=True):
        wanted = expected or float(token.std())
        assert abs(pair.std() / wanted - 1) < 0.1


@pytest.mark.parametrize("position_ids", [None, torch.tensor([[0, 1, 2, 0, 1, 2, 3]])], ids=["whole", "packed"])
def test_kernels_agree(position_ids):
    model, ids = build(MEMORY | {"skip_layer": {}}), tokens(2, 7)
    outputs = []
    for kernel in ("sdpa", "eager", "matmul"):
        model.set_attn_implementation(kernel)
        outputs.append(model(ids, position_ids=position_ids, use_cache=False).logits)
    assert_near(outputs[1], outputs[0], 1e-12)
    assert_near(outputs[2], outputs[0], 1e-12)


@torch.no_grad()
def test_a_soft_cap_holds_for_the_pairs_too():
    """With queries that are long, each of the pairs has the capped score."""
    model = build({"persistent_memory": {"pairs": 1}}, attention_softcap=2.0, attn_implementation="eager")
    reference = Reference(model.config, dict(model.state_dict()))
    ids = tokens(1, 7)[0]
    for block in model.model.layers:
        block.self_attn.q_proj.weight.mul_(30)
    assert_near(model(ids[None], use_cache=False).logits[0], reference(ids), 1e-12)


@torch.no_grad()
def test_a_step_does_not_join_the_pairs_to_the_history(monkeypatch):
    """The kernels, which would take them joined, are asked for the first tokens only."""
    model, ids = build(MEMORY), tokens(2, 9)
    whole = model(ids, use_cache=False).logits
    with torch.enable_grad():
        assert_near(whole, model(ids, use_cache=False).logits, 1e-12)
    first = model(ids[:, :6])
    assert_near(first.logits, whole[:, :6], 1e-12)
    monkeypatch.setattr(attention_kernel, "attention_kernel", None)
    for part in (ids[:, 6:8], ids[:, 8:]):
        last = model(part, past_key_values=first.past_key_values).logits
    assert_near(last, whole[:, 8:], 1e-12)


def test_every_token_sees_the_pairs():
    """The first token of a row and of a document, and one whose window is full."""
    ids, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    model = build(MEMORY, sliding_window=3, num_hidden_layers=1)
    before = model(ids, position_ids=positions, use_cache=False).logits
    model.model.layers[0].self_attn.mechanisms["persistent_memory"].value.data.add_(1.0)
    after = model(ids, position_ids=positions, use_cache=False).logits
    assert ((after - before).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("beside", [{}, {"value_residual": {"target": "probabilities"}}], ids=["alone", "mixed"])
def test_weights_that_are_returned_are_the_tokens(beside):
    model = build(MEMORY | beside)
    model.set_attn_implementation("eager")
    for weights in model(tokens(2, 5), output_attentions=True, use_cache=False).attentions:
        assert weights.shape == (2, 4, 5, 5)
        assert (weights.sum(-1) < 1).all()
        assert not weights.triu(1).any()


@pytest.mark.parametrize("kernel", ["varlen", "flex_attention", "flash_attention_2"])
def test_kernels_without_such_a_mask_are_refused(kernel):
    model = build(MEMORY)
    with pytest.raises(HeadwaterError, match=f"persistent_memory.*sdpa, eager or matmul only, not {kernel}"):
        model.set_attn_implementation(kernel)


def test_the_kernels_of_several_mechanisms_are_those_that_all_work_with():
    mixing = {"value_residual": {"target": "probabilities"}}
    for mechanisms in (MEMORY | mixing, mixing | MEMORY):
        kernels, reason = supported_kernels(config(mechanisms))
        assert kernels == ("eager",)
        assert "value_residual" in reason
        assert build(mechanisms).config._attn_implementation == "eager"


def test_there_is_at_least_one_pair():
    with pytest.raises(HeadwaterError, match="pairs must be at least 1"):
        config({"persistent_memory": {"pairs": 0}})
