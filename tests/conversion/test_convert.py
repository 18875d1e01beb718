"""Models on their way to a smaller cache, and once they are there; against equations written plainly."""

import copy
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import headwater_lab as lab
from conftest import assert_near, build, config, decode, disturb, tokens
from headwater import (
    HeadwaterError,
    HeadwaterForCausalLM,
    HeadwaterForImageClassification,
    HeadwaterVisionConfig,
)
from headwater.conversion import add_mechanisms, from_transformers
from headwater.conversion.alignment import (
    align_layers,
    choose_sources,
    find_maps,
    find_rotations,
    measure_similarity,
    transform_heads,
)
from headwater.conversion.calibration import fit_outputs
from headwater.conversion.convert import blend_model, finish_model, pool_tensors
from headwater.conversion.export import export_family
from headwater.conversion.latent import make_latent
from headwater.cost.counts import training_flops
from headwater.mechanisms.blend import Blend
from headwater.models.cache import cache_bytes
from headwater.testing import Case, Contract
from headwater.testing.naive import Reference, find_sources, mix
from headwater_lab.api.converting import _write_start
from headwater_lab.data.tokenizer import load_tokenizer, train_tokenizer
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.recipe.start_section import CacheConversion, Change, changed_config
from headwater_lab.training.checkpoints import newest_checkpoint
from headwater_lab.training.model_changes import convert_model
from headwater_lab.training.records import Event, read_record
from headwater_lab.training.saving import write_model
from headwater_lab.training.stages import list_healing, train_stages
from headwater_lab.training.trained_models import Trained, measure_model, open_trained

DEEP = dict(num_hidden_layers=4, num_key_value_heads=4)
# (the model, what it goes over to)
GOALS = {
    "values of the first": (DEEP, {"mechanisms": {"svformer": {}}}),
    "heads of layers below": (DEEP, {"mechanisms": {"skip_layer": {"layers": 2, "heads": 2}}}),
    "pairs of layers, GQA": (dict(num_hidden_layers=4, qk_norm=True), {"mechanisms": {"kv_source": {}}}),
    "fewer heads": (dict(DEEP, qkv_bias=True), {"num_key_value_heads": 2}),
    "fewer heads, normed, odd": (
        dict(num_attention_heads=6, num_key_value_heads=6, head_dim=10, qk_norm=True),
        {"num_key_value_heads": 2},
    ),
    "both": (DEEP, {"mechanisms": {"kv_source": {"values": [0, 0, 0, 3]}}, "num_key_value_heads": 1}),
    "GPT-2": (dict(gpt2=True, **DEEP), {"mechanisms": {"kv_source": {}}}),
    "window": (dict(DEEP, sliding_window=5), {"mechanisms": {"kv_source": {}}}),
    "windows in some layers": (
        dict(DEEP, sliding_window=5, sliding_layers=[0, 1]),
        {"mechanisms": {"kv_source": {}}},
    ),
    "windows in every second layer, GQA": (
        dict(
            DEEP, sliding_window=5, sliding_layers=[0, 2], sliding_fields=dict(rope_parameters=dict(rope_theta=100.0))
        ),
        {"mechanisms": {"kv_source": {}}, "num_key_value_heads": 2},
    ),
    "kinds of other heads": (
        dict(
            num_hidden_layers=5,
            sliding_window=5,
            sliding_layers=[0, 2, 3],
            sliding_fields=dict(num_key_value_heads=1, head_dim=6),
        ),
        {"mechanisms": {"kv_source": {"values": "last"}}},
    ),
    "two that share, not in their order": (
        DEEP,
        {"mechanisms": {"skip_layer": {"layers": 1, "heads": 2, "source": "alias"}, "kv_source": {}}},
    ),
    "shifted": (dict(DEEP, mechanisms={"kv_shift": {}}), {"mechanisms": {"svformer": {}}}),
}


