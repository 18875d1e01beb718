"""Pattention that reads the k best pairs: which those are, what they add up to, product keys, and what it costs."""

import itertools
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_pattention import FORMS, layer, random
from torch import Tensor

from conftest import assert_near, build, config, disturb, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.cost import counts as cost
from headwater.growth import importance, shrink
from headwater.kernels import disable_kernels
from headwater.mechanisms import Pattention
from headwater.mechanisms.pattention import default_tau
from headwater.mechanisms.product_keys import ProductKeys, find_largest
from headwater.testing import naive
from headwater.util.precision import Precision
from headwater_lab import grow
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.training.initialization import measure_initialization
from headwater_lab.training.loop import train
from headwater_lab.training.optimizers import parameter_groups

MAPS = ["query", "key", "value", "output", "feed_forward"]
PRODUCT = {"ffn_pairs": 36, "attention_pairs": 25, "top_k": 4, "product_keys": MAPS, "product_heads": 2}
# k, heads of product keys: one pair, more than a side of 5 has, all pairs.
READS = [(1, 0), (7, 0), (25, 0), (1, 1), (3, 2), (7, 2), (25, 1)]


@pytest.mark.parametrize(("top_k", "heads"), READS)
def test_values_and_gradients_equal_naive(top_k, heads):
    for score, gelu in FORMS if (top_k, heads) == (7, 2) else FORMS[:1]:
        module = layer(score, gelu=gelu, pairs=25, top_k=top_k, product_heads=heads)
        x, weigh = random(3, 1, 6).requires_grad_(), random(3, 1, 5)
        inputs = [x, module.key, module.value]
        given = module.key, module.value, module.scale.tau[0], score, gelu, top_k, heads
        wanted = torch.stack([naive.pattention(row, *given) for row in x.flatten(0, 1)])[:, None]
        expected = torch.autograd.grad((wanted * weigh).sum(), inputs)
        for form in (nullcontext, disable_kernels):
            with form():
                actual = module(x)
                found = torch.autograd.grad((actual * weigh).sum(), inputs)
            assert_near(actual, wanted, 1e-12)
            for a, e in zip(found, expected, strict=True):
                assert_near(a, e, 1e-11)


def test_all_pairs_are_the_dense_form():
    """And product keys are keys, sums of two."""
    dense, x = layer(pairs=9), random(4, 6)
    every = layer(pairs=9, top_k=9)
    every.load_state_dict(dense.state_dict())
    assert_near(every(x), dense(x), 1e-12)
    product = layer(pairs=9, top_k=9, product_heads=1)
    with torch.no_grad():
        first, second = product.key.split(3)
        dense.set_pairs((first[:, None] + second).flatten(0, 1), product.value)
    assert_near(product(x), dense(x), 1e-12)


def test_heads_are_several_modules_of_the_same_values():
    whole, x = layer(pairs=16, top_k=3, product_heads=2), random(5, 6)
    parts = [layer(pairs=16, top_k=3, product_heads=1) for _ in range(2)]
    for part, key in zip(parts, whole.key.chunk(2), strict=True):
        part.set_pairs(key, whole.value)
    assert_near(whole(x), parts[0](x) + parts[1](x), 1e-12)


def test_the_memory_of_the_paper():
    """Queries of a linear map, halved, against half keys, softmax over the best of all pairs: arXiv 1907.05242, 3.1."""
    heads, side, top_k, width = 2, 4, 3, 8
    x, values = random(7, 6), random(side**2, 5)
    queries, keys = random(heads, width, 6), random(heads, 2, side, width // 2)
    expected = torch.zeros(7, 5, dtype=torch.float64)
    for (token, row), head in itertools.product(enumerate(x), range(heads)):
        halves = (queries[head] @ row).chunk(2)
        scores = {
            (i, j): keys[head, 0, i] @ halves[0] + keys[head, 1, j] @ halves[1]
            for i in range(side)
            for j in range(side)
        }
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:top_k]
        total = sum(scores[pair].exp() for pair in best)
        for i, j in best:
            expected[token] += scores[i, j].exp() / total * values[i * side + j]
    ours = layer("softmax", pairs=side**2, top_k=top_k, product_heads=heads)
    folded = torch.einsum("hpsw,hpwd->hpsd", keys, queries.unflatten(1, (2, -1)))
    ours.set_pairs(folded.flatten(0, 2) * 6**0.5, values)  # the softmax of equation 15 divides by the root of the width
    assert_near(ours(x), expected, 1e-12)


