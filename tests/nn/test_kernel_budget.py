"""How many GPU kernels each mechanism adds to a compiled layer, in training and in a step of decoding.

PyTorch's compiler writes Triton code for any device; it is captured here and never run. Attention itself is one opaque
operation, as a fused kernel is on a GPU.
"""

import re
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, _dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from transformers import AttentionInterface, AttentionMaskInterface

from conftest import build, tokens
from headwater.models.decoding import Decoder
from headwater.plugins.registry import MECHANISMS

COUNTED = "counted"


@torch.library.custom_op("headwater_tests::attention", mutates_args=(), tags=[torch.Tag.flexible_layout])
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)


@torch.library.custom_op("headwater_tests::attention_backward", mutates_args=(), tags=[torch.Tag.flexible_layout])
def attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


attention.register_fake(lambda q, k, v: q.new_empty(len(q), q.shape[2], q.shape[1], q.shape[3]))
attention_backward.register_fake(
    lambda g, q, k, v: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
attention.register_autograd(
    lambda ctx, g: attention_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture(autouse=True)
def counted_attention(monkeypatch):
    AttentionInterface.register(COUNTED, lambda module, q, k, v, mask, **kwargs: (attention(q, k, v), None))
    AttentionMaskInterface.register(COUNTED, lambda *args, **kwargs: None)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")
    yield
    AttentionInterface._global_mapping.pop(COUNTED)
    AttentionMaskInterface._global_mapping.pop(COUNTED)


def counting_compiler(counts: list[int], is_inference: bool = False):
    """Append the number of Triton kernels of each graph to counts."""

    def compile(graph, inputs):
        with ExitStack() as stack:
            for context in (V.set_fake_mode(torch._guards.detect_fake_mode(inputs)), DebugContext()):
                stack.enter_context(context)
            post_grad_passes(graph, is_inference=is_inference)
            lowered = GraphLowering(graph, example_inputs=inputs, is_inference=is_inference)
            stack.enter_context(V.set_graph_handler(lowered))
            lowered.run(*inputs)
            code = lowered.codegen()[0].value
        counts.append(len(re.findall(r"\btriton_\w+\.run\(", code)))
        return graph.forward

    return compile


def kernels(mechanisms: dict, packed: bool) -> list[tuple[int, int]]:
    """For each different layer: the Triton kernels of its forward and its backward pass."""
    _dynamo.reset()
    model = build(mechanisms, num_hidden_layers=3).to(torch.bfloat16).train()
    model.config._attn_implementation = COUNTED  # not by name: some mechanisms take the kernels that they know only
    forward, backward = [], []
    backend = aot_autograd(
        fw_compiler=counting_compiler(forward),
        bw_compiler=counting_compiler(backward),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    for block in model.model.layers:
        block.compile(backend=backend, fullgraph=True)
    ids = tokens(2, 12)
    positions = (torch.arange(12) % 6)[None].expand(2, -1) if packed else None
    with inductor.patch(cpu_backend="triton", compile_threads=1):
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    return list(zip(forward, reversed(backward), strict=True))


PLAIN = (6, 6)  # two norms, RoPE of q and k, SiLU, the residual sum
PATTENTION = {"pattention": {"attention_pairs": 64, "ffn_pairs": 128}}
# For each different layer of a model: the kernels of its forward and its backward pass. The budget is for the plain
# layer's and these; a layer that others read has to add their gradients.
BUDGETS = {
    "vanilla": ({}, [PLAIN]),
    "shift": ({"kv_shift": {}}, [(7, 9)]),
    "value residual": ({"value_residual": {"mode": "learnable"}}, [(6, 8), (7, 7)]),
    "skip": ({"skip_layer": {}}, [(6, 8), PLAIN, (10, 8)]),
    "svformer": ({"svformer": {}}, [(6, 8), PLAIN]),
    "neutreno": ({"neutreno": {}}, [(6, 8), (7, 8)]),
    "dense": ({"dense_former": {}}, [(6, 7)] * 3),
    "pattention": (PATTENTION, [(10, 10)]),
    "convolution": ({"short_conv": {}}, [(12, 11)]),
    "value embedding": ({"value_embedding": {}}, [(8, 10)]),
    "n-grams": ({"ngram_memory": {}}, [(7, 9), PLAIN]),
    "source": ({"kv_source": {}}, [(6, 8), (5, 5), PLAIN]),
    "memory": ({"persistent_memory": {}}, [(10, 10)]),
    "exclusive": ({"exclusive": {}}, [(8, 9)]),
    "gate": ({"output_gate": {}}, [(8, 7)]),
    "depth attention": ({"depth_attention": {}}, [PLAIN, (11, 12), (12, 13)]),
    "mudd": ({"mudd": {}}, [PLAIN, (11, 12), (18, 17)]),
    "smear": ({"smear": {}}, [(7, 9), PLAIN]),
    "embedding": ({"embedding_residual": {}}, [(6, 8)] * 2),
    "backout": ({"backout": {}}, [PLAIN, PLAIN, (6, 7)]),
}
QUICK = "shift"  # it has the plain layer's kernels and its own


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUDGETS]
)
@pytest.mark.slow
def test_a_layer_needs_no_more_kernels_than_this(name):
    mechanisms, budget = BUDGETS[name]
    found = kernels(mechanisms, packed=False)
    assert len(found) == len(budget)
    assert all(ours <= most for pair in zip(found, budget, strict=True) for ours, most in zip(*pair, strict=True)), (
        found
    )


def test_every_mechanism_has_a_budget():
    assert {name for mechanisms, _ in BUDGETS.values() for name in mechanisms} == set(MECHANISMS.built_in)


@pytest.mark.slow
def test_packed_rows_share_the_kernels_of_the_shift():
    ((forward, backward),) = kernels({"kv_shift": {}}, packed=True)
    assert forward <= PLAIN[0] + 1
    assert backward <= PLAIN[1] + 2


def decoding_kernels(mechanisms: dict, layers: int) -> int:
    """The Triton kernels of one step of the static cache."""
    _dynamo.reset()
    model = build(mechanisms, num_hidden_layers=layers).to(torch.bfloat16).eval()
    model.config._attn_implementation = COUNTED
    counts = []
    backend = aot_autograd(
        fw_compiler=counting_compiler(counts, is_inference=True),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with inductor.patch(cpu_backend="triton", compile_threads=1):
        Decoder(model, compiled=True, backend=backend, join=True)(tokens(1, 12), max_new_tokens=3)
    (count,) = counts
    return count


CONVOLUTIONS = {"short_conv": {"sites": ["attention_input", "feed_forward_input"]}}
# Two norms, RoPE of q, RoPE of k with its write to the cache, the write of v, and SiLU. Mechanisms that look back shift
# their raw tokens in place as they read them.
PLAIN_STEP = 6


@pytest.mark.parametrize(
    ("mechanisms", "budget"),
    [
        ({}, PLAIN_STEP),
        ({"kv_shift": {}}, PLAIN_STEP),
        ({"value_residual": {}}, PLAIN_STEP),
        ({"skip_layer": {}}, PLAIN_STEP),
        (CONVOLUTIONS, PLAIN_STEP),
        ({**CONVOLUTIONS, "svformer": {}}, PLAIN_STEP - 1),  # stores no values
    ],
    ids=lambda case: "+".join(case) or "vanilla" if isinstance(case, dict) else None,
)
@pytest.mark.slow
def test_a_layer_needs_no_more_kernels_than_this_to_decode_a_token(mechanisms, budget):
    assert decoding_kernels(mechanisms, layers=4) - decoding_kernels(mechanisms, layers=3) <= budget