def at(model, weight):
    """A copy whose keys and values have come so far."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Blend):
            module.weight.fill_(weight)
    return model


class BlendReference(Reference):
    """The equation of a model on its way to a goal: (1 - w)·its own keys and values + w·the goal's."""

    knows = (*Reference.knows, "blend")

    def find_goal(self):
        """The goal's config, the weight on the way there, and how many heads become one."""
        c, options = self.config, self.config.mechanisms["blend"]
        goal = copy.copy(c)
        goal.num_key_value_heads = options["num_key_value_heads"] or c.num_key_value_heads
        goal.mechanisms = options["mechanisms"] or {}
        return goal, options["weight"], c.num_key_value_heads // goal.num_key_value_heads

    def find_attended(self, layer, kv, head):
        goal, weight, group = self.find_goal()
        aim = self.bank[find_sources(goal, layer, head // group)[kv]][kv][head]
        return mix((1 - weight, weight), (super().find_attended(layer, kv, head), aim))

    def transform_projections(self, name, layer, q, k, v):
        if name != "blend":
            return super().transform_projections(name, layer, q, k, v)
        return q, self.pool_heads(k), self.pool_heads(v)

    def pool_heads(self, x):
        """Each head mixed with the mean of its group."""
        _, weight, group = self.find_goal()
        if group == 1:
            return x
        means = {h // group: mix([1 / group] * group, [x[h + i] for i in range(group)]) for h in x if h % group == 0}
        return {h: mix((1 - weight, weight), (row, means[h // group])) for h, row in x.items()}


class TestBlend(Contract):
    mechanism = "blend"
    reference = BlendReference

    @classmethod
    def cases(cls):
        given = [
            {"mechanisms": {"svformer": {}}, "weight": 0.25},
            {"mechanisms": {"kv_source": {}}, "weight": 0.75},
            {"mechanisms": {"skip_layer": {"layers": 1, "heads": 2}}, "weight": 0.5},
            {"num_key_value_heads": 1, "weight": 0.625},
            {"num_key_value_heads": 1, "mechanisms": {"svformer": {"share": "both"}}, "weight": 0.25},
        ]
        found = Case.combine([{"blend": one} for one in given], "llama", "gpt2", "partial_rope", "sliding", "two_kinds")
        found += Case.combine([{"kv_shift": {}, "blend": given[0]}, {"value_residual": {}, "blend": given[2]}], "llama")
        return [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in found]


MORE = (
    "values of the first",
    "pairs of layers, GQA",
    "fewer heads",
    "fewer heads, normed, odd",
    "GPT-2",
    "window",
    "shifted",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in MORE else []) for n in GOALS])
def test_it_begins_as_the_model_and_ends_as_the_goal(name):
    given, goal = GOALS[name]
    model, ids = build(**given), tokens(2, 13)
    logits = model(ids, use_cache=False).logits
    before = blend_model(model, **goal)
    assert torch.equal(before(ids, use_cache=False).logits, logits)
    halfway = at(before, 0.5)(ids, use_cache=False).logits
    after = at(before, 1.0)
    ended, made = after(ids, use_cache=False).logits, finish_model(after)
    assert_near(made(ids, use_cache=False).logits, ended, 1e-12)
    assert (ended - logits).abs().max() > 1e-3 < (halfway - ended).abs().max()
    held = [cache_bytes(one(ids, use_cache=True).past_key_values) for one in (model, before, made)]
    assert held[0] == held[1] > held[2]
    assert "blend" not in made.config.mechanisms
    assert made.num_parameters() < model.num_parameters()
    for chunks in ([13], [1] * 13, [5, 1, 7]):
        assert_near(decode(at(before, 0.5), ids, chunks), halfway, 1e-12)
        assert_near(decode(made, ids, chunks), ended, 1e-12)


@pytest.mark.parametrize(
    "goal", [{"mechanisms": {"skip_layer": {"layers": 1, "heads": 2}}}, {"num_key_value_heads": 1}], ids=str
)
def test_on_its_way_it_is_what_the_equation_says(goal):
    options = {"blend": goal | {"weight": 0.25}}
    model, ids = build(options, qk_norm=True), tokens(6)
    expected = BlendReference(model.config, dict(model.state_dict()))(ids)
    assert_near(model(ids[None], use_cache=False).logits[0], expected, 1e-12)


def test_pooled_heads_are_the_means_of_their_groups():
    model = build(num_attention_heads=6, num_key_value_heads=6, head_dim=8, qkv_bias=True)
    made = finish_model(blend_model(model, num_key_value_heads=2, weight=1.0))
    for old, new in zip(model.model.layers, made.model.layers, strict=True):
        for part in ("k_proj", "v_proj"):
            before, after = (getattr(one.self_attn, part) for one in (old, new))
            for kind in ("weight", "bias"):
                wide, narrow = getattr(before, kind), getattr(after, kind)
                for group in range(2):
                    rows = [wide[8 * h : 8 * h + 8] for h in range(3 * group, 3 * group + 3)]
                    assert_near(narrow[8 * group : 8 * group + 8], sum(rows) / 3, 1e-14)


def test_the_state_of_pooled_heads_is_that_of_their_mean():
    """Adam after some steps on heads that are one, and on the one."""
    made = config({"blend": {"num_key_value_heads": 1}})  # groups of two
    torch.manual_seed(0)
    wide = nn.Parameter(torch.randn(16, 5, dtype=torch.float64))
    narrow = nn.Parameter(wide.detach().view(2, 8, 5).mean(0))
    optimizers = [torch.optim.Adam([one], lr=0.0) for one in (wide, narrow)]
    for _ in range(3):
        target = torch.randn(8, 5, dtype=torch.float64)
        (wide.view(2, 8, 5).mean(0) * target).sum().backward()
        (narrow * target).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    name = "optimizer.model.layers.0.self_attn.k_proj.weight"
    states = [optimizer.state[p] for optimizer, p in zip(optimizers, (wide, narrow), strict=True)]
    found = pool_tensors({f"{name}.{key}": states[0][key] for key in ("exp_avg", "exp_avg_sq")}, made, are_moments=True)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_near(found[f"{name}.{key}"], states[1][key], 1e-14)


# In other coordinates


SOURCES = {
    "llama": dict(),
    "partial RoPE, biases": dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5), qkv_bias=True),
    "GPT-2": dict(gpt2=True, num_key_value_heads=4),
    "two kinds": dict(
        num_hidden_layers=4,
        sliding_window=5,
        sliding_layers=[0, 2],
        sliding_fields=dict(rope_parameters=dict(rope_theta=100.0, partial_rotary_factor=0.5)),
    ),
    "normed": dict(qk_norm=True),
}


def aligned(model, rows, **goal):
    made = copy.deepcopy(model)
    align_layers(made, rows, **goal)
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "partial RoPE, biases" else [pytest.mark.slow]) for n in SOURCES]
)
def test_alignment_keeps_the_function_and_brings_what_is_shared_nearer(name):
    model, rows = build(**SOURCES[name]), tokens(2, 12)
    for goal in ({"mechanisms": {"kv_source": {}}}, {"num_key_value_heads": 1}):
        made = aligned(model, rows, **goal)
        assert_near(made(rows, use_cache=False).logits, model(rows, use_cache=False).logits, 1e-12)
        moved = []
        for one in (model, made):
            hidden = [
                m(rows, use_cache=False, output_hidden_states=True).hidden_states[-1]
                for m in (one, finish_model(blend_model(one, **goal, weight=1.0)))
            ]
            moved.append(float((hidden[0] - hidden[1]).detach().norm()))
        assert moved[1] < moved[0]


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_rotations_are_found_and_undone(rotary_dim):
    torch.manual_seed(0)
    x = torch.randn(50, 3, 8, dtype=torch.float64)
    secret = torch.eye(8, dtype=torch.float64).repeat(3, 1, 1)
    half = rotary_dim // 2
    for head in range(3):
        for i in range(half):
            angle = torch.tensor(0.3 + head + i)
            secret[head, i, i] = secret[head, i + half, i + half] = angle.cos()
            secret[head, i, i + half], secret[head, i + half, i] = angle.sin(), -angle.sin()
        if rotary_dim < 8:
            square = torch.randn(8 - rotary_dim, 8 - rotary_dim, dtype=torch.float64)
            secret[head, rotary_dim:, rotary_dim:] = torch.linalg.qr(square)[0]
    assert_near(find_rotations(x, transform_heads(x, secret), rotary_dim), secret, 1e-6)


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_maps_are_least_squares(rotary_dim):
    """Each head and, of what RoPE rotates, each pair against a solver of its own; pairs as z·c = (a + ib)·(u + iw)."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 60, 3, 8, dtype=torch.float64)
    inverse, half = torch.linalg.inv(find_maps(x, target, rotary_dim)), rotary_dim // 2
    for head in range(3):
        expected = torch.zeros(8, 8, dtype=torch.float64)
        for i, j in zip(range(half), range(half, rotary_dim), strict=True):
            a, b = target[:, head, i], target[:, head, j]
            design = torch.stack((torch.cat((a, b)), torch.cat((-b, a))), dim=1)
            u, w = torch.linalg.lstsq(design, torch.cat((x[:, head, i], x[:, head, j]))[:, None]).solution[:, 0]
            expected[i, i], expected[j, j], expected[i, j], expected[j, i] = u, u, w, -w
        unrotated = slice(rotary_dim, None)
        solution = torch.linalg.lstsq(target[:, head, unrotated], x[:, head, unrotated]).solution
        expected[unrotated, unrotated] = solution
        lengths = torch.linalg.svdvals(expected)
        assert lengths[-1] > 0.02 * lengths[0]  # far enough from singular
        assert_near(inverse[head], expected, 1e-6)


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("pruned", ["x", "target", "both"])
def test_a_pruned_head_is_left_as_it_is(rotary_dim, pruned):
    torch.manual_seed(0)
    x, target = torch.randn(2, 60, 3, 8, dtype=torch.float64)
    whole = find_maps(x, target, rotary_dim)
    for samples in {"x": [x], "target": [target], "both": [x, target]}[pruned]:
        samples[:, 1] = 0
    maps = find_maps(x, target, rotary_dim)
    assert_near(maps[1], torch.eye(8, dtype=torch.float64), 1e-12)
    assert_near(maps[[0, 2]], whole[[0, 2]], 1e-12)


@pytest.mark.parametrize("name", ["llama", "partial RoPE, biases", "GPT-2"])
def test_a_layer_whose_keys_and_values_are_images_of_anothers_shares_without_loss(name):
    model, rows = build(num_hidden_layers=2, **SOURCES[name]), tokens(4, 16)
    below, layer = model.model.layers
    for linear in (below.self_attn.o_proj, below.mlp.down_proj):  # so that both layers see the same stream
        for parameter in linear.parameters():
            parameter.data.zero_()
    layer.input_layernorm.load_state_dict(below.input_layernorm.state_dict())
    heads, d = model.config.num_key_value_heads, model.config.head_dim
    rotary_dim = model.config.rotary_dim if model.config.position == "rope" else 0
    torch.manual_seed(0)
    for kind, n in (("k", rotary_dim), ("v", 0)):
        maps = torch.eye(d).repeat(heads, 1, 1) + 0.3 * torch.randn(heads, d, d)
        first_half, second_half = torch.arange(n // 2), torch.arange(n // 2, n)
        maps[:, :n], maps[:, :, :n] = 0, 0
        maps[:, first_half, first_half] = maps[:, second_half, second_half] = torch.rand(heads, n // 2) + 0.5
        maps[:, first_half, second_half] = torch.randn(heads, n // 2)
        maps[:, second_half, first_half] = -maps[:, first_half, second_half]
        theirs, ours = (getattr(block.self_attn, f"{kind}_proj") for block in (below, layer))
        for old, new in zip(theirs.parameters(), ours.parameters(), strict=True):
            split = old.data.unflatten(0, (heads, d))
            new.data = torch.einsum("hi...,hij->hj...", split, maps.to(split)).flatten(0, 1)
    logits = model(rows, use_cache=False).logits
    losses = []
    for source in (model, aligned(model, rows, mechanisms={"kv_source": {}})):
        made = finish_model(blend_model(source, {"kv_source": {}}, weight=1.0))
        losses.append(float((made(rows, use_cache=False).logits - logits).abs().max().detach()))
    assert losses[1] < 1e-4 < 1e-2 < losses[0]


@pytest.mark.parametrize(
    ("name", "goal"),
    [("llama", {"mechanisms": {"kv_source": {}}}), ("partial RoPE, biases", {"num_key_value_heads": 1})],
)
def test_output_projections_are_fitted_from_the_first_layer_to_the_last(name, goal):
    """Against a pass of the whole model for each layer, and least squares with λ as further rows."""
    original, rows = build(num_hidden_layers=4, **SOURCES[name]), tokens(3, 14)
    fitted = finish_model(blend_model(original, **goal, weight=1.0))
    expected = copy.deepcopy(fitted)

    def read_output_projection(model, layer):
        seen = []
        hook = model.model.layers[layer].self_attn.o_proj.register_forward_hook(
            lambda module, inputs, output: seen.append(
                (inputs[0].flatten(0, 1).detach(), output.flatten(0, 1).detach())
            )
        )
        model(rows, use_cache=False)
        hook.remove()
        return seen[0]

    before = [p.clone() for p in expected.parameters()]
    for layer in (1, 3) if "mechanisms" in goal else range(4):
        target = read_output_projection(original, layer)[1]
        x, y = read_output_projection(expected, layer)
        penalty = (0.03 * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
        change = torch.linalg.lstsq(
            torch.cat((x, penalty)), torch.cat((target - y, torch.zeros_like(penalty[:, : y.shape[1]])))
        )
        expected.model.layers[layer].self_attn.o_proj.weight.data += change.solution.T
    fit_outputs(fitted, original, rows)
    for new, old, ours in zip(expected.parameters(), before, fitted.parameters(), strict=True):
        assert_near(ours, new, 1e-9)
        assert torch.equal(new, old) == torch.equal(ours, old)
    layer = original.config.num_hidden_layers - 1
    target = read_output_projection(original, layer)[1]
    plain = finish_model(blend_model(original, **goal, weight=1.0))
    errors = [(read_output_projection(model, layer)[1] - target).norm() for model in (fitted, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_a_conversion_without_annealing_fits_output_projections():
    """The function is nearer to the original's than that of the aligned model alone, and the history says so."""
    model, rows = build(num_hidden_layers=4), tokens(4, 16)
    logits = model(rows, use_cache=False).logits
    change = Change(convert=CacheConversion(mechanisms={"kv_source": {}}))
    made = convert_model(Trained("", copy.deepcopy(model), None, [], {}), change, rows)
    assert made.history[-1].details["aligned_tokens"] == 64
    alone = finish_model(blend_model(aligned(model, rows, mechanisms={"kv_source": {}}), {"kv_source": {}}, weight=1.0))
    errors = [float((m(rows, use_cache=False).logits - logits).detach().norm()) for m in (made.model, alone)]
    assert errors[0] < errors[1]


