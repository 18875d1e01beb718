"""Deeper and wider models: what each method copies, and that the lossless ones keep the function with any mechanism."""

import copy
import random

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from conftest import assert_near, build, config, decode, disturb, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, HeadwaterForImageClassification, HeadwaterVisionConfig
from headwater.growth import grown_parameters, methods, pairs_of
from headwater.growth.grown_model import plan_growth
from headwater.growth.methods import GrowthOptions
from headwater.mechanisms.kv_shift import KVShift
from headwater.plugins.mechanisms import MECHANISMS
from headwater_lab import grow
from headwater_lab.training.model_changes import carry_state

ALL_PLACES = ["queries", "keys", "values", "attention_input", "attention_output", "feed_forward_input"]
ALL_PLACES += ["feed_forward_hidden", "feed_forward_output"]
MODELS = {
    "kv_shift": {},
    "shift of queries too": {"kv_shift": {"queries": True, "window": 3}},
    "tied taps": {"kv_shift": {"variant": "gate"}},
    "half the heads": {"kv_shift": {"variant": "half_heads"}},
    "half the channels": {"kv_shift": {"variant": "half_channels"}},
    "value_residual": {},
    "plus": {"value_residual": {"mode": "learnable_plus"}},
    "dense": {"value_residual": {"mode": "dense"}},
    "recursive": {"value_residual": {"mode": "dense", "recursive": True}},
    "of hidden states": {"value_residual": {"target": "hidden"}},
    "sparse": {"value_residual": {"mode": "sparse"}},
    "svformer": {},
    "svformer of one": {"svformer": {"source": 1, "layers": [2]}},
    "latent": {"mla": {}},
    "low-rank latent": {"low_rank_kv": {}},
    "shared latent": {"low_rank_kv": {}, "kv_source": {}},
    "skip_layer": {},
    "skip one": {"skip_layer": {"layers": 1, "heads": 2}},
    "skip chained": {"skip_layer": {"layers": 1, "heads": 2, "source": "alias"}},
    "kv_source": {},
    "yoco": {"kv_source": {"keys": "yoco", "values": "own"}},
    "dense_former": {},
    "every second": {"dense_former": {"dilation": 2}},
    "mudd": {},
    "depth_attention": {},
    "inkling": {"depth_attention": {"queries": 3, "variant": "inkling_2"}},
    "embedding_residual": {"embedding_residual": {"weight": 0.3}},
    "backout": {},
    "backout of the first": {"backout": {"layer": 0}},
    "exclusive": {"exclusive": {"learnable": True}},
    "neutreno": {"neutreno": {"learnable": True}},
    "output_gate": {},
    "gate by channel": {"output_gate": {"granularity": "channel", "channels": 5}},
    "persistent_memory": {},
    "smear": {"smear": {"weight": 0.5}},
    "smear, normed": {"smear": {"weight": 0.5, "norm": "before"}},
    "short_conv": {"short_conv": {"sites": ALL_PLACES, "dynamic": ["keys", "queries"]}},
    "value_embedding": {},
    "tables": {"value_embedding": {"tables": 2}},
    "tables with a rank": {"value_embedding": {"tables": 2, "rank": 6}},
    "ngram_memory": {"ngram_memory": {"rows": 20}},
    "n-grams with a rank": {"ngram_memory": {"rows": 20, "rank": 16, "layers": [0, 2]}},
    "n-grams of values": {"ngram_memory": {"rows": 20, "rank": 16, "target": "values"}},
    "n-grams that match": {"ngram_memory": {"rows": 20, "gate": "match"}},
    "pattention": {"pattention": {"attention_pairs": 7, "ffn_pairs": 9}},
    "few of many": {
        "pattention": {"top_k": 4, "attention_pairs": 9, "ffn_pairs": 16, "product_keys": ["feed_forward"]}
    },
}
MODELS = {name: given or {name: {}} for name, given in MODELS.items()}
LOSSLESS = {
    "5 layers": ("identity", dict(num_hidden_layers=5)),
    "6 layers": ("exact", dict(num_hidden_layers=6)),
    "channels": ("exact", dict(hidden_size=40)),
    "heads": ("exact", dict(num_attention_heads=6)),
    "more queries": ("exact", dict(num_attention_heads=8, num_key_value_heads=2)),
    "more keys": ("hypercloning", dict(num_key_value_heads=4)),
    "twice": ("hypercloning", dict(hidden_size=64, num_attention_heads=8)),
    "all": ("lemon", dict(num_hidden_layers=4, hidden_size=76, num_attention_heads=6)),
}
# Where a lossless method is refused, and why.
REFUSED = {
    **{("shared latent", way): "share nothing" for way in ("heads", "more keys", "twice", "all")},
    ("half the heads", "heads"): "second half",
    ("half the heads", "all"): "even number",
    ("skip one", "5 layers"): "change some of these distances",
    ("skip chained", "5 layers"): "change some of these distances",
    ("skip one and two", "5 layers"): "change some of these distances",
    ("skip one and two", "heads"): "divided evenly",
    ("skip one and two", "all"): "divided evenly",
    ("every second", "5 layers"): "dilation",
    ("every second", "6 layers"): "dilation",
    ("every second", "all"): "dilation",
    ("depth_attention", "5 layers"): "softmax",
    ("depth_attention", "6 layers"): "softmax",
    ("depth_attention", "all"): "softmax",
    ("inkling", "5 layers"): "softmax",
    ("inkling", "6 layers"): "softmax",
    ("inkling", "all"): "softmax",
    ("inkling", "channels"): "√hidden_size",
    ("inkling", "twice"): "√hidden_size",
    ("smear, normed", "channels"): "norms the embedding",
    ("smear, normed", "all"): "norms the embedding",
    ("ngram_memory", "channels"): "rank",
    ("ngram_memory", "twice"): "rank",
    ("ngram_memory", "all"): "rank",
    ("n-grams that match", "channels"): "rank",
    ("n-grams that match", "twice"): "rank",
    ("n-grams that match", "all"): "rank",
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def difference(a, b, ids=None) -> float:
    ids = tokens(2, 20) if ids is None else ids
    with torch.no_grad():
        before, after = (model(ids).logits.double() for model in (a, b))
    return ((before - after).abs().max() / before.abs().max()).item()


def of_layer(model, layer: int) -> dict:
    start = f"model.layers.{layer}."
    return {name.removeprefix(start): t for name, t in model.state_dict().items() if name.startswith(start)}


@pytest.mark.sampled(61)
@pytest.mark.parametrize("case", LOSSLESS)
@pytest.mark.parametrize("name", MODELS)
def test_a_lossless_method_keeps_the_function_with_a_mechanism_or_is_refused(name, case):
    model, (method, sizes) = shared(MODELS[name]), LOSSLESS[case]
    if said := REFUSED.get((name, case)):
        with pytest.raises((HeadwaterError, StrictDataclassError), match=said):
            grow(model, method=method, **sizes)
        return
    large = grow(model, method=method, **sizes)
    assert all(getattr(large.config, size) == value for size, value in sizes.items())
    assert difference(model, large) < 1e-12
    single = copy.deepcopy(model).float()
    rounding = difference(model, single)  # with MUDD's many sums it is near 1e-5 by itself
    assert difference(single, copy.deepcopy(large).float()) < max(1e-5, 3 * rounding)
    assert_near(decode(large, tokens(2, 20), [7, 1, 12]), large(tokens(2, 20)).logits, 1e-11)


def some_model(draw: random.Random) -> HeadwaterForCausalLM:
    """A model of any kind, with any two mechanisms that go together."""
    norm = draw.choice(["rms_norm", "layer_norm"])
    group, kv = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    fields = dict(
        norm=norm,
        unit_offset_norm=norm == "rms_norm" and draw.random() < 0.3,
        position=draw.choice(["rope", "learned", "none", "alibi"]),
        feed_forward=draw.choice(["gated", "plain"]),
        hidden_act=draw.choice(["silu", "gelu"]),
        num_hidden_layers=draw.choice([2, 3]),
        hidden_size=draw.choice([20, 27, 32]),
        intermediate_size=draw.choice([31, 48]),
        num_attention_heads=group * kv,
        num_key_value_heads=kv,
        head_dim=8,
        **{name: draw.random() < 0.5 for name in ("qkv_bias", "output_bias", "mlp_bias", "tie_word_embeddings")},
        **{name: draw.random() < 0.25 for name in ("qk_norm", "output_norms", "embedding_norm", "parallel_residual")},
        **{name: draw.random() < 0.75 for name in ("norm_weight", "final_norm_weight")},
        **{name: draw.choice([None, None, 5]) for name in ("logit_softcap", "attention_softcap", "sliding_window")},
        embedding_scale=draw.choice([1.0, 3.0, "width"]),
        logit_scale=draw.choice([1.0, 0.5, "fan_in"]),
    )
    fields["unit_offset_norm"] &= fields["norm_weight"]
    if fields["sliding_window"] is not None and draw.random() < 0.7:
        fields["sliding_layers"] = [draw.choice([0, 1])]
        if fields["position"] == "rope":
            fields["sliding_fields"] = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    for _ in range(50):
        chosen = draw.sample(sorted(MODELS), draw.choice([0, 1, 2]))
        try:
            return build({key: value for name in chosen for key, value in MODELS[name].items()}, **fields)
        except (HeadwaterError, StrictDataclassError, ValueError):
            continue
    raise AssertionError("no two of them go together")


def some_sizes(draw: random.Random, model: HeadwaterForCausalLM) -> tuple[str, dict]:
    old, method = model.config, draw.choice(["exact", "exact", "hypercloning", "lemon", "identity+hypercloning"])
    factor = draw.choice([2, 3])
    wide = dict(hidden_size=old.hidden_size, intermediate_size=old.intermediate_size)
    wide["num_attention_heads"] = old.num_attention_heads
    many = {name: size * factor for name, size in wide.items()}
    if "hyper" not in method:
        many = {name: size + draw.choice([1, 5, size]) for name, size in wide.items()}
        many["num_attention_heads"] = old.num_attention_heads + draw.choice([1, 2]) * (
            old.num_attention_heads // old.num_key_value_heads
        )
    sizes = {name: size for name, size in many.items() if draw.random() < 0.6}
    if method != "hypercloning":
        sizes["num_hidden_layers"] = old.num_hidden_layers + draw.choice([0, 1, 2, old.num_hidden_layers])
    if "pattention" in old.mechanisms:  # which has pairs in place of units
        many.pop("intermediate_size")
        sizes.pop("intermediate_size", None)
    return method, sizes or dict([many.popitem()])


def check_some(seed: int) -> bool:
    """Whether growth was possible; fails where it does not keep the function."""
    draw = random.Random(seed)
    model = some_model(draw)
    method, sizes = some_sizes(draw, model)
    try:
        large = grow(model, method=method, **sizes)
    except (HeadwaterError, StrictDataclassError) as error:
        if not str(error).rstrip().endswith("."):
            raise
        return False
    ids, note = tokens(2, 20), f"seed {seed}: {method} {sizes} of {model.config}"
    assert difference(model, large) < 1e-12, note
    with torch.no_grad():
        logits = model(ids).logits
        assert_near(decode(large, ids, [7, 1, 12]), logits, 1e-11)
        single, in_single = copy.deepcopy(large).float(), copy.deepcopy(model).float()(ids).logits
        for found in (single(ids).logits, decode(single, ids, [7, 1, 12])):
            assert (found - in_single).abs().max() < 1e-5 * logits.abs().max(), note
    return True


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        (dict(norm="layer_norm", norm_weight=False, output_norms=True), dict(num_hidden_layers=4)),
        (
            dict(
                sliding_window=5,
                sliding_layers=[0],
                sliding_fields={"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
            ),
            dict(num_attention_heads=8),
        ),
        (
            dict(
                sliding_window=5,
                sliding_layers=[0],
                sliding_fields=dict(num_attention_heads=3, num_key_value_heads=1),
                mechanisms={"persistent_memory": {}, "value_embedding": {"tables": 1, "layers": [0]}},
            ),
            dict(num_hidden_layers=5),
        ),
    ],
    ids=["a norm of nothing but a bias", "positions of their own in some layers", "fewer heads in some layers"],
)
def test_the_function_is_kept_for_rarer_fields(fields, sizes):
    model = shared(**fields)
    assert difference(model, grow(model, **sizes)) < 1e-12


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_the_last_norm_makes_up_for_a_tied_head_that_reads_copies(norm):
    """A family such as Llama has no logit_scale."""
    model = shared(tie_word_embeddings=True, norm=norm)
    large = grow(model, method="hypercloning", hidden_size=64)
    assert large.config.logit_scale == model.config.logit_scale
    assert_near(large.model.norm.weight, model.model.norm.weight.repeat(2) / 2, 1e-12)
    assert difference(model, large) < 1e-12


