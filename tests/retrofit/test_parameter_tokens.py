"""Pattention from trained linear maps: exact where it can be, and reported as it is where it cannot."""

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_near, build, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.conversion.parameter_tokens import MapReport, Report, to_parameter_tokens
from headwater.mechanisms import Pattention

NORMED = ("query", "key", "value")
# Behind an epsilon the norm of what a norm gives is constant only nearly.
EXACT = dict(norm_eps=0.0)


def worst(report: Report, *names: str) -> float:
    return max(max(of.fitted, of.held_out) for of in report.maps if of.name in names)


def of_layer(model: HeadwaterForCausalLM, layer: int) -> nn.Module:
    return model.get_submodule(f"model.layers.{layer}")


# Exact


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mechanisms", "changes"),
    [
        ({}, {}),
        ({"kv_shift": {}, "value_residual": {}}, {"tie_word_embeddings": True}),
        ({"svformer": {}}, {"num_key_value_heads": 4, "qk_norm": True}),
        ({"dense_former": {}, "skip_layer": {}}, {"head_dim": 6, "num_key_value_heads": 4}),
        ({}, {"norm": "layer_norm", "norm_weight": False, "norm_bias": False}),
        ({}, {"norm": "layer_norm", "qkv_bias": True, "qk_norm": True}),
        ({}, {"norm": "layer_norm", "norm_bias": False, "qkv_bias": True, "parallel_residual": True, "qk_norm": True}),
    ],
)
def test_queries_keys_and_values_are_exact(mechanisms, changes):
    model = build(mechanisms, **EXACT, **changes)
    new, report = to_parameter_tokens(model, tokens(8, 24))
    assert worst(report, *NORMED) <= 1e-10
    assert new.config.mechanisms.keys() == {*mechanisms, Pattention.registered_name()}
    assert list(new.config.mechanisms)[:-1] == list(mechanisms)
    assert {of.pairs for of in report.maps if of.name in NORMED} == {64}


def test_a_norms_epsilon_is_all_that_is_lost_of_them():
    _, report = to_parameter_tokens(build(), tokens(8, 24))
    assert 1e-9 < worst(report, *NORMED) < 1e-4  # ε = 1e-5 beside a mean square of some 0.04


def test_fp32_without_an_epsilon_is_exact_to_rounding():
    model = build(**EXACT).float()
    new, _ = to_parameter_tokens(model, tokens(8, 24))
    x = torch.nn.functional.rms_norm(torch.randn(50, 32), (32,))
    y = of_layer(model, 1).self_attn.q_proj(x * of_layer(model, 1).input_layernorm.weight)
    assert (of_layer(new, 1).self_attn.q_proj(x) - y).norm() <= 1e-5 * y.norm()


@pytest.mark.parametrize("changes", [{}, {"norm_weight": False, "norm_bias": False}, {"mlp_bias": False}])
def test_a_feed_forward_of_the_erf_gelu_is_exact_with_its_biases(changes):
    model = build(gpt2=True, hidden_act="gelu", **EXACT, **changes)
    new, report = to_parameter_tokens(model, tokens(8, 24))
    assert worst(report, *NORMED, "feed_forward") <= 1e-10
    biased = model.config.mlp_bias
    assert {of.pairs for of in report.maps if of.name == "feed_forward"} == {48 + 32 + biased}
    # All but the output map: with that taken from the old model, the logits are the same.
    for layer in range(3):
        of_layer(new, layer).self_attn.o_proj = of_layer(model, layer).self_attn.o_proj
    ids = tokens(2, 9, seed=5)
    assert_near(new(ids).logits, model(ids).logits, 1e-9)


def test_a_plain_feed_forward_behind_an_rms_norm_is_exact_without_biases_only():
    _, report = to_parameter_tokens(build(feed_forward="plain", hidden_act="gelu", **EXACT), tokens(8, 24))
    assert worst(report, "feed_forward") <= 1e-10
    biased = build(feed_forward="plain", hidden_act="gelu", qkv_bias=True, mlp_bias=True, output_bias=True, **EXACT)
    new, report = to_parameter_tokens(biased, tokens(40, 24))
    assert 1e-3 < worst(report, "query", "feed_forward") < 0.5
    assert not any(name.endswith("bias") for name in new.state_dict())


@pytest.mark.slow
def test_more_pairs_change_nothing_that_is_exact_and_help_the_rest():
    model, ids = build(gpt2=True, hidden_act="gelu", **EXACT), tokens(48, 24)
    _, natural = to_parameter_tokens(model, ids)
    new, more = to_parameter_tokens(model, ids, attention_pairs=64 + 64 + 3, ffn_pairs=48 + 32 + 1 + 64 + 5)
    assert worst(more, *NORMED, "feed_forward") <= 1e-10
    assert worst(more, "output") < worst(natural, "output")
    module = of_layer(new, 1).mlp
    assert (module.key[-5:] == 0).all()
    assert (module.value[-5:] != 0).all(), "a zero pair of a zero key would never get a gradient"
    assert (module.key[:-5].square().sum(1) > 0).all()


# The report