# Choosing the layers that share


def hide_copies(model, pairs):
    """Give layers the keys and values of others in other coordinates: a rotation that RoPE leaves alone."""
    for block in model.model.layers:  # so that all layers see the same stream
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    for layer, source in pairs:
        theirs, ours = (model.model.layers[index] for index in (source, layer))
        ours.input_layernorm.load_state_dict(theirs.input_layernorm.state_dict())
        for name in ("k_proj", "v_proj"):
            half = theirs.self_attn.head_dim // 2
            x, y = getattr(theirs.self_attn, name).weight.detach().unflatten(0, (-1, 2, half)).unbind(1)
            rotated = torch.stack((0.6 * x - 0.8 * y, 0.8 * x + 0.6 * y), dim=1)
            getattr(ours.self_attn, name).weight.data = rotated.flatten(0, 2)
    return model


@pytest.mark.parametrize(
    ("kinds", "pairs", "expected"),
    [
        ({}, [(3, 1), (4, 0), (5, 2)], [0, 1, 2, 1, 0, 2]),
        (dict(sliding_window=5, sliding_layers=[0, 1, 3, 4]), [(3, 1), (4, 0), (5, 2)], [0, 1, 2, 1, 0, 2]),
        # The copy in a layer of the other kind is no source.
        (dict(sliding_window=5, sliding_layers=[0, 2, 4]), [(4, 2), (3, 0), (5, 3)], [0, 1, 2, 3, 2, 3]),
    ],
    ids=["one kind", "two kinds", "a copy in another kind"],
)
def test_sources_are_the_most_similar_layers_of_a_kind(kinds, pairs, expected):
    model = hide_copies(build(num_hidden_layers=6, **kinds), pairs)
    chosen = choose_sources(model.config, {"kv_source": {}}, measure_similarity(model, tokens(2, 12)))
    assert chosen == {"kv_source": {"keys": expected, "values": expected}}
    config = blend_model(model, chosen, weight=1.0).config
    assert config.mechanisms["blend"]["mechanisms"]["kv_source"]["keys"] == expected


def test_only_what_is_left_open_is_chosen():
    given = config(num_hidden_layers=4)
    assert choose_sources(given, {"kv_source": {"keys": "own", "group_size": 4}}) == {
        "kv_source": {"keys": "own", "group_size": 4, "values": [0, 0, 0, 0]}
    }
    for mechanisms in ({"svformer": {}}, {"kv_source": {"keys": "own", "values": [0, 0, 0, 3]}}, None):
        convert = CacheConversion(mechanisms=mechanisms, num_key_value_heads=1, choose=True)
        with pytest.raises(HeadwaterError, match=r"convert\.choose \(--choose\) needs a mechanism that shares"):
            changed_config(given, Change(convert=convert))
    change = Change(convert=CacheConversion(mechanisms={"kv_source": {}}, choose=True, align=False))
    with pytest.raises(HeadwaterError, match="measures keys and values on rows"):
        convert_model(Trained("", build(), None, [], {}), change, None)


# What is refused


