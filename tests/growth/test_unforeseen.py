"""Growth that once passed as exact and was not, and parameters that could never learn."""

import pytest
import torch

from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.conversion.add import add_mechanisms
from headwater.testing.small_models import build, config, disturb, tokens
from headwater_lab import grow


def model(mechanisms, **settings):
    return disturb(HeadwaterForCausalLM(config(mechanisms, **settings)).double()).eval()


@torch.no_grad()
def moved(old, new):
    ids = tokens(2, 20)
    one, other = (which(ids, use_cache=False).logits for which in (old, new))
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize(("heads", "more", "rank"), [(4, 6, 6), (3, 4, 8), (4, 6, 5)])
def test_tables_of_a_low_rank_have_no_heads(heads, more, rank):
    """Their rows are as long before as after, though the new number of heads may divide them."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8}
    old = model({"value_embedding": {"tables": 1, "rank": rank}}, **sizes)
    assert moved(old, grow(old, num_attention_heads=more)) < 1e-12


@pytest.mark.parametrize("sizes", [{"hidden_size": 40}, {"num_attention_heads": 8, "num_key_value_heads": 4}], ids=str)
def test_a_score_that_depends_on_the_width_is_refused_and_kept_at_the_same_width(sizes):
    old = model({"pattention": {"attention_pairs": 8, "ffn_pairs": 16, "score": "softmax"}})
    with pytest.raises(HeadwaterError, match="score=softmax divides by the square root"):
        grow(old, **sizes)
    assert moved(old, grow(old, num_hidden_layers=6)) < 1e-12


@pytest.mark.parametrize("mechanisms", [["backout", "dense_former"], ["mudd", "dense_former"]], ids=str)
def test_what_acts_after_the_last_layer_keeps_its_order_or_is_refused(mechanisms):
    old = model({name: {} for name in mechanisms})
    with pytest.raises(HeadwaterError, match=r"After the last layer .* act in an order"):
        grow(old, num_hidden_layers=6)
    turned = model({name: {} for name in reversed(mechanisms)})
    assert moved(turned, grow(turned, num_hidden_layers=6)) < 1e-12


def test_new_channels_of_new_layers_learn_under_output_norms():
    old = build({}, output_norms=True)
    large = grow(old, num_hidden_layers=4, hidden_size=40)
    assert moved(old, large) < 1e-12
    before = {name: p.detach().clone() for name, p in large.named_parameters()}
    steps = torch.optim.AdamW(large.parameters(), lr=3e-3)
    for seed in range(6):
        ids = tokens(8, 40, seed=seed)
        steps.zero_grad()
        large.train()(ids, labels=ids).loss.backward()
        steps.step()
    still = [n for n, p in large.named_parameters() if "embed" not in n and not (p != before[n]).all()]
    assert still == []


def test_a_model_on_its_way_to_a_smaller_cache_is_finished_first():
    old = build({"blend": {"num_key_value_heads": 1}})
    with pytest.raises(HeadwaterError, match="finish the conversion before it grows"):
        grow(old, num_hidden_layers=6)
    with pytest.raises(HeadwaterError, match="finish the conversion first"):
        add_mechanisms(old, {"kv_shift": {}})
