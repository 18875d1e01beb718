"""The scalars that `inspect` shows are those the forward pass uses, and the census counts them right."""

import math

import pytest
import torch

from conftest import assert_near, build
from headwater.mechanisms import KVShift, PlusWeights
from headwater_lab.inspection.scalars import Census, collect_scalars, compose_windows, take_census, value_taps
from headwater_lab.inspection.scores import compose_taps


def put(model, **values):
    """Set parameters by the end of their names, e.g. layers__1__alpha."""
    with torch.no_grad():
        for end, value in values.items():
            (parameter,) = [p for name, p in model.named_parameters() if name.endswith(end.replace("__", "."))]
            parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).view(parameter.shape))
    return model


def shown(model, symbol):
    """(layer, place) -> values of one symbol."""
    return {(s.layer, s.place): s.values for s in collect_scalars(model) if s.symbol == symbol}


def shift(layer, name):
    return f"layers__{layer}__self_attn__mechanisms__kv_shift__{name}"


def test_kv_shift_by_layer_and_head():
    model = build({"kv_shift": {}}, num_hidden_layers=2)
    put(model, **{shift(0, "alpha"): [[0.25, -1.5], [0.75, 2.0]], shift(1, "beta"): [[3.0, 4.0], [5.0, 6.0]]})
    assert shown(model, "α1")[0, ""] == [0.25, -1.5]
    assert shown(model, "α2")[0, ""] == [0.75, 2.0]
    assert shown(model, "β2")[1, ""] == [5.0, 6.0]
    (first, *_) = [s for s in collect_scalars(model) if s.symbol == "α1"]
    assert (first.mechanism, first.by, first.at) == ("kv_shift", "kv head", (0, 1))


@pytest.mark.parametrize(
    ("form", "options", "current"),
    [("gate", [0.0, math.log(3)], [0.5, 0.75]), ("clamped", [-2.0, 0.4], [0.0, 0.4])],
)
def test_tied_forms_show_what_they_come_to(form, options, current):
    model = put(build({"kv_shift": {"variant": form}}, num_hidden_layers=1), **{shift(0, "alpha"): options})
    assert shown(model, "α1")[0, ""] == pytest.approx(current)
    assert shown(model, "α2")[0, ""] == pytest.approx([1 - value for value in current])


def test_longer_windows_and_queries():
    model = build({"kv_shift": {"window": 4, "queries": True, "values": False}}, num_hidden_layers=1)
    symbols = {s.symbol: s for s in collect_scalars(model)}
    assert list(symbols) == ["α1", "α2", "α3", "α4", "γ1", "γ2", "γ3", "γ4"]
    assert (symbols["γ4"].by, symbols["γ4"].at) == ("query head", (0, 1, 2, 3))


def test_means_of_a_convolutions_taps():
    places = ["values", "attention_input", "feed_forward_hidden"]
    model = build({"short_conv": {"sites": places, "window": 2}}, num_hidden_layers=1, feed_forward="gated")
    taps = {name.split(".")[-1]: p for name, p in model.named_parameters() if name.endswith("_taps")}
    assert shown(model, "mean v1")[0, ""] == pytest.approx((taps["values_taps"][0].mean(1) + 1).tolist())
    for name in ("attention_input", "gate", "up"):
        assert shown(model, f"mean {name} 2")[0, ""] == [pytest.approx(taps[f"{name}_taps"][1].mean().item())]


def test_only_heads_that_exist_are_shown():
    """With skip heads read one layer on, the last layer has no keys of its own for its second head."""
    model = build({"kv_shift": {}, "skip_layer": {"layers": 1, "heads": 2}})
    heads = {s.layer: s.at for s in collect_scalars(model) if s.symbol == "α1"}
    assert heads == {0: (0, 1), 1: (0, 1), 2: (0,)}


@pytest.mark.parametrize(
    ("options", "first", "own"),
    [
        ({"mode": "identity"}, [0.5, 0.5], [0.5, 0.5]),
        ({"mode": "constant", "weight": 3}, [3.0, 3.0], [1.0, 1.0]),
        ({"mode": "sparse"}, [5.0], [1.0]),
    ],
)
def test_fixed_value_residuals(options, first, own):
    model = build({"value_residual": options})
    assert list(shown(model, "λ1").values()) == [[value] for value in first]
    assert list(shown(model, "λ2").values()) == [[value] for value in own]


def test_learnable_plus_shows_its_softmax():
    model = build({"value_residual": {"mode": "learnable_plus"}})
    put(model, scale=[6.0], logits=[0.0, math.log(2)])
    assert [isinstance(module, PlusWeights) for module in model.model.mechanisms.values()] == [True]
    assert [values[0] for values in shown(model, "λ1").values()] == pytest.approx([2.0, 4.0])


