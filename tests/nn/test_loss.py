"""The loss over blocks of rows, against transformers'."""

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from conftest import assert_near
from headwater.kernels import fused_loss as module
from headwater.kernels.scratch import saved_bytes
from headwater.nn.loss import causal_lm_loss

V = 97


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    labels = torch.randint(V, (3, 16))
    labels[0, :5] = labels[2, -3:] = -100
    return (3 * torch.randn(3, 16, V)).to(dtype).requires_grad_(), labels


def agree(logits: Tensor, labels: Tensor | None, tolerance: float, **kwargs) -> None:
    ours, theirs = (f(logits, labels, V, **kwargs) for f in (causal_lm_loss, ForCausalLMLoss))
    assert torch.equal(ours, theirs)
    assert ours.dtype == theirs.dtype
    (actual,), (expected,) = (torch.autograd.grad(2 * loss, logits) for loss in (ours, theirs))
    assert actual.dtype == expected.dtype == logits.dtype
    assert_near(actual, expected, tolerance)


@pytest.mark.parametrize("block", [1, 5 * V, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_is_the_loss_of_transformers(monkeypatch, dtype, block):
    monkeypatch.setattr(module, "BLOCK", block)
    logits, labels = batch(dtype)
    tolerance = 1e-6 if dtype in (torch.float32, torch.float64) else 1e-4
    agree(logits, labels, tolerance)
    agree(logits, labels, tolerance, num_items_in_batch=7)
    agree(logits, labels, tolerance, num_items_in_batch=torch.tensor(7))
    agree(logits, None, tolerance, shift_labels=labels)
    labels[labels == -100] = 3
    agree(logits, labels, tolerance, ignore_index=3)


def test_logits_that_lie_apart():
    _, labels = batch()
    wide = torch.randn(3, 16, V + 3, requires_grad=True)
    loss = causal_lm_loss(wide[..., :V], labels, V)
    assert torch.equal(loss, ForCausalLMLoss(wide[..., :V].contiguous(), labels, V))


def test_nothing_to_predict():
    logits, labels = batch()
    labels.fill_(-100)
    assert causal_lm_loss(logits, labels, V).isnan()
    assert causal_lm_loss(logits, labels, V, num_items_in_batch=1) == 0


def test_kept_are_the_logits():
    logits, labels = batch(torch.bfloat16)
    assert saved_bytes(lambda: causal_lm_loss(logits, labels, V), [logits]) < logits.numel()


def test_without_gradient_and_under_compile():
    logits, labels = batch()
    with torch.no_grad():
        assert torch.equal(causal_lm_loss(logits, labels, V), ForCausalLMLoss(logits, labels, V))
    compiled = torch.compile(causal_lm_loss, fullgraph=True, backend="aot_eager")
    assert_near(compiled(logits, labels, V), ForCausalLMLoss(logits, labels, V), 1e-6)
