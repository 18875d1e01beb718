from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from conftest import assert_near, build, config, random, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, kernels
from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.kernels.fused_shift import TracedShift
from headwater.mechanisms.contract import QKV, Context
from headwater.mechanisms.kv_shift import KVShift, shift
from headwater.mechanisms.shift import dynamic_shift
from headwater.models.cache import HeadwaterLayer
from references import reference, shift_naively

B, K, T, D = 2, 3, 7, 4
REACH = torch.tensor([[0, 1, 2, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0]])


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weigh = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad((y * weigh).sum(), inputs)


def starts(reach: torch.Tensor) -> set[tuple[int, int]]:
    return {(b, t) for b, row in enumerate(reach.tolist()) for t, back in enumerate(row) if back == 0}


def mechanism(heads: int = K, value_heads: int | None = None, **options) -> KVShift:
    module = KVShift(heads, value_heads, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


# Values and gradients


@pytest.mark.parametrize("reach", [None, REACH], ids=["whole_rows", "documents"])
@pytest.mark.parametrize("length", [T, 2, 1])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_shift_equals_naive(reach, length, window):
    x, weight = random(B, K, length, D).requires_grad_(), random(window, K).requires_grad_()
    reach = None if reach is None else reach[:, :length]
    expected = shift_naively(x, weight, frozenset() if reach is None else starts(reach))
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
    assert "Shift" in type(shift(x, weight).grad_fn).__name__
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
    shifted = module.transform_qkv(QKV(q, k, v), Context([]))
    assert shifted.q is q
    assert_near(shifted.k, shift_naively(k, module.alpha), 1e-12)
    assert_near(shifted.v, shift_naively(v, module.beta), 1e-12)


def test_layer_without_values_has_no_beta():
    module, k, none = mechanism(value_heads=0), random(B, K, T, D), random(B, 0, T, D)
    assert dict(module.named_parameters()).keys() == {"alpha"}
    shifted = module.transform_qkv(QKV(k, k, none), Context([]))
    assert shifted.v is none
    assert_near(shifted.k, shift_naively(k, module.alpha), 1e-12)


@pytest.mark.parametrize("reach", [None, REACH], ids=["whole_rows", "documents"])
@pytest.mark.parametrize("chunks", [[T], [1] * T, [3, 1, 3]])
def test_chunks_with_a_tail_equal_one_row(chunks, reach):
    module, k, v = mechanism(), random(B, K, T, D), random(B, K, T, D)
    tail, parts, end = HeadwaterLayer(), [], 0
    for chunk in chunks:
        begin, end = end, end + chunk
        context = Context([], None if reach is None else reach[:, begin:end], tail)
        parts.append(module.transform_qkv(QKV(k, k[:, :, begin:end], v[:, :, begin:end]), context))
    border = frozenset() if reach is None else starts(reach)
    assert_near(torch.cat([part.k for part in parts], 2), shift_naively(k, module.alpha, border), 1e-12)
    assert_near(torch.cat([part.v for part in parts], 2), shift_naively(v, module.beta, border), 1e-12)


@pytest.mark.parametrize("window", [2, 4])
def test_plan_keeps_the_raw_tokens_of_every_layer(window):
    for plan in plan_layers(config({"kv_shift": {"window": window}})):
        assert (plan.acts, plan.reads, plan.exports) == (((Stage.QKV, "kv_shift"),), (), ())
        assert plan.tails == (("k", window - 1, "kv_shift"), ("v", window - 1, "kv_shift"))
        assert plan.lookback == window - 1


@pytest.mark.parametrize(
    ("options", "tails"),
    [
        ({"values": False}, "k"),
        ({"keys": False}, "v"),
        ({"queries": True}, "kvq"),
        ({"queries": True, "keys": False}, "vq"),
    ],
)
def test_plan_keeps_only_what_is_shifted(options, tails):
    for plan in plan_layers(config({"kv_shift": options})):
        assert plan.tails == tuple((part, 1, "kv_shift") for part in tails)


def test_scalars_are_built_for_stored_heads_alone():
    model = HeadwaterForCausalLM(config({"kv_shift": {}, "skip_layer": {}, "svformer": {}}))
    shapes = [
        {name: tuple(p.shape) for name, p in layer.self_attn.mechanisms["kv_shift"].named_parameters()}
        for layer in model.model.layers
    ]
    assert shapes == [{"alpha": (2, 2), "beta": (2, 2)}, {"alpha": (2, 2)}, {"alpha": (2, 1)}]


def test_layer_without_heads_of_its_own_is_left_alone():
    plans = plan_layers(config({"kv_shift": {}, "skip_layer": {"layers": 1, "heads": 4, "source": "alias"}}))
    assert [plan.acts for plan in plans] == [((Stage.QKV, "kv_shift"),), (), ()]


# The other forms


@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("reach", [None, REACH, REACH[:1].to(torch.int8)], ids=["whole_rows", "documents", "one_row"])
@pytest.mark.parametrize("length", [T, 2])
def test_form_for_the_compiler_equals_naive(window, reach, length):
    x, weight = random(B, K, length, D).requires_grad_(), random(window, K).requires_grad_()
    reach = None if reach is None else reach[:, :length]
    expected = shift_naively(x, weight, frozenset() if reach is None else starts(reach.expand(B, -1)))
    actual = TracedShift.apply(x, weight, reach)
    assert_near(actual, expected, 1e-12)
    for a, e in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
        assert_near(a, e, 1e-12)


def test_compiled_shift_keeps_no_shifted_copy():
    """In bf16 with taps in fp32, values and gradients in the dtypes of what they belong to."""
    x, weight = random(B, K, T, D).bfloat16().requires_grad_(), random(2, K).float().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = torch.compile(shift, backend="aot_eager", fullgraph=True)(x, weight, REACH)
    assert sum(t.numel() == x.numel() for t in kept) == 1
    gx, gw = gradients(y, x, weight)
    assert (y.dtype, gx.dtype, gw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    with kernels.disable_kernels():
        for a, e in zip((gx, gw), gradients(shift(x, weight, REACH), x, weight), strict=True):
            assert_near(a.double(), e.double(), 0.02 * e.abs().max().item())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_dtype_it_has_all_gradients(dynamic):
    """In PyTorch 2.11 a cast to the same dtype, as the result of an autograd function, lost them."""
    inputs = [random(B, K, T, D).requires_grad_(), random(2, K).requires_grad_()]
    if dynamic:
        inputs.append(random(2, B, K, T, 1).requires_grad_())
    form = dynamic_shift if dynamic else shift
    actual = gradients(torch.compile(form, backend="aot_eager", fullgraph=True)(*inputs), *inputs)
    with kernels.disable_kernels():
        for a, e in zip(actual, gradients(form(*inputs), *inputs), strict=True):
            assert_near(a, e, 1e-12)


@pytest.mark.slow
def test_transforms_inside_compiled_code():
    x, weight = random(3, B, K, T, D).requires_grad_(), random(2, K).requires_grad_()

    def rows(x):
        return torch.func.vmap(lambda one: shift(one, weight))(x)

    def tangent(x):
        return torch.func.jvp(lambda one: shift(one, weight), (x,), (x,))[1]

    for function, given in ((rows, x), (tangent, x[0].detach())):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_near(compiled(given), function(given), 1e-12)


@pytest.mark.parametrize("window", [3, 4])
def test_longer_windows_pass_gradcheck(window):
    x, weight = random(B, K, 5, 2).requires_grad_(), random(window, K).requires_grad_()
    assert torch.autograd.gradcheck(shift, (x, weight))


def test_window_longer_than_the_row():
    x, weight = random(B, K, 2, D), random(4, K)
    assert_near(shift(x, weight), shift_naively(x, weight), 1e-12)


@pytest.mark.parametrize("variant", ["gate", "clamped"])
def test_tied_variants(variant):
    module, k = mechanism(variant=variant), random(B, K, T, D)
    with torch.no_grad():
        module.alpha.copy_(torch.tensor([-0.5, 0.25, 1.75]))
    first = module.alpha.sigmoid() if variant == "gate" else torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert_near(module(k, k)[0], shift_naively(k, torch.stack((first, 1 - first))), 1e-12)


def test_queries_are_shifted_by_their_own_scalars():
    module, k, q = mechanism(query_heads=2 * K), random(B, K, T, D), random(B, 2 * K, T, D)
    assert_near(module(k, k, q)[2], shift_naively(q, module.gamma), 1e-12)


# Start


def test_start_is_uniform_and_sums_to_one():
    heads = 4000
    module = KVShift(heads)
    for name in ("alpha", "beta"):
        current, previous = module.initial_value(name, torch.Generator().manual_seed(5))
        assert torch.equal(previous, 1 - current)
        assert current.min() >= 0
        assert current.max() < 1
        assert (current.sort().values - torch.linspace(0, 1, heads)).abs().max() < 0.03


def test_start_of_longer_windows_is_normalized_once():
    taps = KVShift(4000, window=3).initial_value("alpha", torch.Generator().manual_seed(5))
    assert_near(taps.sum(0), torch.ones(4000), 1e-6)
    assert_near(taps.mean(1), torch.full((3,), 1 / 3), 0.01)
    assert taps.min() >= 0


@pytest.mark.parametrize("variant", ["gate", "clamped"])
def test_tied_variants_start_uniform(variant):
    module = KVShift(4000, variant=variant)
    module.reset_parameters(torch.Generator().manual_seed(5))
    current, previous = module.taps("k")
    assert_near(current + previous, torch.ones(4000), 1e-6)
    assert (current.sort().values - torch.linspace(0, 1, 4000)).abs().max() < 0.03


@pytest.mark.parametrize(
    ("given", "identity"),
    [
        ({}, {"init": "identity"}),
        ({"window": 4, "init": "identity"}, {"window": 4, "init": "identity"}),
        ({"variant": "clamped"}, {"variant": "clamped", "init": "identity"}),
        ({"variant": "gate"}, None),
        ({"init": "random"}, None),
    ],
)
def test_options_for_an_identity_start(given, identity):
    assert KVShift.find_identity_options(given) == identity


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"variant": "clamped"}])
def test_identity_start_changes_nothing(options):
    ids = tokens(2, T)
    with_shift = HeadwaterForCausalLM(config({"kv_shift": {"init": "identity", "queries": True, **options}})).eval()
    assert torch.equal(with_shift(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)


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


@pytest.mark.parametrize("options", [True, 3, ["x"], [], False])
def test_options_are_a_mapping(options):
    with pytest.raises(HeadwaterError, match="must be a mapping"):
        config({"kv_shift": options})


def test_no_options_may_be_written_as_none():
    assert config({"kv_shift": None}).mechanisms == config({"kv_shift": {}}).mechanisms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": False, "values": False}, "shifts nothing"),
        ({"variant": "half_heads", "init": "identity"}, "cannot start as the identity"),
        ({"window": 1}, "at least 2"),
        ({"window": 3, "variant": "gate"}, "two taps"),
        ({"variant": "gate", "init": "identity"}, "cannot start as the identity"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"kv_shift": options})


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