@pytest.mark.parametrize(
    ("given", "goal", "said"),
    [
        ({}, {"num_key_value_heads": 2}, "must be 1 to make them fewer"),
        (dict(num_key_value_heads=4), {"num_key_value_heads": 3}, "4 key/value heads cannot be divided into 3"),
        (dict(num_key_value_heads=1), {"num_key_value_heads": 1}, "one key/value head"),
        ({}, {"mechanisms": {"kv_source": {"keys": "own", "values": "own"}}}, "same keys and values as before"),
        ({}, {"mechanisms": {"kv_shift": {}}}, "'kv_shift' does more than let layers share"),
        ({}, {"mechanisms": {"kv_source": {}, "output_gate": {}}}, "'output_gate' does more than let layers share"),
        *(
            (
                dict(num_key_value_heads=4),
                {"num_key_value_heads": 2, "mechanisms": {name: {}}},
                f"{name}' does more than let layers",
            )
            for name in ("value_residual", "persistent_memory", "mudd", "smear")
        ),
        ({}, {"mechanisms": {"svformer": {"source": 7}}}, "from 0 to 2"),
        ({}, {"mechanisms": {"kv_source": {"keys": [0, 0]}}}, "has 2 elements"),
        (dict(mechanisms={"svformer": {}}), {"num_key_value_heads": 1}, "already attends"),
        (dict(mechanisms={"svformer": {}}), {"mechanisms": {"svformer": {}}}, "already has"),
        (
            dict(mechanisms={"mla": {}}),
            {"mechanisms": {"kv_source": {}}},
            "one cached vector for keys and values already",
        ),
        (dict(mechanisms={"neutreno": {}}), {"mechanisms": {"kv_source": {}}}, "acts on what heads have read"),
        (dict(mechanisms={"kv_shift": {}}), {"num_key_value_heads": 1}, "cannot be pooled"),
        (GOALS["kinds of other heads"][0], {"num_key_value_heads": 1}, "differ in their number of key/value heads"),
        (
            GOALS["windows in every second layer, GQA"][0],
            {"mechanisms": {"svformer": {}}},
            "only between layers of one",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_converted_is_refused_in_a_sentence(given, goal, said):
    with pytest.raises(HeadwaterError, match=said) as raised:
        blend_model(build(**given), **goal)
    assert "\n" not in str(raised.value)


def test_only_what_has_arrived_is_finished():
    model = blend_model(build(), {"svformer": {}}, weight=0.5)
    with pytest.raises(HeadwaterError, match="is 50% complete"):
        finish_model(model)
    with pytest.raises(HeadwaterError, match="nothing to finish"):
        finish_model(build())
    with pytest.raises(HeadwaterError, match="already being converted"):
        blend_model(model, {"kv_source": {}})


def test_a_blended_model_is_saved_and_loaded_on_its_way(tmp_path):
    model, ids = at(blend_model(build(), {"svformer": {}}), 0.75), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path).double().eval()
    assert {float(m.weight) for m in loaded.modules() if isinstance(m, Blend)} == {0.75}
    assert_near(loaded(ids).logits, model(ids).logits, 1e-6)


# Other families


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=32, n_layer=4, n_head=4, n_positions=64))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True))


def qwen():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5))


def gemma3():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    fields = dict(num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=kinds)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **fields))


SIZES = dict(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama, qwen, gemma2, gemma3])
def test_models_of_other_families(make):
    torch.manual_seed(0)
    theirs, ids = disturb(make().double(), 0.1).eval(), tokens(2, 12)
    with torch.no_grad():
        expected = theirs(ids).logits
        model = from_transformers(theirs)
        assert_near(model(ids).logits, expected, 5e-6)  # their RoPE is in fp32
        expected = model(ids).logits
        for goal in ({"mechanisms": {"kv_source": {}}}, {"num_key_value_heads": 1}):
            assert_near(blend_model(aligned(model, ids, **goal), **goal)(ids).logits, expected, 1e-12)


