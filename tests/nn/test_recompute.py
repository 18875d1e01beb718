"""What is computed again in the backward pass is the same, and what is kept is not computed again."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import _dynamo
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from conftest import build, config, document_positions, tokens
from headwater.cost import activation_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.registry import REGISTRY
from headwater.training.recompute import recompute_activations

least = min_cut_rematerialization_partition
KINDS = ("attention", "half")
DOCUMENTS = [[1, 5, 1, 1, 2, 7], [6, 1, 9, 1]]
T = 17
MECHANISMS = {"none": {}, **{name: {name: {}} for name in sorted(REGISTRY)}}
MECHANISMS["three"] = {"kv_shift": {}, "value_residual": {}, "pattention": {}}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_gradients_are_the_same(name, what):
    plain, again = (build(MECHANISMS[name], residual_dropout=0.1).train() for _ in range(2))
    again.load_state_dict(plain.state_dict())
    recompute_activations(again, what)
    ids = tokens(2, T)
    for model in (plain, again):
        torch.manual_seed(1)
        model(ids, labels=ids, position_ids=document_positions(DOCUMENTS), use_cache=False).loss.backward()
    for (place, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), place
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-13), place


class Live(TorchDispatchMode):
    """The storages that operations have made, by address."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self):
        """Of those that still exist."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


WIDE = dict(hidden_size=64, num_key_value_heads=4)


@pytest.mark.slow
def test_more_is_kept_the_less_is_computed_again():
    """And as much as `headwater plan` says."""
    made = config(**WIDE, max_position_embeddings=128)
    ids = torch.zeros(2, 128, dtype=torch.long)
    kept = {}
    for what in (False, "half", "attention", True):
        model = HeadwaterForCausalLM(made).train()
        recompute_activations(model, what)
        with Live() as live:
            loss = model(ids, labels=ids, use_cache=False).loss
            kept[what] = live.bytes()
        del loss
    assert kept[False] > kept["half"] > kept["attention"] > kept[True]
    planned = {what: activation_bytes(made, 128, 2, gradient_checkpointing=what)["kept"] for what in kept}
    for what in KINDS:  # the block in work is not there yet
        assert kept[what] - kept[True] == pytest.approx(planned[what] - planned[True], rel=0.1), what


def products(graph) -> int:
    return sum(str(node.target) == "aten.mm.default" for node in graph.graph.nodes)


@pytest.mark.parametrize("what", [pytest.param("attention", marks=pytest.mark.slow), "half"])
def test_compiled_blocks_keep_the_same_in_one_graph(what):
    """One graph for all layers, whole; its backward pass repeats the matmuls that were not kept."""
    _dynamo.reset()
    forward, backward = [], []
    model = build({"kv_shift": {}}, num_hidden_layers=3).float().train()
    recompute_activations(model, what)

    def compiler(graphs):
        def compile(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compile

    backend = aot_autograd(fw_compiler=compiler(forward), bw_compiler=compiler(backward), partition_fn=least)
    for block in model.model.layers:
        block.compile(backend=backend, fullgraph=True)
    ids = tokens(2, 12)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert (len(forward), len(backward)) == (1, 1)
    # Seven in a block: two each in the backward pass; again all but the last, which nothing reads, or every second.
    assert (products(forward[0]), products(backward[0])) == (7, 14 + (6 if what == "attention" else 3))
