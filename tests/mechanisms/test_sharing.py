"""Skip-layer attention and SVFormer: heads that attend to another layer's keys and values."""

import random

import pytest
import torch

from conftest import assert_near, build, config, decode, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.pattention import Pattention
from headwater.models.cache import cache_bytes
from headwater.plugins.mechanisms import MECHANISMS
from headwater.testing.naive import Reference, find_sources
from references import reference

BIG = dict(num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12, hidden_size=48, head_dim=4)


def stores(mechanisms: dict, **changes) -> list[tuple[int, int]]:
    """Key and value heads that each layer stores."""
    return [(len(plan.k_heads), len(plan.v_heads)) for plan in plan_layers(config(mechanisms, **changes))]


def bytes_of(mechanisms: dict, tokens_in: int = 7) -> int:
    model = HeadwaterForCausalLM(config(mechanisms, **BIG)).eval()
    return cache_bytes(model(tokens(2, tokens_in), use_cache=True).past_key_values)


# What is stored


def test_skip_layer_at_three_quarters_stores_13_of_16():
    assert stores({"skip_layer": {}}, **BIG) == [(12, 12)] * 9 + [(3, 3)] * 3
    assert bytes_of({"skip_layer": {}}) * 16 == bytes_of({}) * 13


def test_svformer_stores_values_once():
    assert stores({"svformer": {}}, **BIG) == [(12, 12)] + [(12, 0)] * 11
    assert bytes_of({"svformer": {}}) * 24 == bytes_of({}) * 13


def test_sharing_keys_or_both():
    assert stores({"svformer": {"share": "keys"}}) == [(2, 2), (0, 2), (0, 2)]
    assert stores({"svformer": {"share": "both"}}) == [(2, 2), (0, 0), (0, 0)]
    assert bytes_of({"svformer": {"share": "both"}}) * 12 == bytes_of({})


def test_alias_stores_skip_heads_in_the_first_layers_only():
    projection = {"skip_layer": {"layers": 2, "heads": 6}}
    alias = {"skip_layer": {"layers": 2, "heads": 6, "source": "alias"}}
    assert stores(projection, **BIG) == [(12, 12)] * 10 + [(6, 6)] * 2
    assert stores(alias, **BIG) == [(12, 12)] * 2 + [(6, 6)] * 10


def test_both_together_take_keys_from_the_source_and_values_from_the_first():
    for order in (["skip_layer", "svformer"], ["svformer", "skip_layer"]):
        plans = plan_layers(config({name: {} for name in order}))
        assert [(a.k, a.v) for a in plans[2].attends] == [(2, 0), (0, 0)]


def test_plan_says_what_the_equations_say():
    """Against the reference's own reading of the equations."""
    for mechanisms in (
        {"skip_layer": {}},
        {"skip_layer": {"layers": 3, "heads": 8}, "svformer": {"source": 2}},
        {"svformer": {"layers": [4, 7], "share": "both"}, "skip_layer": {"layers": 2, "heads": 8}},
        {"skip_layer": {"layers": 5, "source": "alias"}},
    ):
        described = config(mechanisms, **BIG)
        for plan in plan_layers(described):
            assert [tuple(a) for a in plan.attends] == [find_sources(described, plan.index, h) for h in range(12)]
            assert list(plan.k_heads) == Reference(described, {}).list_stored_heads(plan.index, 0)
            assert list(plan.v_heads) == Reference(described, {}).list_stored_heads(plan.index, 1)


# What is not built


@pytest.mark.parametrize("mechanisms", [{"skip_layer": {"layers": 1, "heads": 4}}, {"svformer": {"share": "both"}}])
def test_layers_that_nobody_attends_to_have_no_maps(mechanisms):
    last = HeadwaterForCausalLM(config(mechanisms)).model.layers[-1].self_attn
    assert last.k_proj is None
    assert last.v_proj is None
    assert not any("k_proj" in name or "v_proj" in name for name, _ in last.named_parameters())


