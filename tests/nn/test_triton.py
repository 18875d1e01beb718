"""The Triton kernels: equal to their equations, known to the compiler, and run where a timing says so and nowhere else.

Triton's interpreter runs them on a CPU, but only in a process that has TRITON_INTERPRET=1 before anything imports
Triton; `test_by_the_interpreter` starts one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, _dynamo
from torch._dynamo.backends.debugging import aot_eager

import headwater
from conftest import build, tokens
from headwater import kernels
from headwater.kernels import choose, gpu
from headwater.kernels.gpu import OURS, keys_operation, place, score_operation
from headwater.mechanisms import KVShift
from headwater.mechanisms.pattention import GELU, GUARD
from headwater.nn.position import for_heads
from headwater.testing import naive

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and gpu.triton_version() is not None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton, and TRITON_INTERPRET=1 before Python starts")
installed = pytest.mark.skipif(
    gpu.triton_version() is None or INTERPRETED, reason="needs triton, and a process without TRITON_INTERPRET=1"
)
if INTERPRETED:
    from headwater.kernels import triton_keys, triton_score


@installed
@pytest.mark.slow
def test_by_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-m", "slow or not slow"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


# Equal to the equations


def near(found: Tensor, expected: Tensor, most: float = 1e-6) -> bool:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm()) < most


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@interpreted
@pytest.mark.parametrize("n", [1, 37, 300])  # of 300 scores a block holds 128
@pytest.mark.parametrize("form", GELU)
@pytest.mark.parametrize("score", ["l2_norm_gelu", "gelu_l2_norm", "l1_norm_gelu", "gelu_l1_norm"])
def test_a_score_equals_its_equation(score, form, n, monkeypatch):
    monkeypatch.setattr(triton_score, "BLOCK", 128)
    scores, tau, grad = draw(2, 3, n), torch.tensor([1.7 * n**0.5]), draw(2, 3, n, seed=1)
    given, wide = [
        [x.clone().to(dtype).requires_grad_() for x in (scores, tau)] for dtype in (torch.float32, torch.float64)
    ]
    found, _ = torch.ops.headwater.pattention_score(*given, score, GELU[form], GUARD)
    unit = torch.eye(n, dtype=torch.float64)
    rows = [naive.pattention(row, unit, unit, wide[1], score, form) for row in wide[0].flatten(0, 1)]
    expected = torch.stack(rows).view(2, 3, n)
    assert near(found, expected)
    gradients = [torch.autograd.grad(y, x, grad.to(y)) for y, x in ((found, given), (expected, wide))]
    if n == 1:  # a single score has a fixed norm: only its sign remains
        assert float(gradients[0][0].abs().max()) < 1e-5
        gradients = [one[1:] for one in gradients]
    assert all(near(one, other, 1e-5) for one, other in zip(*gradients, strict=True))


@interpreted
def test_scores_of_nothing_are_zero():
    scores = torch.cat((torch.zeros(1, 5), draw(1, 5))).requires_grad_()
    weights, scale = torch.ops.headwater.pattention_score(scores, torch.ones(1), "l2_norm_gelu", "none", GUARD)
    (grad,) = torch.autograd.grad(weights.sum(), scores)
    assert not any(x[0].any() for x in (weights, grad, scale))
    assert all(x[1].all() for x in (weights, grad, scale))
    weights, _ = torch.ops.headwater.pattention_score(scores[:0], torch.ones(1), "l2_norm_gelu", "none", GUARD)
    assert weights.shape == (0, 5)


def keys_inputs(norm: str, packed: bool, window: int, dtype: torch.dtype = torch.float32) -> list:
    """Two rows of 21 tokens, heads of 12 channels of which 4 are turned."""
    length, width, turned = 21, 12, 4
    x, taps = draw(2, length, 2, width), 0.5 + draw(window, 2, seed=1)
    weight = 1 + 0.1 * draw(width, seed=2) if norm == "weighted" else None
    slot = torch.arange(length)
    positions = torch.stack((slot % 5, slot % 8)) if packed else slot[None]
    angles = positions[..., None] * 100.0 ** (-2 * torch.arange(turned // 2) / turned)
    cos, sin = for_heads(*(torch.cat((a, a), -1).to(dtype) for a in (angles.cos(), angles.sin())))
    reach = positions.clamp(max=window - 1).to(torch.int8) if packed else None
    x, weight = x.to(dtype), None if weight is None else weight.to(dtype)
    return [x, taps, weight, reach, cos, sin, norm != "none", 1e-5]


def keys_equation(x: Tensor, taps: Tensor, weight: Tensor | None, norm: bool, packed: bool) -> Tensor:
    """[B, T, K, d] by loops."""
    found = []
    for b, row in enumerate(x):
        every = (5, 8)[b] if packed else len(row)
        heads = [list(head) for head in row.transpose(0, 1)]
        if norm:
            heads = [[naive.rms_norm(z, 1.0 if weight is None else weight, 1e-5) for z in head] for head in heads]
        heads = naive.shift_heads(heads, taps, set(range(0, len(row), every)))
        heads = [[naive.rope(z, t % every, 100.0, 4) for t, z in enumerate(head)] for head in heads]
        found.append(torch.stack([torch.stack(head) for head in heads], 1))
    return torch.stack(found)


@interpreted
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", ["none", "weightless", "weighted"])
def test_keys_equal_their_equation(norm, packed, window, monkeypatch):
    monkeypatch.setattr(triton_keys, "TILE", 128)  # 8 tokens
    given = keys_inputs(norm, packed, window)
    learned = [x.requires_grad_() for x in given[:3] if x is not None]
    found = torch.ops.headwater.keys(*given)
    wide = [x.detach().double().requires_grad_() for x in learned]
    expected = keys_equation(wide[0], wide[1], wide[2] if len(wide) == 3 else None, norm != "none", packed)
    assert near(found, expected)
    grad = draw(2, 2, 21, 12, seed=3).transpose(1, 2)  # as attention lays it out
    gradients = [torch.autograd.grad(y, x, grad.to(y)) for y, x in ((found, learned), (expected, wide))]
    assert all(near(one, other, 1e-5) for one, other in zip(*gradients, strict=True))


@interpreted
def test_rows_may_share_where_documents_begin():
    x, taps, weight, reach, cos, sin, norm, eps = keys_inputs("weighted", True, 2)
    found = []
    for alike in (reach[:1], reach[:1].expand(2, -1).clone()):
        learned = [one.detach().clone().requires_grad_() for one in (x, taps)]
        y = torch.ops.headwater.keys(*learned, weight, alike, cos[:1], sin[:1], norm, eps)
        found.append([y, *torch.autograd.grad(y, learned, draw(*y.shape, seed=3))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@interpreted
def test_half_precision_rounds_once():
    given = keys_inputs("weighted", True, 2, torch.bfloat16)
    x, taps, weight = (x.double() for x in given[:3])
    found = torch.ops.headwater.keys(*given)
    assert found.dtype == torch.bfloat16
    assert near(found, keys_equation(x, taps, weight, True, True), 1e-2)
    scores = draw(3, 40).bfloat16()
    weights, scale = torch.ops.headwater.pattention_score(scores, torch.ones(1), "l2_norm_gelu", "none", GUARD)
    assert (weights.dtype, scale.dtype) == (torch.bfloat16, torch.float32)
    unit = torch.eye(40, dtype=torch.float64)
    assert near(weights, torch.stack([naive.pattention(row, unit, unit, 1.0) for row in scores.double()]), 1e-2)


# Known to the compiler


@interpreted
@pytest.mark.parametrize("norm", ["none", "weighted"])
def test_pytorch_knows_them(norm):
    """Schemas, results without data, autograd and traces agree with what runs."""
    x, taps, weight, *others = keys_inputs(norm, norm == "none", 2)
    given = [None if x is None else x.requires_grad_() for x in (x, taps, weight)]
    torch.library.opcheck(torch.ops.headwater.keys.default, (*given, *others))
    scores = draw(2, 3, 20).requires_grad_()
    torch.library.opcheck(
        torch.ops.headwater.pattention_score.default, (scores, torch.ones(1), "l2_norm_gelu", "tanh", GUARD)
    )


VARIANTS = {
    "score": ("score", {"L1": False, "FIRST": False, "TANH": False}),
    "L1 score": ("score", {"L1": True, "FIRST": False, "TANH": True}),
    "GELU first": ("score", {"L1": False, "FIRST": True, "TANH": False}),
    "keys": ("keys", {"NORM": False, "WEIGHT": False, "REACH": False, "weight_": None, "reach_": None}),
    "normed packed keys": ("keys", {"NORM": True, "WEIGHT": True, "REACH": True}),
}


@installed
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("variant", VARIANTS)
def test_they_compile_for_gpus(variant, capability):
    """To machine code, which needs no GPU; they read and write 16 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headwater.kernels import triton_keys, triton_score

    kernel, constants = VARIANTS[variant]
    module, sizes = (
        (triton_score, {"B": 1024})
        if kernel == "score"
        else (triton_keys, {"d": 64, "r": 16, "WINDOW": 2, "TOKENS": 32, "D": 64})
    )
    constants = sizes | constants
    kinds = {"reach_": "*i8", "eps": "fp32", "guard": "fp32"}
    kinds |= dict.fromkeys(("tau_", "scale_", "dots_", "taps_", "grad_taps_", "grad_weight_"), "*fp32")
    for function in (module._forward, module._backward):
        names = function.arg_names
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "*bf16" if name.endswith("_") else "i32")
            for name in names
        }
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if signature[name] not in ("constexpr", "fp32") and name != "K"
        }
        values = {(names.index(name),): value for name, value in constants.items() if name in names}
        source = ASTSource(function, signature, values, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert made.asm["cubin"]
        assert all(f"{access}.global.v4" in made.asm["ptx"] for access in ("ld", "st"))


# Where they run


def test_only_triton_modules_import_triton():
    """And nothing imports those by name: not headwater, and not the code that is exported with checkpoints."""
    root = Path(headwater.__file__).parent
    for file in root.rglob("*.py"):
        text = file.read_text()
        if file.name.startswith("triton_"):
            continue
        assert not re.search(r"^\s*(import|from) triton", text, re.MULTILINE), file
        assert not re.search(r"^\s*(import|from) .*\btriton_(score|keys)", text, re.MULTILINE), file
    assert all((root.parent / f"{module.replace('.', '/')}.py").exists() for module in gpu.MODULES.values())


def test_a_cpu_needs_no_triton():
    assert INTERPRETED or not any(gpu.available(operation, "cpu") for operation in gpu.MODULES)


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
CASES = {
    "pattention": ({"pattention": {"attention_pairs": 16, "ffn_pairs": 24}}, {}),
    "shift": ({"kv_shift": {}}, {}),
    "norm": ({"kv_shift": {"form": "gate"}, "value_residual": {}}, {"qk_norm": True, "partial_rotary_factor": 0.5}),
}


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Callable[[float], None]:
    """Records that our forms take this share of the plain ones' time, of all operations of `CASES`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADWATER_KERNELS", "measured")
    monkeypatch.setattr(choose, "_known", {})
    here = place(torch.device("cpu"))

    def records(share: float) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            operations = [score_operation(dtype, pairs, "l2_norm_gelu", "none") for pairs in (16, 24)]
            operations += [keys_operation(dtype, 2, norm, packed) for norm in (True, False) for packed in (True, False)]
            for operation in operations:
                choose.record(here, operation, {"plain": 1.0, OURS: share})

    records(0.5)
    return records


def gradients(model: torch.nn.Module, packed: bool = False, **given) -> Tensor:
    ids = tokens(1, 6)
    positions = (torch.arange(6) % 4)[None] if packed else None
    model.zero_grad()
    model(ids, labels=ids, position_ids=positions, use_cache=False, **given).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


class Compiled:
    """A model whose blocks are compiled; `ran` names our operations in the graphs."""

    def __init__(self, name: str, **options) -> None:
        mechanisms, given = CASES[name]
        _dynamo.reset()
        self.model = build(mechanisms, **SMALL | given | options).float().train()
        self.ran: set[str] = set()

    def compile(self) -> torch.nn.Module:
        def backend(graph, inputs):
            self.ran |= {str(node.target) for node in graph.graph.nodes if "headwater." in str(node.target)}
            return aot_eager(graph, inputs)

        for block in self.model.model.layers:
            block.compile(backend=backend, fullgraph=True)
        return self.model


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_trains_with_them(name, packed, measured):
    compiled = Compiled(name)
    expected = gradients(compiled.model, packed)
    assert near(gradients(compiled.compile(), packed), expected, 1e-5)
    assert compiled.ran == {"headwater.pattention_score" if name == "pattention" else "headwater.keys"}


@interpreted
@pytest.mark.parametrize("name", ["pattention", "norm"])
def test_under_autocast(name, measured):
    compiled = Compiled(name)
    expected = gradients(compiled.model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(compiled.compile())
    assert compiled.ran
    assert near(found, expected, 5e-2)


@interpreted
@pytest.mark.parametrize("name", ["pattention", "shift"])
def test_the_plain_form_runs_elsewhere(name, measured, monkeypatch):
    def ran() -> set[str]:
        compiled = Compiled(name, num_hidden_layers=1)
        gradients(compiled.compile())
        return compiled.ran

    assert ran()
    with kernels.plain():
        assert not ran()
    torch.use_deterministic_algorithms(True)
    try:
        assert not ran()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("HEADWATER_KERNELS", "fixed")
    assert not ran()
    monkeypatch.setenv("HEADWATER_KERNELS", "measured")
    measured(0.95)  # not clearly faster
    assert not ran()
    monkeypatch.setattr(choose, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "/elsewhere")  # where nothing was measured
    assert not ran()


@interpreted
def test_what_the_kernel_of_keys_refuses(measured):
    """A norm of another kind, a class derived from the shift, evaluation, a cache."""
    compiled = Compiled("norm", norm="layer_norm")
    gradients(compiled.compile())
    assert not compiled.ran

    class More(KVShift):
        pass

    compiled = Compiled("shift", num_hidden_layers=1)
    for block in compiled.model.model.layers:
        for mechanism in block.self_attn.mechanisms.children():
            mechanism.__class__ = More
    gradients(compiled.compile())
    assert not compiled.ran

    compiled = Compiled("shift", num_hidden_layers=1)
    with torch.no_grad():
        compiled.compile()(tokens(1, 6), use_cache=False)
    assert not compiled.ran
    compiled.model(tokens(1, 6), use_cache=True).logits.sum().backward()
    assert not compiled.ran
