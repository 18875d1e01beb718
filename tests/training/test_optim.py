"""Parameter groups and the learning-rate schedule."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from conftest import build, config
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.mechanisms import KVShift
from headwater.util.errors import HeadwaterError
from headwater_lab.optimization.muon import Muon
from headwater_lab.optimization.registry import OPTIMIZERS
from headwater_lab.recipe.training_section import Training
from headwater_lab.training.optimizers import (
    clip_gradient,
    gradient_norm,
    learning_rate,
    make_optimizers,
    parameter_groups,
)


@pytest.fixture
def model():
    mechanisms = {"kv_shift": {}, "value_residual": {}}
    shape = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return HeadwaterForCausalLM(HeadwaterConfig.gpt2(**shape, mechanisms=mechanisms))


def test_only_matrices_decay(model):
    groups = {group["name"]: group for group in parameter_groups(model, 0.1)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrices": 0.1, "embeddings": 0.0, "vectors": 0.0, "scalars": 0.0,
    }  # fmt: skip
    decayed, embeddings, vectors, scalars = (set(group["params"]) for group in groups.values())
    kept = embeddings | vectors | scalars
    assert embeddings == {model.model.embed_tokens.weight, model.model.embed_positions.weight}
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p].split(".")[-1] for p in scalars} == {"alpha", "beta", "lambdas"}
    assert not vectors & scalars
    assert {names[p].rsplit(".", 2)[-2] for p in decayed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not decayed & kept
    assert decayed | kept == set(model.parameters())


def test_no_bias_decays_whatever_its_shape():
    biased = build({"low_rank_kv": {}}, qkv_bias=True, output_bias=True)
    matrices = next(group["params"] for group in parameter_groups(biased, 0.1) if group["name"] == "matrices")
    names = {parameter: name for name, parameter in biased.named_parameters()}
    assert any(name.endswith("low_rank_kv.keys_bias") for name in names.values())
    assert not [names[parameter] for parameter in matrices if names[parameter].endswith("bias")]


@pytest.mark.parametrize(
    ("decay_on", "decayed"),
    [("embeddings", {"matrices", "embeddings"}), ("all", {"matrices", "embeddings", "vectors", "scalars"})],
)
def test_a_recipe_says_what_decays(model, decay_on, decayed):
    (optimizer,) = make_optimizers(model, Training(weight_decay=0.3, weight_decay_on=decay_on))
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {
        name: 0.3 if name in decayed else 0.0 for name in ("matrices", "embeddings", "vectors", "scalars")
    }


def extend(model, **members):
    """Give the model's KV shifts more members: a class of the same name, since Python remembers what a class can do."""
    kind = type("KVShift", (KVShift,), {"__module__": KVShift.__module__, **members})
    for module in model.modules():
        if isinstance(module, KVShift):
            module.__class__ = kind


def test_a_mechanism_may_have_a_group_of_its_own(model):
    extend(model, choose_group=lambda self, parameter: "taps" if parameter == "beta" else None)
    *_, scalars, taps = parameter_groups(model, 0.1)
    assert (scalars["name"], taps["name"], taps["weight_decay"]) == ("scalars", "taps", 0.0)
    assert set(taps["params"]) == {p for name, p in model.named_parameters() if name.endswith("beta")}
    assert not set(taps["params"]) & set(scalars["params"])
    extend(model, choose_group=lambda self, parameter: "scalar")
    with pytest.raises(HeadwaterError, match="among the scalar; its choose_group"):
        parameter_groups(model, 0.1)


def test_a_parameter_that_no_group_holds_is_seen(model, monkeypatch):
    """The groups must add up to all parameters, whatever modules come."""
    real = model.named_modules
    monkeypatch.setattr(model, "named_modules", lambda *args, **kwargs: real(*args, **kwargs) if kwargs else iter([]))
    with pytest.raises(AssertionError, match="every parameter once"):
        parameter_groups(model, 0.1)


def test_adamw_is_fused_on_this_device(model):
    (optimizer,) = make_optimizers(model, Training())
    assert optimizer.defaults["fused"]


def test_muon_takes_the_matrices_and_adamw_the_rest(model):
    muon, adamw = make_optimizers(model, Training(optimizer="muon", learning_rate=0.1))
    assert isinstance(muon, Muon)
    assert [group["name"] for group in muon.param_groups] == ["matrices"]
    assert [group["name"] for group in adamw.param_groups] == ["embeddings", "vectors", "scalars"]
    (matrices,) = muon.param_groups
    before = [p.detach().clone() for p in matrices["params"]]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    muon.step()
    for p, was in zip(matrices["params"], before, strict=True):
        # Orthogonal up to the iteration's tolerance: singular values of the update near 0.2·sqrt(longer side)·lr.
        update = (p - was * (1 - 0.1 * 0.1)) / (0.1 * 0.2 * math.sqrt(max(p.shape)))
        sizes = torch.linalg.svdvals(update.detach())
        assert 0.5 < sizes.median() < 1.3
        assert sizes.max() < 1.3


SHAPES = [(12, 8), (12, 8), (8, 12), (6, 6), (12, 8), (1, 5)]