def test_unbuilt_heads_change_nothing():
    """The paper's listing, which builds all heads, with the same weights."""
    model, ids = shared({"skip_layer": {}}, position="none"), tokens(2, 9)
    whole = build({}, position="none")
    with torch.no_grad():
        for (name, target), source in zip(
            whole.named_parameters(), [model.state_dict().get(n) for n, _ in whole.named_parameters()], strict=True
        ):
            if source.shape == target.shape:
                target.copy_(source)
            else:
                assert "layers.2.self_attn" in name
                target[: len(source)].copy_(source)
    saved: list = []
    for depth, block in enumerate(whole.model.layers):
        attention = block.self_attn

        def hooked(inputs, context, attention=attention, depth=depth, **kwargs):
            (group,) = inputs
            k, v = group.k, group.v
            saved.append((k, v))
            if depth == 2:  # two layers back, the last of two key/value heads
                k, v = (torch.cat((own[:, :1], source[:, 1:]), 1) for own, source in zip((k, v), saved[0], strict=True))
            return type(attention).attend(attention, [group._replace(k=k, v=v)], context, **kwargs)

        attention.attend = hooked
    assert_near(model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits, 1e-12)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers must be less than the model's 3 layers"),
        ({"layers": -1}, "not -1"),
        ({"heads": 5}, "heads must be from 0 to the model's 4, not 5"),
        ({"heads": 3}, "heads must be a multiple of 2, not 3"),
        ({"source": "chain"}, "source"),
    ],
)
def test_contradictory_skip_layer(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"skip_layer": options})


def test_a_sliding_window_with_a_skip_source_is_refused():
    with pytest.raises(HeadwaterError, match="remove sliding_window"):
        config({"skip_layer": {}}, sliding_window=5)


@pytest.mark.parametrize("options", [{"layers": 0}, {"heads": 0}])
def test_off(options):
    model, vanilla = HeadwaterForCausalLM(config({"skip_layer": options})), HeadwaterForCausalLM(config())
    assert model.plans == vanilla.plans


def test_neutreno_acts_where_values_are_not_the_first_layers():
    plans = plan_layers(config({"svformer": {"layers": [2]}, "neutreno": {}}, num_hidden_layers=4))
    assert [plan.at(Stage.HEAD_OUTPUTS) for plan in plans] == [(), ("neutreno",), (), ("neutreno",)]


@pytest.mark.parametrize("options", [{"layers": 0}, {"heads": 0}])
def test_a_skip_that_is_off_may_stand_beside_a_sliding_window(options):
    config({"skip_layer": options}, sliding_window=5)


@pytest.mark.parametrize("other", [{"value_residual": {}}, {"neutreno": {}}])
def test_svformer_leaves_no_values_to_mix(other):
    for mechanisms in ({"svformer": {}, **other}, {**other, "svformer": {}}):
        with pytest.raises(HeadwaterError, match="remove"):
            config(mechanisms)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"source": 3}, "source must be a layer"), ({"layers": [1], "source": 1}, "layer 1 cannot receive from layer 1")],
)
def test_contradictory_svformer(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"svformer": options})


def test_keys_and_values_of_heads_that_lie_at_different_places():
    """A layer that stores all keys, since the next one's skip head attends to them, and its own head's values alone."""
    model, ids = build({"skip_layer": {"layers": 1}, "svformer": {"layers": [2]}}), tokens(1, 9)
    assert any(group.k_heads != group.v_heads for plan in model.plans for group in plan.groups)
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 1, 4]), model(ids, use_cache=False).logits)


# Who takes from whom, through several mechanisms

DEPTH = dict(num_hidden_layers=4)
LAST = {"keys": "last", "values": "last", "num_shared_layers": 2}
SKIP = {"layers": 1, "heads": 2}  # of two key/value heads the second


def attends(mechanisms: dict, head: int, **changes) -> list[tuple[int, int]]:
    """The layers whose keys and whose values a head of each layer attends to."""
    return [tuple(plan.attends[head]) for plan in plan_layers(config(mechanisms, **DEPTH | changes))]