@pytest.mark.parametrize("changes", [{"attention_pairs": 21, "ffn_pairs": 70}, {"ffn_pairs": 40}, {}])
def test_the_report_says_what_the_new_model_does(changes):
    model, ids = build({"kv_shift": {}}, norm_bias=False), tokens(12, 20)
    new, report = to_parameter_tokens(model, ids, **changes)
    assert (report.tokens, len(report.maps)) == (9 * 20, 15)

    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in new.named_modules():
        if isinstance(module, Pattention):
            module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
    with torch.no_grad():
        new(ids)
        for of in report.maps:
            block, at = of_layer(model, of.layer), f"model.layers.{of.layer}"
            if of.name == "feed_forward":
                x, y = seen[f"{at}.mlp"]
                wanted = block.mlp(x * block.post_attention_layernorm.weight)
            else:
                x, y = seen[f"{at}.self_attn.{of.name[0]}_proj"]
                weight = 1 if of.name == "output" else block.input_layernorm.weight
                wanted = getattr(block.self_attn, f"{of.name[0]}_proj")(x * weight)
            for error, part in ((of.fitted, slice(9)), (of.held_out, slice(9, None))):
                assert error == pytest.approx(((y - wanted)[part].norm() / wanted[part].norm()).item(), rel=1e-6)
            pairs = changes.get("ffn_pairs", 128) if of.name == "feed_forward" else changes.get("attention_pairs", 64)
            assert of.pairs == pairs == len(new.get_submodule(_name(of)).key)

        before, after = model(ids[9:]).logits, new(ids[9:]).logits
    assert report.logits == pytest.approx(((before - after).abs().max() / before.abs().max()).item())
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (before, after))
    assert report.kl == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item())
    for loss, logits in ((report.loss_before, before), (report.loss_after, after)):
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[9:, 1:].flatten())
        assert loss == pytest.approx(expected.item())


def _name(of: MapReport) -> str:
    return f"model.layers.{of.layer}." + ("mlp" if of.name == "feed_forward" else f"self_attn.{of.name[0]}_proj")


def test_values_are_the_ridges_optimum_around_the_linear_maps():
    model, ids = build(), tokens(8, 24)
    new, _ = to_parameter_tokens(model, ids, ridge=1e-3)
    old, module, seen = of_layer(model, 1).self_attn.o_proj, of_layer(new, 1).self_attn.o_proj, []
    module.register_forward_pre_hook(lambda _, x: seen.append(x[0][:6].flatten(0, 1)))
    with torch.no_grad():
        new(ids)
        scores = seen[0] @ module.key.T
        weights = nn.functional.gelu(module.scale.tau * scores / scores.norm(dim=1, keepdim=True))
        begun = torch.cat((old.weight.T, -old.weight.T))
        penalty = (1e-3 * weights.square().sum(0).mean()).sqrt() * torch.eye(64, dtype=torch.float64)
        rows = torch.cat((weights, penalty))
        targets = torch.cat((old(seen[0]) - weights @ begun, torch.zeros(64, 32, dtype=torch.float64)))
        assert_near(module.value, begun + torch.linalg.lstsq(rows, targets).solution, 1e-9)
    assert module.scale.tau.item() == pytest.approx(scores.norm(dim=1).mean().item())


def test_held_out_rows_are_not_looked_at():
    model, ids = build(), tokens(8, 24)
    changed = torch.cat((ids[:6], tokens(2, 24, seed=9)))
    one, other = (to_parameter_tokens(model, rows)[0].state_dict() for rows in (ids, changed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_old_model_is_left_as_it_is():
    model = build({"kv_shift": {}}).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new, _ = to_parameter_tokens(model, tokens(4, 12))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert new.training
    assert model.config.mechanisms.keys() == {"kv_shift"}


# What comes of it is a model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_saves_loads_decodes_and_trains(tmp_path, dtype):
    model, ids = build({"kv_shift": {}}).to(dtype), tokens(4, 12)
    new, _ = to_parameter_tokens(model, ids)
    assert new.dtype == dtype
    assert of_layer(new, 0).mlp.scale.tau.dtype == torch.promote_types(dtype, torch.float32)
    new.save_pretrained(tmp_path)
    again = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, new(ids).logits)
    new.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in new.parameters())


# Refusals


@pytest.mark.parametrize(
    ("mechanisms", "ids", "options", "message"),
    [
        ({"pattention": {}}, tokens(4, 12), {}, "already has mechanism 'pattention'"),
        ({}, tokens(1, 12), {}, "at least two rows"),
        ({}, tokens(12), {}, "at least two rows"),
        ({}, tokens(4, 1), {}, "at least two rows"),
        ({}, tokens(4, 12), {"ridge": 0.0}, "ridge must be above zero"),
        ({}, tokens(4, 12), {"attention_pairs": 1}, "attention_pairs must be at least 2"),
        ({}, tokens(4, 12), {"ffn_pairs": 0}, "ffn_pairs must be at least 2"),
    ],
)
def test_what_cannot_be_is_refused(mechanisms, ids, options, message):
    with pytest.raises(HeadwaterError, match=message):
        to_parameter_tokens(build(mechanisms), ids, **options)
