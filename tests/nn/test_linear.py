"""The kernels behind `Linear`, against PyTorch's own in fp64, and where they are left alone."""

import copy
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.nn import linear
from headwater.nn.linear import LARGE, PATIENCE, Linear, packed


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (2, 5), (4, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("d_out", [256, 257, 50257, 1], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_any_number_of_rows(shape, d_out, bias, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # one row goes another way with several
    module, x = Linear(300, d_out, bias=bias), torch.randn(*shape, 300)
    exact = copy.deepcopy(module).double()(x.double())
    assert module(x).shape == exact.shape
    torch.testing.assert_close(module(x).double(), exact, atol=1e-5, rtol=1e-5)
    strided = torch.randn(300, *shape).movedim(0, -1)
    torch.testing.assert_close(module(strided), nn.functional.linear(strided, module.weight, module.bias))


@torch.no_grad()
def test_threads_do_not_matter():
    module, x = Linear(300, 4 * 97), torch.randn(1, 300)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(module(x))
    torch.set_num_threads(before)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def kernels(run) -> bool:
    """Whether `run` used a kernel of ours."""
    with torch.profiler.profile() as seen:
        run()
    return any(event.key in ("mkldnn::_linear_pointwise", "aten::bmm") for event in seen.key_averages())


def test_kernels_are_for_plain_numbers_only():
    module, x = Linear(300, 300), torch.randn(3, 300)
    small = Linear(8, LARGE // 8 - 1)
    with torch.no_grad():
        assert kernels(lambda: module(x))
        assert kernels(lambda: module(x[:1]))
        assert not kernels(lambda: small(x[:, :8]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not kernels(lambda: module(x))
        with torch.backends.mkldnn.flags(enabled=False):
            assert not kernels(lambda: module(x))
    assert not kernels(lambda: module(x))


def test_derivatives_are_pytorchs():
    module, x = Linear(300, 300), torch.randn(3, 300)
    plain = nn.functional.linear
    v = torch.randn(3, 300)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = module(torch.autograd.forward_ad.make_dual(x, v))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, plain(v, module.weight))
    (hessian,) = torch.autograd.grad(
        torch.autograd.grad(module(x.requires_grad_()).pow(3).sum(), x, create_graph=True)[0].sum(), x
    )
    assert hessian.abs().sum() > 0
    assert torch.func.jacrev(lambda x: module(x).sum(0))(x.detach()).shape == (300, 3, 300)


@torch.no_grad()
def test_flops_are_counted():
    module = Linear(300, 300)
    for rows in (1, 5):
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(rows, 300))
        assert counter.get_total_flops() == 2 * rows * 300 * 300


# Packed weights

needs_bf16 = pytest.mark.skipif(
    linear._PACK is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 here"
)


@needs_bf16
@torch.no_grad()
def test_packed_weights_give_the_same_bits():
    module, x = Linear(300, 300).bfloat16(), torch.randn(5, 300, dtype=torch.bfloat16)
    expected = module(x)
    with packed():
        for _ in range(PATIENCE + 2):
            assert torch.equal(module(x), expected)
        packs = linear._PACKS.get()
        assert list(packs.packs) == [module]
        assert torch.equal(copy.deepcopy(module)(x), expected)
    assert linear._PACKS.get() is None


@needs_bf16
@torch.no_grad()
def test_a_weight_that_changes_is_noticed():
    module, x = Linear(300, 300).bfloat16(), torch.randn(5, 300, dtype=torch.bfloat16)
    with packed():
        for _ in range(PATIENCE + 2):
            module(x)
        module.weight.mul_(2)
        changed = module(x)
    assert torch.equal(changed, module(x))


@needs_bf16
@torch.no_grad()
def test_other_threads_see_no_packs():
    seen = []
    with packed():
        thread = threading.Thread(target=lambda: seen.append(linear._PACKS.get()))
        thread.start()
        thread.join()
    assert seen == [None]


GENERATE = """
import torch
from headwater import HeadwaterConfig, HeadwaterForCausalLM
config = HeadwaterConfig(vocab_size=97, hidden_size=256, num_hidden_layers=1, num_attention_heads=4)
model = HeadwaterForCausalLM(config).bfloat16().eval()
ids = torch.arange(9)[None]
made = [model.generate(ids, max_new_tokens=30, do_sample=False, use_cache=cached) for cached in (True, False)]
print(made[0].shape[1])
"""


def test_generation_in_bf16_on_a_processor_without_the_instructions_for_it():
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", GENERATE], env=limited, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "39", done.stderr[-2000:]


@needs_bf16
def test_generation_packs_when_it_is_long_and_may_be_told_not_to(monkeypatch):
    packs = []
    monkeypatch.setattr(linear, "_PACK", lambda weight, pack=linear._PACK: packs.append(weight) or pack(weight))
    config = HeadwaterConfig(vocab_size=300, hidden_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = HeadwaterForCausalLM(config).bfloat16().eval()

    def generated(tokens: int) -> int:
        packs.clear()
        model.generate(torch.arange(9)[None], max_new_tokens=tokens, do_sample=False)
        return len(packs)

    assert generated(PATIENCE - 2) == 0
    assert generated(PATIENCE + 8) == 4 + 3 + 1
    model.packs_weights = False
    assert generated(PATIENCE + 8) == 0
