"""Kernels and the plain forms they stand in for: one switch, one guard, the same numbers."""

import pytest
import torch
from torch import Tensor

from conftest import assert_near, build, config, decode, document_positions, tokens
from headwater import HeadwaterForCausalLM, kernels
from headwater.mechanisms import DenseFormer, KVShift, Pattention, ValueResidual
from headwater.util.errors import HeadwaterError

ALL = {"Rotate", "Shift", "_Pattention", "_RMSNorm", "_Activated", "_TargetLogProbabilities"}
MODELS = {
    "vanilla": ({}, {"Rotate", "_RMSNorm", "_Activated"}),
    "kv_shift": ({"kv_shift": {"queries": True, "window": 3}}, {"Shift"}),
    "pattention": ({"pattention": {}}, {"_Pattention"}),
    "value_residual": ({"value_residual": {"mode": "dense"}}, set()),
    "dense_former": ({"dense_former": {}, "kv_shift": {"variant": "gate"}}, {"Shift"}),
}


def functions(y: Tensor) -> set[str]:
    """The kernels in a tensor's graph."""
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {name for node in seen if (name := node.name().removesuffix("Backward")) in ALL}


def loss_and_gradients(model: HeadwaterForCausalLM, ids: Tensor, **kwargs) -> tuple[Tensor, list[Tensor]]:
    loss = model(ids, labels=ids, use_cache=False, **kwargs).loss
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("documents", [None, [[1, 5, 1, 10], [6, 9, 2]]], ids=["rows", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_without_kernels(name, documents):
    mechanisms, expected = MODELS[name]
    model, ids = build(mechanisms), tokens(2, 17)
    positions = {} if documents is None else {"position_ids": document_positions(documents)}
    on, gradients = loss_and_gradients(model, ids, **positions)
    with kernels.disable_kernels():
        plain, plain_gradients = loss_and_gradients(model, ids, **positions)
    if documents is None:
        assert functions(on) >= expected
    assert not functions(plain)
    assert_near(on, plain, 1e-12)
    for one, other in zip(gradients, plain_gradients, strict=True):
        assert_near(one, other, 1e-11)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_decoding_computes_the_same_without_kernels(name):
    model, ids = build(MODELS[name][0]), tokens(2, 17)
    logits = decode(model, ids, [5, 1, 6, 5])
    with kernels.disable_kernels():
        assert_near(decode(model, ids, [5, 1, 6, 5]), logits, 1e-12)
        assert_near(model(ids).logits, logits, 1e-12)


def test_every_kernel_goes_off_in_half_precision_too():
    mechanisms = {"kv_shift": {}, "value_residual": {}}
    model, ids = HeadwaterForCausalLM(config(mechanisms)), tokens(2, 17)
    found = {}
    for name, context in {"on": torch.enable_grad(), "off": kernels.disable_kernels()}.items():
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            loss, gradients = loss_and_gradients(model, ids)
        found[name] = functions(loss), loss, gradients
    assert found["on"][0] >= {"Rotate", "Shift", "_RMSNorm", "_Activated", "_TargetLogProbabilities"}
    assert not found["off"][0]
    assert_near(found["on"][1], found["off"][1], 1e-2)
    for one, other in zip(found["on"][2], found["off"][2], strict=True):
        assert_near(one, other, 1e-2)


def test_activation_checkpointing_without_kernels():
    model, ids = build({"kv_shift": {}, "dense_former": {}}).train(), tokens(2, 17)
    expected = loss_and_gradients(model, ids)[1]
    with kernels.disable_kernels():
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        gradients = loss_and_gradients(model, ids)[1]
    for one, other in zip(gradients, expected, strict=True):
        assert_near(one, other, 1e-11)


X = (2, 3, 5, 4)
MODULES = {
    "kv_shift": lambda: (KVShift(3), lambda m, x: m(x, x)[0]),
    "pattention": lambda: (Pattention(4, 4, 9, key_std=1.0), lambda m, x: m(x)),
    "value_residual": lambda: (ValueResidual(), lambda m, x: m(x, x.sin())),
    "dense_former": lambda: (DenseFormer(2), lambda m, x: m(x, x.sin())),
}


@pytest.mark.parametrize("name", MODULES)
def test_transforms_of_functions_get_the_plain_form(name):
    module, run = MODULES[name]()
    module, x, v = module.double(), torch.randn(X, dtype=torch.float64), torch.randn(X, dtype=torch.float64)
    assert_near(torch.func.vmap(lambda x: run(module, x[None])[0])(x), run(module, x), 1e-12)
    (expected,) = torch.autograd.grad(run(module, x.requires_grad_()).square().sum(), x)
    x = x.detach()
    assert_near(torch.func.grad(lambda x: run(module, x).square().sum())(x), expected, 1e-12)
    _, tangent = torch.func.jvp(lambda x: run(module, x).square().sum(), (x,), (v,))
    assert_near(tangent, (expected * v).sum(), 1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODULES)
def test_second_derivatives_exist_without_kernels(name):
    module, run = MODULES[name]()
    module, x = module.double(), torch.randn(X, dtype=torch.float64, requires_grad=True)
    with kernels.disable_kernels():
        assert torch.autograd.gradgradcheck(lambda x: run(module, x), (x,))


def test_the_variable_is_read_once_and_knows_its_values(monkeypatch):
    x = torch.zeros(1, requires_grad=True)
    assert not kernels.can_fuse(x.detach())
    for value, allowed in {"plain": False, "measured": True, "": True}.items():
        monkeypatch.setattr(kernels, "_disabled", None)
        monkeypatch.setenv("HEADWATER_KERNELS", value)
        assert kernels.can_fuse(x) is allowed
    with kernels.disable_kernels():
        assert not kernels.can_fuse(x)
    assert kernels.can_fuse(x)
    monkeypatch.setattr(kernels, "_disabled", None)
    monkeypatch.setenv("HEADWATER_KERNELS", "fast")
    with pytest.raises(HeadwaterError, match=r"HEADWATER_KERNELS.*'fast'.*plain"):
        kernels.can_fuse(x)