# Which pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_are_in_order_and_of_equal_ones_the_first(dtype):
    a = torch.randint(-3, 4, (200, 11), generator=torch.Generator().manual_seed(0)).to(dtype) / 3
    a[a == 0] *= torch.where(torch.rand(200, 11) < 0.5, 1, -1)[a == 0]  # zeros of both signs are equal
    a[0, :3] = torch.tensor([math.inf, -math.inf, 1e-40])
    for row, found in zip(a.tolist(), find_largest(a, 5).tolist(), strict=True):
        assert found == sorted(range(11), key=lambda i: (-row[i], i))[:5]


@pytest.mark.parametrize(("side", "top_k"), [(3, 1), (3, 2), (3, 5), (3, 9), (7, 7), (7, 12), (7, 40), (40, 32)])
def test_product_keys_find_the_best_of_all_pairs(side, top_k):
    found, scores = ProductKeys(side, top_k), random(30, 2, side)
    pairs, sums = found(scores)
    every = (scores[:, 0, :, None] + scores[:, 1, None, :]).flatten(1)
    values, places = every.topk(top_k)
    assert torch.equal(pairs, places)
    assert_near(sums, values, 1e-12)
    assert found.ranks.shape[1] <= top_k * (1 + math.log(top_k))
    zero = found(torch.zeros(1, 2, side))[0]
    assert zero.tolist() == [list(range(top_k))]


def test_gradients_reach_the_chosen_pairs_alone():
    module, x = layer(pairs=25, top_k=2, product_heads=1), random(1, 6)
    module(x).square().sum().backward()
    chosen = (module.weights(x)[0] != 0).nonzero()[:, 0]
    assert module.value.grad.any(1).nonzero()[:, 0].tolist() == chosen.tolist()
    rows = {int(pair) // 5 for pair in chosen} | {5 + int(pair) % 5 for pair in chosen}
    assert set(module.key.grad.any(1).nonzero()[:, 0].tolist()) == rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_precision(dtype):
    """The pairs that fp64 would choose among the scores of this precision, and weights rounded once."""
    module = layer(d_in=32, pairs=64, top_k=8).to(dtype)
    x = random(9, 32).to(dtype)
    scores = (x @ module.key.T).double()
    pairs = find_largest(scores, 8)
    weights = module._theta(scores.gather(-1, pairs), module.scale.tau).to(dtype).double()
    wanted = (weights[..., None] * module.value.double()[pairs]).sum(-2)
    assert module(x).dtype == dtype
    assert_near(module(x).double(), wanted, 2**-7 if dtype == torch.bfloat16 else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


# At the start


@pytest.mark.parametrize("options", [PRODUCT, {"top_k": {"feed_forward": 4}}], ids=["product keys", "dense keys"])
def test_sub_layers_write_as_much_as_dense_ones(options):
    shape = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)
    dense, sparse = (
        measure_initialization(HeadwaterForCausalLM(config({"pattention": given}, **shape))) for given in ({}, options)
    )
    for a, b in zip(sparse, dense, strict=True):
        assert 0.7 < a.output / b.output < 1.6


def test_start():
    sizes = dict(hidden_size=64, num_hidden_layers=2, initializer_range=0.02)
    options = {"ffn_pairs": 4096, "top_k": {"feed_forward": 8}, "product_keys": ["feed_forward"], "product_heads": 4}
    mlp = HeadwaterForCausalLM(config({"pattention": options}, **sizes)).model.layers[0].mlp
    assert mlp.key.shape == (2 * 4 * 64, 64)
    assert mlp.key.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.03)
    assert mlp.value.std().item() == pytest.approx(2 / (2 * 8) * (256 / 32) ** 0.5, rel=0.03)
    assert mlp.scale.tau.item() == pytest.approx(8**0.5)
    fan_in = HeadwaterForCausalLM(config({"pattention": options | {"value_init": "fan_in"}}, **sizes))
    assert fan_in.model.layers[0].mlp.value.std().item() == pytest.approx(32**-0.5, rel=0.03)
    assert HeadwaterForCausalLM(config({"pattention": options | {"tau": "pairs"}})).model.layers[0].mlp.scale.tau == 8


# In a model