def test_dense_value_residual_and_dense_former_name_their_layers():
    model = build({"value_residual": {"mode": "dense"}, "dense_former": {}})
    at = {(s.mechanism, s.layer): s.at for s in collect_scalars(model)}
    assert at["value_residual", 2] == (0, 1, 2)
    assert at["dense_former", 1] == (-1, 0, 1)
    last = model.model.layers[2].self_attn.mechanisms["value_residual"].lambdas
    assert shown(model, "λ")[2, ""] == last.tolist()


@pytest.mark.parametrize("learnable", [True, False])
def test_neutreno(learnable):
    model = build({"neutreno": {"weight": 0.25, "learnable": learnable}}, num_hidden_layers=2)
    if learnable:
        put(model, lambdas=[0.7])
    assert shown(model, "λ") == {(1, ""): pytest.approx([0.7 if learnable else 0.25])}


def test_tau_of_each_map():
    model = build({"pattention": {"attention_pairs": 9, "ffn_pairs": 16}}, num_hidden_layers=1)
    places = {place: values for (_, place), values in shown(model, "τ").items()}
    assert places == {"q_proj": [3.0], "k_proj": [3.0], "v_proj": [3.0], "o_proj": [3.0], "mlp": [4.0]}


# The census


def test_census_of_hand_set_heads():
    """Heads in order: both current; previous key; previous value; both previous. Ties count as previous."""
    model = build({"kv_shift": {}}, num_hidden_layers=3)
    put(
        model,
        **{
            shift(0, "alpha"): [[1.0, 0.0], [0.0, 1.0]],
            shift(0, "beta"): [[1.0, 0.5], [0.0, 0.2]],
            shift(1, "alpha"): [[-0.1, -2.0], [-0.2, -1.0]],
            shift(1, "beta"): [[0.3, 0.1], [0.4, 0.2]],
            shift(2, "alpha"): [[0.5, 0.9], [0.5, 0.1]],
            shift(2, "beta"): [[0.9, 0.9], [0.1, 0.1]],
        },
    )
    assert take_census(model) == Census(6, 2, 2, 1, 1)


def test_census_with_longer_windows_looks_at_the_largest_of_the_others():
    model = build({"kv_shift": {"window": 3}}, num_hidden_layers=1)
    alpha = [[0.5, 0.5], [0.1, 0.4], [0.6, 0.3]]
    beta = [[0.5, 0.5], [0.4, 0.4], [0.4, 0.4]]
    put(model, **{shift(0, "alpha"): alpha, shift(0, "beta"): beta})
    assert take_census(model) == Census(2, 1, 1, 0, 0)


@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {"values": False}}, {"value_residual": {}}])
def test_no_census_without_both_shifts(mechanisms):
    assert take_census(build(mechanisms)) is None


def test_heads_without_values_of_their_own_are_not_counted():
    assert take_census(build({"kv_shift": {}, "svformer": {}})).heads == 2


# Windows


def test_values_attended_to_elsewhere_have_the_taps_of_there():
    model = build({"kv_shift": {}, "skip_layer": {"layers": 1, "heads": 2}})
    betas = [model.model.layers[layer].self_attn.mechanisms["kv_shift"].beta for layer in range(3)]
    taps = value_taps(model)[1]
    assert_near(taps, torch.stack((betas[1][:, 0], betas[1][:, 0], betas[0][:, 1], betas[0][:, 1]), dim=1).detach())
    assert value_taps(build({}))[0].tolist() == [[1.0] * 4]
    assert compose_windows(build({}).model.layers[0], "v") is None


def test_keys_that_are_read_as_values_have_the_keys_taps():
    model = build({"kv_shift": {}, "mla": {}})
    alpha = model.model.layers[1].self_attn.mechanisms["kv_shift"].alpha
    assert_near(value_taps(model)[1], alpha.repeat_interleave(2, dim=1).detach())
    model = build({"kv_shift": {}, "low_rank_kv": {}})
    alpha = model.model.layers[1].self_attn.mechanisms["kv_shift"].alpha
    assert_near(value_taps(model)[1], alpha.mean(1, keepdim=True).expand(-1, 4).detach())


def test_windows_one_after_the_other():
    first, second = KVShift(2, window=3), KVShift(2)
    x = torch.randn(1, 2, 7, 4)
    both = compose_taps(first.beta.detach(), second.beta.detach())
    expected = second(x, first(x, x)[1])[1].detach()
    got = sum(
        tap.view(1, 2, 1, 1) * torch.nn.functional.pad(x, (0, 0, back, 0))[:, :, :7] for back, tap in enumerate(both)
    )
    assert_near(got, expected, 1e-5)