@pytest.mark.parametrize("turned", [False, True], ids=["listed so", "in the other order"])
@pytest.mark.parametrize(
    ("mechanisms", "expected"),
    [
        # Layers 2 and 3 take both from layer 1, whose values, or both, are those of layer 0.
        ({"svformer": {"layers": [1]}, "kv_source": LAST}, [(0, 0), (1, 0), (1, 0), (1, 0)]),
        ({"svformer": {"layers": [1], "share": "both"}, "kv_source": LAST}, [(0, 0)] * 4),
        # Layers 2 and 3 take values from layer 1, which has those of layer 0.
        (
            {"svformer": {"source": 1}, "kv_source": {"keys": "own", "values": [0, 0, 2, 3]}},
            [(0, 0), (1, 0), (2, 0), (3, 0)],
        ),
        # Layer 3 takes values from layer 2, which takes them from layer 1, which takes them from layer 0.
        (
            {"svformer": {"source": 2, "layers": [3]}, "kv_source": {"keys": "own", "values": [0, 0, 0, 3]}},
            [(0, 0), (1, 0), (2, 0), (3, 0)],
        ),
    ],
)
def test_a_layer_attends_to_what_its_source_attends_to(mechanisms, expected, turned):
    assert attends(dict(reversed(mechanisms.items())) if turned else mechanisms, 0) == expected


@pytest.mark.parametrize(
    ("mechanisms", "second"),
    [
        # Layer 1's second head attends to layer 0, and with it those of the layers that take from layer 1.
        ({"skip_layer": SKIP, "kv_source": LAST}, [(0, 0)] * 4),
        ({"skip_layer": SKIP, "svformer": {"source": 1}}, [(0, 0), (0, 0), (1, 0), (2, 0)]),
        # Listed last, the skip counts: it takes what layers 1 and 2 project, or what they take from elsewhere.
        ({"kv_source": LAST, "skip_layer": SKIP}, [(0, 0), (0, 0), (1, 1), (0, 0)]),
        ({"svformer": {}, "skip_layer": SKIP}, [(0, 0), (0, 0), (1, 0), (2, 0)]),
        ({"skip_layer": SKIP, "svformer": {}}, [(0, 0), (0, 0), (1, 0), (2, 0)]),
        ({"kv_source": LAST, "skip_layer": SKIP | {"source": "alias"}}, [(0, 0)] * 4),
        ({"skip_layer": SKIP | {"source": "alias"}, "kv_source": LAST}, [(0, 0)] * 4),
        # A skip head reads what its source projects, not what the source's skip head reads; but what it takes is taken.
        ({"skip_layer": SKIP}, [(0, 0), (0, 0), (1, 1), (2, 2)]),
        ({"kv_source": {"keys": [0, 0, 2, 3], "values": [0, 0, 2, 3]}, "skip_layer": SKIP}, [(0, 0)] * 3 + [(2, 2)]),
        ({"skip_layer": SKIP, "kv_source": {"keys": [0, 0, 2, 3], "values": [0, 0, 2, 3]}}, [(0, 0)] * 3 + [(2, 2)]),
    ],
)
def test_skip_heads_with_shared_layers(mechanisms, second):
    assert attends(mechanisms, 1) == second
    assert attends(mechanisms, 1) == [find_sources(config(mechanisms, **DEPTH), layer, 1) for layer in range(4)]


def drawn_sharing(seed: int) -> dict:
    """Some of the mechanisms that share, in any order, with any options."""
    draw, depth = random.Random(seed), 5

    def a_map() -> list[int]:
        sources: list[int] = []
        for layer in range(depth):
            sources.append(draw.choice([layer, *set(sources)]))
        return sources

    source = draw.randrange(depth - 1)
    receivers = sorted(draw.sample(range(source + 1, depth), draw.randint(1, depth - source - 1)))
    shared_part = draw.choice(["keys", "values", "both"])
    everything = {
        "kv_source": {"keys": a_map(), "values": a_map()},
        "svformer": {"source": source, "layers": receivers, "share": shared_part},
        "skip_layer": {
            "layers": draw.choice([1, 2, 3]),
            "heads": 4,
            "source": draw.choice(["projection", "alias"]),
        },
    }
    return {name: everything[name] for name in draw.sample(list(everything), draw.choice([2, 3]))}