# Runs


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A Llama of transformers with a tokenizer, not to be changed, and texts."""
    folder = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    llama().save_pretrained(folder / "llama")
    load_tokenizer("bytes").save_pretrained(folder / "llama")
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / "texts" / f"{i}.txt").write_text(f"The {i}th text says {'so ' * (i % 5)}much about {i * i}. " * 12)
    return folder


def staged(written, convert, **training):
    values = {
        "data": {"kind": "text", "source": str(written / "texts"), "context": 16, "held_out_bytes": 300},
        "start": {"checkpoint": str(written / "llama"), "convert": convert},
        "training": {"steps": 4, "batch_size": 2, "warmup_steps": 0, "schedule": "constant", "threads": 1} | training,
        "stages": [{"name": "finish", "finish_conversion": True, "optimizer_state": "keep", "training": {"steps": 3}}],
        "reporting": {"log_every": 1, "evaluate_every": 2, "save_every": 1, "tensorboard": False},
    }
    return parse(values, "test")


def llama_config():
    return from_transformers(llama()).config


def test_a_run_goes_over_and_finishes(written, tmp_path):
    before = {file.name: file.read_bytes() for file in (written / "llama").iterdir()}
    recipe = staged(written, {"num_key_value_heads": 1, "anneal": True}, distillation={})
    record = train_stages(recipe, tmp_path / "run")
    stages = record.stages
    assert [stage.cache_bytes_per_token for stage in stages] == [512, 256]
    assert record.cache_bytes_per_token == 256
    points = list_healing(record)
    assert [(p["tokens"], p["cache_bytes_per_token"]) for p in points] == [
        (0, 512), (64, 512), (128, 512), (128, 256), (192, 256), (224, 256),
    ]  # fmt: skip
    assert points[2]["loss"] == pytest.approx(points[3]["loss"], rel=1e-6)
    said = [notice.message for notice in record.notices]  # the second stage tells nothing of the first's rows
    assert len(said) == 2
    assert any("were fitted to those that replace them" in text for text in said)
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "stages" / "01-finish" / "checkpoints" / "step-000003"
    )
    assert made.config.num_key_value_heads == 1
    assert not made.config.mechanisms
    events = read_record(tmp_path / "run" / "stages" / "01-finish").origin.history
    assert [event.kind for event in events] == ["retrofitted", "converted", "trained", "converted"]
    # In the source's precision it is a copy, which commands then read.
    assert _write_start(tmp_path / "run", record, torch.float32).parent.parent.name == "01-finish"
    place = _write_start(tmp_path / "run", record, torch.bfloat16)
    assert newest_checkpoint(tmp_path / "run") == place
    found = open_trained(tmp_path / "run").model
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found.parameters(), made.parameters(), strict=True))
    start = record.stages[0]
    own = read_record(tmp_path / "run" / start.folder)
    assert start.flops == pytest.approx(4 / 3 * own.tokens * training_flops(llama_config(), 16), rel=1e-6)
    assert {file.name: file.read_bytes() for file in (written / "llama").iterdir()} == before


def test_the_choice_is_told(written, tmp_path):
    recipe = staged(written, {"mechanisms": ["kv_source"], "choose": True, "anneal": True})
    record = train_stages(recipe, tmp_path / "run")
    options = (
        read_record(tmp_path / "run" / "stages" / "01-finish").origin.history[1].details["mechanisms"]["kv_source"]
    )
    assert f"kv_source={options}." in record.notices[0].message


def test_a_model_in_bf16_is_turned_in_fp32():
    model, rows = build().bfloat16(), tokens(2, 12)
    expected = copy.deepcopy(model).float()(rows, use_cache=False).logits
    trained = Trained("", model, None, [], {})
    change = Change(convert=CacheConversion(num_key_value_heads=1, anneal=True))
    made = convert_model(trained, change, rows)
    assert made.history[-1].details["cache_bytes_per_token"] == {"from": 3 * 2 * 2 * 8 * 2, "to": 3 * 2 * 8 * 2}
    assert made.model.dtype == torch.float32
    assert_near(made.model(rows, use_cache=False).logits, expected, 1e-5)
    assert made.history[-1].details["aligned_tokens"] == 24


def test_turned_weights_do_not_keep_the_optimizers_state():
    model, rows = build(), tokens(2, 12)
    state = {f"optimizer.{name}.exp_avg": torch.ones_like(p) for name, p in model.named_parameters()}
    convert = {"num_key_value_heads": 1, "anneal": True}
    for aligns, choice, kept in ((True, "fresh", False), (False, "keep", True)):
        change = Change(convert=CacheConversion(**convert, align=aligns), optimizer_state=choice)
        assert bool(convert_model(Trained("", copy.deepcopy(model), None, [], dict(state)), change, rows).state) == kept
    change = Change(convert=CacheConversion(**convert), optimizer_state="keep")
    with pytest.raises(HeadwaterError, match=r"set convert\.align=false"):
        convert_model(Trained("", model, None, [], dict(state)), change, rows)


def test_the_history_says_whether_anything_was_turned():
    model, rows = build(**GOALS["shifted"][0]), tokens(2, 12)
    change = Change(convert=CacheConversion(mechanisms={"svformer": {}}, anneal=True))
    made = convert_model(Trained("", model, None, [], {}), change, rows)
    assert made.history[-1].details["aligned_tokens"] == 0


@pytest.mark.slow
def test_killed_and_resumed_it_ends_the_same(written, tmp_path):
    recipe = staged(written, {"mechanisms": ["kv_source"], "anneal": True}, distillation={}, steps=12)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    train_stages(recipe, tmp_path / "whole")
    command = [sys.executable, "-m", "headwater_lab", "train", str(file), "--out", str(tmp_path / "cut"), "--resume"]
    log = tmp_path / "cut" / "stages" / "00-start" / "metrics.jsonl"
    for lines in (3, 9):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not (log.exists() and log.read_bytes().count(b'"curve"') >= lines):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    one, other = (read_record(tmp_path / name) for name in ("whole", "cut"))
    assert (one.curve, one.held_out, one.data_order) == (other.curve, other.held_out, other.data_order)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_command(written, tmp_path, run, dtype):
    out, source = tmp_path / "out", tmp_path / "llama"
    LlamaForCausalLM.from_pretrained(written / "llama", dtype=dtype).save_pretrained(source)
    load_tokenizer("bytes").save_pretrained(source)
    arguments = [
        "convert", source, "--mechanism", "kv_source", "--heal", "400", "data.context=16",
        "training.batch_size=2", "--text", written / "texts", "--out", out, "data.held_out_bytes=300",
    ]  # fmt: skip
    code, printed, _ = run(*arguments, "--plan")
    assert code == 0
    sizes = [32 * dtype.itemsize * n for n in (4, 2)]
    assert all(str(size) in printed for size in sizes)
    assert not out.exists()
    code, printed, said = run(*arguments)
    assert code == 0, said
    result = json.loads((out / "conversion.json").read_text())
    measured = [result["price"][side]["cache_bytes_per_token"] for side in ("before", "after")]
    assert measured == sizes
    assert open_trained(out).model.dtype == dtype
    settings = load_recipe(out / "recipe.yaml").data
    data = settings.model_copy(update={"held_out_rows": None}).build()
    assert settings.held_out_rows == result["price"]["rows"] < data.held_out_rows
    assert measure_model(open_trained(out).model, data) == result["after"]
    # The card has the result on all held-out text, and a stage's card only what the stage measured.
    stage = sorted(out.glob("stages/*"))[0]
    for source, loss in ((out, result["after"]["loss"]), (stage, read_record(stage).held_out[-1].metrics["loss"])):
        code, _, said = run("export", source, "--out", tmp_path / f"card-{source.name}")
        assert code == 0, said
        card = (tmp_path / f"card-{source.name}" / "README.md").read_text()
        assert f"| loss | {loss:.4f} |" in card
        assert (f"| {result['before']['loss']:.4f} |" in card) == (source is out)
        assert (f"{result['data']['held_out_bytes']:,} bytes of" in card) == (source is out)
        assert f"cache bytes per token {sizes[0]:,} → {sizes[1]:,};" in card
        assert "True" not in card.partition("## How it was made")[2].partition("##")[0]
    assert "has seen 384 tokens more than the original" in " ".join(printed.split())
    assert "--family" not in printed
    assert result["price"]["flops"].keys() == {"start", "finish", "heal", "measuring"}
    assert [point["cache_bytes_per_token"] for point in result["curve"]][:3] == [512, 512, 256]
    assert all(before != after for before, after in itertools.pairwise(result["curve"])), "each point once"
    code, _, said = run(*arguments)
    assert code == 2
    assert "continue it with --resume" in said


def test_a_latent_by_the_command(written, tmp_path, run):
    out = tmp_path / "out"
    code, printed, said = run(
        "convert", written / "llama", "--latent-width", 8, "--heal", "400", "--text", written / "texts", "--out", out,
        "data.context=16", "training.batch_size=2", "data.held_out_bytes=300",
    )  # fmt: skip
    assert code == 0, said
    result = json.loads((out / "conversion.json").read_text())
    model = open_trained(out).model
    before, after = (result["price"][side]["cache_bytes_per_token"] for side in ("before", "after"))
    assert (before, after) == (512, len(model.plans) * (4 * 8 + 4))
    assert result["price"]["flops"].keys() == {"start", "heal", "measuring"}, "it is the smaller model from the start"
    history = open_trained(out).history
    event = next(event for event in history if event.kind == "converted")
    assert event.details["latent_width"] == 8
    assert event.details["aligned_tokens"] > 0
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.start.convert == CacheConversion(latent_width=8)
    assert recipe.training.learning_rate == 1e-4
    assert f"{before:,}" in printed
    assert f"{after:,}" in printed
    theirs, ids = exported(run, tmp_path, printed), tokens(2, 20)
    assert type(theirs) is LlamaForCausalLM
    assert_near(theirs(ids).logits, model.double()(ids).logits, 1e-5)


def exported(run, folder, printed):
    """transformers' own model, exported by the command that the output names, without any code of headwater."""
    family, _, command = printed.partition("It is a plain ")[2].partition(" model")
    command = " ".join(command.partition("`headwater ")[2].partition("`")[0].split())
    target = folder / f"plain-{family}"
    code, _, said = run(*(str(target) if word == "NEW" else word for word in command.split()))
    assert code == 0, said
    assert json.loads((target / "config.json").read_text())["model_type"] == family
    return AutoModelForCausalLM.from_pretrained(target).double().eval()


