import math
import typing

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_near, build, config, disturb, random, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.kernels.fused_pattention import fused_pattention
from headwater.mechanisms import Pattention
from headwater.mechanisms.pattention import GELU, GUARD, ScoreFunction, default_tau
from headwater.testing import naive

SCORES = typing.get_args(ScoreFunction)
# Every score with every form of GELU that it may have.
FORMS = [(score, gelu) for score in SCORES for gelu in (("erf", "tanh") if "gelu" in score else ("erf",))]


def layer(score: str = "l2_norm_gelu", d_in: int = 6, d_out: int = 5, pairs: int = 11, **options) -> Pattention:
    return disturb(Pattention(d_in, d_out, pairs, score=score, **options).double(), 1.0)


def expected(module: Pattention, x: Tensor) -> Tensor:
    tau = module.scale.tau[0]
    given = module.key, module.value, tau, module.score, module.gelu
    rows = [naive.pattention(row, *given) for row in x.flatten(0, -2)]
    return torch.stack(rows).view(*x.shape[:-1], -1)


@pytest.mark.parametrize(("score", "gelu"), FORMS)
def test_values_and_gradients_equal_naive(score, gelu):
    module, x = layer(score, gelu=gelu), random(2, 3, 6).requires_grad_()
    inputs = [x, module.key, module.value]
    actual, wanted = module(x), expected(module, x)
    weigh = random(*actual.shape)
    assert_near(actual, wanted, 1e-12)
    for a, e in zip(*(torch.autograd.grad((y * weigh).sum(), inputs) for y in (actual, wanted)), strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize("gelu", GELU)
def test_fused_form_passes_gradcheck_in_every_input(gelu):
    module, x = layer(gelu=gelu), random(4, 6).requires_grad_()
    tau = module.scale.tau.clone().requires_grad_()
    fused = type(module(x).grad_fn).__name__
    assert "_Pattention" in fused or "View" in fused
    assert torch.autograd.gradcheck(fused_pattention, (x, module.key, module.value, tau, GELU[gelu]))


@pytest.mark.parametrize("gelu", GELU)
def test_fused_and_plain_forms_agree(gelu, monkeypatch):
    module, x = layer(gelu=gelu), random(4, 6).requires_grad_()
    inputs = [x, module.key, module.value]
    fused = [module(x), *torch.autograd.grad(module(x).square().sum(), inputs)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = [module(x), *torch.autograd.grad(module(x).square().sum(), inputs)]
    for a, b in zip(fused, plain, strict=True):
        assert_near(a, b, 1e-12)
    assert_near(module.weights(x) @ module.value, plain[0], 1e-12)


def test_the_two_forms_of_gelu_differ_by_its_approximation():
    erf, x = layer(), random(20, 6)
    tanh = layer(gelu="tanh")
    tanh.load_state_dict(erf.state_dict())
    difference = (tanh(x) - erf(x)).abs().max() / erf(x).abs().max()
    assert 1e-5 < difference < 1e-2


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("gelu", GELU)
def test_blocks_of_rows_change_nothing(rows, gelu, monkeypatch):
    module, x = layer(gelu=gelu), random(7, 6).requires_grad_()
    whole = torch.autograd.grad(module(x).square().sum(), [x, module.key, module.value])
    monkeypatch.setattr("headwater.kernels.fused_pattention.BLOCK", rows * 11)
    in_blocks = torch.autograd.grad(module(x).square().sum(), [x, module.key, module.value])
    for a, b in zip(in_blocks, whole, strict=True):
        assert_near(a, b, 1e-12)


def test_fp32():
    module, x = layer(d_in=64, d_out=48, pairs=200), random(50, 64)
    wanted = [expected(module, x)]
    wanted += torch.autograd.grad(wanted[0].square().sum(), [module.key, module.value])
    module.float()
    actual = [module(x.float())]
    actual += torch.autograd.grad(actual[0].square().sum(), [module.key, module.value])
    for a, e in zip(actual, wanted, strict=True):
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()


# Rows without scores


@pytest.mark.parametrize("score", [score for score in SCORES if "norm" in score and "exp" not in score])
@pytest.mark.parametrize("size", [0.0, math.sqrt(GUARD) / 100])
def test_a_row_without_scores_gives_zero_and_no_gradient(score, size):
    module, x = layer(score), random(4, 6)
    x[1] *= size
    x.requires_grad_()
    y = module(x)
    grad, key, value = torch.autograd.grad(y.square().sum(), [x, module.key, module.value])
    assert not y[1].any()
    assert not grad[1].any()
    assert all(t.isfinite().all() for t in (y, grad, key, value))
    assert y[0].abs().min() > 0


def test_new_zero_keys_change_nothing():
    """The guard is on ‖A‖² itself: an epsilon under a mean over n would show here."""
    small, x = layer(pairs=64), random(20, 6) * 1e-4
    large = layer(pairs=150, tau=float(small.scale.tau))
    with torch.no_grad():
        large.key[:64], large.value[:64] = small.key, small.value
        large.key[64:] = 0
    assert_near(large(x), small(x), 1e-13)
    assert torch.autograd.grad(large(x).sum(), large.key)[0][64:].abs().min() > 0


# Precision


def errors(run: typing.Callable, inputs: list[Tensor], weigh: Tensor, wanted: list[Tensor], dtype: torch.dtype) -> list:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(*leaves)
    actual = [y, *torch.autograd.grad(y, leaves, weigh.to(y.dtype))]
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, wanted, strict=True)]