def test_wrong_options_say_what_is_right():
    for options, message in (
        ({"variant": "gat"}, "variant must be 'free', 'gate', 'clamped', 'half_heads' or 'half_channels', not 'gat'."),
        ({"window": "3"}, "window must be a whole number, not '3'."),
        ({"keys": 1}, "keys must be true or false, not 1."),
    ):
        with pytest.raises(HeadwaterError, match=message):
            config({"kv_shift": options})


def test_plain_module_refuses_what_it_cannot_do():
    for options in (dict(variant="x"), dict(window=3, variant="gate"), dict(init="x"), dict(window=1)):
        with pytest.raises(HeadwaterError):
            KVShift(4, **options)


@pytest.mark.parametrize("shape", [(1, 5, 2, 8), (2, 5, 8), (1, 1, 5, 2)])
@pytest.mark.parametrize("variant", ["free", "half_channels"])
def test_plain_module_refuses_other_shapes(variant, shape):
    """Among them [batch, tokens, heads, width], and one head, which two weights would take for two channels."""
    with pytest.raises(HeadwaterError, match=r"takes keys \[batch, 2, tokens, width\], not \["):
        KVShift(2, variant=variant)(torch.zeros(shape), torch.zeros(shape))


# Halves


@torch.no_grad()
def test_half_of_the_heads_is_zayas_value_path():
    """At once and in chunks, with their cache on their side and ours on ours."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    settings = zaya.ZayaConfig(num_hidden_layers=1, **sizes)
    theirs, ours = zaya.ZayaCCAProjection(settings, 0), KVShift(0, 4, variant="half_heads")
    x = torch.randn(2, 9, 32)

    def shifted(part, tail=None):
        v = torch.cat((theirs.v_proj_current(part), theirs.v_proj_delayed(part)), -1)
        v = v.unflatten(2, (4, 8)).transpose(1, 2)
        return ours(v, v, tail=tail)[1].transpose(1, 2)

    assert_near(shifted(x), theirs(x, None)[2], 5e-6)
    tail, cache, parts = HeadwaterLayer(), DynamicCache(config=settings), x.split([4, 1, 1, 3], 1)
    expected = torch.cat([theirs(part, cache)[2] for part in parts], 1)
    assert_near(torch.cat([shifted(part, tail) for part in parts], 1), expected, 5e-6)


def test_half_of_the_channels_are_those_without_rope():
    """Of keys, after their norm, as in modded-nanogpt; at a document's start there is nothing."""
    shift, k = KVShift(2, 0, variant="half_channels"), torch.randn(1, 2, 5, 8)
    made, v = shift(k, k, reach=torch.tensor([[0, 1, 0, 1, 2]]))
    assert torch.equal(v, k)
    assert torch.equal(made[..., :4], k[..., :4])
    assert torch.equal(made[:, :, [1, 3, 4], 4:], k[:, :, [0, 2, 3], 4:])
    assert not made[:, :, [0, 2], 4:].any()
    assert not list(shift.parameters())


