"""Maps of layers: which layer attends to whose keys and values, here and in models of others."""

import itertools
import random

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import DynamicCache, Gemma3nTextConfig, Gemma4TextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

from conftest import assert_near, build, config, shared, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater.config.planner import plan_layers
from headwater.cost import counts as cost
from headwater.mechanisms.contract import Mechanism
from headwater.models.cache import cache_bytes
from headwater.nn.cache_name import CACHE
from headwater.nn.position import for_heads
from headwater.plugins.mechanisms import MECHANISMS
from headwater.testing.naive import find_sources


def sources(made: HeadwaterConfig) -> list[tuple[int, int]]:
    """The layers whose keys and values each layer attends to."""
    return [tuple(plan.attends[0]) for plan in plan_layers(made)]


@pytest.mark.parametrize(
    ("options", "keys", "values"),
    [
        ({}, [0, 0, 2, 2, 4, 4], [0, 0, 2, 2, 4, 4]),
        ({"group_size": 4}, [0, 0, 0, 0, 4, 4], [0, 0, 0, 0, 4, 4]),
        ({"keys": "yoco", "values": "yoco"}, [0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 3, 3]),
        ({"keys": "last", "values": "own"}, [0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]),
        ({"keys": "own", "values": "last", "num_shared_layers": 2}, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3]),
        (
            {"keys": "own", "values": "last", "num_shared_layers": 2, "layer_types": [*"absbss"]},
            [0, 1, 2, 3, 4, 5],
            [0, 1, 2, 3, 2, 2],
        ),
        ({"keys": [0, 1, 1, 0, 4, 4], "values": [0] * 6}, [0, 1, 1, 0, 4, 4], [0] * 6),
    ],
)
def test_maps_of_layers(options, keys, values):
    made = config({"kv_source": options}, num_hidden_layers=6)
    assert sources(made) == list(zip(keys, values, strict=True))
    assert sources(made) == [find_sources(made, layer, 0) for layer in range(6)]
    stored = [(len(plan.k_heads), len(plan.v_heads)) for plan in plan_layers(made)]
    assert stored == [(2 * (i in keys), 2 * (i in values)) for i in range(6)]


@pytest.mark.parametrize(
    ("options", "share"), [({}, 1 / 2), ({"keys": "yoco", "values": "yoco"}, 7 / 12), ({"keys": "own"}, 3 / 4)]
)
def test_shared_layers_store_nothing(options, share):
    models = [
        HeadwaterForCausalLM(config(given, num_hidden_layers=12, hidden_size=16, intermediate_size=8))
        for given in ({"kv_source": options}, {})
    ]
    mapped, whole = (cache_bytes(model.eval()(tokens(2, 7)).past_key_values) for model in models)
    assert mapped == share * whole


def test_a_map_to_the_first_layer_is_svformer():
    ids = tokens(2, 9)
    mapped = shared({"kv_shift": {}, "kv_source": {"keys": "own", "values": [0, 0, 0]}})
    named = build({"kv_shift": {}, "svformer": {}})
    named.load_state_dict(mapped.state_dict())
    assert torch.equal(mapped(ids, use_cache=False).logits, named(ids, use_cache=False).logits)


@pytest.mark.parametrize("order", [["kv_source", "skip_layer"], ["skip_layer", "kv_source"]])
def test_a_map_and_skip_heads_in_either_order(order):
    made = config({name: {"layers": 1, "heads": 2} if name == "skip_layer" else {} for name in order})
    attends = [[tuple(pair) for pair in plan.attends] for plan in plan_layers(made)]
    assert attends == [[(0, 0)] * 2, [(0, 0)] * 2, [(2, 2), (0, 0)]]
    assert attends == [[find_sources(made, layer, head) for head in range(2)] for layer in range(3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": [0, 1]}, "keys has 2 elements, and the model has 3 layers"),
        ({"values": [0, 2, 2]}, "layer 1 cannot have the values of layer 2; name a layer from 0 to 1"),
        (
            {"keys": [0, 0, 1]},
            "layer 2 cannot have the keys of layer 1, which itself shares layer 0's; name layer 0",
        ),
        ({"keys": [0, -1, 1]}, "name a layer from 0"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"num_shared_layers": 3}, "num_shared_layers must be from 1 to 2"),
        ({"num_shared_layers": 1}, "num_shared_layers is for the map 'last'; set keys or values"),
        ({"keys": "yoco", "layer_types": ["a", "b", "a"]}, "layer_types is for the map 'last'"),
        ({"keys": "last", "layer_types": ["a"]}, "layer_types has 1 elements, and the model has 3 layers"),
        ({"keys": "last", "layer_types": ["a", "a", "b"]}, "layer 2 is of kind 'b', and none of the 2 layers"),
        ({"keys": "all"}, "keys must be 'cross_layer', 'yoco', 'last', 'own' or a list"),
    ],
)
def test_contradictory_maps(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"kv_source": options})


