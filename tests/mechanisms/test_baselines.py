"""NeuTRENO, DenseFormer and the embedding residual."""

import itertools

import pytest
import torch

from conftest import assert_near, build, config, random, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Source, Stage
from headwater.config.planner import plan_layers
from headwater.mechanisms import DenseFormer, NeuTRENO


def test_neutreno_adds_the_difference_to_each_head():
    out, first, own = random(2, 5, 6, 4), random(2, 3, 5, 4), random(2, 3, 5, 4)
    read = NeuTRENO(0.4)(out, first, own)
    for head in range(6):
        difference = first[:, head // 2] - own[:, head // 2]
        assert_near(read[:, :, head], out[:, :, head] + 0.4 * difference, 1e-12)


def test_neutreno_may_learn_its_weight():
    learned, fixed = NeuTRENO(0.25, learnable=True).double(), NeuTRENO(0.25)
    out, first, own = random(2, 5, 6, 4), random(2, 3, 5, 4), random(2, 3, 5, 4)
    read = learned(out, first, own)
    assert torch.equal(read, fixed(out, first, own))
    read.sum().backward()
    difference = (first - own).sum() * 2  # two query heads to each key/value head
    assert_near(learned.lambdas.grad, difference[None], 1e-12)
    assert not list(fixed.parameters())


def test_neutreno_starts_as_vanilla_at_zero_and_learns():
    ids, options = tokens(2, 9), NeuTRENO.find_identity_options({})
    assert options == {"weight": 0.0, "learnable": True}
    model = HeadwaterForCausalLM(config({"neutreno": options})).eval()
    assert torch.equal(model(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)
    model.bfloat16()(ids, labels=ids).loss.backward()
    for block in model.model.layers[1:]:
        weight = block.self_attn.mechanisms["neutreno"].lambdas
        assert weight.dtype == torch.float32
        assert weight.grad.abs() > 0


@pytest.mark.parametrize(
    ("given", "identity"),
    [({"weight": 0}, {"weight": 0.0, "learnable": True}), ({"weight": 0.4}, None), ({"learnable": False}, None)],
)
def test_options_for_neutrenos_identity_start(given, identity):
    assert NeuTRENO.find_identity_options(given) == identity


def test_neutreno_reads_the_unmixed_values():
    plans = plan_layers(config({"value_residual": {"mode": "identity"}, "neutreno": {"weight": 0.2}}))
    assert plans[1].acts == ((Stage.QKV, "value_residual"), (Stage.HEAD_OUTPUTS, "neutreno"))
    assert plans[1].reads == (Source("raw", "v", 0),)


def test_neutreno_of_skip_heads_takes_the_values_they_attend_to():
    plan = plan_layers(config({"neutreno": {}, "skip_layer": {"layers": 1}}))[2]
    assert Source("raw", "v", 1) in plan.reads


def test_dense_former_starts_as_vanilla():
    ids = tokens(2, 9)
    dense = HeadwaterForCausalLM(config({"dense_former": {}})).eval()
    assert torch.equal(dense(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)


def test_dense_former_weighs_what_it_is_given():
    average, states = DenseFormer(3).double(), [random(2, 5, 4) for _ in range(3)]
    with torch.no_grad():
        average.alpha.copy_(torch.tensor([0.5, -1.0, 2.0]))
    assert_near(average(*states), 0.5 * states[0] - states[1] + 2 * states[2], 1e-12)


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({}, [2, 3, 4, 5, 6, 7, 8, 9]),
        ({"dilation": 2}, [1, 2, 2, 3, 3, 4, 4, 5]),
        ({"dilation": 4}, [1, 1, 1, 2, 2, 2, 2, 3]),
        ({"period": 3}, [0, 0, 4, 0, 0, 7, 0, 0]),
        ({"dilation": 3, "period": 2}, [0, 1, 0, 2, 0, 3, 0, 3]),
    ],
)
def test_dilation_and_period(options, terms):
    """How many hidden states each of eight blocks averages, its own included; 0: no average."""
    model = HeadwaterForCausalLM(config({"dense_former": options}, num_hidden_layers=8))
    counts = [len(m["dense_former"].alpha) if (m := block.mechanisms) else 0 for block in model.model.layers]
    assert counts == terms


def test_dense_former_averages_outputs_and_not_averages():
    model, ids = build({"dense_former": {}}), tokens(1, 5)
    seen: list[torch.Tensor] = []
    for block in model.model.layers:
        block.mechanisms["dense_former"].register_forward_pre_hook(lambda _, states: seen.append(states))
    model(ids)
    assert [len(states) for states in seen] == [2, 3, 4]
    for earlier, later in itertools.pairwise(seen):
        for a, b in zip(earlier, later, strict=False):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dilation": 0}, "dilation must be at least 1"), ({"period": 4}, "no block of 3 is followed by an average")],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"dense_former": options})


def test_a_weight_is_finite():
    with pytest.raises(HeadwaterError, match="weight must be a finite number, not nan"):
        config({"neutreno": {"weight": float("nan")}})


# The embedding at every layer


def test_embedding_residual_changes_the_stream_itself():
    """Layer 0 included: there it only scales. Without attention and feed-forward the stream is all there is."""
    model, ids = build({"embedding_residual": {}}), tokens(1, 4)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    first = x = model.model.embed_tokens(ids)
    for block in model.model.layers:
        mu, own = block.mechanisms["embedding_residual"].lambdas
        x = own * x + mu * first
    assert_near(model(ids, use_cache=False).logits, model.lm_head(model.model.norm(x)), 1e-12)


def test_embedding_residual_starts_as_vanilla_or_with_a_weight():
    ids = tokens(2, 9)
    plain = HeadwaterForCausalLM(config()).eval()(ids).logits
    made = HeadwaterForCausalLM(config({"embedding_residual": {}})).eval()
    assert torch.equal(made(ids).logits, plain)
    other = HeadwaterForCausalLM(config({"embedding_residual": {"weight": 0.1}})).eval()
    assert not torch.equal(other(ids).logits, plain)
    assert made.bfloat16().model.layers[0].mechanisms["embedding_residual"].lambdas.dtype == torch.float32


def test_embedding_residual_acts_before_the_layers_that_are_named():
    plans = plan_layers(config({"embedding_residual": {"layers": [0, 2]}}))
    assert [plan.at(Stage.RESIDUAL) for plan in plans] == [("embedding_residual",), (), ("embedding_residual",)]
    with pytest.raises(HeadwaterError, match="between 0 and 2"):
        config({"embedding_residual": {"layers": [3]}})
