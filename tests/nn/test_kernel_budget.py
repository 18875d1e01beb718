"""How many GPU kernels each mechanism adds to a compiled layer, in training and in a step of decoding, and
how many bytes those of training read and write.

PyTorch's compiler writes Triton code for any device; it is captured here and never run. Attention itself is one opaque
operation, as a fused kernel is on a GPU.
"""

import re
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, _dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from transformers import AttentionInterface, AttentionMaskInterface

from conftest import build, tokens
from gpu_code import write_code
from headwater.models.compiling import expect_layers
from headwater.models.decoding import Decoder
from headwater.plugins.mechanisms import MECHANISMS

COUNTED = "counted"
ROWS, LENGTH, WIDTH, HEADS = 8, 1024, 768, 12
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 3072,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": LENGTH,
}
STREAM = ROWS * LENGTH * WIDTH * 2  # bytes of one tensor in bf16; the queries, keys and values have the same size
H100 = DeviceProperties("cpu", None, 132, 90, 9, 65536, 2048, 1024, 32)


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
    monkeypatch.setattr(DeviceProperties, "create", lambda device: H100)  # they decide how sums are split
    yield
    AttentionInterface._global_mapping.pop(COUNTED)
    AttentionMaskInterface._global_mapping.pop(COUNTED)


class Passes(NamedTuple):
    """What the compiler's own kernels do in a graph's forward and backward pass.

    kernels: how many there are. tensors: what they read and write, in tensors of the stream's size.
    """

    kernels: tuple[int, int]
    tensors: tuple[float, float]


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def counting_compiler(counts: list[tuple[int, float]], is_inference: bool = False):
    """Append each graph's `Passes` to counts. Only graphs of inference run; others return memory that nobody wrote."""

    def compile(graph, inputs):
        results = [getattr(node, "meta", {}).get("val") for node in graph.graph.output_node().args[0]]
        code, size = write_code(graph, inputs, is_inference)
        counts.append((len(re.findall(r"\btriton_\w+\.run\(", code)), size / STREAM))
        if is_inference:
            return graph.forward
        return make_boxed_func(lambda *args: [x if x is None else empty_like(x) for x in results])

    return compile