def test_half_of_the_heads_are_those_of_the_model():
    """Not of those that a layer stores: skip-layer attention leaves the last layers the first head alone."""
    made = config({"skip_layer": {"layers": 1, "heads": 2}, "kv_shift": {"variant": "half_heads"}})
    assert [plan.k_heads for plan in plan_layers(made)] == [(0, 1), (0, 1), (0,)]
    assert [plan.at(Stage.QKV) for plan in plan_layers(made)] == [("kv_shift",), ("kv_shift",), ()]
    options = made.mechanisms["kv_shift"]
    assert not KVShift.splits_heads(options)
    made = config({"kv_shift": options}, num_key_value_heads=4)
    plan = replace(plan_layers(made)[2], k_heads=(0, 1, 2), v_heads=())
    assert KVShift.build_module(options, made, plan).show_windows()["k"].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize("options", [{}, {"keys": False, "values": False, "queries": True}])
def test_half_of_the_heads_that_a_layer_has(heads, options):
    """In layers with other heads than the model."""
    fields = dict(num_attention_heads=heads, num_key_value_heads=heads)
    sizes = dict(num_hidden_layers=2, num_key_value_heads=4, sliding_window=5, sliding_layers=[1])
    model, ids = build({"kv_shift": {"variant": "half_heads"} | options}, **sizes, sliding_fields=fields), tokens(1, 7)
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)
    shift = model.model.layers[1].self_attn.mechanisms["kv_shift"]
    assert all(shift.current_heads[part] == size // 2 for part, size in shift.sizes.items() if size)


def test_half_of_the_heads_needs_an_even_number_in_every_layer():
    for fields, name in (
        (dict(num_attention_heads=3, num_key_value_heads=3), "num_key_value_heads of layer 1 is 3"),
        (dict(num_key_value_heads=1), "num_key_value_heads of layer 1 is 1"),
    ):
        with pytest.raises(HeadwaterError, match=name):
            config({"kv_shift": {"variant": "half_heads"}}, sliding_window=5, sliding_layers=[1], sliding_fields=fields)