def test_another_function_is_refused_though_the_rules_missed_it(monkeypatch):
    monkeypatch.setattr(grown_parameters.ParameterGrower, "is_zeroed", lambda self, name, axes: False)
    with pytest.raises(HeadwaterError, match="This is a bug in headwater"):
        grow(shared(), num_hidden_layers=4)


@pytest.mark.parametrize("seeds", [range(4, 8), slow(range(8, 400))], ids=["few", "many"])
def test_any_model_grows_in_any_direction_without_a_change(seeds):
    grew = [check_some(seed) for seed in seeds]
    assert sum(grew) > len(grew) / 3


@pytest.mark.parametrize("method", ["lemon", slow("exact"), slow("hypercloning")])
def test_it_is_kept_when_saved_and_in_fp32(method, tmp_path):
    model = shared(MODELS["value_residual"], tie_word_embeddings=True, qkv_bias=True)
    large = grow(model, method=method, hidden_size=64, intermediate_size=96, num_attention_heads=8)
    large.save_pretrained(tmp_path / "large")
    assert difference(model, HeadwaterForCausalLM.from_pretrained(tmp_path / "large").eval()) < 1e-12
    single = copy.deepcopy(model).float()
    assert difference(single, grow(single, method=method, hidden_size=64)) < 1e-5
    half = grow(copy.deepcopy(model).bfloat16(), method=method, intermediate_size=96)
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16, torch.float32}  # mechanisms' scalars stay


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("exact", dict(num_hidden_layers=5, hidden_size=40, intermediate_size=60, num_attention_heads=6)),
        slow("hypercloning", dict(hidden_size=64, intermediate_size=96, num_attention_heads=8)),
        slow("lemon", dict(num_hidden_layers=4, hidden_size=76, intermediate_size=101, num_attention_heads=6)),
    ],
)
def test_every_new_parameter_learns_within_two_steps_and_copies_part(method, sizes):
    large, ids = grow(build(), method=method, **sizes).train(), tokens(4, 20)
    start = {name: parameter.detach().clone() for name, parameter in large.named_parameters()}
    optimizer = torch.optim.Adam(large.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        large(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in large.named_parameters():
        moved = parameter != start[name]
        used = torch.ones_like(moved)
        if "embed_tokens" in name:
            used = torch.isin(torch.arange(len(moved)), ids[:, :-1])[:, None].expand_as(moved)
        assert moved[used].double().mean() > 0.99, name
    up = large.model.layers[0].mlp.up_proj.weight.detach()
    assert (torch.cdist(up, up) + torch.eye(len(up))).min() > 1e-6, "no two units are alike"


@pytest.mark.parametrize("method", ["lemon", "identity+hypercloning"])
@pytest.mark.parametrize("steps", ["at once", "one after the other"])
def test_copies_in_identity_layers_part_too(method, steps):
    """There what writes is zero, so that the copies' noise alone can tell them apart."""
    model, ids = build(), tokens(4, 20)
    layers = 2 * model.config.num_hidden_layers
    wider = dict(intermediate_size=2 * model.config.intermediate_size)
    if steps == "at once":
        large = grow(model, method=method, num_hidden_layers=layers, **wider)
    else:
        large = grow(model, method="identity", num_hidden_layers=layers)
        large = grow(large, method=method.removeprefix("identity+"), **wider)
    assert difference(model, large) < 1e-12
    optimizer = torch.optim.Adam(large.train().parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        large(ids, labels=ids).loss.backward()
        optimizer.step()
    for layer in large.model.layers:
        up = layer.mlp.up_proj.weight.detach()
        assert (torch.cdist(up, up) + torch.eye(len(up))).min() > 1e-6


def moved(model, ids):
    """Which elements of each parameter four steps of Adam change."""
    start = {name: parameter.detach().clone() for name, parameter in model.train().named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: parameter != start[name] for name, parameter in model.named_parameters()}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", ["all", "twice", "6 layers"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "few of many"])  # which trains those it picks
def test_with_a_mechanism_as_much_learns_as_in_a_fresh_model_and_copies_part(name, case):
    if (name, case) in REFUSED:
        return
    (method, sizes), ids = LOSSLESS[case], tokens(4, 20)
    large = grow(build(MODELS[name]), method=method, **sizes)
    fresh = moved(disturb(HeadwaterForCausalLM(large.config).double(), 0.1), ids)
    for parameter, which in moved(large, ids).items():
        assert which.double().mean() > fresh[parameter].double().mean() - 0.02, parameter
    for layer in large.model.layers:
        maps = [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"] + [getattr(layer.mlp, "up_proj", None)]
        for linear, width in zip(maps, [large.config.head_dim] * 3 + [1], strict=True):
            if isinstance(linear, torch.nn.Linear):
                rows = linear.weight.detach().unflatten(0, (-1, width)).flatten(1)
                assert (torch.cdist(rows, rows) + torch.eye(len(rows))).min() > 1e-8, "two heads or units are alike"


@pytest.mark.parametrize("method", ["hypercloning", "lemon"])
def test_what_reads_copies_shares_the_old_weight(method):
    model = shared(qkv_bias=True)
    large = grow(model, method=method, hidden_size=64, intermediate_size=96)
    old, new = (one.model.layers[1].mlp for one in (model, large))
    for name in ("gate_proj", "up_proj"):
        was, now = getattr(old, name).weight, getattr(new, name).weight
        assert_near(now[:, :32] + now[:, 32:], torch.cat((was, was)), 1e-12)
        share = (now[:, :32] - torch.cat((was, was)) / 2).std() / (was / 2).std()
        assert share.item() == pytest.approx(dict(hypercloning=0.316, lemon=1.0)[method], rel=0.1)
    assert torch.equal(large.model.embed_tokens.weight, model.model.embed_tokens.weight.repeat(1, 2))
    assert torch.equal(large.model.norm.weight, model.model.norm.weight.repeat(2))
    was, now = old.down_proj.weight, new.down_proj.weight
    assert_near(now[:, :48] + now[:, 48:], torch.cat((was, was)), 1e-12)
    was, now = model.lm_head.weight, large.lm_head.weight
    assert_near(now[:, :32] + now[:, 32:], was, 1e-12)


def test_stacking_copies_layers():
    model = shared({"kv_shift": {}, "value_residual": {}, "dense_former": {}})
    for method, order in (("stack", [0, 1, 2, 0, 1, 2]), ("interleave", [0, 0, 1, 1, 2, 2])):
        large = grow(model, method=method, num_hidden_layers=6)
        for layer, old in enumerate(order):
            was, now = of_layer(model, old), of_layer(large, layer)
            for name in was.keys() - {"mechanisms.dense_former.alpha"}:
                assert torch.equal(was[name], now[name]), (method, layer, name)
        assert difference(model, large) > 1e-3
    # Each sum reads the nearest copies: layer 4 is made from layer 2, whose sum was over X0, X1, X2, X3.
    was, now = model.model.layers[2].mechanisms["dense_former"].alpha, large.model.layers[4].mechanisms
    assert now["dense_former"].alpha.tolist() == [was[0], 0, was[1], 0, was[2], was[3]]


def test_new_layers_add_nothing_and_stand_evenly():
    model = shared(mlp_bias=True, output_bias=True)
    large = grow(model, num_hidden_layers=5)
    growth, _ = plan_growth(model.config, GrowthOptions(num_hidden_layers=5))
    assert (growth.layers, growth.identity_layers) == ((0, 1, 1, 2, 2), {2, 4})
    for layer, old in enumerate(growth.layers):
        for name, tensor in of_layer(large, layer).items():
            silent = layer in growth.identity_layers and name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            assert torch.equal(tensor, torch.zeros_like(tensor) if silent else of_layer(model, old)[name]), name
    normed = grow(shared(output_norms=True), num_hidden_layers=4).model.layers[3]
    assert not normed.attention_output_norm.weight.any()
    assert normed.mlp.down_proj.weight.any(), "the norm before the stream is zero; before it gradients would be huge"


def test_net2net_keeps_the_old_block_and_not_the_function():
    model = shared()
    wide = grow(model, hidden_size=64, intermediate_size=128, num_attention_heads=8, method="net2net")
    for name, tensor in model.state_dict().items():
        assert torch.equal(wide.state_dict()[name][tuple(map(slice, tensor.shape))], tensor), name
    fresh = HeadwaterForCausalLM(wide.config).state_dict()
    for name, tensor in wide.state_dict().items():
        new = torch.ones(tensor.shape, dtype=torch.bool)
        new[tuple(map(slice, model.state_dict()[name].shape))] = False
        assert torch.equal(tensor[new], fresh[name].double()[new]), name
    assert difference(model, wide) > 1e-4


@pytest.mark.parametrize(
    ("mechanisms", "method", "depth", "options"),
    [
        ({"svformer": {"source": 1}}, "identity", 5, {"source": 1, "layers": [3, 4]}),
        ({"svformer": {"source": 1, "layers": [2]}}, "identity", 6, {"source": 2, "layers": [4, 5]}),
        ({"skip_layer": {"layers": 1, "heads": 2}}, "identity", 6, {"layers": 2, "heads": 2}),
        ({"skip_layer": {}}, "stack", 6, {"layers": 2, "heads": 2}),
        ({"kv_source": {}}, "identity", 4, {"keys": [0, 0, 2, 3], "values": [0, 0, 2, 3]}),
        ({"kv_source": {}}, "stack", 6, {"keys": [0, 0, 2, 3, 3, 5], "values": [0, 0, 2, 3, 3, 5]}),
        ({"value_residual": {"mode": "learnable_plus"}}, "identity", 6, {"layers": [2, 4]}),
        ({"value_residual": {}}, "stack", 6, {"layers": [1, 2, 4, 5]}),
        ({"embedding_residual": {"layers": [1]}}, "interleave", 6, {"layers": [2, 3]}),
        ({"value_embedding": {"layers": [0, 2]}}, "identity", 6, {"layers": [0, 4]}),
        ({"ngram_memory": {"rank": 16}}, "stack", 6, {"layers": [0]}),
    ],
)
def test_mechanisms_go_along_by_the_rules_they_state(mechanisms, method, depth, options):
    _, large = plan_growth(config(mechanisms), GrowthOptions(num_hidden_layers=depth, method=method))
    (made,) = large.mechanisms.values()
    assert {name: made[name] for name in options} == options


def test_parameter_tokens_grow_in_all_directions_at_once():
    model = shared({"pattention": {"attention_pairs": 7, "ffn_pairs": 13}})
    large = grow(model, 9, 20, num_hidden_layers=4, hidden_size=64, method="identity+hypercloning")
    assert difference(model, large) < 1e-12
    assert pairs_of(large)["query"] == 9
    assert large.model.layers[0].mlp.scale.tau == model.model.layers[0].mlp.scale.tau
    with pytest.raises(HeadwaterError, match="freeze"):
        grow(model, 9, num_hidden_layers=4, freeze=True)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("exact", dict(num_hidden_layers=4, hidden_size=40, intermediate_size=60, num_attention_heads=6)),
        slow("hypercloning", dict(hidden_size=64, intermediate_size=96, num_attention_heads=8)),
    ],
)
def test_averages_of_gradients_move_as_the_gradients_do(method, sizes, monkeypatch):
    """The averages of one step, carried along, are those that the larger model's own first step gives."""
    monkeypatch.setattr(methods, "NOISE", dict.fromkeys(methods.NOISE, 0.0))
    model, ids = build({"kv_shift": {}, "output_gate": {}}, qkv_bias=True), tokens(2, 20)
    large = grow(model, method=method, **sizes)
    for one in (model, large):
        one(ids, labels=ids).loss.backward()
    state = {f"optimizer.{name}.exp_avg": p.grad for name, p in model.named_parameters()}
    state |= {f"optimizer.{name}.exp_avg_sq": p.grad.square() for name, p in model.named_parameters()}
    state |= {f"optimizer.{name}.step": torch.ones(1) for name, p in model.named_parameters()}
    moved = carry_state(state, model, large, GrowthOptions(**sizes, method=method))
    growth, _ = plan_growth(model.config, GrowthOptions(**sizes, method=method))
    for name, parameter in large.named_parameters():
        first = moved[f"optimizer.{name}.exp_avg"]
        known = first != 0
        if any(f"layers.{layer}." in name for layer in growth.identity_layers):
            assert not known.any(), name
        else:
            assert known.double().mean() > 0.2 or "embed" in name, name
        assert_near(first[known], parameter.grad[known], 1e-12)
        squares = moved[f"optimizer.{name}.exp_avg_sq"][known]
        assert_near(squares, parameter.grad[known].square(), 1e-12)
        assert moved[f"optimizer.{name}.step"] == 1
    assert len({tensor.data_ptr() for tensor in moved.values()}) == len(moved), "files hold no tensor twice"


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        slow("exact", dict(num_hidden_layers=3, intermediate_size=50, num_attention_heads=6)),
        ("lemon", dict(num_hidden_layers=3, hidden_size=80)),
        slow("hypercloning", dict(hidden_size=64, num_attention_heads=8)),
    ],
)
def test_models_of_images_grow_too(method, sizes):
    small = dict(image_size=16, patch_size=4, num_labels=5, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    given = HeadwaterVisionConfig(**small, intermediate_size=40, register_tokens=1, mechanisms={"value_residual": {}})
    model = disturb(HeadwaterForImageClassification(given).double()).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        assert_near(grow(model, method=method, **sizes)(images).logits, model(images).logits, 1e-12)


class Unknown(KVShift):
    """An outside mechanism that says nothing of growth."""

    grow_options = None


class Wordless(KVShift):
    describe_axes = None


def test_an_outside_mechanism_has_to_say_how_it_grows(monkeypatch):
    for kind, said in ((Unknown, "does not define how it grows"), (Wordless, "does not describe the axes")):
        monkeypatch.setitem(MECHANISMS.added, "mine", kind)
        with pytest.raises(HeadwaterError, match=said):
            grow(build({"mine": {}}), num_hidden_layers=4)


@pytest.mark.parametrize(
    ("changes", "sizes", "said"),
    [
        ({}, dict(hidden_size=16), "would shrink"),
        ({}, dict(hidden_size=32), "Nothing would grow"),
        ({}, dict(), "Nothing would grow"),
        ({}, dict(num_hidden_layers=2), "would shrink"),
        ({}, dict(num_hidden_layers=99999999), "at most 4,096"),
        ({}, dict(hidden_size=10**10), "less than or equal to 2147483647"),
        ({}, dict(num_attention_heads=7), "must be a multiple of 2, not 7"),
        ({}, dict(num_key_value_heads=4), "only where they are copied.* by the same factor"),
        ({}, dict(hidden_size=40, method="zero"), "no growth method 'zero'"),
        ({}, dict(hidden_size=40, method="stack+identity"), "one that makes it wider"),
        ({}, dict(hidden_size=40, method="stack"), "does not make models wider; use, for example, stack[+]exact"),
        (
            {},
            dict(num_hidden_layers=4, method="net2net"),
            "not make models deeper; use, for example, identity[+]net2net",
        ),
        ({}, dict(num_hidden_layers=4, method="stack"), "can be 6 or 9, not 4"),
        ({}, dict(num_hidden_layers=4, key_init="random"), "key_init applies only to new pairs"),
        ({}, dict(num_hidden_layers=4, tau="recompute"), "tau applies only to new pairs"),
        ({}, dict(num_hidden_layers=6, method="stack+lemon"), "'lemon' is for the other; use the method stack"),
        ({}, dict(hidden_size=40, method="stack+lemon"), "'stack' is for the other; use the method lemon"),
        (
            {"mechanisms": MODELS["pattention"]},
            dict(attention_pairs=99, method="stack"),
            "applies only to layers and widths",
        ),
        ({}, dict(hidden_size=40, method="hypercloning"), "can be 64 or 96, not 40"),
        ({"norm_weight": False}, dict(hidden_size=40), "norms without weights"),
        ({"qk_norm": True}, dict(hidden_size=40), "norm_eps"),
        ({"position": "alibi"}, dict(num_attention_heads=8), "ALiBi"),
        ({"norm": "layer_norm", "output_norms": True}, dict(hidden_size=40), "mean of the others"),
        ({"norm": "layer_norm", "mechanisms": MODELS["mudd"]}, dict(hidden_size=40), "mean of the others"),
        ({"mechanisms": MODELS["pattention"]}, dict(intermediate_size=50), "grow ffn_pairs"),
    ],
)
def test_what_cannot_grow_is_refused_in_a_sentence(changes, sizes, said):
    with pytest.raises((HeadwaterError, StrictDataclassError), match=said):
        grow(shared(changes.get("mechanisms"), **{k: v for k, v in changes.items() if k != "mechanisms"}), **sizes)


def test_a_wrong_map_does_not_pass_unnoticed(monkeypatch):
    """Plans are compared: a mechanism that moves its source wrongly is refused, and not silently another function."""
    kind = type(
        "Wrong", (MECHANISMS.resolve("svformer"),), {"grow_options": classmethod(lambda c, options, config, g: options)}
    )
    monkeypatch.setitem(MECHANISMS.added, "wrong", kind)
    with pytest.raises(HeadwaterError, match="attends to layers"):
        plan_growth(config({"wrong": {"source": 1, "layers": [2]}}), GrowthOptions(num_hidden_layers=6))