def stepped(make, grads: list[list[torch.Tensor]], skip: set[int] = frozenset()) -> tuple[list, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make([{"params": parameters}])
    for step, options in enumerate(grads):
        for parameter, grad in zip(parameters, options, strict=True):
            parameter.grad = grad.clone()
        if isinstance(optimizer, Muon):
            optimizer.found_inf = torch.tensor(float(step in skip))
        optimizer.step()
    return parameters, optimizer


def random_grads(steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(steps)]


def test_muon_leaves_the_output_to_adamw():
    model = HeadwaterForCausalLM(config({}, tie_word_embeddings=False))
    _, adamw = make_optimizers(model, Training(optimizer="muon"))
    groups = {group["name"]: group["params"] for group in adamw.param_groups}
    assert groups["head"] == [model.lm_head.weight]


def test_the_rate_of_a_group_keeps_its_ratio(model, monkeypatch):
    def faster(groups, *, learning_rate):
        groups[0]["lr"] = 10 * learning_rate
        return torch.optim.SGD(groups, lr=learning_rate)

    monkeypatch.setattr(OPTIMIZERS, "added", {"faster": faster})
    training = Training(optimizer="faster", scalar_learning_rate_multiplier=3.0)
    (optimizer,) = make_optimizers(model, training)
    ratios = {group["name"]: group["ratio"] for group in optimizer.param_groups}
    assert ratios == {"matrices": pytest.approx(10.0), "embeddings": 1.0, "vectors": 1.0, "scalars": 3.0}


def test_muon_in_stacks_is_pytorchs():
    settings = dict(lr=0.05, momentum=0.9, weight_decay=0.2)
    grads = random_grads(4)
    ours, optimizer = stepped(lambda groups: Muon(groups, **settings), grads)
    theirs, reference = stepped(
        lambda groups: torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **settings), grads
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.01 * b.norm(), "bfloat16 rounds each product a little differently"
        assert optimizer.state[a].keys() == reference.state[b].keys()
        moments = (each.state[x]["momentum_buffer"] for each, x in ((optimizer, a), (reference, b)))
        torch.testing.assert_close(*moments)


def test_muon_skips_a_step_on_the_device():
    grads = random_grads(4)
    spoiled = [*grads[:2], [torch.full_like(grad, math.nan) for grad in grads[0]], *grads[2:]]
    ours, optimizer = stepped(lambda groups: Muon(groups, lr=0.05), spoiled, skip={2})
    plain, reference = stepped(lambda groups: Muon(groups, lr=0.05), grads)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_the_norm_and_clipping_are_pytorchs(model, limit):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in parameters]
    norm = gradient_norm(parameters)
    clip_gradient(parameters, norm, limit)
    ours = [p.grad for p in parameters]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(parameters, limit)
    assert torch.equal(norm, expected)
    assert all(torch.allclose(a, p.grad, rtol=1e-6) for a, p in zip(ours, parameters, strict=True))


def test_cosine_schedule():
    training = Training(steps=110, warmup_steps=10, learning_rate=2.0, min_learning_rate_ratio=0.1)
    assert [learning_rate(step, training) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert learning_rate(10, training) == pytest.approx(2.0)
    assert learning_rate(60, training) == pytest.approx(0.2 + 1.8 * 0.5)
    assert learning_rate(109, training) == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.99)))


def test_constant_schedule():
    training = Training(steps=100, warmup_steps=0, learning_rate=2.0, schedule="constant")
    assert {learning_rate(step, training) for step in range(100)} == {2.0}


@pytest.mark.parametrize("form", ["linear", "1-sqrt"])
def test_wsd_is_constant_and_then_decays(form):
    training = Training(
        steps=100, warmup_steps=10, learning_rate=2.0, schedule="wsd", decay_fraction=0.25, decay_form=form,
        min_learning_rate_ratio=0.1,
    )  # fmt: skip
    assert training.decay_start == 75
    assert {learning_rate(step, training) for step in range(9, 76)} == {2.0}
    for step in range(76, 100):
        x = (step - 75) / 25
        fraction = 1 - (x if form == "linear" else math.sqrt(x))
        assert learning_rate(step, training) == pytest.approx(2 * (0.1 + 0.9 * fraction))


def test_linear_is_a_line():
    training = Training(steps=110, warmup_steps=10, learning_rate=2.0, schedule="linear", min_learning_rate_ratio=0.1)
    assert [learning_rate(step, training) for step in (10, 60, 109)] == pytest.approx([2.0, 1.1, 0.2 + 1.8 * 0.01])


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_a_decay_takes_at_least_one_step_and_at_most_all(steps, fraction):
    training = Training(steps=steps, warmup_steps=0, schedule="wsd", decay_fraction=fraction)
    assert 0 <= training.decay_start < steps
    rates = [learning_rate(step, training) for step in range(steps)]
    assert set(rates[: training.decay_start + 1]) == {training.learning_rate}
    assert all(0 < later < earlier for earlier, later in pairwise(rates[training.decay_start :]))


def test_a_decay_within_the_warmup_is_refused():
    with pytest.raises(ValueError, match=r"wsd begins after step 80, within the 90 warm-up steps"):
        Training(steps=100, warmup_steps=90, schedule="wsd")