# Any map with anything else


def a_map(draw: random.Random, depth: int) -> list[int]:
    """Any map: each layer has a source of its own, or an earlier one."""
    made: list[int] = []
    for layer in range(depth):
        made.append(draw.choice([layer, *set(made)]))
    return made


def combined(seed: int) -> dict | None:
    """A model of a random shape with a random map and up to two other mechanisms; None if it is refused."""
    draw = random.Random(seed)
    depth = draw.randint(2, 5)
    chosen = draw.sample([name for name in MECHANISMS.built_in if name != "kv_source"], draw.randint(0, 2))
    mechanisms: dict = {name: {} for name in chosen}
    keys = a_map(draw, depth)
    mechanisms["kv_source"] = {"keys": keys, "values": keys if draw.random() < 0.5 else a_map(draw, depth)}
    order = draw.sample(list(mechanisms), len(mechanisms))
    shape = dict(num_hidden_layers=depth, sliding_window=draw.choice([None, None, 6]))
    made = {"mechanisms": {name: mechanisms[name] for name in order}} | shape
    try:
        config(**made)
    except (HeadwaterError, StrictDataclassError):
        return None
    return made


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_any_map_with_other_mechanisms_is_exact_and_priced(seed):
    """Bytes of the cache as planned, after a prompt and after more; the last logits alone, and those that follow, equal
    the uncached ones."""
    made = combined(seed)
    if made is None:
        return
    model, ids = build(**made), tokens(2, 13)
    expected = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    last = model(ids[:, :9], past_key_values=cache, logits_to_keep=1).logits
    assert_near(last, expected[:, 8:9], 1e-12)
    assert cache_bytes(cache) == cost.cache_bytes(model.config, 9, 2, 8)
    assert_near(model(ids[:, 9:], past_key_values=cache).logits, expected[:, 9:], 1e-12)
    assert cache_bytes(cache) == cost.cache_bytes(model.config, 13, 2, 8)


# The maps of others

GEMMA = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size_per_layer_input=97,
    hidden_size_per_layer_input=4,
)
KINDS = {"s": "sliding_attention", "f": "full_attention"}
GEMMAS = {
    "gemma3n": (Gemma3nTextConfig, Gemma3nTextAttention, {}),
    "gemma4": (Gemma4TextConfig, Gemma4TextAttention, dict(global_head_dim=8)),
}
every_gemma = pytest.mark.parametrize("name", GEMMAS)


def gemma(name: str, kinds: str, last: int, **changes):
    make, _, own = GEMMAS[name]
    named = [KINDS[kind] for kind in kinds]
    shape = dict(num_hidden_layers=len(kinds), layer_types=named, num_kv_shared_layers=last, sliding_window=4)
    return make(**GEMMA | own | shape | changes)


def sharing_modes(theirs) -> list:
    if "kv_sharing_modes" not in dir(type(theirs)):
        pytest.skip("this version of transformers does not say it")
    return theirs.kv_sharing_modes


