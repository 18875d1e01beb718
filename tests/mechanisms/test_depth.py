"""Inputs of attention from all depths: attention over depth and MUDD connections."""

import pytest
import torch

from conftest import assert_near, build, config, decode, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Source, Stage
from headwater.config.planner import plan_layers
from headwater.cost.counts import cache_bytes as planned_bytes
from headwater.mechanisms import MUDD, DepthAttention
from headwater.models.cache import cache_bytes
from references import reference


def stream(*layers: int) -> tuple[Source, ...]:
    return tuple(Source("stream", "x", layer) for layer in layers)


# Attention over depth


@pytest.mark.parametrize("queries", [1, 3])
def test_it_is_inklings(queries):
    """transformers' module reads sums of blocks, ours the hidden states at their borders."""
    modeling = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    config = type("Config", (), {"hidden_size": 64, "_attn_implementation": "eager"})
    theirs = modeling.Inkling2BlockAttentionResidual(config, queries)
    ours = DepthAttention(64, queries, variant="inkling_2", eps=theirs.norm.eps)
    with torch.no_grad():
        ours.query.copy_(theirs.query.normal_().view(queries, 64))
        blocks, partial = 3 * torch.randn(2, 9, 5, 64), 3 * torch.randn(2, 9, 64)
        states = blocks.cumsum(2)
        expected = torch.stack(theirs(blocks, partial))
        found = ours(states[:, :, -1] + partial, *states.unbind(2)).view(expected.shape)
    assert (found - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_a_query_picks_the_layer_it_points_at():
    """One that points far enough reads that h_j alone: what the layer added, or its direction times √D."""
    earlier, x = list(torch.randn(3, 2, 5, 16, dtype=torch.float64)), torch.randn(2, 5, 16, dtype=torch.float64)
    added = earlier[2][0, 0] - earlier[1][0, 0]
    for variant, expected in (("attnres", added), ("inkling_2", 4 * added / added.norm())):
        module = DepthAttention(16, variant=variant, eps=0.0).double()
        module.query.data.copy_(1e3 * added)
        assert_near(module(x, *earlier)[0, 0], expected, 1e-9)


def test_layers_read_the_borders_of_blocks():
    plans = plan_layers(config({"depth_attention": {"block": 2}}, num_hidden_layers=6))
    assert [plan.reads for plan in plans] == [(), *[stream(-1)] * 2, *[stream(-1, 1)] * 2, stream(-1, 1, 3)]
    assert [plan.at(Stage.BLOCK_INPUT) for plan in plans[:2]] == [(), ("depth_attention",)]
    some = plan_layers(config({"depth_attention": {"layers": [2]}}, num_hidden_layers=4))
    assert [plan.acts for plan in some] == [(), (), ((Stage.BLOCK_INPUT, "depth_attention"),), ()]


def test_the_stream_stays_as_it_is():
    """Where attention writes nothing, nothing has changed."""
    made = [HeadwaterForCausalLM(config(mechanisms)) for mechanisms in ({"depth_attention": {"queries": 3}}, {})]
    for block in (block for model in made for block in model.model.layers):
        block.self_attn.o_proj.weight.data.zero_()
    assert torch.equal(*(model(tokens(1, 5), use_cache=False).logits for model in made))


def test_queries_are_vectors():
    """Three of them are no matrix to be orthogonalized."""
    module = HeadwaterForCausalLM(config({"depth_attention": {"queries": 3}})).model.layers[1].mechanisms
    assert module["depth_attention"].choose_group("query") == "vectors"
    assert not module["depth_attention"].query.any()


# MUDD


def test_mudd_starts_as_a_plain_transformer():
    ids = tokens(2, 9)
    plain = HeadwaterForCausalLM(config()).eval()(ids).logits
    model = HeadwaterForCausalLM(config({"mudd": {}})).eval()
    assert torch.equal(model(ids).logits, plain)
    first = model.model.layers[1].mechanisms["mudd"]
    assert abs(first.up.weight.std() * 32**0.5 - 1) < 0.1
    assert model.bfloat16().model.layers[1].mechanisms["mudd"].bias.dtype == torch.float32
    assert first.up.weight.dtype == torch.bfloat16


def test_mudd_sums_by_weights_of_each_token():
    """The equation, with the sizes of the authors' code: as many columns as weights, four times at the end."""
    mudd = MUDD(width=16, terms=3, ways=4).double()
    for parameter in mudd.parameters():
        parameter.data.normal_()
    earlier, x = list(torch.randn(2, 2, 5, 16, dtype=torch.float64)), torch.randn(2, 5, 16, dtype=torch.float64)
    made = mudd(x, *earlier)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    weights = torch.nn.functional.gelu(normed @ mudd.up.weight.T) @ mudd.down.weight.T
    weights = weights.view(2, 5, 4, 3) + mudd.bias
    assert_near(made, torch.einsum("btsj,jbtd->sbtd", weights, torch.stack([*earlier, x])), 1e-12)
    model = build({"mudd": {}})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "layers.2.mechanisms.mudd" in name}
    own = "model.layers.2.mechanisms.mudd"
    assert shapes == {
        f"{own}.bias": (4, 3),
        f"{own}.up.weight": (12, 32),
        f"{own}.down.weight": (12, 12),
        f"{own}.last.bias": (1, 4),
        f"{own}.last.up.weight": (16, 32),
        f"{own}.last.down.weight": (4, 16),
    }


