"""Layers of one kind share one compiled graph: how many there are does not depend on the depth."""

import pytest
import torch
from torch import _dynamo, distributed
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

from conftest import build, tokens
from headwater import kernels
from headwater.models import compiling
from headwater.models.compiling import compile_blocks, compile_model
from headwater_lab.util.machine import c_compiler

PATTENTION = {"pattention": {"attention_pairs": 8, "ffn_pairs": 16}}
# The different layers of each: the first makes what others read.
COMBINATIONS = {
    "vanilla": ({}, 1),
    "shift": ({"kv_shift": {}}, 1),
    "value residual": ({"value_residual": {}}, 2),
    "plus": ({"value_residual": {"mode": "learnable_plus"}}, 2),
    "svformer": ({"svformer": {}}, 2),
    "neutreno": ({"neutreno": {}}, 2),
    "skip": ({"skip_layer": {}}, 3),
    "pattention": (PATTENTION, 1),
    "exclusive": ({"exclusive": {}}, 1),
    "gate": ({"output_gate": {}}, 1),
    "memory": ({"persistent_memory": {}}, 1),
    "tables": ({"value_embedding": {}}, 1),
    "shared tables": ({"value_embedding": {"tables": 2}}, 2),
    "n-grams": ({"ngram_memory": {"gate": "match"}}, 2),
    "every second layer": ({"kv_source": {}}, 2),
    "embedding": ({"embedding_residual": {}}, 2),  # in the first layer it is the stream itself
    "three inputs": ({"depth_attention": {"queries": 3, "block": 9}}, 2),  # all but the first read the same
    "smear": ({"smear": {}}, 2),  # in the first layer
    "dynamic": ({"short_conv": {"sites": ["keys", "feed_forward_hidden"], "dynamic": ["keys"]}}, 1),
    "convolutions": ({"short_conv": {"sites": ["keys", "attention_input", "feed_forward_output"]}}, 1),
    "shift and skip": ({"kv_shift": {}, "skip_layer": {}}, 3),
    "three": ({"kv_shift": {}, "value_residual": {}, **PATTENTION}, 2),
}


def graphs(mechanisms: dict, depth: int, packed: bool, training: bool) -> int:
    """How many graphs the blocks of a model compile to, each without a break inside."""
    _dynamo.reset()
    model = build(mechanisms, num_hidden_layers=depth).float().train(training)
    counter = CompileCounter()
    compile_blocks(model.model.layers, counter)
    ids = tokens(2, 12)
    positions = (torch.arange(12) % 6)[None].expand(2, -1) if packed else None
    with torch.set_grad_enabled(training):
        out = model(ids, position_ids=positions, labels=ids, use_cache=False)
    if training:
        out.loss.backward()
    return counter.frame_count


QUICK = ("three",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMBINATIONS]
)
@pytest.mark.parametrize(("packed", "training"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)])
def test_graphs_do_not_grow_with_depth(name, packed, training):
    mechanisms, different = COMBINATIONS[name]
    assert graphs(mechanisms, 6, packed, training) == different


@_dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)
def test_layers_may_all_differ():
    """PyTorch's limit on the graphs of one function is not one on the layers of a model."""
    assert graphs({"dense_former": {}}, 4, packed=False, training=True) == 4


@_dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1)
def test_models_of_one_process_do_not_add_up(monkeypatch):
    """A comparison's worker trains one after another; the graphs of earlier ones would reach the limit."""
    monkeypatch.setattr(compiling, "GRAPHS", 1)
    for width in (16, 32, 48, 64):
        model = build({}, num_hidden_layers=2, hidden_size=width).float().train()
        compile_model(model, "eager")
        ids = tokens(2, 12)
        model(ids, labels=ids, skip_logits=True).loss.backward()


def test_evaluating_first_makes_no_shape_symbolic():
    _dynamo.reset()
    model = build({"kv_shift": {}}, num_hidden_layers=2).float()
    shapes = []

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.extend(size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
        return graph.forward

    compile_model(model, backend)
    with torch.no_grad():
        model.eval()(tokens(4, 12), use_cache=False)
    ids = tokens(2, 12)
    model.train()(ids, labels=ids, skip_logits=True).loss.backward()
    assert shapes
    assert all(isinstance(size, int) for size in shapes)


def test_ddp_does_not_split_a_block():
    """At a width where its gradients fill several buckets."""
    _dynamo.reset()
    counter = CompileCounter()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build({}, num_hidden_layers=2, hidden_size=512, intermediate_size=512).float().train()
        compile_model(model, counter)
        ids = tokens(2, 12)
        DistributedDataParallel(model)(ids, labels=ids, skip_logits=True).loss.backward()
    finally:
        distributed.destroy_process_group()
    assert counter.frame_count == 2  # the blocks', and the loss


def test_the_switch_of_the_kernels_is_read_before_the_compiler_looks_at_it(monkeypatch):
    """Read while the first layer is traced, it would give that layer a graph of its own."""
    monkeypatch.setattr(kernels, "_disabled", None)
    build({"kv_shift": {}})
    assert kernels._disabled is False


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mechanisms", [{}, COMBINATIONS["three"][0]])
def test_a_whole_model_is_two_graphs_and_gives_the_same_gradients(mechanisms, packed):
    """One for training and one for evaluation, at any depth, and no more in later steps."""
    ids, positions = tokens(2, 12), (torch.arange(12) % 6)[None].expand(2, -1) if packed else None
    model = build(mechanisms, num_hidden_layers=5).train()
    inputs = {"position_ids": positions, "labels": ids, "use_cache": False}

    def gradients():
        model.zero_grad()
        model(ids, skip_logits=True, **inputs).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradients()
    counter = CompileCounter()
    compile_model(model, counter, whole=True)
    for _ in range(2):
        assert torch.allclose(gradients(), expected, rtol=1e-12, atol=1e-15)
        assert compiling.is_compiled(model)
        with torch.no_grad():
            model.eval()(ids, **inputs)
        model.train()
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.skipif(c_compiler() is None, reason="needs a C++ compiler")
def test_a_second_run_compiles_nothing_and_trains_the_same():
    """Runs of a comparison that share shapes read what the first one has compiled, autograd functions included."""
    ids = tokens(2, 12)
    mechanisms = {"kv_shift": {}, "short_conv": {"sites": ["attention_input"]}}

    def gradients(model):
        model.train()(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    with fresh_cache():
        for seed in (1, 2):
            counters.clear()
            model, plain = (build(mechanisms, num_hidden_layers=2, seed=seed) for _ in range(2))
            compile_model(model, whole=True)
            assert torch.allclose(gradients(model), gradients(plain), rtol=1e-12, atol=1e-15)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_hit"] == 2  # forward and backward pass
    assert not counters["inductor"]["fxgraph_cache_miss"]
