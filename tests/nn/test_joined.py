"""One product for layers of the same input, against one product each, in fp64; and where each must run alone."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import _dynamo, distributed, nn
from torch.distributed.fsdp import fully_shard

from conftest import assert_near, build, config, tokens
from headwater import HeadwaterForCausalLM
from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS
from headwater.models.compiling import compile_model
from headwater.models.decoding import Decoder
from headwater.nn.linear import join_linears
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater_lab.util.machine import c_compiler

NAMES = sorted(MECHANISMS.built_in)
THREE_INPUTS = {"depth_attention": {"queries": 3, "block": 9}}


def fits(mechanisms: dict, fields: dict | None = None) -> bool:
    try:
        plan_layers(config(mechanisms, **fields or {}))
    except HeadwaterError:
        return False
    return True


ALONE = [{}, THREE_INPUTS, *({name: {}} for name in NAMES)]
BIASES = [{}, {"gpt2": True}, {"qkv_bias": True, "mlp_bias": True}]
CELLS = [cell for cell in itertools.product(ALONE, BIASES) if fits(*cell)]
RECOMMENDED = PRESETS["headwater-base"].fields["mechanisms"]
PAIRS = [{a: {}, b: {}} for a, b in itertools.combinations(NAMES, 2) if fits({a: {}, b: {}})]


def name_of(mechanisms: dict) -> str:
    return "+".join(name + ("" if options in ({}, True) else "…") for name, options in mechanisms.items()) or "vanilla"


class Products:
    """A compiler that runs graphs as they are, and counts their linear layers: joined ones and all."""

    def __init__(self) -> None:
        self.joined = self.all = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        for node in itertools.chain.from_iterable(one.nodes for one in graphs):
            if node.target is torch._C._nn.linear:
                self.all += 1
                self.joined += node.args[1].target is torch.cat
        return graph.forward


def derive(
    model: HeadwaterForCausalLM, ids: torch.Tensor, whole: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a step, or its logits, and the gradients. The loss of logits is in fp64, the model's in fp32."""
    model.train().zero_grad()
    if whole:
        values = model(ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(values[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    else:
        values = loss = model(ids, labels=ids, skip_logits=True).loss
    loss.backward()
    return values.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compile_joined(model: HeadwaterForCausalLM, whole: bool = False) -> Products:
    products = Products()
    compile_model(model, products, join=True, whole=whole)
    return products


def assert_equal_step(
    mechanisms: dict, change=lambda model: None, whole: bool = False, compile=compile_joined, **fields
) -> Products:
    """A compiled step with joined products has the results of one that runs every layer alone."""
    ids, plain, model = tokens(2, 12), build(mechanisms, **fields), build(mechanisms, **fields)
    change(plain)
    change(model)
    products = compile(model, whole)
    (values, grads), (expected_values, expected) = derive(model, ids, whole), derive(plain, ids, whole)
    assert_near(values, expected_values, 1e-12)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        scale = grad.abs().max().item()
        assert (grads[name] - grad).abs().max().item() <= 1e-12 * max(scale, 1e-3), name
    return products


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("mechanisms", "fields"), CELLS, ids=name_of)
def test_training_is_the_same_with_each_mechanism(mechanisms, fields, whole):
    assert_equal_step(mechanisms, whole=whole, **fields)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("mechanisms", PAIRS, ids=name_of)
def test_training_is_the_same_with_pairs(mechanisms, whole):
    assert_equal_step(mechanisms, whole=whole)


@pytest.mark.slow  # ten seconds each
@pytest.mark.skipif(c_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("mechanisms", "join"),
    [*((cell, True) for cell in (*ALONE, *PAIRS[::40], RECOMMENDED)), ({}, False), (RECOMMENDED, False)],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "joined" if value else "plain",
)
def test_generated_code_of_a_whole_model_trains_the_same(mechanisms, join):
    few = {"num_hidden_layers": 2}
    assert_equal_step(
        mechanisms,
        whole=True,
        compile=lambda model, whole: compile_model(model, whole=whole, join=join),
        **few if fits(mechanisms, few) else {},
    )


@pytest.mark.parametrize(
    ("mechanisms", "joined"),
    [
        ({}, [2]),
        ({"pattention": {"attention_pairs": 8, "ffn_pairs": 16}}, [0]),
        ({"svformer": {}}, [2, 2]),  # the later layers join queries and keys
        (THREE_INPUTS, [2, 1]),  # after the first layer, queries, keys and values read different inputs
    ],
    ids=["vanilla", "pattention", "no values", "three inputs"],
)
def test_layers_join_what_reads_the_same_input(mechanisms, joined):
    products = assert_equal_step(mechanisms)
    assert products.joined == sum(joined)


def replace_linear(model: nn.Module, name: str, kind: type[nn.Linear]) -> None:
    """Put a layer of another class in the place of one, as quantizers and adapters do."""
    old = model.get_submodule(name)
    layer = kind(old.in_features, old.out_features, bias=old.bias is not None, dtype=old.weight.dtype)
    layer.load_state_dict(old.state_dict())
    model.set_submodule(name, layer)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def double_outputs(model: nn.Module, layer: str) -> None:
    model.get_submodule(layer).register_forward_hook(lambda module, inputs, y: 2 * y)


KEYS = "model.layers.0.self_attn.k_proj"
CHANGES = {
    "another class": lambda model: replace_linear(model, KEYS, Doubled),
    "a hook": lambda model: double_outputs(model, KEYS),
    "a pre-hook": lambda model: model.get_submodule(KEYS).register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule(KEYS)),
    "frozen": lambda model: model.get_submodule(KEYS).requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_layer_runs_alone(change):
    products = assert_equal_step({}, change, num_hidden_layers=1)
    assert products.joined == 1  # gate and up


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_changed_layer_decodes_alone(change):
    model, ids = build(), tokens(2, 9)
    change(model)
    expected = model(ids).logits
    with join_linears(model):
        assert model.model.layers[0].self_attn.joined is None
        assert model.model.layers[0].mlp.joined is not None
        assert_near(model(ids).logits, expected, 1e-12)


def test_adapters_run_alone():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)

    def wrapped() -> HeadwaterForCausalLM:
        torch.manual_seed(0)
        model = build()
        peft.get_peft_model(model, options)
        return model

    ids, plain, model = tokens(2, 12), wrapped(), wrapped()
    products = compile_joined(model)
    (loss, grads), (expected_loss, expected) = derive(model, ids), derive(plain, ids)
    assert products.joined == 0
    assert_near(loss, expected_loss, 1e-12)
    for name, grad in expected.items():
        assert_near(grads[name], grad, 1e-12)
    with torch.no_grad(), join_linears(model.eval()):
        assert_near(model(ids).logits, plain.eval()(ids).logits, 1e-12)


def test_evaluation_copies_no_weights():
    model, ids = build(num_hidden_layers=1), tokens(2, 9)
    products = compile_joined(model)
    with torch.no_grad():
        model(ids, use_cache=False)
    assert products.all > 0
    assert products.joined == 0


def test_recomputed_activations():
    model, ids = build().train(), tokens(2, 12)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    products = compile_joined(model)
    (_, grads), (_, expected) = derive(model, ids), derive(build(), ids)
    assert products.joined
    for name, grad in expected.items():
        assert_near(grads[name], grad, 1e-12)


def test_sharded_weights():
    """FSDP gathers a block's weights before the block runs."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, ids = build().train(), tokens(2, 12)
        products = compile_joined(model)
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        (_, grads), (_, expected) = derive(model, ids), derive(build(), ids)
        assert products.joined == 2
        for name, grad in expected.items():
            assert_near(grads[name].full_tensor(), grad, 1e-12)
        with torch.no_grad(), join_linears(model.eval()):
            assert all(block.self_attn.joined is None for block in model.model.layers)
    finally:
        distributed.destroy_process_group()


# Adjacent memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mechanisms", "fields"), CELLS, ids=name_of)
@torch.no_grad()
def test_adjacent_weights_give_the_same(mechanisms, fields):
    model, ids = build(mechanisms, **fields), tokens(2, 9)
    expected, weights = model(ids).logits, copy.deepcopy(model.state_dict())
    with join_linears(model):
        assert_near(model(ids).logits, expected, 1e-12)
    assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mechanisms", ALONE, ids=name_of)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_decoder_gives_the_same_tokens(mechanisms, compiled):
    _dynamo.reset()
    model, ids = build(mechanisms), tokens(2, 9)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    products = Products()
    decoder = Decoder(model, compiled, products, join=True)
    assert torch.equal(decoder(ids, max_new_tokens=8), expected)
    if compiled and not mechanisms:
        assert products.all == 3 * 4 + 1
    with _dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(decoder(ids, max_new_tokens=8), expected)
    next(model.model.layers[0].self_attn.parameters()).data.neg_()  # in place, as training changes it
    assert torch.equal(decoder(ids, max_new_tokens=8), Decoder(model)(ids, max_new_tokens=8))


def test_parameters_stay_what_they_were(tmp_path):
    model = build()
    old = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with torch.no_grad(), join_linears(model):
        memory = model.model.layers[0].self_attn.joined[0]
        assert memory.data_ptr() == old["model.layers.0.self_attn.q_proj.weight"].data_ptr()
    with join_linears(model):
        assert model.model.layers[0].self_attn.joined[0].data_ptr() == memory.data_ptr()  # moved once
    assert all(parameter is old[name] for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == old.keys()
    clone, ids = copy.deepcopy(model), tokens(2, 9)
    for other in (HeadwaterForCausalLM.from_pretrained(tmp_path), clone):
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, old[name]), name
    derive(model, ids)
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(clone(ids).logits, model.eval()(ids).logits)
        for changed in (model.to(torch.float32), clone.to(torch.float32)):
            expected = changed(ids).logits
            with join_linears(changed):
                assert_near(changed(ids).logits, expected, 1e-5)


def test_a_recorded_graph_is_not_replayed_on_moved_weights():
    model, ids = build(), tokens(2, 9)
    decoder = Decoder(model)
    decoder(ids, max_new_tokens=3)
    state = decoder.state
    decoder(ids, max_new_tokens=3)
    assert decoder.state is state
    Decoder(model, join=True)(ids, max_new_tokens=3)
    decoder(ids, max_new_tokens=3)
    assert decoder.state is not state


def test_autocast_casts_each_weight_once():
    """Joined in fp32, the weights would be written once more."""
    model, ids = build(num_hidden_layers=1).float().train(), tokens(2, 12)
    dtypes = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        joined = [node for node in graph.graph.nodes if node.target is torch.cat and node.kwargs == {}]
        dtypes.extend(part.meta["example_value"].dtype for node in joined for part in node.args[0])
        return graph.forward

    compile_model(model, backend, join=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, skip_logits=True).loss
        plain = build(num_hidden_layers=1).float().train()(ids, labels=ids).loss
    loss.backward()
    assert dtypes.count(torch.bfloat16) == 5
    torch.testing.assert_close(loss, plain, atol=0, rtol=1e-2)
