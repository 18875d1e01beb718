"""The kernels behind `apply_linear`, against PyTorch's own in fp64, and where they are left alone."""

import copy
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import processes
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.kernels import fused_linear as linear
from headwater.kernels.autotune import allow_autotuning, get_choices
from headwater.kernels.fused_linear import LARGE, PackedLinear
from headwater.nn.linear import apply_linear

ROW, ROWS = linear._FP32_ROW, linear._FP32


@pytest.fixture
def take(monkeypatch):
    """Makes a form win wherever it can be taken; "plain" everywhere."""

    def made(name: str) -> None:
        monkeypatch.setattr(linear, "find_fastest", lambda operation, forms: name if name in forms() else "plain")

    return made


@pytest.mark.sampled(10)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (2, 5), (4, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("d_out", [256, 257, 50257, 1], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [*ROW, "packed"])
@torch.no_grad()
def test_each_form_of_a_linear_map_is_the_plain_one(shape, d_out, bias, form, take, monkeypatch):
    take(form)
    monkeypatch.setattr(linear, "LARGE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # the number of pieces
    module, x = nn.Linear(300, d_out, bias=bias), torch.randn(*shape, 300)
    if form == "packed":
        module, x = module.bfloat16(), x.bfloat16()
    plain = nn.functional.linear(x, module.weight, module.bias)
    strided = torch.randn(300, *shape).movedim(0, -1).to(x.dtype)
    with allow_autotuning(pack_weights=True):
        for given, expected in ((x, plain), (strided, nn.functional.linear(strided, module.weight, module.bias))):
            near = dict(atol=1e-5, rtol=1e-5) if form != "packed" else dict(atol=1e-2, rtol=1e-2)  # a bfloat16's step
            torch.testing.assert_close(apply_linear(module, given), expected, **near)


@torch.no_grad()
def test_pieces_of_any_number_of_threads(monkeypatch):
    module, x = nn.Linear(300, 4 * 97), torch.randn(1, 300)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.testing.assert_close(ROW["pieces"](x, module.weight, module.bias), apply_linear(module, x))


def ours(run) -> bool:
    """Whether `run` used another kernel than PyTorch's."""
    with torch.profiler.profile() as seen:
        run()
    return any(event.key in ("mkldnn::_linear_pointwise", "aten::bmm") for event in seen.key_averages())


@pytest.mark.parametrize("form", ["onednn", "pieces"])
def test_kernels_are_for_generation_only(form, take):
    take(form)
    module, x = nn.Linear(300, 300), torch.randn(1, 300)
    small = nn.Linear(8, LARGE // 8 - 1)
    with torch.no_grad():
        assert not ours(lambda: apply_linear(module, x))
        with allow_autotuning():
            assert ours(lambda: apply_linear(module, x))
            assert ours(lambda: apply_linear(module, x.expand(3, -1))) is (form == "onednn")
            assert not ours(lambda: apply_linear(module, x.expand(linear.FEW + 1, -1)))
            assert not ours(lambda: apply_linear(small, x[:, :8]))
        with torch.backends.mkldnn.flags(enabled=False), allow_autotuning():
            assert not ours(lambda: apply_linear(module, x))
    with allow_autotuning():
        assert not ours(lambda: apply_linear(module, x))


@torch.no_grad()
def test_hooks_of_a_layer_run_during_generation(take):
    take("onednn")
    x, seen = torch.randn(3, 300), []
    hooks = {
        "forward hook": lambda layer: layer.register_forward_hook(lambda module, inputs, output: seen.append(1)),
        "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, inputs: seen.append(1)),
        "replaced": lambda layer: setattr(
            layer, "forward", lambda x: seen.append(1) or nn.functional.linear(x, layer.weight)
        ),
    }
    for add in hooks.values():
        layer = nn.Linear(300, 300)
        add(layer)
        with allow_autotuning():
            assert not ours(lambda layer=layer: apply_linear(layer, x))
    assert seen == [1] * len(hooks)


def test_derivatives_are_pytorchs(take):
    take("onednn")
    module, x = nn.Linear(300, 300), torch.randn(3, 300)
    plain = nn.functional.linear
    v = torch.randn(3, 300)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), allow_autotuning():
        dual = apply_linear(module, torch.autograd.forward_ad.make_dual(x, v))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, plain(v, module.weight))
    (hessian,) = torch.autograd.grad(
        torch.autograd.grad(apply_linear(module, x.requires_grad_()).pow(3).sum(), x, create_graph=True)[0].sum(), x
    )
    assert hessian.abs().sum() > 0
    assert torch.func.jacrev(lambda x: apply_linear(module, x).sum(0))(x.detach()).shape == (300, 3, 300)


@torch.no_grad()
def test_flops_are_counted(take):
    take("onednn")
    module = nn.Linear(300, 300)
    for rows in (1, 5):
        with FlopCounterMode(display=False) as counter, allow_autotuning():
            apply_linear(module, torch.randn(rows, 300))
        assert counter.get_total_flops() == 2 * rows * 300 * 300


# Packed weights

needs_bf16 = pytest.mark.skipif(
    linear._PACK is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 here"
)


@needs_bf16
@torch.no_grad()
def test_packed_weights_give_the_same_bits(take):
    take("packed")
    module, x = nn.Linear(300, 300).bfloat16(), torch.randn(5, 300, dtype=torch.bfloat16)
    expected = apply_linear(module, x)
    with allow_autotuning(pack_weights=True):
        for _ in range(2):
            assert torch.equal(apply_linear(module, x), expected)
        assert list(get_choices().packs) == [module]
        assert torch.equal(apply_linear(copy.deepcopy(module), x), expected)
    assert get_choices() is None


@needs_bf16
@torch.no_grad()
def test_nothing_is_packed_where_that_does_not_win(take):
    take("plain")
    module, x = nn.Linear(300, 300).bfloat16(), torch.randn(5, 300, dtype=torch.bfloat16)
    with allow_autotuning(pack_weights=True):
        apply_linear(module, x)
        assert get_choices().packs == {}


@needs_bf16
@torch.no_grad()
def test_a_weight_that_changes_is_noticed(take):
    take("packed")
    module, x = nn.Linear(300, 300).bfloat16(), torch.randn(5, 300, dtype=torch.bfloat16)
    with allow_autotuning(pack_weights=True):
        apply_linear(module, x)
        module.weight.mul_(2)
        changed = apply_linear(module, x)
    assert torch.equal(changed, apply_linear(module, x))


@needs_bf16
@torch.no_grad()
def test_other_threads_see_no_packs():
    seen = []
    with allow_autotuning(pack_weights=True):
        thread = threading.Thread(target=lambda: seen.append(get_choices()))
        thread.start()
        thread.join()
    assert seen == [None]


def generate_in_bf16():
    config = HeadwaterConfig(vocab_size=97, hidden_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = HeadwaterForCausalLM(config).bfloat16().eval()
    ids = torch.arange(9)[None]
    made = [model.generate(ids, max_new_tokens=30, do_sample=False, use_cache=cached) for cached in (True, False)]
    print(made[0].shape[1])


@pytest.mark.slow
def test_generation_in_bf16_on_a_processor_without_the_instructions_for_it(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"} | cache
    _, printed, said = processes.run(call=generate_in_bf16, env=limited)
    assert printed.strip() == "39", said[-2000:]


@needs_bf16
def test_generation_packs_each_layer_once_and_may_be_told_not_to(take, monkeypatch):
    take("packed")
    packs: list[PackedLinear] = []
    begin = PackedLinear.__init__
    monkeypatch.setattr(PackedLinear, "__init__", lambda self, weight: packs.append(self) or begin(self, weight))
    config = HeadwaterConfig(vocab_size=300, hidden_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = HeadwaterForCausalLM(config).bfloat16().eval()
    model.generate(torch.arange(9)[None], max_new_tokens=5, do_sample=False)
    assert len(packs) == 4 + 3 + 1
    model.packs_weights = False
    model.generate(torch.arange(9)[None], max_new_tokens=5, do_sample=False)
    assert len(packs) == 4 + 3 + 1