def test_mudd_reads_every_layer():
    plans = plan_layers(config({"mudd": {}}))
    assert [plan.reads for plan in plans] == [(), stream(-1), stream(-1, 0, 1)]
    before, after = (Stage.ATTENTION_INPUTS, "mudd"), (Stage.BLOCK_OUTPUT, "mudd")
    assert [plan.acts for plan in plans] == [(), (before,), (before, after)]
    shown = build({"mudd": {}}).model.layers[2].mechanisms["mudd"].show_scalars(plans[2], {})
    assert list(shown) == ["b q", "b k", "b v", "b stream"]
    assert shown["b q"].indices == (-1, 0, 1)


# The inputs of attention


def test_a_layer_without_keys_or_values_has_no_input_for_them():
    model = build({"kv_source": {"keys": [0, 0, 2], "values": [0, 1, 0]}, "mudd": {}})
    assert [plan.inputs for plan in model.plans] == [("q",), ("q", "v"), ("q", "k")]
    assert model.model.layers[1].mechanisms["mudd"].bias.shape == (3, 2)
    ids = tokens(1, 6)
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)


@pytest.mark.parametrize(
    ("mechanisms", "base"),
    [
        (
            {"mudd": {}, "short_conv": {"sites": ["attention_input", "keys"]}, "output_gate": {}},
            {"parallel_residual": True},
        ),
        ({"short_conv": {"sites": ["attention_input"]}, "depth_attention": {"queries": 3}, "mudd": {}}, {}),
        ({"value_residual": {"target": "hidden"}, "mudd": {}, "depth_attention": {"queries": 3}}, {}),
    ],
    ids=lambda given: "+".join(given),
)
def test_inputs_that_differ_equal_naive(mechanisms, base):
    """Each has convolutions and tails of its own, whichever mechanism comes first."""
    model, ids = build(mechanisms, **base), tokens(1, 5)
    whole = model(ids, use_cache=False)
    assert_near(whole.logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 1]), whole.logits)
    cache = model(ids, use_cache=True).past_key_values
    assert cache_bytes(cache) == planned_bytes(model.config, 5, element_size=8)


def test_the_gate_sees_the_input_of_queries():
    model, seen = build({"mudd": {}, "output_gate": {}}), {}
    attention = model.model.layers[1].self_attn
    attention.q_proj.register_forward_pre_hook(lambda _, given: seen.update(q=given[0]))
    attention.v_proj.register_forward_pre_hook(lambda _, given: seen.update(v=given[0]))
    attention.mechanisms["output_gate"].register_forward_pre_hook(lambda _, given: seen.update(gate=given[1]))
    model(tokens(1, 4))
    assert torch.equal(seen["gate"], seen["q"])
    assert not torch.equal(seen["v"], seen["q"])


@pytest.mark.parametrize(
    ("mechanisms", "changes", "message"),
    [
        ({"depth_attention": {"block": 0}}, {}, "block must be at least 1, not 0"),
        ({"depth_attention": {"queries": 2}}, {}, "queries must be 1 or 3, not 2"),
        ({"depth_attention": {"layers": [0]}}, {}, "layer 0 cannot receive from layer 0"),
        ({"depth_attention": {}}, {"num_hidden_layers": 1}, "add layers to the model, or remove depth_attention"),
        ({"mudd": {}}, {"num_hidden_layers": 1}, "the model has only one; add layers, or remove mudd"),
    ],
)
def test_what_a_config_refuses(mechanisms, changes, message):
    with pytest.raises(HeadwaterError, match=message):
        config(mechanisms, **changes)