def test_any_mechanisms_that_share_as_the_equations_say():
    sizes = dict(num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
    for seed in range(60):
        described = config(drawn_sharing(seed), **sizes)
        for plan in plan_layers(described):
            assert [tuple(pair) for pair in plan.attends] == [
                find_sources(described, plan.index, head) for head in range(4)
            ]
            # What is stored is attended to by someone, and nothing is attended to that is not stored.
            assert list(plan.k_heads) == Reference(described, {}).list_stored_heads(plan.index, 0)
            assert list(plan.v_heads) == Reference(described, {}).list_stored_heads(plan.index, 1)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_models_with_any_of_them_are_exact(seed):
    model, ids = (
        build(drawn_sharing(seed), num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4),
        tokens(1, 8),
    )
    logits = model(ids, use_cache=False).logits
    assert_near(logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 4]), logits)


class FromBelow(Mechanism):
    """Every layer takes the keys of the layer below it; `above`: of the layer above, which cannot be."""

    class Options:
        above: bool = False
        short: bool = False

    @classmethod
    def redirect_heads(cls, options, config, plans):
        step = -1 if options["above"] else 1
        changed = [plan.attending([0], k=max(0, plan.index - step)) for plan in plans]
        return changed[:-1] if options["short"] else changed


@pytest.mark.parametrize("turned", [False, True])
def test_a_mechanism_from_outside_shares_by_the_same_rule(turned, monkeypatch):
    monkeypatch.setitem(MECHANISMS.added, "from_below", FromBelow)
    mechanisms = {"from_below": {}, "kv_source": {"keys": "own", "values": [0, 1, 1, 3]}}
    given = dict(reversed(mechanisms.items())) if turned else mechanisms
    assert attends(given, 0) == [(0, 0), (0, 1), (0, 1), (0, 3)]
    assert attends(given, 1) == [(0, 0), (1, 1), (2, 1), (3, 3)]
    with pytest.raises(
        HeadwaterError, match="layer 0 cannot attend to keys or values of layer 1; in redirect_heads, name"
    ):
        config({"from_below": {"above": True}})
    with pytest.raises(HeadwaterError, match="redirect_heads must return a list with the plan of each layer"):
        config({"from_below": {"short": True}})


def test_two_mechanisms_cannot_replace_one_map(monkeypatch):
    monkeypatch.setitem(MECHANISMS.added, "tokens", type("Tokens", (Pattention,), {}))
    with pytest.raises(HeadwaterError, match="both replace the query map of layer 0; remove one"):
        config({"pattention": {}, "tokens": {}})


@pytest.mark.parametrize(
    ("latent", "reason"),
    [("mla", "keys as values|its keys or a latent are|values for which keys"), ("low_rank_kv", "latent")],
)
@pytest.mark.parametrize(
    "other",
    [
        {"neutreno": {}},
        {"exclusive": {}},
        {"kv_shift": {"keys": False}},
        {"value_embedding": {}},
        {"value_residual": {}},
        {"ngram_memory": {"target": "values", "rank": 8}},
        {"short_conv": {"sites": ["values"]}},
    ],
    ids=str,
)
def test_what_needs_values_says_that_layers_have_none(other, latent, reason):
    with pytest.raises(HeadwaterError, match=reason):
        config(other | {latent: {}})


def test_a_latent_is_refused_where_it_cannot_be():
    for fields, said in (
        (dict(mechanisms={"low_rank_kv": {"heads": 0}}), "heads must be at least 1"),
        (dict(mechanisms={"low_rank_kv": {"heads": 3}}), "at most the 2 heads that keys have"),
        (dict(mechanisms={"low_rank_kv": {}, "mla": {}}), "both replace the values of layers; remove one"),
        (dict(mechanisms={"low_rank_kv": {}, "skip_layer": {}}), "in layer 2 they come from several layers"),
        (dict(mechanisms={"low_rank_kv": {}, "kv_source": {"keys": "own"}}), "come from several layers"),
    ):
        with pytest.raises(HeadwaterError, match=said):
            config(**fields)
    dynamic = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    with pytest.raises(HeadwaterError, match="use another rope_type"):
        config({"low_rank_kv": {}}, rope_parameters=dynamic)
    windows = dict(sliding_window=5, sliding_layers=[1], sliding_fields=dict(rope_parameters=dynamic))
    with pytest.raises(HeadwaterError, match="use another rope_type"):
        config({"low_rank_kv": {}}, **windows)
