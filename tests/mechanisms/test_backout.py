"""A middle layer's output, taken out of the last one's."""

import pytest
import torch

from conftest import assert_near, build, config, decode, tokens
from headwater import HeadwaterError
from headwater.config.plan import Stage
from references import reference


@pytest.mark.parametrize("options", [{}, {"layer": 0, "weight": -0.7}])
def test_it_is_the_equation(options):
    """After DenseFormer's average of the last block, and before the final norm."""
    model, ids = build({"dense_former": {}, "backout": options}, num_hidden_layers=4), tokens(1, 7)
    logits = model(ids, use_cache=False).logits
    assert_near(logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 3]), logits)
    with torch.no_grad():
        model.model.layers[-1].mechanisms["backout"].strength.zero_()
    assert not torch.allclose(model(ids).logits, logits)


def test_only_the_last_layer_has_it():
    model = build({"backout": {}}, num_hidden_layers=5)
    assert [plan.acts for plan in model.plans] == [()] * 4 + [((Stage.BLOCK_OUTPUT, "backout"),)]
    assert [source.layer for source in model.plans[4].reads] == [2], "as nanochat counts"


@pytest.mark.parametrize(("options", "layers"), [({}, 2), ({"layer": 3}, 4), ({"layer": -1}, 4), ({}, 1)])
def test_the_layer_comes_before_the_last(options, layers):
    with pytest.raises(HeadwaterError, match="'backout' subtracts the output of a layer before"):
        config({"backout": options}, num_hidden_layers=layers)