@every_gemma
@pytest.mark.parametrize(
    ("kinds", "last"), [("ffffff", 2), ("sfsfsf", 2), ("ssssfssssf", 4), ("ssfssf", 3), ("sffssf", 1), ("sfffsf", 2)]
)
def test_the_map_last_is_gemmas(name, kinds, last):
    theirs = gemma(name, kinds, last)
    modes = sharing_modes(theirs)
    stored = {theirs.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    expected = [stored[theirs.layer_types[i]] if mode == "reuse" else i for i, mode in enumerate(modes)]
    options = {"keys": "last", "values": "last", "num_shared_layers": last, "layer_types": theirs.layer_types}
    made = config({"kv_source": options}, num_hidden_layers=len(kinds))
    assert sources(made) == [(source, source) for source in expected]


@every_gemma
def test_a_kind_without_a_source_is_refused_there_too(name):
    with pytest.raises(ValueError, match="set of layer types"):
        sharing_modes(gemma(name, "ssssff", 2))


def test_a_map_is_refused_where_mistral_refuses_it():
    mistral = pytest.importorskip("transformers.models.mistral_large4.configuration_mistral_large4")
    refused = 0
    for layers in itertools.product(range(3), repeat=3):
        try:
            theirs = mistral.MistralLarge4TextConfig(num_hidden_layers=3, kv_source_layers=list(layers))
        except (ValueError, StrictDataclassError):
            refused += 1
            with pytest.raises(HeadwaterError):
                config({"kv_source": {"keys": list(layers), "values": list(layers)}})
            continue
        made = config({"kv_source": {"keys": list(layers), "values": list(layers)}})
        reuses = [mode is not None and mode.startswith("reuse") for mode in theirs.kv_sharing_modes]
        assert [plan.leaves_nothing for plan in plan_layers(made)] == reuses
    assert refused == 27 - 5


class ValueNorm(Mechanism):
    """Values without their length, as Gemma's are."""

    class Options:
        pass

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [plan.acting(cls, cls.transform_qkv) if plan.v_heads else plan for plan in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls()

    def transform_qkv(self, x, context):
        return x._replace(v=x.v * (x.v.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())


def ours_like(theirs, kinds: str, last: int, window: int | None) -> HeadwaterForCausalLM:
    """A model whose attention layers have the weights of Gemma's."""
    named = [KINDS[kind] for kind in kinds]
    made = HeadwaterForCausalLM(
        config(
            {
                "kv_source": {"keys": "last", "values": "last", "num_shared_layers": last, "layer_types": named},
                "value_norm": {},
            },
            num_hidden_layers=len(kinds),
            qk_norm=True,
            norm_eps=1e-6,
            sliding_window=window,
        )
    ).eval()
    for block, attention in zip(made.model.layers, theirs, strict=True):
        weights = attention.state_dict()
        weights["q_norm.weight"] = weights["q_norm.weight"] * 8**0.5  # ours divides scores by √d
        block.self_attn.load_state_dict(weights)
    return made


def seen(cache: DynamicCache, layer: int, length: int, past: int, window: int | None) -> Tensor:
    """The mask for what a layer's cache will hold, [1, 1, T, S]."""
    slots, offset = cache.get_mask_sizes(length, layer)
    query, key = torch.arange(length)[:, None] + past, torch.arange(slots) + offset
    return ((key <= query) & (key > query - (window or past + length)))[None, None]


@every_gemma
@pytest.mark.parametrize("kinds", ["sfsf", "ffff"])
def test_attention_of_a_shared_layer_is_gemmas(name, kinds, monkeypatch):
    """Random weights and inputs in fp32, in chunks, each side with its own cache."""
    monkeypatch.setattr(MECHANISMS, "added", {"value_norm": ValueNorm})
    torch.manual_seed(0)
    last, window = 2, 4
    settings = gemma(name, kinds, last, attn_implementation="sdpa")
    theirs = [GEMMAS[name][1](settings, layer).eval() for layer in range(len(kinds))]
    for attention in theirs:
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    windows = {"s": window, "f": None}
    ours = {kind: ours_like(theirs, kinds, last, windows[kind]) for kind in set(kinds)}
    caches = {kind: DynamicCache(config=model.config) for kind, model in ours.items()}
    their_cache, past = DynamicCache(config=settings), 0
    for length in (6, 1, 3):
        x = torch.randn(len(kinds), 2, length, 32)
        angles = (torch.arange(length) + past)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
        turns = angles.cos().repeat(1, 2)[None], angles.sin().repeat(1, 2)[None]
        sizes = {kind: seen(their_cache, kinds.index(kind), length, past, windows[kind]) for kind in ours}
        own_sizes = {kind: seen(caches[kind], 0, length, past, windows[kind]) for kind in ours}
        stored: dict = {}
        carried: dict = {kind: {} for kind in ours}
        for layer, kind in enumerate(kinds):
            expected, _ = theirs[layer](
                hidden_states=x[layer],
                position_embeddings=turns,
                attention_mask=sizes[kind],
                shared_kv_states=stored,
                **{CACHE: their_cache},
            )
            for other, model in ours.items():
                plan = model.plans[layer]
                out, _, *exports = model.model.layers[layer].self_attn(
                    x[layer],
                    *(carried[other][source] for source in plan.reads),
                    position_embeddings=for_heads(*turns),
                    attention_mask=own_sizes[other],
                    past_key_values=caches[other],
                )
                carried[other] |= zip(plan.exports, exports, strict=True)
                if other == kind:
                    assert_near(out, expected, 5e-6)
        past += length
    assert cache_bytes(caches["f"]) == 2 * 2 * (len(kinds) - last) * 2 * 8 * past * 4
