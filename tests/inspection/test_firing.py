"""Parameter tokens: exactly those fire that hand-set keys make fire, and every figure is that of a loop."""

import pytest
import torch

from conftest import build, tokens
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater_lab.inspection.pairs import FIRES, PairCounter
from headwater_lab.inspection.sample import Sample
from headwater_lab.inspection.watch import read_sample

PAIRS = 12


def one_hot_model():
    """Token i is the i-th unit vector, attention adds nothing, and pair i of the feed-forward has it as its key."""
    config = HeadwaterConfig(
        vocab_size=PAIRS,
        hidden_size=PAIRS,
        num_hidden_layers=1,
        num_attention_heads=2,
        position="none",
        mechanisms={"pattention": {"ffn_pairs": PAIRS}},
    )
    model = HeadwaterForCausalLM(config).double().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(PAIRS))
        model.model.layers[0].self_attn.o_proj.value.zero_()
        model.model.layers[0].mlp.key.copy_(torch.eye(PAIRS))
        model.model.layers[0].mlp.value.copy_(torch.eye(PAIRS))
    return model


def test_exactly_the_pairs_with_the_tokens_keys_fire():
    ids = torch.tensor([[3, 3, 3, 5], [7, 7, 3, 7]])
    model = one_hot_model()
    found = read_sample(model, Sample({"input_ids": ids}))
    (ffn,) = [map for map in found.maps if map.place == "mlp"]
    assert (ffn.layer, ffn.pairs) == (0, PAIRS)
    assert ffn.effective == pytest.approx(1.0)
    assert ffn.fires == pytest.approx(1 / PAIRS)
    assert ffn.silent == pytest.approx((PAIRS - 3) / PAIRS)
    by_pair = {one.pair: one for one in ffn.strongest}
    assert [one.pair for one in ffn.strongest[:3]] == [3, 7, 5]
    assert {pair: one.fires for pair, one in by_pair.items() if one.fires} == {3: 4 / 8, 7: 3 / 8, 5: 1 / 8}
    # GELU(τ) = τ·Φ(τ) of the one score, and each value has length 1.
    weight = float(torch.nn.functional.gelu(model.model.layers[0].mlp.scale()))
    assert by_pair[5].contribution == pytest.approx(weight / 8)
    best = by_pair[5].tokens[0]
    assert (best.before, best.token, best.after) == ("3 3 3", "5", "")
    assert best.contribution == pytest.approx(weight)


def test_when_all_pairs_share_the_work_none_fires():
    model = one_hot_model()
    with torch.no_grad():
        model.model.layers[0].mlp.key.fill_(1.0)
    found = read_sample(model, Sample({"input_ids": tokens(1, 8) % PAIRS}))
    (ffn,) = [map for map in found.maps if map.place == "mlp"]
    assert ffn.effective == pytest.approx(PAIRS)
    assert (ffn.fires, ffn.silent) == (0, 1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_as_loops_whatever_the_batches(size):
    c = torch.rand(5, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    ids = tokens(5, 6)
    counter = PairCounter(Sample({"input_ids": ids}))
    for first in range(0, 5, size):
        counter.add(c[first : first + size], first)
    found = counter.result(2, "mlp")

    effective, fired, means, places = 0.0, [0] * 9, [0.0] * 9, []
    for b in range(5):
        for t in range(6):
            row = c[b, t].tolist()
            effective += sum(row) ** 2 / sum(x * x for x in row) / 30
            for i, x in enumerate(row):
                fired[i] += x > FIRES * sum(row) / 9
                means[i] += x / 30
            places.append((b, t))
    assert found.effective == pytest.approx(effective)
    assert found.fires == pytest.approx(sum(fired) / 30 / 9)
    assert found.silent == sum(count == 0 for count in fired) / 9
    order = sorted(range(9), key=lambda i: -means[i])[:8]
    assert [one.pair for one in found.strongest] == order
    for one in found.strongest:
        assert one.contribution == pytest.approx(means[one.pair])
        assert one.fires == fired[one.pair] / 30
        best = sorted(places, key=lambda place: -c[(*place, one.pair)].item())[:3]
        assert [tok.token for tok in one.tokens] == [str(ids[b, t].item()) for b, t in best]


@pytest.mark.parametrize("score", ["l2_norm_gelu", "gelu_l1_norm", "exp_l1_norm", "softmax"])
def test_contributions_add_up_to_the_output(score):
    """A pair's contribution is the length of its row of Θ·V_P: the sum of the rows is the output."""
    mlp = build({"pattention": {"ffn_pairs": 7, "score": score}}, num_hidden_layers=1).model.layers[0].mlp
    x = torch.randn(3, 4, 32, dtype=torch.float64)
    added = mlp.weights(x)[..., None] * mlp.values
    assert torch.allclose(added.sum(-2), mlp(x))
    assert torch.allclose(mlp.show_firing(x), added.norm(dim=-1))
