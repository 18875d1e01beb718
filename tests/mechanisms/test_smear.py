"""The embedding of the token before, added to the token's own."""

import pytest
import torch

from conftest import assert_near, build, config, decode, document_positions, tokens
from headwater import HeadwaterError
from headwater.config.plan import Stage
from headwater.mechanisms import Smear
from references import reference

SMEAR = {"smear": {"weight": 0.5}}


def test_it_is_the_equation():
    smear, x = Smear(channels=5, weight=0.7).double(), torch.randn(2, 6, 8).double()
    made = smear(x)
    gate = smear.strength * (x[:, 1:, :5] @ smear.gate.weight[0]).sigmoid()
    assert_near(made[:, 1:], x[:, 1:] + gate[..., None] * x[:, :-1], 1e-12)
    assert torch.equal(made[:, 0], x[:, 0])


@pytest.mark.parametrize("norm", ["none", "before", "after"])
def test_whoever_reads_the_embedding_reads_the_smeared_one(norm):
    """In layer 0 and in later ones; cached, packed, and as in the equations."""
    smear = {"smear": {"weight": 0.5, "norm": norm}}
    model, ids = build({"embedding_residual": {"layers": [0, 2]}, **smear, "dense_former": {}}), tokens(1, 9)
    logits = model(ids, use_cache=False).logits
    assert_near(logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [4, 1, 4]), logits)
    packed = model(ids, position_ids=document_positions([[2, 6, 1]]), use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([2, 6, 1], 1)]
    assert_near(packed, torch.cat(alone, 1))


def test_it_is_in_layer_0_alone():
    model = build(SMEAR)
    assert [plan.at(Stage.EMBEDDING) for plan in model.plans] == [("smear",), (), ()]
    assert [name for name, _ in model.named_parameters() if "smear" in name] == [
        "model.layers.0.mechanisms.smear.strength",
        "model.layers.0.mechanisms.smear.gate.weight",
    ]


def test_channels_are_those_of_the_stream():
    with pytest.raises(HeadwaterError, match="channels must be from 1 to hidden_size 32, not 33"):
        config({"smear": {"channels": 33}})