def count_passes(mechanisms: dict, packed: bool = False, whole: bool = False) -> list[Passes]:
    """Count for each different layer of a model with three, or for the model compiled as a whole. Nothing runs."""
    _dynamo.reset()
    expect_layers(3)
    model = build(mechanisms, **SIZES).to(torch.bfloat16).train()
    model.config._attn_implementation = COUNTED  # not by name: some mechanisms take the kernels that they know only
    forward, backward = [], []
    backend = aot_autograd(
        fw_compiler=counting_compiler(forward),
        bw_compiler=counting_compiler(backward),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    for module in [model] if whole else model.model.layers:
        module.compile(backend=backend, fullgraph=True, dynamic=False)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    positions = (torch.arange(LENGTH) % (LENGTH // 2))[None].expand(ROWS, -1) if packed else None
    with inductor.patch(cpu_backend="triton", compile_threads=1):
        model(ids, position_ids=positions, labels=ids, use_cache=False, skip_logits=True).loss.backward()
    return [Passes(*zip(*graph, strict=True)) for graph in zip(forward, reversed(backward), strict=True)]


# Two norms, RoPE of q and k, SiLU, the residual sum; backward, the gradients of the norms' weights take two steps.
PLAIN = (5, 7)
PLAIN_TENSORS = (25.1, 43.1)
PATTENTION = {"pattention": {"attention_pairs": 64, "ffn_pairs": 128}}
# For each different layer of a model: the kernels of its forward and its backward pass. The budget is for the plain
# layer's and these; a layer that others read has to add their gradients.
BUDGETS = {
    "vanilla": ({}, [PLAIN]),
    "shift": ({"kv_shift": {}}, [(6, 12)]),
    "value residual": ({"value_residual": {"mode": "learnable"}}, [(5, 8), (6, 10)]),
    "skip": ({"skip_layer": {}}, [(5, 8), PLAIN, (8, 10)]),
    "svformer": ({"svformer": {}}, [(5, 8), PLAIN]),
    "neutreno": ({"neutreno": {}}, [(5, 8), (6, 9)]),
    "dense": ({"dense_former": {}}, [(5, 9)] * 3),
    "pattention": (PATTENTION, [(9, 11)]),
    "convolution": ({"short_conv": {}}, [(11, 20)]),
    "value embedding": ({"value_embedding": {}}, [(7, 11)]),
    "n-grams": ({"ngram_memory": {}}, [(6, 10), PLAIN]),
    "source": ({"kv_source": {}}, [(5, 8), PLAIN, PLAIN]),
    "latent": ({"mla": {}}, [PLAIN]),
    "low-rank latent": ({"low_rank_kv": {}}, [PLAIN]),
    "memory": ({"persistent_memory": {}}, [(10, 11)]),
    "exclusive": ({"exclusive": {}}, [(6, 10)]),
    "gate": ({"output_gate": {}}, [(7, 8)]),
    "depth attention": ({"depth_attention": {}}, [PLAIN, (10, 13), (11, 14)]),
    "mudd": ({"mudd": {}}, [PLAIN, (10, 16), (17, 22)]),
    "smear": ({"smear": {}}, [(6, 10), PLAIN]),
    "embedding": ({"embedding_residual": {}}, [(5, 9)] * 2),
    "backout": ({"backout": {}}, [PLAIN, PLAIN, (6, 9)]),
}
QUICK = "shift"  # it has the plain layer's kernels and its own
# What the equations need beyond the plain layer, in tensors of all heads. A shift or a mix of values reads and writes
# them once. Keys are shifted in RoPE's kernel. Backward, a factor's gradient needs the tensor that it multiplied.
NEEDED = {
    # v, v'; k, and v, the gradient of v', that of v.
    "shift": [(2, 4)],
    # The two gradients of V_0, their sum; then V_l, V_0, V'_l; V_l, V_0, the gradients of V'_l, V_l and V_0.
    "value residual": [(0, 3), (3, 5)],
    # As V_0, and one more gradient of the keys, whose sum is part of RoPE's kernel; then, of 3 own heads of 12, 9 need
    # no RoPE of keys, the outputs of two calls are joined, and the gradients of the source's 9 heads filled up to 12.
    "skip": [(0, 4), (0, 0), (-1.5 + 2, -1.5 + 3.5)],
}
# In the three layers at once no gradient of V_0 is written before the sum, and none is filled up.
NEEDED_AT_ONCE = {"shift": (6, 12), "value residual": (6, 12), "skip": (0.5, 2)}
SMALL = 0.45  # sums of the factors' gradients, by row: fp32 numbers per row and head; `reach`


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUDGETS]
)
@pytest.mark.slow
def test_a_layer_needs_no_more_kernels_than_this(name):
    mechanisms, budget = BUDGETS[name]
    layers = count_passes(mechanisms)
    assert len(layers) == len(budget)
    for layer, most in zip(layers, budget, strict=True):
        assert is_within(layer.kernels, most), layers
    for layer, extra in zip(layers, NEEDED.get(name, ()), strict=name in NEEDED):
        assert is_within(layer.tensors, add(PLAIN_TENSORS, extra, (SMALL, SMALL))), layers


def add(*pairs: tuple[float, float]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*pairs, strict=True)))


def is_within(counts: tuple[float, ...], most: tuple[float, ...]) -> bool:
    return all(ours <= limit for ours, limit in zip(counts, most, strict=True))


def test_every_mechanism_has_a_budget():
    assert {name for mechanisms, _ in BUDGETS.values() for name in mechanisms} == set(MECHANISMS.built_in)


@pytest.mark.slow
def test_packed_rows_need_no_more():
    (layer,) = count_passes({"kv_shift": {}}, packed=True)
    assert is_within(layer.kernels, BUDGETS["shift"][1][0]), layer
    assert is_within(layer.tensors, add(PLAIN_TENSORS, NEEDED["shift"][0], (SMALL, SMALL))), layer


@pytest.mark.slow
def test_a_whole_model_needs_no_more():
    (plain,) = count_passes({}, whole=True)
    for name, extra in NEEDED_AT_ONCE.items():
        (model,) = count_passes(BUDGETS[name][0], whole=True)
        assert is_within(model.tensors, add(plain.tensors, extra, (3 * SMALL, 3 * SMALL))), (name, model, plain)


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
    ((count, _),) = counts
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
