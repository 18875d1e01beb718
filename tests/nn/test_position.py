import copy

import pytest
import torch

from conftest import assert_near, decode, document_positions, shared, tokens
from headwater.nn.position import alibi_slopes
from headwater.testing import naive
from references import reference


@pytest.mark.parametrize("heads", range(1, 33))
def test_alibi_slopes(heads):
    assert alibi_slopes(heads).tolist() == pytest.approx([naive.alibi_slope(head, heads) for head in range(heads)])


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [2**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rel=1e-15)


ALIBI = [dict(num_attention_heads=6, num_key_value_heads=3, head_dim=4), dict(sliding_window=5)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("changes", ALIBI)
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "matmul"])
@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}, "svformer": {}}])
def test_alibi_in_a_model(changes, kernel, mechanisms):
    model, ids = shared(mechanisms, position="alibi", attn_implementation=kernel, **changes), tokens(2, 13)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = mask[1, 6] = 0
    expected = torch.stack([reference(model)(row, real.bool().tolist()) for row, real in zip(ids, mask, strict=True)])
    real = mask.bool()
    assert_near(model(ids, attention_mask=mask, use_cache=False).logits[real], expected[real], 1e-12)
    assert_near(decode(model, ids, [5, 1, 7], attention_mask=mask)[real], expected[real], 1e-12)
    packed = model(ids, position_ids=document_positions([[6, 7], [6, 7]]), use_cache=False).logits
    assert_near(packed[:, 6:], model(ids[:, 6:], use_cache=False).logits, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_hides_padding_in_half_precision(dtype):
    model = shared({}, position="alibi")
    half, ids = copy.deepcopy(model).to(dtype), tokens(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    logits = half(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    assert_near(logits[1, 4:].float(), half(ids[1:, 4:]).logits[0].float(), 0.05)
