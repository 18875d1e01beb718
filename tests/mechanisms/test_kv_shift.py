import pytest
import torch

import naive
from conftest import assert_near, build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.mechanisms.base import KV, Local
from headwater.mechanisms.kv_shift import KVShift, shift
from headwater.models.cache import HeadwaterLayer
from headwater.plan import LayerPlan

B, K, T, D = 2, 3, 7, 4
REACH = torch.tensor([[0, 1, 2, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0]])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weigh = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad((y * weigh).sum(), inputs)


def starts(reach: torch.Tensor) -> set[tuple[int, int]]:
    return {(b, t) for b, row in enumerate(reach.tolist()) for t, back in enumerate(row) if back == 0}


def mechanism(kv_heads: int = K, owns_v: bool = True) -> KVShift:
    module = KVShift({}, config(), LayerPlan(0, kv_heads, owns_v=owns_v)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


# Values and gradients


@pytest.mark.parametrize("reach", [None, REACH], ids=["whole_rows", "documents"])
@pytest.mark.parametrize("length", [T, 2, 1])
def test_shift_equals_naive(reach, length):
    x, weight = random(B, K, length, D).requires_grad_(), random(2, K).requires_grad_()
    reach = None if reach is None else reach[:, :length]
    expected = naive.kv_shift(x, weight, frozenset() if reach is None else starts(reach))
    actual = shift(x, weight, reach)
    assert_near(actual, expected, 1e-12)
    for a, e in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
        assert_near(a, e, 1e-12)


def test_shift_of_one_document_a_row_needs_no_reach():
    x, weight = random(B, K, T, D), random(2, K)
    assert_near(shift(x, weight, torch.arange(T).expand(B, T)), shift(x, weight), 1e-12)


def test_reach_of_one_row_stands_for_all():
    x, weight = random(B, K, T, D), random(2, K)
    assert_near(shift(x, weight, REACH[:1]), shift(x, weight, REACH[:1].expand(B, T)), 1e-12)


def test_shift_of_nothing():
    x, weight = random(B, K, 0, D).requires_grad_(), random(2, K).requires_grad_()
    y = shift(x, weight)
    assert y.shape == x.shape
    assert not gradients(y, weight)[0].any()


def test_shift_of_non_contiguous_input():
    x, weight = random(B, T, K, D).transpose(1, 2).requires_grad_(), random(2, K).requires_grad_()
    assert not x.is_contiguous()
    actual, expected = shift(x, weight), shift(x.contiguous(), weight)
    assert_near(actual, expected, 1e-12)
    for a, e in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
        assert_near(a, e, 1e-12)


def test_shift_with_non_contiguous_gradient():
    x, weight = random(B, K, T, D).requires_grad_(), random(2, K).requires_grad_()
    weigh = random(B, T, K, D).transpose(1, 2)
    plain = shift(x, weight, torch.arange(T).expand(B, T))
    actual, expected = (torch.autograd.grad((y * weigh).sum(), (x, weight)) for y in (shift(x, weight), plain))
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_fast_path_passes_gradcheck(length):
    x, weight = random(B, K, length, 2).requires_grad_(), random(2, K).requires_grad_()
    assert "_Shift" in type(shift(x, weight).grad_fn).__name__
    assert torch.autograd.gradcheck(shift, (x, weight))
    assert torch.autograd.gradcheck(lambda x: shift(x, weight.detach()), (x,))
    assert torch.autograd.gradcheck(lambda weight: shift(x.detach(), weight), (weight,))


def test_fast_path_equals_plain_path():
    x, weight = random(B, K, T, D).requires_grad_(), random(2, K).requires_grad_()
    fast, plain = shift(x, weight), shift(x, weight, torch.arange(T).expand(B, T))
    assert type(fast.grad_fn) is not type(plain.grad_fn)
    assert_near(fast, plain, 1e-12)
    for a, e in zip(gradients(fast, x, weight), gradients(plain, x, weight), strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize("reach", [None, REACH], ids=["whole_rows", "documents"])
def test_shift_computes_bf16_in_fp32(reach):
    x, weight = random(B, K, T, D).bfloat16().requires_grad_(), random(2, K).float().requires_grad_()
    y = shift(x, weight, reach)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, shift(x.float(), weight, reach).bfloat16())
    gx, gw = torch.autograd.grad(y.float().sum(), (x, weight))
    assert (gx.dtype, gw.dtype) == (torch.bfloat16, torch.float32)


# The mechanism in a layer


def test_keys_and_values_are_shifted_by_their_own_scalars():
    module, k, v, q = mechanism(), random(B, K, T, D), random(B, K, T, D), random(B, 2 * K, T, D)
    same_q, shifted = module.local(q, KV(k, v), Local({}))
    assert same_q is q
    assert_near(shifted.k, naive.kv_shift(k, module.alpha), 1e-12)
    assert_near(shifted.v, naive.kv_shift(v, module.beta), 1e-12)


def test_layer_without_values_has_no_beta():
    module, k = mechanism(owns_v=False), random(B, K, T, D)
    assert dict(module.named_parameters()).keys() == {"alpha"}
    _, shifted = module.local(k, KV(k, None), Local({}))
    assert shifted.v is None
    assert_near(shifted.k, naive.kv_shift(k, module.alpha), 1e-12)


@pytest.mark.parametrize("reach", [None, REACH], ids=["whole_rows", "documents"])
@pytest.mark.parametrize("chunks", [[T], [1] * T, [3, 1, 3]])
def test_chunks_with_a_tail_equal_one_row(chunks, reach):
    module, k, v = mechanism(), random(B, K, T, D), random(B, K, T, D)
    tail, parts, end = HeadwaterLayer(), [], 0
    for chunk in chunks:
        begin, end = end, end + chunk
        context = Local({}, None if reach is None else reach[:, begin:end], tail)
        parts.append(module.local(k, KV(k[:, :, begin:end], v[:, :, begin:end]), context)[1])
    border = frozenset() if reach is None else starts(reach)
    assert_near(torch.cat([part.k for part in parts], 2), naive.kv_shift(k, module.alpha, border), 1e-12)
    assert_near(torch.cat([part.v for part in parts], 2), naive.kv_shift(v, module.beta, border), 1e-12)


def test_plan_keeps_one_raw_token_in_every_layer():
    for plan in config({"kv_shift": {}}).layer_plans:
        assert (plan.mechanisms, plan.tail, plan.reads, plan.exports) == (("kv_shift",), 1, (), ())


def test_layer_without_heads_of_its_own_is_left_alone():
    plans = [LayerPlan(0, 2), LayerPlan(1, 0)]
    assert KVShift.plan({}, plans)[1] == plans[1]


# Start


def test_start_is_uniform_and_sums_to_one():
    heads = 4000
    module = KVShift({}, config(), LayerPlan(0, heads))
    for name in ("alpha", "beta"):
        current, previous = module.start(name, torch.Generator().manual_seed(5))
        assert torch.equal(previous, 1 - current)
        assert current.min() >= 0
        assert current.max() < 1
        assert (current.sort().values - torch.linspace(0, 1, heads)).abs().max() < 0.03


def test_model_starts_every_scalar_on_its_own():
    model = HeadwaterForCausalLM(config({"kv_shift": {}}))
    shifts = [layer.self_attn.mechanisms["kv_shift"] for layer in model.model.layers]
    current = torch.cat([weight[0] for shift in shifts for weight in (shift.alpha, shift.beta)])
    previous = torch.cat([weight[1] for shift in shifts for weight in (shift.alpha, shift.beta)])
    assert len(current.unique()) == 3 * 2 * 2
    assert torch.equal(previous, 1 - current)


# Options and precision


def test_unknown_option():
    with pytest.raises(HeadwaterError, match="'kv_shift' has no option 'windw'"):
        config({"kv_shift": {"windw": 2}})


@pytest.mark.parametrize("options", [True, 3, ["x"]])
def test_options_are_a_mapping(options):
    with pytest.raises(HeadwaterError, match="must be a mapping"):
        config({"kv_shift": options})


def test_no_options_may_be_written_as_none():
    assert config({"kv_shift": None}).mechanisms == {"kv_shift": {}}


def scalars(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".mechanisms." in name}


CASTS = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(bf16)": lambda model: model.to(torch.bfloat16),
    "to(dtype=fp16)": lambda model: model.to(dtype=torch.float16),
    "to(device, bf16)": lambda model: model.to("cpu", torch.bfloat16),
    "module": lambda model: model.model.layers.bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_scalars_stay_in_fp32_when_the_model_is_cast(cast):
    model = build({"kv_shift": {}}).float()
    before = scalars(model)
    cast(model)
    assert model.model.layers[0].mlp.up_proj.weight.dtype in (torch.bfloat16, torch.float16)
    for name, after in scalars(model).items():
        assert after.dtype == torch.float32
        assert torch.equal(after, before[name])


def test_scalars_stay_in_fp32_when_loaded_in_bf16(tmp_path):
    model = build({"kv_shift": {}}).float()
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    for name, after in scalars(loaded).items():
        assert after.dtype == torch.float32
        assert torch.equal(after, scalars(model)[name])


def test_bf16_model_saves_and_loads_its_fp32_scalars(tmp_path):
    model = build({"kv_shift": {}}).float().bfloat16()
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for (name, a), b in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def test_scalars_may_be_fp64():
    model = HeadwaterForCausalLM(config({"kv_shift": {}})).double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}


def test_fp64_model_saves_and_loads_its_scalars(tmp_path):
    model = build({"kv_shift": {}})
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    for name, after in scalars(loaded).items():
        assert torch.equal(after, scalars(model)[name]), name


def test_bf16_model_gives_its_scalars_fp32_gradients():
    model, ids = build({"kv_shift": {}}).bfloat16().train(), tokens(2, T)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        for weight in layer.self_attn.mechanisms["kv_shift"].parameters():
            assert weight.grad.dtype == torch.float32
            assert weight.grad.abs().min() > 0
