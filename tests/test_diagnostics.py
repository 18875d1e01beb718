"""What is shown of a model's start, against the same figures computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.config.presets import preset
from headwater_lab.training.initialization import measure_initialization, warn_drowning

SIZES = dict(vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128)
TOKENFORMER = dict(
    mechanisms={"pattention": {}},
    norm="layer_norm",
    norm_weight=False,
    norm_bias=False,
    final_norm_weight=True,
    tie_word_embeddings=True,
)


def model_of(**fields):
    return HeadwaterForCausalLM(HeadwaterConfig(**(SIZES | fields))).eval()


@pytest.mark.parametrize("fields", [{}, TOKENFORMER, dict(parallel_residual=True), dict(position="learned")])
@torch.no_grad()
def test_figures_of_the_first_block_equal_those_computed_by_hand(fields):
    model = model_of(**fields)
    ids = torch.arange(80).view(2, 40)
    found = measure_initialization(model, ids)
    assert [(one.layer, one.name) for one in found] == [
        (layer, name) for layer in range(3) for name in ("attention", "feed-forward")
    ]

    x = model.model.embed_tokens(ids)
    if model.model.embed_positions is not None:
        x = x + model.model.embed_positions(torch.arange(40))
    block = model.model.layers[0]
    seen = {}
    handle = block.self_attn.register_forward_hook(lambda module, inputs, output: seen.update(out=output[0]))
    model(ids)
    handle.remove()
    parallel = model.config.parallel_residual
    read = x if parallel else x + seen["out"]
    out = block.mlp(block.post_attention_layernorm(read)).double()
    mean = out.mean((0, 1))
    attention, feed_forward = found[:2]
    torch.testing.assert_close(attention.output, float(seen["out"].square().mean().sqrt()), rtol=1e-5, atol=0)
    torch.testing.assert_close(attention.stream, float(x.square().mean().sqrt()), rtol=1e-5, atol=0)
    assert attention.cosine == pytest.approx(1.0)
    torch.testing.assert_close(feed_forward.output, float(out.square().mean().sqrt()), rtol=1e-5, atol=0)
    torch.testing.assert_close(feed_forward.stream, float(read.square().mean().sqrt()), rtol=1e-5, atol=0)
    cosine = nn.functional.cosine_similarity(read, x, dim=-1).mean()
    assert feed_forward.cosine == pytest.approx(float(cosine), abs=1e-5)
    constant = mean.square().sum() / out.square().sum(-1).mean()
    assert feed_forward.constant == pytest.approx(float(constant), abs=1e-5)


def test_a_pattention_drowns_a_small_embedding_and_a_larger_one_mends_it():
    small, large = (measure_initialization(model_of(**TOKENFORMER, embedding_range=std)) for std in (0.02, 0.2))
    assert "embedding_range" in warn_drowning(small)
    assert small[1].cosine < 0.15
    assert warn_drowning(large) is None
    assert large[1].cosine > 0.3
    assert warn_drowning(measure_initialization(model_of())) is None


def test_nothing_of_the_model_is_changed_by_looking():
    model = model_of(residual_dropout=0.5).train()
    before = torch.random.get_rng_state()
    measure_initialization(model)
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# The options of a start.


def std_of(model, name):
    return float(dict(model.named_parameters())[name].detach().std())


def test_fields_that_stored_configs_lack_mean_the_old_start():
    new = model_of(**TOKENFORMER)
    stored = new.config.to_dict()
    assert stored.pop("embedding_range") == 0.2
    old = HeadwaterForCausalLM(HeadwaterConfig.from_dict(stored))
    assert old.config.embedding_range is None
    assert std_of(old, "model.embed_tokens.weight") == pytest.approx(0.02, rel=0.05)
    assert std_of(old, "model.layers.0.self_attn.q_proj.value") == pytest.approx(2 / (3 * 8), rel=0.05)


def test_a_new_tokenformer_starts_with_an_embedding_that_does_not_drown():
    model = model_of(**TOKENFORMER)
    assert std_of(model, "model.embed_tokens.weight") == pytest.approx(0.2, rel=0.05)
    assert warn_drowning(measure_initialization(model)) is None
    assert warn_drowning(measure_initialization(model_of(**TOKENFORMER, embedding_range=0.02))) is not None
    assert model_of().config.embedding_range is None
    assert preset("tokenformer-124m").embedding_range == 0.02


def test_each_part_starts_as_it_was_asked_to():
    start = {"key_init": "fan_in", "value_init": {"feed_forward": "fan_in", "query": 0.5}, "ffn_pairs": 100}
    model = model_of(**(TOKENFORMER | dict(mechanisms={"pattention": start}, embedding_range=0.2)))
    assert std_of(model, "model.embed_tokens.weight") == pytest.approx(0.2, rel=0.05)
    assert std_of(model, "model.layers.1.self_attn.k_proj.key") == pytest.approx(1 / 8, rel=0.05)
    assert std_of(model, "model.layers.1.mlp.value") == pytest.approx(1 / 10, rel=0.05)
    assert std_of(model, "model.layers.1.self_attn.q_proj.value") == pytest.approx(0.5, rel=0.05)
    assert std_of(model, "model.layers.1.self_attn.v_proj.value") == pytest.approx(2 / (3 * 8), rel=0.05)
    linear = model_of(linear_init="fan_in", intermediate_size=400)
    assert std_of(linear, "model.layers.0.mlp.up_proj.weight") == pytest.approx(1 / 8, rel=0.05)
    assert std_of(linear, "model.layers.0.mlp.down_proj.weight") == pytest.approx(1 / 20, rel=0.05)


def test_logits_are_scaled_with_a_cache_and_without():
    plain, scaled = model_of(), model_of(logit_scale=0.125)
    ids = torch.arange(10)[None]
    torch.testing.assert_close(scaled(ids).logits, plain(ids).logits / 8, rtol=1e-5, atol=1e-7)
    past = scaled(ids[:, :6], use_cache=True).past_key_values
    rest = scaled(ids[:, 6:], past_key_values=past).logits
    torch.testing.assert_close(rest, plain(ids).logits[:, 6:] / 8, rtol=1e-4, atol=1e-6)


def test_a_logit_scale_by_fan_in_is_that_of_the_width(tmp_path):
    model = model_of(logit_scale="fan_in")
    assert model.config.logit_scale == 0.125
    model.save_pretrained(tmp_path)
    assert HeadwaterConfig.from_pretrained(tmp_path).logit_scale == 0.125
    assert torch.equal(model(torch.arange(10)[None]).logits, model_of(logit_scale=0.125)(torch.arange(10)[None]).logits)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (dict(embedding_range=-1.0), "embedding_range"),
        (dict(embedding_range=float("inf")), "embedding_range"),
        (dict(logit_scale=0.0), "logit_scale"),
        (dict(mechanisms={"pattention": {"key_init": "fan_out"}}), "key_init"),
        (dict(mechanisms={"pattention": {"value_init": {"keys": 1.0}}}), "keys"),
        (dict(mechanisms={"pattention": {"value_init": float("nan")}}), "value_init"),
        (dict(mechanisms={"pattention": {"value_init": True}}), "value_init"),
    ],
)
def test_starts_that_make_no_sense_are_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        HeadwaterConfig(**(SIZES | fields))
