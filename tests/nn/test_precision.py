"""bf16-stream: what is in bf16, what stays in fp32, and that all else about a model is the same."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from headwater.config.presets import PRESETS
from headwater.kernels import disable_kernels
from headwater.models.compiling import compile_model
from headwater.nn.linear import join_linears
from headwater.nn.norm import LayerNorm, RMSNorm
from headwater.testing.small_models import assert_near, build, tokens
from headwater.util.precision import Precision

STREAM, MIXED = Precision.BF16_STREAM, Precision.BF16_MIXED
HALF = torch.bfloat16
MANY = {"pattention": {}, "short_conv": {"dynamic": ["keys"]}, "value_embedding": {"tables": 1, "rank": 4}, "mudd": {}}
PRESET = dict(PRESETS["headwater-base"].fields["mechanisms"])
MODELS = pytest.mark.parametrize("mechanisms", [{}, PRESET, MANY], ids=["vanilla", "preset", "many"])
T = 12


def stream(mechanisms: dict, **changes):
    return STREAM.cast_activations(build(mechanisms, **changes).float()).train()


def gradients(model, ids, **inputs):
    model.zero_grad()
    model(ids, labels=ids, **inputs).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_layers_equal_their_equations_with_rounded_inputs():
    """In fp64, of inputs and weights rounded to bf16."""
    holder = nn.ModuleList([nn.Linear(9, 5), nn.Linear(9, 5, bias=False), nn.Conv1d(9, 5, 3), nn.Embedding(7, 5)])
    linear, plain, conv, table = STREAM.cast_activations(holder)
    x = torch.randn(2, 9, 6)

    def wide(tensor):
        return tensor.to(HALF).double()

    expected = wide(x.mT) @ wide(linear.weight).T
    pairs = [(linear(x.mT), expected + wide(linear.bias)), (plain(x.mT), wide(x.mT) @ wide(plain.weight).T)]
    windows = wide(x).unfold(2, 3, 1)  # [2, 9, 4, 3]
    pairs.append((conv(x), torch.einsum("bctk,ock->bot", windows, wide(conv.weight)) + wide(conv.bias)[:, None]))
    pairs.append((table(torch.tensor([3, 0])), wide(table.weight[[3, 0]])))
    for actual, expected in pairs:
        assert actual.dtype == HALF
        torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7)
    assert {parameter.dtype for parameter in holder.parameters()} == {torch.float32}
    other = MIXED.cast_activations(nn.ModuleList([nn.Linear(9, 5)]))
    assert type(other[0]) is nn.Linear


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "norm", [RMSNorm(32, 1e-6), RMSNorm(32, 1e-6, offset=True), LayerNorm(32, 1e-6), LayerNorm(32, 1e-6, weight=False)]
)
def test_norms_compute_in_fp32(norm, kernels):
    """Of an input in bf16, with weights in fp32 that bf16 cannot hold: rounded once, at the end."""
    norm = copy.deepcopy(norm)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = (5 + torch.randn(40, 32)).to(HALF).requires_grad_()
    if kernels:
        y = norm(x)
    else:
        with disable_kernels():
            y = norm(x)
    wide = x.detach().double().requires_grad_()
    expected = copy.deepcopy(norm).double()(wide)
    assert y.dtype == HALF
    assert (y.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    weigh = torch.randn(40, 32).to(HALF)
    (grad,), (exact,) = torch.autograd.grad(y, x, weigh), torch.autograd.grad(expected, wide, weigh.double())
    assert (grad.double() - exact).norm() < 2**-7 * exact.norm()


@MODELS
def test_activations_are_in_bf16_and_gradients_in_fp32(mechanisms):
    model, dtypes = stream(mechanisms), set()
    for module in (*model.model.layers, *(block.self_attn for block in model.model.layers), model.model.norm):
        module.register_forward_hook(lambda _, x, y: dtypes.update(t.dtype for t in (x[0], *y) if t is not None))
    ids = tokens(2, T)
    for (name, parameter), grad in zip(model.named_parameters(), gradients(model, ids), strict=True):
        assert parameter.dtype == grad.dtype == torch.float32, name
    assert dtypes == {HALF}
    out = model.eval()(ids, labels=ids, z_loss_weight=0.1)
    assert (out.logits.dtype, out.loss.dtype, out.z_loss.dtype) == (HALF, torch.float32, torch.float32)
    assert {layer.keys.dtype for layer in model(ids, use_cache=True).past_key_values.layers} <= {HALF}
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, T + 3)


@MODELS
def test_it_is_the_model_whose_weights_are_rounded(mechanisms):
    """The model that bf16-true trains, with the same weights, up to what it rounds more."""
    exact, ids = build(mechanisms), tokens(4, T)
    logits = exact(ids).logits
    errors = []
    for precision in (Precision.BF16, STREAM):
        model = precision.cast_activations(copy.deepcopy(exact).to(precision.weights))
        errors.append((model(ids).logits - logits).norm() / logits.norm())
    assert 0 < errors[1] < 1.2 * errors[0]


@MODELS
def test_gradient_checkpointing_changes_nothing(mechanisms):
    model, ids = stream(mechanisms), tokens(2, T)
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for actual, grad in zip(gradients(model, ids), expected, strict=True):
        assert torch.equal(actual, grad)


@pytest.mark.parametrize("settings", [{}, {"whole": True, "join": True}], ids=["blocks", "whole, joined"])
@MODELS
def test_it_compiles_into_as_many_graphs_as_bf16_mixed(mechanisms, settings):
    ids, graphs = tokens(2, T), []
    for precision in (MIXED, STREAM):
        model, products = precision.cast_activations(build(mechanisms).float()).train(), []

        def count(graph, inputs, products=products):
            products += [node for node in graph.graph.nodes if node.target is nn.functional.linear]
            return graph.forward

        with precision.autocast("cpu"):
            expected = gradients(model, ids, skip_logits=True, use_cache=False)
            counters.clear()
            compile_model(model, count, **settings)
            actual = gradients(model, ids, skip_logits=True, use_cache=False)
        breaks = sum(counters["graph_break"].values())
        graphs.append((counters["stats"]["unique_graphs"], breaks, len(products)))
        a, e = (torch.cat([grad.flatten() for grad in grads]) for grads in (actual, expected))
        assert_near(a, e, 0.3)
    assert graphs[0] == graphs[1]
    assert graphs[1][1] == 0


def test_generation_joins_products_too():
    model, ids = stream({}).eval(), tokens(2, T)
    with torch.no_grad():
        expected = model(ids).logits
        with join_linears(model):
            assert model.model.layers[0].mlp.joined is not None
            torch.testing.assert_close(model(ids).logits, expected, rtol=0.02, atol=0.05)
