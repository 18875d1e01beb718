"""What is done to what a head has read: exclusive self attention and output gates."""

import pytest
import torch

from conftest import assert_near, build, config, random, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Source, Stage
from headwater.config.planner import plan_layers
from headwater.mechanisms import Exclusive, OutputGate


@pytest.mark.parametrize("learned", [False, True])
def test_exclusive_removes_what_lies_along_the_own_value(learned):
    out, own, removes = random(2, 5, 6, 4), random(2, 3, 5, 4), Exclusive(6 * learned).double()
    if learned:
        removes.alpha.data.normal_()
    left = removes(out, own)
    for head in range(6):
        unit = torch.nn.functional.normalize(own[:, head // 2], dim=-1)
        strength = removes.alpha[head].tanh() if learned else 1.0
        expected = out[:, :, head] - strength * (out[:, :, head] * unit).sum(-1, keepdim=True) * unit
        assert_near(left[:, :, head], expected, 1e-12)


def test_exclusive_removes_nothing_where_a_value_is_zero():
    out, own = random(1, 3, 2, 4).requires_grad_(), random(1, 2, 3, 4)
    own[:, :, 1] = 0
    own.requires_grad_()
    left = Exclusive()(out, own)
    assert torch.equal(left[:, 1], out[:, 1])
    left.sum().backward()
    assert own.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exclusive_leaves_nothing_of_a_token_that_reads_itself_alone(dtype):
    """Not even rounding errors, which an output map that norms its scores would make large."""
    own = random(3, 2, 9, 64).to(dtype)
    assert not Exclusive()(own.transpose(1, 2).repeat_interleave(2, dim=2), own).any()
    model, ids = build({"pattention": {}, "exclusive": {}}).to(dtype), tokens(2, 5)
    seen = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids, use_cache=False)
    assert not seen[0][:, 0].any()
    assert seen[0][:, 1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exclusive_in_half_precision(dtype):
    """Values whose squares float16 cannot hold."""
    out, own = random(1, 7, 4, 64), 100 * random(1, 2, 7, 64)
    expected = Exclusive()(out.to(dtype).double(), own.to(dtype).double())
    left = Exclusive(4).to(dtype)
    left.alpha.data.fill_(20.0)
    assert left.alpha.dtype == torch.float32
    assert_near(left(out.to(dtype), own.to(dtype)).double(), expected, 2e-2)


def test_exclusive_takes_the_values_that_a_head_attends_to():
    plans = plan_layers(config({"exclusive": {}, "skip_layer": {"layers": 1}}))
    assert plans[2].reads[-1] == Source("local", "v", 1)
    assert Source("local", "v", 1) in plans[1].exports
    shared = plan_layers(config({"svformer": {}, "exclusive": {}}))
    assert all(Source("local", "v", 0) in plan.reads for plan in shared[1:])


def test_exclusive_acts_in_the_layers_that_are_named():
    model = build({"exclusive": {"layers": [1], "learnable": True}})
    assert [plan.at(Stage.HEAD_OUTPUTS) for plan in model.plans] == [(), ("exclusive",), ()]
    assert [name for name, _ in model.named_parameters() if "exclusive" in name] == [
        "model.layers.1.self_attn.mechanisms.exclusive.alpha"
    ]
    shown = model.model.layers[1].self_attn.mechanisms["exclusive"].show_scalars(model.plans[1], {})
    assert shown["α"].owner == "query head"
    assert shown["α"].values.abs().max() < 1
    model(tokens(1, 3))


def test_exclusive_leaves_something_of_the_first_token():
    with pytest.raises(HeadwaterError, match="first_residual"):
        config({"exclusive": {}}, first_residual=False)
    config({"exclusive": {"learnable": True}}, first_residual=False)
    config({"exclusive": {"layers": [1, 2]}}, first_residual=False)


@pytest.mark.parametrize(("layers", "message"), [([3], "between 0 and 2"), ([-1], "between 0 and 2"), ([], "is empty")])
def test_layers_that_are_not_there(layers, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"exclusive": {"layers": layers}})


@pytest.mark.parametrize(("by", "outputs"), [("head", 6), ("channel", 24)])
def test_a_gate_scales_what_a_head_has_read(by, outputs):
    x, out, gates = random(2, 5, 8), random(2, 5, 6, 4), OutputGate(3, outputs, scale=1.5).double()
    opened = 1.5 * (x[..., :3] @ gates.gate.weight.T).sigmoid()
    opened = opened[..., None] if by == "head" else opened.view(2, 5, 6, 4)
    assert_near(gates(out, x), out * opened, 1e-12)


def test_a_gate_reads_the_normed_input_that_attention_has():
    """Also where other mechanisms change what goes in."""
    model, ids = build({"value_residual": {"target": "hidden"}, "output_gate": {}}), tokens(1, 6)
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[1].self_attn
    layer.q_proj.register_forward_pre_hook(lambda _, given: seen.update(queries=given[0]))
    layer.mechanisms["output_gate"].register_forward_pre_hook(lambda _, given: seen.update(gate=given[1]))
    model(ids)
    assert torch.equal(seen["queries"], seen["gate"])


def test_a_gate_that_starts_at_zero_halves_everything():
    model = HeadwaterForCausalLM(config({"output_gate": {"init": "zero"}}))
    gates = model.model.layers[0].self_attn.mechanisms["output_gate"]
    assert not gates.gate.weight.any()
    out = random(1, 2, 4, 8).float()
    assert torch.equal(gates(out, torch.randn(1, 2, 32)), out / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels must be from 1 to hidden_size 32, not 0"),
        ({"channels": 33}, "not 33"),
        ({"scale": 0.0}, "scale must be above zero"),
        ({"layers": [5]}, "between 0 and 2"),
    ],
)
def test_contradictory_gates(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"output_gate": options})