def test_error_under_autocast_is_that_of_the_plain_form():
    module, x, weigh = layer(d_in=64, d_out=48, pairs=256), random(128, 64), random(128, 48)
    tau = float(module.scale.tau)

    def plain(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (x @ key.T).float()
        return nn.functional.gelu(tau * scores / scores.norm(dim=-1, keepdim=True)) @ value

    def ours(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(key=key, value=value), (x,))

    inputs = [x.requires_grad_(), module.key, module.value]
    y = ours(*inputs)
    wanted = [y, *torch.autograd.grad(y, inputs, weigh)]
    module.float()
    for a, b in zip(*(errors(f, inputs, weigh, wanted, torch.float32) for f in (ours, plain)), strict=True):
        assert a <= 1.1 * b


def test_half_precision_is_rounded_once():
    module, x = layer(d_in=32, pairs=64).bfloat16(), random(9, 32).bfloat16()
    scores = (x @ module.key.T).float()
    weights = nn.functional.gelu(scores * (module.scale.tau / scores.norm(dim=-1, keepdim=True))).bfloat16()
    assert torch.equal(module(x), weights @ module.value)


def test_tau_stays_in_fp32_and_in_the_checkpoint(tmp_path):
    model = build({"pattention": {"attention_pairs": 10}}).float()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.scale.tau.fill_(math.pi)
    assert model.bfloat16().model.layers[1].mlp.scale.tau.dtype == torch.float32
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=dtype).model.layers
        assert loaded[1].self_attn.q_proj.key.dtype == dtype
        for module in (layer.self_attn.q_proj for layer in loaded):
            assert module.scale.tau.dtype == torch.float32
        assert loaded[1].self_attn.q_proj.scale.tau.item() == pytest.approx(math.pi, abs=1e-7)
        assert loaded[0].self_attn.q_proj.scale.tau.item() == pytest.approx(math.sqrt(10))


def test_a_tau_that_was_put_is_made_again():
    """Buffers of a model on the meta device are made from `constants()`."""
    scale = Pattention(4, 4, 16).scale
    scale.set_tau(7.5)
    assert scale().item() == scale.constants()["tau"].item() == 7.5


@pytest.mark.parametrize(("score", "tau"), [("l2_norm_gelu", 4.0), ("gelu_l1_norm", 16.0), ("softmax", 1.0)])
def test_default_tau(score, tau):
    assert default_tau(score, 16) == tau
    assert Pattention(4, 4, 16, score=score).scale.tau.item() == tau


# In a model


def test_every_linear_map_is_replaced():
    model = HeadwaterForCausalLM(config({"pattention": {}}))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linear == {"lm_head"}
    for block in model.model.layers:
        attention = block.self_attn
        maps = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        assert [tuple(m.key.shape) for m in maps] == [(32, 32)] * 4
        assert [m.value.shape[1] for m in maps] == [32, 16, 16, 32]
        assert tuple(block.mlp.key.shape) == (128, 32)


def test_every_map_may_have_its_own_pairs():
    pairs = {"attention_pairs": 7, "value_pairs": 9, "ffn_pairs": 20}
    for block in HeadwaterForCausalLM(config({"pattention": pairs})).model.layers:
        attention = block.self_attn
        counts = [len(m.key) for m in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)]
        assert counts == [7, 7, 9, 7]
        assert len(block.mlp.key) == 20


def test_start():
    changes = dict(hidden_size=256, num_hidden_layers=2, initializer_range=0.02)
    model = HeadwaterForCausalLM(config({"pattention": {"ffn_pairs": 2000}}, **changes))
    for block in model.model.layers:
        assert block.mlp.key.std().item() == pytest.approx(0.02, rel=0.02)
        assert block.mlp.value.std().item() == pytest.approx(2 / (2 * 16), rel=0.02)
    assert not torch.equal(model.model.layers[0].mlp.key, model.model.layers[1].mlp.key)


def test_maps_to_heads_that_nobody_attends_to_are_not_built():
    model = shared({"pattention": {}, "svformer": {}, "skip_layer": {}})
    assert [layer.self_attn.v_proj is None for layer in model.model.layers] == [False, True, True]
    assert model.model.layers[2].self_attn.k_proj.value.shape[1] == 8


def test_pairs_decay_and_tau_does_not():
    from headwater_lab.training.optimizers import parameter_groups

    model = HeadwaterForCausalLM(config({"pattention": {}, "kv_shift": {}}))
    decay = {p: group["weight_decay"] for group in parameter_groups(model, 0.1) for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[parameter] == 0.1 * name.endswith((".key", ".value", "lm_head.weight")), name


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"ffn_pairs": 0}, {}, "there must be at least one pair, not 0"),
        ({}, {"qkv_bias": True}, "set qkv_bias to false"),
        ({"score": "relu"}, {}, "score must be 'l2_norm_gelu', 'gelu_l2_norm'"),
        ({"score": "softmax", "tau": "pairs"}, {}, "has no tau"),
        ({"score": "exp_l1_norm", "gelu": "tanh"}, {}, "has no GELU"),
        ({"gelu": "relu"}, {}, "gelu must be 'erf' or 'tanh'"),
        ({"pairs": 3}, {}, "no option 'pairs'; known names: attention_pairs"),
    ],
)
def test_contradictory_options(options, changes, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"pattention": options}, **changes)


def test_a_step_of_training_lowers_the_loss():
    model, ids = HeadwaterForCausalLM(config({"pattention": {}})).train(), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_plain_module_refuses_what_it_cannot_do():
    for options in (
        dict(score="x"),
        dict(gelu="x"),
        dict(score="softmax", gelu="tanh"),
        dict(tau=0.0),
        dict(tau=float("nan")),
        dict(pairs=0),
    ):
        with pytest.raises(HeadwaterError):
            Pattention(4, 4, **({"pairs": 8} | options))


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(rows):
    x = torch.randn(*rows, 4, requires_grad=True)
    y = Pattention(4, 5, 6)(x)
    assert y.shape == (*rows, 5)
    y.sum().backward()