def test_values_are_in_the_group_of_embeddings():
    model = HeadwaterForCausalLM(config({"pattention": {"top_k": {"feed_forward": 4}}}))
    (group,) = [group for group in parameter_groups(model, 0.1) if group["name"] == "embeddings"]
    looked_up = [block.mlp.value for block in model.model.layers]
    assert set(group["params"]) == {model.model.embed_tokens.weight, *looked_up}
    assert group["weight_decay"] == 0


def test_cost_grows_with_the_root():
    def made(pairs: int) -> dict:
        return {"pattention": {"ffn_pairs": pairs, "top_k": 4, "product_keys": ["feed_forward"]}}

    flops = [sum(cost.forward_flops(config(made(side**2)), 32).values()) for side in (8, 16, 32)]
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0]) == 3 * 2 * 2 * 16 * 32
    read = [cost.weights_read(config(made(side**2))) for side in (8, 16)]
    assert read[1] - read[0] == 3 * 2 * 8 * 32
    copies = [cost.state_bytes(config(made(side**2)), Precision.BF16_MIXED)["copies"] for side in (8, 16)]
    assert copies[1] - copies[0] == 2 * (read[1] - read[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be from 1 to the 32 pairs, not 0"),
        ({"top_k": {"feed_forward": 129}}, "'feed_forward': top_k must be from 1 to the 128 pairs, not 129"),
        ({"top_k": {"mlp": 4}}, "top_k has no map 'mlp'"),
        ({"product_keys": ["feed_forward"], "ffn_pairs": 36}, "product keys need top_k"),
        ({"product_keys": ["feedforward"], "top_k": 4}, "product_keys has no map 'feedforward'; did you mean"),
        ({"product_keys": ["feed_forward"], "top_k": 4}, "a square number of pairs, such as 121 or 144, not 128"),
        ({"product_heads": 2}, "product_heads must be at least 1, and 1 without product_keys, not 2"),
        (PRODUCT | {"product_heads": 0}, "product_heads must be at least 1"),
        (PRODUCT | {"frozen": {"query": 3}}, "none can be frozen"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"pattention": options})


# Growth


def test_growing_and_shrinking_by_dense_keys_alone():
    sizes = {"attention_pairs": 7, "ffn_pairs": 13}
    model, product = build({"pattention": sizes | {"top_k": 5}}), build({"pattention": PRODUCT})
    ids = tokens(2, 9)
    with pytest.raises(HeadwaterError, match=r"the 5 best pairs of 'query'.*key_init=random"):
        grow(model, 9)
    grown = grow(model, 9, key_init="random", tau="recompute")
    assert grown.model.layers[0].self_attn.q_proj.scale.tau.item() == pytest.approx(default_tau("l2_norm_gelu", 5))
    assert grown.model.layers[0].mlp.find_tau_path() is None
    weights = importance(grown, [{"input_ids": ids}])
    small = shrink(grown, weights, 6)
    assert small.model.layers[0].self_attn.q_proj.n == 6
    small(ids)
    with pytest.raises(
        HeadwaterError, match=r"Too few pairs of '.*' would remain: top_k must be from 1 to the 4 pairs"
    ):
        shrink(grown, weights, 4)
    weights = importance(product, [{"input_ids": ids}])
    for attempt in (
        lambda: grow(product, 36),
        lambda: grow(product, 36, key_init="random"),
        lambda: shrink(product, weights, 16),
    ):
        with pytest.raises(HeadwaterError, match=r"product keys, each of which belongs to many pairs"):
            attempt()


def test_plain_module_refuses_what_it_cannot_do():
    for options in (
        dict(top_k=0),
        dict(top_k=9),
        dict(product_heads=1),
        dict(pairs=9, top_k=2, product_heads=1, frozen=2),
    ):
        with pytest.raises(HeadwaterError):
            Pattention(4, 4, **({"pairs": 8} | options))


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(rows):
    x = torch.randn(*rows, 4, requires_grad=True)
    y: Tensor = disturb(Pattention(4, 5, 9, top_k=2, product_heads=2))(x)
    assert y.shape == (*rows, 5)
    y.sum().backward()


FILE = Path(__file__).parents[2] / "recipes/pairs/product-keys.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("arm", load_recipe(FILE).compare.arms)
def test_two_steps_of_the_recipe(arm, tmp_path):
    recipe = load_recipe(FILE, ["training.steps=2", "training.warmup_steps=1", "training.batch_size=2"]).arm(arm, 0)
    record = train(recipe, tmp_path / "run")
    assert record.status == "finished"
    assert all(math.isfinite(point.loss) and point.gradient_norm > 0 for point in record.curve)
