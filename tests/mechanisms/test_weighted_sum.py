import pytest
import torch
from torch import Tensor

from conftest import assert_near
from headwater.mechanisms.weighted_sum import weighted_sum


def tensors(count: int, *shape: int) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_passes_gradcheck(count):
    weights, xs = torch.randn(count, dtype=torch.float64, requires_grad=True), tensors(count, 3, 2, 4, 2)
    assert_near(weighted_sum(weights, *xs), sum(w * x for w, x in zip(weights, xs, strict=True)), 1e-14)
    assert torch.autograd.gradcheck(weighted_sum, (weights, *xs))


def test_tensors_that_lie_differently_in_memory():
    weights, (a, b) = torch.randn(2, dtype=torch.float64, requires_grad=True), tensors(2, 3, 2, 4, 2)
    b = b.contiguous()
    grads = torch.autograd.grad(weighted_sum(weights, a, b).square().sum(), (weights, a, b))
    expected = torch.autograd.grad((weights[0] * a + weights[1] * b).square().sum(), (weights, a, b))
    for actual, wanted in zip(grads, expected, strict=True):
        assert_near(actual, wanted, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half(dtype):
    weights = torch.randn(3, requires_grad=True)
    xs = [x.detach().to(dtype).requires_grad_() for x in tensors(3, 5, 2, 4, 6)]
    wide = [x.detach().float().requires_grad_() for x in xs]
    y, expected = weighted_sum(weights, *xs), weighted_sum(weights, *wide)
    assert y.dtype == dtype
    assert_near(y.float(), expected, 0.02)
    g = torch.randn(y.shape).to(dtype)
    gw, *gx = torch.autograd.grad(y, (weights, *xs), g)
    ew, *ex = torch.autograd.grad(expected, (weights, *wide), g.float())
    assert gw.dtype == torch.float32
    assert_near(gw, ew, 0.02)
    for a, e in zip(gx, ex, strict=True):
        assert torch.equal(a, e.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_form_for_the_compiler_equals_the_plain_form(dtype):
    weights = torch.randn(3, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    xs = [x.detach().to(dtype).requires_grad_() for x in tensors(3, 5, 2, 4, 6)]
    y, expected = (
        torch.compile(weighted_sum, backend="aot_eager", fullgraph=True)(weights, *xs),
        weighted_sum(weights, *xs),
    )
    g, tolerance = torch.randn(y.shape).to(dtype), 1e-12 if dtype == torch.float64 else 0.05
    pairs = zip(
        (y, *torch.autograd.grad(y, (weights, *xs), g)),
        (expected, *torch.autograd.grad(expected, (weights, *xs), g)),
        strict=True,
    )
    for actual, wanted in pairs:
        assert actual.dtype == wanted.dtype
        assert_near(actual.double(), wanted.double(), tolerance)


def test_inputs_without_gradient_get_none():
    weights, (a, b) = torch.randn(2, dtype=torch.float64, requires_grad=True), tensors(2, 3, 2, 4, 2)
    weighted_sum(weights, a.detach(), b).sum().backward()
    assert weights.grad is not None