def test_what_is_plain_says_how_it_is_exported(written, tmp_path, run):
    code, printed, said = run("retrofit", written / "llama", "--out", tmp_path / "same")
    assert code == 0, said
    theirs = exported(run, tmp_path, printed)
    assert type(theirs) is LlamaForCausalLM
    ours = open_trained(tmp_path / "same").model.double()
    assert_near(theirs(tokens(2, 9)).logits, ours(tokens(2, 9)).logits, 5e-6)  # their RoPE is in fp32
    card = (tmp_path / "plain-llama" / "README.md").read_text()
    assert f"{ours.config.num_hidden_layers} layers of width {ours.config.hidden_size}, " in card
    assert "- Cache: " in card
    latent = make_latent(open_trained(tmp_path / "same").model, tokens(2, 40), ours.config.head_dim)
    export_family(latent, tmp_path / "latent", "llama")
    numbers = [line for line in card.splitlines() if line.startswith("- Cache: ") or "parameters, " in line]
    other = (tmp_path / "latent" / "README.md").read_text()
    assert len(numbers) == 2
    assert all(line in other for line in numbers), "the card is of what is written, not of the latent"
    code, printed, _ = run("retrofit", written / "llama", "--mechanism", "kv_shift", "--out", tmp_path / "shifted")
    assert code == 0
    assert "--family" not in printed


def test_a_notice_of_both_the_result_and_the_control_is_shown_once(tmp_path, run):
    recipe = {
        "data": {"kind": "induction", "length": 16},
        "model": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
        "training": {"steps": 2, "batch_size": 2, "warmup_steps": 0, "threads": 1},
        "reporting": {"tensorboard": False},
    }
    lab.train(recipe, tmp_path / "run")
    out = tmp_path / "out"
    arguments = ["--num-key-value-heads", "1", "--heal", "400", "--control", "training.batch_size=2"]
    code, _, said = run("convert", tmp_path / "run", *arguments, "--out", out)
    assert code == 0, said
    notices = [notice.message for folder in (out, out / "control") for notice in read_record(folder).notices]
    assert len(set(notices)) < len(notices)
    assert {said.count(message) for message in notices} == {1}


def test_a_change_in_half_precision_names_its_dtype(written, tmp_path, run):
    llama().bfloat16().save_pretrained(tmp_path / "half")
    assert "in bfloat16, whose rounding" in " ".join(run("retrofit", tmp_path / "half")[1].split())
    assert "rounding" not in run("retrofit", written / "llama", "--out", tmp_path / "full")[1]


def test_a_converted_model_reads_a_prompt_as_transformers_does(tmp_path, run):
    """Its tokenizer adds no token before a text, and one of ours knows the token between documents."""
    theirs = llama().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter *= 5  # else the latest token alone decides
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = load_tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert run("retrofit", tmp_path / "theirs", "--out", tmp_path / "ours")[0] == 0
    prompt = "The 3rd text says"
    code, shown, said = run("generate", tmp_path / "ours", prompt, "--temperature", 0, "--max-new-tokens", 6)
    assert code == 0, said
    ids = theirs.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert shown.strip() == tokenizer.decode(ids[0]).strip()


