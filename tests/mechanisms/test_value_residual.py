import pytest
import torch

from conftest import assert_near, build, config, random, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Source, Stage
from headwater.config.planner import plan_layers
from headwater.mechanisms.contract import QKV, Context
from headwater.mechanisms.value_residual import PlusWeights, ValueResidual
from headwater.testing import naive
from references import reference

FIRST = Source("raw", "v", 0)
MODES = ["identity", "learnable"]


def mechanism(mode: str) -> ValueResidual:
    module = ValueResidual(mode, reads=(FIRST,), slots=((0, None),)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def expected_values(module: ValueResidual, first: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    weights = (0.5, 0.5) if module.lambdas is None else module.lambdas
    return naive.mix(weights, (first, own))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [5, 1])
def test_values_and_gradients_equal_naive(mode, length):
    module = mechanism(mode)
    first, own = (random(2, 3, length, 4).requires_grad_() for _ in range(2))
    inputs = [first, own, *module.parameters()]
    actual = module.transform_qkv(QKV(own, own, own), Context([first])).v
    expected = expected_values(module, first, own)
    weigh = random(*actual.shape)
    assert_near(actual, expected, 1e-12)
    for a, e in zip(*(torch.autograd.grad((y * weigh).sum(), inputs) for y in (actual, expected)), strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_non_contiguous_values(mode):
    module, first, own = mechanism(mode), random(2, 5, 3, 4).transpose(1, 2), random(2, 5, 3, 4).transpose(1, 2)
    actual = module.transform_qkv(QKV(own, own, own), Context([first])).v
    assert_near(actual, expected_values(module, first, own), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_no_new_tokens(mode):
    empty = random(2, 3, 0, 4)
    assert mechanism(mode).transform_qkv(QKV(empty, empty, empty), Context([empty])).v.shape == empty.shape


@pytest.mark.parametrize("mode", MODES)
def test_queries_and_keys_are_left_alone(mode):
    q, k, v = random(2, 4, 5, 4), random(2, 2, 5, 4), random(2, 2, 5, 4)
    qkv = mechanism(mode).transform_qkv(QKV(q, k, v), Context([v]))
    assert qkv.q is q
    assert qkv.k is k


@pytest.mark.parametrize("mode", MODES)
def test_values_keep_their_precision(mode):
    first, own = (random(2, 3, 5, 4).bfloat16() for _ in range(2))
    module = mechanism(mode).float()
    assert module.transform_qkv(QKV(own, own, own), Context([first])).v.dtype == torch.bfloat16


# In a model


def mixes(model: torch.nn.Module) -> list[ValueResidual]:
    return [module for module in model.modules() if isinstance(module, ValueResidual)]


def test_first_layer_has_no_mix_and_hands_on_its_values():
    first, *rest = plan_layers(config({"value_residual": {}}))
    assert (first.acts, first.reads, first.exports) == ((), (), (FIRST,))
    for plan in rest:
        assert (plan.acts, plan.reads, plan.exports, plan.tails) == (((Stage.QKV, "value_residual"),), (FIRST,), (), ())


def acting(**changes) -> list[int]:
    """The layers of an eight-layer model that a value residual acts in."""
    return [plan.index for plan in plan_layers(config(num_hidden_layers=8, **changes)) if plan.acts]


def test_receiving_layers():
    assert acting(mechanisms={"value_residual": {}}) == [1, 2, 3, 4, 5, 6, 7]
    assert acting(mechanisms={"value_residual": {"mode": "sparse"}}) == [5, 6, 7]
    assert acting(mechanisms={"value_residual": {"source": 3}}) == [4, 5, 6, 7]
    assert acting(mechanisms={"value_residual": {"layers": [6]}}) == [6]
    # A layer without values of its own has nothing to mix into.
    assert acting(mechanisms={"svformer": {"layers": [2, 3]}, "value_residual": {}}) == [1, 4, 5, 6, 7]


def test_fewer_values_take_their_own_heads_of_the_first():
    model = HeadwaterForCausalLM(config({"skip_layer": {}, "value_residual": {}}))
    assert [[heads for _, heads in mix.slots] for mix in mixes(model)] == [[None], [slice(0, 1)]]


def test_fixed_weights():
    first, own = random(2, 3, 5, 4), random(2, 3, 5, 4)
    for mode, weights in {"identity": (0.5, 0.5), "constant": (2, 1), "sparse": (5, 1)}.items():
        assert_near(ValueResidual(mode)(own, first), weights[0] * first + weights[1] * own, 1e-12)
    assert_near(ValueResidual("constant", 0.3)(own, first), 0.3 * first + own, 1e-12)


def test_dense_starts_as_its_own_value():
    model, ids = HeadwaterForCausalLM(config({"value_residual": {"mode": "dense"}})).eval(), tokens(2, 6)
    assert [mix.lambdas.tolist() for mix in mixes(model)] == [[0, 1], [0, 0, 1]]
    assert torch.equal(model(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)


def test_the_recursive_dense_form_mixes_what_earlier_layers_have_mixed():
    """A layer after an earlier one whose own values weigh nothing reads the first layer's through it."""
    options = {"value_residual": {"mode": "dense", "recursive": True}}
    model, ids = HeadwaterForCausalLM(config(options)).eval(), tokens(2, 6)
    first = HeadwaterForCausalLM(config({"value_residual": {"mode": "dense"}})).eval()
    first.load_state_dict(model.state_dict())
    with torch.no_grad():
        for of, weights in ((model, [0.0, 0.5, 1.0]), (first, [1.5, 0.0, 1.0])):
            early, late = (mix.lambdas for mix in mixes(of))
            early.copy_(torch.tensor([3.0, 0.0]))
            late.copy_(torch.tensor(weights))
        assert_near(model(ids).logits, first(ids).logits, 1e-5)
    start = HeadwaterForCausalLM(config(options)).eval()
    assert torch.equal(start(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("uniform", [8 / 7] * 7),
        ("ramp", [8 * depth / 28 for depth in range(1, 8)]),
        ("depth", [8 * 2.718281828**depth / sum(2.718281828**i for i in range(2, 9)) for depth in range(2, 9)]),
    ],
)
def test_plus_shares_the_depth_among_the_receivers(init, expected):
    model = HeadwaterForCausalLM(
        config({"value_residual": {"mode": "learnable_plus", "plus_init": init}}, num_hidden_layers=8)
    )
    weights = model.model.mechanisms["value_residual"]
    assert isinstance(weights, PlusWeights)
    assert_near(weights(), torch.tensor(expected), 1e-5)
    assert [mix.lambdas.tolist() for mix in mixes(model)] == [[0.5]] * 7


@pytest.mark.parametrize("order", [["kv_shift", "value_residual"], ["value_residual", "kv_shift"]])
def test_first_values_are_raw(order):
    """What layer 0 hands on is its projection, whatever mechanism changes its own values."""
    model, ids = shared({name: {} for name in order}), tokens(2, 6)
    layer = model.model.layers[0]
    normed = layer.input_layernorm(model.model.embed_tokens(ids))
    handed_on = layer.self_attn(normed)[2]  # after its output and its weights
    projected = layer.self_attn.v_proj(normed).view(2, 6, 2, 8).transpose(1, 2)
    assert torch.equal(handed_on, projected)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_reaches_the_first_values(mode):
    """Through later layers alone: the first layer's own attention output is cut off."""
    model, ids = build({"value_residual": {"mode": mode}}), tokens(2, 6)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad.abs().max() > 1e-6


def test_learnable_starts_at_one_half_each():
    model = HeadwaterForCausalLM(config({"value_residual": {}}))
    assert [mix.lambdas.tolist() for mix in mixes(model)] == [[0.5, 0.5]] * 2


def test_identity_has_no_parameters():
    vanilla = HeadwaterForCausalLM(config())
    identity = HeadwaterForCausalLM(config({"value_residual": {"mode": "identity"}}))
    assert identity.state_dict().keys() == vanilla.state_dict().keys()


def test_learnable_starts_as_identity():
    ids = tokens(2, 6)
    learnable, identity = (HeadwaterForCausalLM(config({"value_residual": {"mode": mode}})).eval() for mode in MODES)
    assert torch.equal(learnable(ids).logits, identity(ids).logits)


@pytest.mark.parametrize("target", ["values", "queries", "keys", "hidden"])
def test_identity_start_leaves_the_model_as_it_is(target):
    ids, options = tokens(2, 6), {"mode": "learnable", "init": "identity", "target": target}
    model = HeadwaterForCausalLM(config({"value_residual": options})).eval()
    assert {tuple(mix.lambdas.tolist()) for mix in mixes(model)} == {(0, 1)}
    assert torch.equal(model(ids).logits, HeadwaterForCausalLM(config()).eval()(ids).logits)


@pytest.mark.parametrize(
    ("given", "identity"),
    [
        ({}, {"mode": "learnable", "init": "identity"}),
        ({"target": "keys"}, {"target": "keys", "mode": "learnable", "init": "identity"}),
        ({"mode": "learnable", "source": 1}, {"mode": "learnable", "source": 1, "init": "identity"}),
        ({"mode": "dense"}, {"mode": "dense"}),
        *(({"mode": mode}, None) for mode in ("identity", "constant", "sparse", "learnable_plus")),
        ({"target": "hidden", "weight": 0.5}, None),
        ({"init": "half"}, None),
    ],
)
def test_options_for_an_identity_start(given, identity):
    assert ValueResidual.find_identity_options(given) == identity


def test_the_start_is_written_into_the_config():
    for options, init in (({}, "half"), ({"mode": "dense"}, None), ({"target": "keys"}, None)):
        assert config({"value_residual": options}).mechanisms["value_residual"]["init"] == init


# Options and precision


def test_default_mode_is_written_into_the_config():
    for target, mode in {
        "values": "learnable",
        "queries": "identity",
        "keys": "identity",
        "probabilities": "identity",
        "hidden": "constant",
    }.items():
        assert config({"value_residual": {"target": target}}).mechanisms["value_residual"]["mode"] == mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dense", "init": "identity"}, "mode 'dense' has no init"),
        ({"source": 3}, "source must be a layer from 0 to 2"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [0]}, "layer 0 cannot receive from layer 0"),
        ({"layers": [3]}, "between 1 and 2"),
        ({"weight": 2.0}, "has no weight"),
        ({"mode": "dense", "target": "keys"}, "only to values"),
        ({"mode": "dense", "source": 1}, "leave source out"),
        ({"recursive": True}, "mode 'learnable' has no recursive"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"value_residual": options})


def test_probabilities_need_the_eager_kernel():
    assert (
        HeadwaterForCausalLM(config({"value_residual": {"target": "probabilities"}})).config._attn_implementation
        == "eager"
    )
    with pytest.raises(HeadwaterError, match="attn_implementation eager only, not sdpa"):
        HeadwaterForCausalLM(config({"value_residual": {"target": "probabilities"}}, attn_implementation="sdpa"))


def test_alibi_needs_a_kernel_that_takes_a_bias():
    assert HeadwaterForCausalLM(config(position="alibi")).config._attn_implementation == "sdpa"
    for kernel in ("flash_attention_2", "flex_attention"):
        with pytest.raises(
            HeadwaterError, match=f"ALiBi works with attn_implementation sdpa, eager or matmul only, not {kernel}"
        ):
            HeadwaterForCausalLM(config(position="alibi", attn_implementation=kernel))


def test_unknown_option_names_the_nearest():
    with pytest.raises(HeadwaterError, match="has no option 'mod'; did you mean 'mode'"):
        config({"value_residual": {"mod": "identity"}})


@pytest.mark.parametrize("mode", ["identty", 1, True])
def test_unknown_mode(mode):
    with pytest.raises(HeadwaterError, match="value_residual"):
        config({"value_residual": {"mode": mode}})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalars_stay_in_fp32_when_the_model_is_cast(dtype):
    model = build({"value_residual": {}}).float()
    before = [mix.lambdas.clone() for mix in mixes(model)]
    model.to(dtype)
    assert model.lm_head.weight.dtype == dtype
    for mix, old in zip(mixes(model), before, strict=True):
        assert mix.lambdas.dtype == torch.float32
        assert torch.equal(mix.lambdas, old)


def test_scalars_stay_in_fp32_when_loaded_in_bf16(tmp_path):
    model = build({"value_residual": {}}).float()
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for a, b in zip(mixes(loaded), mixes(model), strict=True):
        assert a.lambdas.dtype == torch.float32
        assert torch.equal(a.lambdas, b.lambdas)


def test_bf16_model_trains():
    model, ids = build({"value_residual": {}}).bfloat16().train(), tokens(2, 6)
    model(ids, labels=ids).loss.backward()
    for mix in mixes(model):
        assert mix.lambdas.grad.dtype == torch.float32
        assert mix.lambdas.grad.abs().min() > 0


# Beside mechanisms that share keys and values


@pytest.mark.parametrize(
    "mechanisms",
    [
        {"svformer": {"layers": [5]}, "value_residual": {"source": 5}},
        {"svformer": {"layers": [5]}, "skip_layer": {"layers": 1, "heads": 2}, "value_residual": {"source": 5}},
        {"svformer": {"share": "keys", "layers": [5]}, "value_residual": {"target": "keys", "source": 5}},
    ],
)
def test_a_source_without_values_of_its_own_is_refused(mechanisms):
    with pytest.raises(HeadwaterError, match=r"layer 5 does not make .* choose another source"):
        config(mechanisms, num_hidden_layers=8)


@pytest.mark.parametrize(
    "mechanisms",
    [
        {"skip_layer": {"layers": 1, "heads": 2}, "svformer": {"layers": [5]}, "value_residual": {"mode": "dense"}},
        {
            "value_residual": {"mode": "dense"},
            "skip_layer": {"layers": 2, "heads": 4},
            "svformer": {"layers": [2]},
        },
        {"skip_layer": {"layers": 1, "heads": 2}, "value_residual": {"mode": "dense", "recursive": True}},
        {"kv_shift": {}, "value_residual": {"mode": "dense", "recursive": True}},
        {"skip_layer": {"heads": 4}, "value_residual": {"mode": "learnable_plus"}},
        {"skip_layer": {"heads": 4}, "value_residual": {"mode": "sparse"}},
    ],
)
def test_values_that_are_only_partly_there(mechanisms):
    model, ids = build(mechanisms, num_hidden_layers=8, position="none"), tokens(1, 6)
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)


def test_plus_divides_its_budget_among_those_that_receive():
    model = HeadwaterForCausalLM(
        config({"skip_layer": {"heads": 4}, "value_residual": {"mode": "learnable_plus"}}, num_hidden_layers=8)
    )
    assert model.model.mechanisms["value_residual"].layers == [1, 2, 3, 4, 5]
    with pytest.raises(HeadwaterError, match="there is only layer 3; use 'learnable'"):
        config({"value_residual": {"mode": "learnable_plus", "layers": [3]}}, num_hidden_layers=8)


def test_sparse_takes_the_last_that_have_values():
    assert acting(mechanisms={"skip_layer": {"heads": 4}, "value_residual": {"mode": "sparse"}}) == [3, 4, 5]


@pytest.mark.parametrize("source", [7, 0])
def test_no_layer_to_receive(source):
    with pytest.raises(HeadwaterError, match="no layer comes after layer"):
        config({"value_residual": {"source": source}}, num_hidden_layers=source + 1)


# As a plain module


def test_plain_module_refuses_what_it_cannot_do():
    x = torch.randn(2, 3, 4, 5)
    for make in (
        lambda: ValueResidual("nonsense"),
        lambda: ValueResidual("identity", weight=0.3),
        lambda: ValueResidual("dense", init="identity"),
        lambda: ValueResidual(init="nonsense"),
        lambda: ValueResidual("learnable", sources=3),
        lambda: ValueResidual()(x),
        lambda: ValueResidual()(x, x, weight=torch.ones(())),
        lambda: ValueResidual("learnable_plus")(x, x),
        lambda: PlusWeights(range(3), 8),
    ):
        with pytest.raises(HeadwaterError):
            make()


def test_what_another_mechanism_reads_is_not_mixed_in():
    mechanisms = {
        "value_residual": {"mode": "dense"},
        "skip_layer": {"layers": 1, "heads": 2},
        "svformer": {"layers": [5]},
        "neutreno": {},
    }
    model, ids = build(mechanisms, num_hidden_layers=8, position="none"), tokens(1, 6)
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)