def test_the_control_is_the_original_trained_on_the_same_rows(written, tmp_path, run):
    # In bfloat16, as most are: what training writes in fp32 is then copied.
    shutil.copytree(written / "llama", tmp_path / "llama")
    LlamaForCausalLM.from_pretrained(written / "llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "llama")
    arguments = [
        "convert", tmp_path / "llama", "--num-key-value-heads", "1", "--heal", "2k", "data.context=16", "--control",
        "training.batch_size=2", "--text", written / "texts", "data.held_out_bytes=300", "reporting.save_every=1",
    ]  # fmt: skip
    out, cut = tmp_path / "out", tmp_path / "cut"
    code, printed, said = run(*arguments, "--out", out)
    assert code == 0, said
    record, control = read_record(out), read_record(out / "control")
    assert (control.tokens, control.data_order) == (record.tokens, record.data_order)
    rates = [[point.learning_rate for point in each.curve] for each in (record, control)]
    assert rates[0] == rates[1]
    assert open_trained(out / "control").model.config.num_key_value_heads == 2
    result = json.loads((out / "conversion.json").read_text())
    assert result["price"]["flops"]["control"] == pytest.approx(control.flops, rel=1e-6)
    data = load_recipe(out / "control" / "recipe.yaml").data.model_copy(update={"held_out_rows": None}).build()
    assert measure_model(open_trained(out / "control").model, data) == result["control"]
    assert "after / control" in printed
    for folder, name in ((out, "after"), (out / "control", "control")):
        assert run("export", folder, "--out", tmp_path / f"{name}-exported")[0] == 0
        card = (tmp_path / f"{name}-exported" / "README.md").read_text()
        assert f"| loss | {result[name]['loss']:.4f} |" in card
    rows = load_recipe(out / "recipe.yaml").data.held_out_rows
    evaluations = [len(read_record(stage).held_out) for stage in out.rglob("stages/*")]
    passes = 3 + 1 + 3  # forward and backward, the teacher's, and the control's
    assert 0.5 < sum(evaluations) * rows * 16 / (0.1 * passes * record.tokens) <= 1
    theirs, ours = exported(run, tmp_path, printed), open_trained(out).model.double()
    assert type(theirs) is LlamaForCausalLM
    assert theirs.config.num_key_value_heads == 1
    assert_near(theirs(tokens(2, 9)).logits, ours(tokens(2, 9)).logits, 5e-6)

    # Killed in the conversion and in the control, and resumed.
    command = [sys.executable, "-m", "headwater_lab", *map(str, arguments), "--out", str(cut)]
    for log in (cut / "stages" / "01-finish", cut / "control" / "stages" / "02-heal"):
        process = subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not (log / "checkpoints" / "step-000002").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    code, _, said = run(*arguments, "--out", cut)
    assert code == 2
    assert "holds a conversion; continue it with --resume" in " ".join(said.split())
    code, printed, said = run(*arguments, "--out", cut, "--resume", "--heal", "900")
    assert code == 2
    assert "with other options" in " ".join(said.split())
    text_file = next(path for path in sorted((written / "texts").iterdir()) if path.is_file())
    weights_file = tmp_path / "llama" / "model.safetensors"
    for file, what in ((text_file, "The text has"), (weights_file, f"{str(tmp_path / 'llama')!r} has")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        code, _, said = run(*arguments, "--out", cut, "--resume")
        assert (code, f"{what} changed since the conversion" in " ".join(said.split())) == (2, True)
        file.write_bytes(content)
    measured = json.loads((cut / "conversion.json").read_text())
    (cut / "conversion.json").write_text(json.dumps(measured | {"source": "other"}))
    code, _, said = run(*arguments, "--out", cut, "--resume")
    assert code == 2
    assert "holds a conversion of 'other'" in " ".join(said.split())
    (cut / "conversion.json").write_text(json.dumps(measured))
    code, _, said = run(*arguments, "--out", cut, "--resume")
    assert code == 0, said
    assert not any(f"measuring the {title}" in said for title in ("original", "result"))
    again = json.loads((cut / "conversion.json").read_text())
    assert {**again, "source": None} == {**result, "source": None}
    for folder in ("", "control"):
        assert (cut / folder / "model.safetensors").read_bytes() == (out / folder / "model.safetensors").read_bytes()


def test_a_control_may_be_added_later(written, tmp_path, run):
    arguments = [
        "convert", written / "llama", "--num-key-value-heads", "1", "--heal", "1k", "data.context=16",
        "training.batch_size=2", "--text", written / "texts", "--out", tmp_path / "out",
    ]  # fmt: skip
    assert run(*arguments)[0] == 0
    result = json.loads((tmp_path / "out" / "conversion.json").read_text())
    code, printed, said = run(*arguments, "--resume", "--control")
    assert code == 0, said
    assert "after / control" in printed
    again = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert again["after"] == result["after"]


@pytest.mark.parametrize("more", ["", "training.batch_size=4", "data.length=24"])
def test_heal_is_the_tokens_of_rows_of_any_data(tmp_path, run, more):
    recipe = {
        "data": {"kind": "induction", "length": 16},
        "model": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
        "training": {"steps": 1, "batch_size": 2, "warmup_steps": 0, "threads": 1},
        "reporting": {"tensorboard": False},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")[0] == 0
    code, printed, said = run(
        "convert", tmp_path / "run", "--num-key-value-heads", "1", "--heal", "4k", "--plan", *more.split()
    )
    assert code == 0, said
    healed = int(printed.partition("healing on ")[2].partition(" tokens")[0].replace(",", ""))
    assert 3800 < healed <= 4000


def test_image_models_are_refused(written, tmp_path, run):
    sizes = dict(image_size=8, patch_size=4, num_labels=3, num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    model = HeadwaterForImageClassification(HeadwaterVisionConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(tmp_path / "vit")
    code, _, said = run(
        "convert", tmp_path / "vit", "--num-key-value-heads", "1", "--heal", "4k", "--text", written / "texts"
    )
    assert code == 2
    assert "image model" in said
    with pytest.raises(HeadwaterError, match="image model"):
        convert_model(Trained("", model, None, [], {}), Change(convert=CacheConversion(num_key_value_heads=1)), None)


@pytest.mark.parametrize(
    ("mechanism", "goal", "said"),
    [
        ("mudd", ["--mechanism", "kv_source"], "would have shape"),
        ("kv_shift", ["--num-key-value-heads", "1"], "cannot be pooled"),
    ],
)
def test_what_cannot_be_finished_is_refused_before_anything_is_trained(written, tmp_path, run, mechanism, goal, said):
    model = add_mechanisms(from_transformers(llama()), {mechanism: {}})
    write_model(tmp_path / "model", model, load_tokenizer("bytes"))
    for more in ([], ["--plan"]):
        given = ["--text", written / "texts", "data.context=16", "--heal", "400", "training.batch_size=2", *more]
        code, _, error = run("convert", tmp_path / "model", *goal, *given, "--out", tmp_path / "out")
        assert code == 2
        assert said in " ".join(error.split())
        assert not (tmp_path / "out").exists()


def test_the_plan_says_memory_time_and_passes(written, tmp_path, run):
    def plan(*settings, heal="4k"):
        command = ["convert", written / "llama", "--num-key-value-heads", "1", "--heal", heal, "--plan", *settings]
        code, said, told = run(*command, "--text", written / "texts", "data.context=64", "training.batch_size=8")
        assert code == 0, told
        said = " ".join(said.split())
        assert re.search(r"The conversion computes for about \d+:\d\d:\d\d on this machine", said)
        step, process = (
            float(amount) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
            for amount, unit in re.findall(r"(?:about|takes up to) ([\d.]+) ([kMG]?)B", said)
        )
        assert process == pytest.approx(1.25 * step + 1e9, rel=1e-3)
        return step, " ".join(told.split())

    plain, told = plan()
    assert "Healing reads the text" not in told
    if not torch.cuda.is_available():
        command = ["convert", written / "llama", "--num-key-value-heads", "1", "--heal", "4k", "--plan"]
        more = ["data.context=64", "training.batch_size=8", "training.device=cuda"]
        code, said, _ = run(*command, "--text", written / "texts", *more)
        assert code == 0
        assert "How long it takes is not known here, where PyTorch cannot use cuda." in " ".join(said.split())
    assert plan("training.gradient_checkpointing=true")[0] < plain
    assert plan("training.ema_decay=0.9")[0] > plain
    assert "Healing reads the text" in plan(heal="1M")[1]


def test_a_teacher_in_another_precision_does_not_change_the_cache(written, tmp_path, run):
    llama().bfloat16().save_pretrained(tmp_path / "half")
    load_tokenizer("bytes").save_pretrained(tmp_path / "half")
    command = ["convert", tmp_path / "half", "--num-key-value-heads", "1", "--heal", "4k", "--plan"]
    command += ["--text", written / "texts", "data.context=16"]
    rows, teachers = [], []
    for teacher in (tmp_path / "half", written / "llama"):
        said = " ".join(run(*command, f"training.distillation.teacher={teacher}")[1].split())
        rows.append(re.search(r"cache, bytes a token ([\d,]+ [\d,]+)", said)[1])
        teachers.append(float(re.search(r"of which the teacher ([\d.]+)", said)[1]))
    assert rows[0] == rows[1]
    assert teachers[1] == pytest.approx(2 * teachers[0], rel=0.05)


def test_what_was_measured_stays_after_an_interruption(written, tmp_path, run, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("headwater_lab.api.converting.train_stages", interrupt)
    command = ["convert", written / "llama", "--num-key-value-heads", "1", "--heal", "4k", "data.context=16"]
    assert run(*command, "--text", written / "texts", "--out", tmp_path / "out")[0] == 130
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["before"]


def test_another_tokenizer_is_refused_before_anything_is_measured(written, tmp_path, run):
    """Of as many tokens, so that only they show it."""
    train_tokenizer(["some other words " * 20], 257).save_pretrained(tmp_path / "other")
    goal = ["--num-key-value-heads", "1", "--heal", "4k", f"data.tokenizer={tmp_path / 'other'}", "data.context=16"]
    for more in ([], ["--plan"]):
        command = ["convert", written / "llama", *goal, "--text", written / "texts", "--out", tmp_path / "out", *more]
        code, _, said = run(*command)
        assert code == 2
        assert "not the one" in " ".join(said.split())
        assert not (tmp_path / "out").exists()


def test_the_plan_needs_the_text(written, tmp_path, run):
    given = ["--num-key-value-heads", "1", "--heal", "4k", "--plan"]
    code, _, said = run("convert", written / "llama", *given, "--text", str(tmp_path / "none" / "*.txt"))
    assert code == 2
    assert "No file matches" in " ".join(said.split())


@pytest.mark.slow
def test_a_name_on_the_hub_is_a_source(written, tmp_path):
    """As one that was downloaded before, without a connection."""
    place = tmp_path / "hub" / "models--me--tiny"
    shutil.copytree(written / "llama", place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    command = [
        sys.executable,
        "-m",
        "headwater_lab",
        "convert",
        "me/tiny",
        "--num-key-value-heads",
        "1",
        "--heal",
        "100",
    ]
    command += ["data.context=16", "training.batch_size=2", "--out", str(tmp_path / "out"), "data.held_out_bytes=300"]
    offline = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--text", str(written / "texts")], check=True, env=offline)
    assert open_trained(tmp_path / "out").model.config.num_key_value_heads == 1
    refused = subprocess.run(
        [*command[:-2], str(tmp_path / "new"), "--text", str(tmp_path / "none")], capture_output=True, env=offline
    )
    assert refused.returncode == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["induction", "arithmetic"])
def test_runs_on_synthetic_data(tmp_path, run, kind):
    recipe = {
        "data": {"kind": kind} | ({"length": 16} if kind == "induction" else {}),
        "model": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
        "training": {"steps": 1, "batch_size": 2, "warmup_steps": 0, "threads": 1},
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(recipe))
    assert run("train", tmp_path / "task.yaml", "--out", tmp_path / "source")[0] == 0
    code, _, said = run(
        "convert",
        tmp_path / "source",
        "--num-key-value-heads",
        "1",
        "--heal",
        "1k",
        "training.batch_size=2",
        "--out",
        tmp_path / "out",
    )
    assert code == 0, said
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["after"]


def test_the_source_is_not_written_to(written, tmp_path, run):
    model = tmp_path / "model"
    write_model(model, from_transformers(llama()), load_tokenizer("bytes"))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    given = ["--num-key-value-heads", "1", "--text", written / "texts", "data.context=16", "--heal", "400"]
    for folder in (model, model / "inside"):
        code, _, error = run("convert", model, *given, "training.batch_size=2", "--out", folder)
        assert code == 2
        assert "is the source, contains it, or is inside it" in " ".join(error.split())
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_refused_conversion_leaves_an_empty_folder_empty(written, tmp_path, run, monkeypatch):
    def refuse(*_):
        raise HeadwaterError("no such device")

    monkeypatch.setattr("headwater_lab.api.converting.connect_processes", refuse)
    given = ["--text", written / "texts", "data.context=16", "--heal", "1k", "training.batch_size=2"]
    code, _, said = run("convert", written / "llama", "--num-key-value-heads", "1", *given, "--out", tmp_path)
    assert code == 2
    assert "no such device" in said
    assert not list(tmp_path.iterdir())


def test_rows_are_no_longer_than_the_model_has_positions(written, run):
    given = [
        "convert",
        written / "llama",
        "--num-key-value-heads",
        "1",
        "--heal",
        "4k",
        "--plan",
        "training.batch_size=2",
    ]
    code, printed, said = run(*given, "--text", written / "texts")
    assert code == 0
    assert "Rows of 64 tokens" in said
    assert "3,968 tokens" in printed
    code, printed, _ = run(*given, "--text", written / "texts", "training.gradient_accumulation_steps=4")
    assert "3,584 tokens" in printed, "7 steps of 4 · 2 rows"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Choose how to make the cache smaller"),
        (["--latent-width", "64"], "latent_width must be a multiple of head_dim, from"),
        (["--latent-width", "4", "--num-key-value-heads", "1"], "latent_width goes alone"),
        (["--latent-width", "4", "--mechanism", "kv_source"], "latent_width goes alone"),
        (["--latent-width", "4", "--choose"], "latent_width goes alone"),
        (["--mechanism", "mla"], "same keys and values as before"),
        (["--num-key-value-heads", "3"], "must be 1 to make them fewer"),
        (["--mechanism", "kv_shift"], "does more than let layers share"),
        (["--num-key-value-heads", "1", "--mechanism", "short_conv"], "does more than let layers share"),
        (
            ["--num-key-value-heads", "1", "--heal", "1k", "stages=[]"],
            "No stage of the recipe ends with",
        ),
        (
            ["--num-key-value-heads", "1", "--heal", "1k", "--no-anneal", "stages=[]"],
            "No stage of the recipe ends with",
        ),
        (
            ["--num-key-value-heads", "1", "--heal", "1k", "training.distillation.teacher=/nope"],
            "no local file or folder '/nope'",
        ),
        (["--num-key-value-heads", "1", "--heal", "20"], "takes at least 3"),
        (["--num-key-value-heads", "1", "--heal", "many"], "takes a number"),
        (["--num-key-value-heads", "1", "data.context=65"], "has 64 positions"),
        (
            ["training.devices=2", "--num-key-value-heads", "1", "--heal", "1k", "training.device=cpu"],
            "uses one device",
        ),
        (["--mechanism", "nothing"], "no mechanism"),
        (["--latent-width", "16", "--no-anneal"], "--no-anneal has no effect with --latent-width"),
        (["--num-key-value-heads", "1", "--heal", "1k", "start.checkpoint=x"], "leave out start.checkpoint"),
        (["--num-key-value-heads", "1", "--heal", "1k", "model.hidden_size=64"], "The model is SOURCE, and"),
        (["--num-key-value-heads", "1", "start.convert.anneal=false"], "use --no-anneal"),
        (
            ["--mechanism", "svformer", "--mechanism", "kv_source={group_size: 4}", "--heal", "1k"],
            "no smaller than 'kv_source' alone",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_sentence(written, tmp_path, run, arguments, said):
    out = tmp_path / "out"
    given = ["convert", written / "llama", "--text", written / "texts", "--out", out, *arguments]
    code, _, error = run(*given, *(["data.context=16"] if "data.context=65" not in arguments else []))
    assert code == 2
    assert said in " ".join(error.split())
    assert not out.exists()


@pytest.mark.slow
def test_text_that_has_changed_since_training_is_told(written, tmp_path, run):
    text = {
        "kind": "text",
        "source": str(written / "texts"),
        "tokenizer": "bytes",
        "context": 16,
        "held_out_bytes": 300,
    }
    now = load_recipe(_recipe(tmp_path, text)).data.build().description["sha256"]
    for sha, warned in ((now, False), ("another", True)):
        history = [Event(kind="trained", details={"data": {"settings": text, "sha256": sha}})]
        model = from_transformers(llama())
        write_model(tmp_path / sha, model, load_tokenizer("bytes"), history)
        given = [
            "--num-key-value-heads",
            "1",
            "--heal",
            "100",
            "training.batch_size=2",
            "--out",
            tmp_path / f"{sha}-out",
        ]
        code, _, said = run("convert", tmp_path / sha, *given)
        assert code == 0
        assert ("have changed since it was trained on them" in " ".join(said.split())) == warned


def _recipe(folder, data):
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({"data": data}))
    return file


def test_sources_without_a_tokenizer_or_a_text_are_refused(written, tmp_path, run):
    bare = tmp_path / "bare"
    llama().save_pretrained(bare)
    code, _, error = run("convert", bare, "--num-key-value-heads", "1", "--text", written / "texts")
    assert code == 2
    assert "no tokenizer" in error
    code, _, error = run("convert", bare, "--num-key-value-heads", "1")
    assert code == 2
    assert "pass similar text" in " ".join(error.split())
    short = tmp_path / "short"
    short.mkdir()
    for name in "ab":
        (short / f"{name}.txt").write_text("A few words.")
    code, _, error = run(
        "convert", written / "llama", "--num-key-value-heads", "1", "--text", short, "data.context=64", "--heal", "2k",
        "training.batch_size=1", "--out", tmp_path / "x",
    )  # fmt: skip
    assert code == 2
    assert "use more text" in " ".join(error.split())
    assert not (tmp_path / "x").exists()


def test_recipes_are_checked():
    data = {"kind": "text", "source": "python-topics", "tokenizer": "bytes"}
    for change, said in (
        ({"start": {"checkpoint": "x", "convert": {}}}, "convert needs"),
        ({"start": {"checkpoint": "x", "convert": {"mechanisms": 3}}}, "convert.mechanisms"),
        (
            {"start": {"checkpoint": "x", "finish_conversion": True, "convert": {"num_key_value_heads": 1}}},
            "one at a time",
        ),
        ({"training": {"distillation": {}}}, "needs a model to learn from"),
        (
            {"training": {"distillation": {"teacher": "x"}, "compile": "whole"}},
            "compile=whole does not fit training.distillation",
        ),
        (
            {"stages": [{"name": "c", "convert": {"num_key_value_heads": 1}, "optimizer_state": "keep"}]},
            "set convert.align to false",
        ),
    ):
        with pytest.raises(HeadwaterError, match=said):
            parse({"data": data} | change, "test")
