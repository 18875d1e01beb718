"""What every mechanism, alone and combined with others, must keep on every base. Built from the registry alone."""

import functools
import itertools
import json
import random
import shutil
import typing
from dataclasses import fields
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CompileConfig

from conftest import Wanted, assert_near, build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.testing.contract_suite import BASES, ODD_LAYERS, Case, Contract, T, is_refused

pytestmark = pytest.mark.sampled(409)

# Options with other values than a few named ones, which `variants` cannot find by itself.
MORE_VARIANTS: dict[str, list[dict]] = {
    "kv_shift": [{"window": 3}, {"window": 4, "queries": True}, {"queries": True, "keys": False, "values": False}],
    "short_conv": [
        {"sites": ["queries", "keys", "values"], "window": 3, "residual": False},
        {"sites": ["attention_input", "feed_forward_input"], "layers": [0, 2]},
        {"sites": ["keys", "values", "attention_output", "feed_forward_output"]},
        {"sites": ["keys", "values", "feed_forward_hidden"], "dynamic": ["keys", "values"]},
    ],
    "value_residual": [
        {"source": 1},
        {"layers": [2]},
        {"mode": "constant", "weight": 0.7},
        {"mode": "sparse", "target": "keys", "layers": [1]},
        {"mode": "learnable", "target": "probabilities"},
        {"mode": "learnable", "target": "hidden", "source": 1},
        *({"mode": "learnable_plus", "plus_init": start} for start in ("uniform", "depth")),
    ],
    "value_embedding": [
        {"tables": 2, "rank": 5},
        {"tables": 2, "gate": "none", "layers": [0, 2]},
        {"rank": 3, "channels": 4, "scale": 3.0},
    ],
    "ngram_memory": [
        {"orders": [2, 4], "heads": 2, "rows": 11, "layers": [0, 2], "gate": "match", "rank": 12},
        {"target": "values", "gate": "match", "rank": 8, "end_of_text": 5},
        {"orders": [3], "heads": 2, "rank": 6, "seed": 3},
    ],
    "svformer": [{"source": 1}, {"layers": [1]}, {"share": "both", "layers": [2]}],
    "kv_source": [
        {"keys": "yoco", "values": "yoco"},
        {"keys": "own", "values": "last", "num_shared_layers": 2},
        {"keys": [0, 1, 1], "values": [0, 0, 0]},
    ],
    "skip_layer": [
        {"layers": 1},
        {"layers": 1, "heads": 4},
        {"layers": 1, "source": "alias"},
    ],
    "pattention": [
        {"attention_pairs": 24, "ffn_pairs": 40, "value_pairs": 9},
        {"top_k": 7},
        {
            "attention_pairs": 25,
            "ffn_pairs": 36,
            "top_k": {"query": 4, "feed_forward": 6},
            "product_keys": ["query", "feed_forward"],
            "product_heads": 2,
        },
    ],
    "neutreno": [{"weight": 0.2}],
    "persistent_memory": [{"pairs": 1, "layers": [0, 2]}],
    "exclusive": [{"learnable": True, "layers": [0, 2]}],
    "output_gate": [{"granularity": "channel", "channels": 5, "scale": 2.0, "layers": [1]}],
    "smear": [{"weight": 0.5, "norm": "after"}],
    "embedding_residual": [{"weight": 0.5, "layers": [0, 2]}],
    "backout": [{"weight": 0.5, "layer": 0}],
    "depth_attention": [
        {"block": 2, "layers": [2]},
        {"queries": 3, "variant": "inkling_2"},
        {"block": 2},
    ],
    "dense_former": [{"dilation": 2}, {"period": 2}],
    "low_rank_kv": [{"heads": 1}],
}


def variants(name: str) -> list[dict]:
    """Options of a mechanism: the defaults, then each other choice of every option that is one of a few values."""
    options = resolve(name).Options
    hints = typing.get_type_hints(options)
    found: list[dict] = [{}]
    for field in fields(options):
        hint = hints[field.name]
        union = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        choices = [
            c for member in union if typing.get_origin(member) is typing.Literal for c in typing.get_args(member)
        ]
        choices = [False, True] if hint is bool else choices
        found += [{field.name: choice} for choice in choices if choice != field.default]
    return [
        options
        for options in found + MORE_VARIANTS.get(name, [])
        if not is_refused(Case("llama", json.dumps({name: options})))
    ]


FORMS = {name: variants(name) for name in MECHANISMS.built_in}
SINGLES = [{name: {}} for name in MECHANISMS.built_in]
VARIANTS = [{name: options} for name, forms in FORMS.items() for options in forms if options]
# The registry lists mechanisms in the order in which the papers' models would apply them.
PAIRS = [{name: {} for name in names} for names in itertools.combinations(MECHANISMS.built_in, 2)]
SWAPPED = [dict(reversed(pair.items())) for pair in PAIRS]
_chance = random.Random(0)


def mixed(names: tuple[str, ...]) -> dict[str, dict]:
    """These mechanisms, each in one of its forms."""
    return {name: _chance.choice(FORMS[name]) for name in names}


MIXED = [mixed(names) for names in itertools.combinations(MECHANISMS.built_in, 2)]
# Of the thousand triples, some.
TRIPLES = [mixed(names) for names in _chance.sample(list(itertools.combinations(MECHANISMS.built_in, 3)), k=160)]


of = Case.combine


def in_turn(mechanisms: list[dict], *bases: str) -> list[Case]:
    """Each choice of mechanisms on one of the bases."""
    return [case for i, base in enumerate(bases) for case in of(mechanisms[i :: len(bases)], base)]


NORMAL = of([{}, *SINGLES], *BASES) + of(VARIANTS + PAIRS, "llama")
REFUSED = [case for m in PAIRS if is_refused(case := Case("llama", json.dumps(m)))]


@functools.cache
def cases() -> list:
    params = [pytest.param(case, id=str(case)) for case in NORMAL]
    if not Wanted.slow:
        return params
    slow = (
        in_turn(VARIANTS, "sliding", "alibi", "tokenformer")
        + in_turn(MIXED, "llama", "partial_rope", "alibi")
        + of(SWAPPED, "llama")
        + in_turn(TRIPLES, "llama", "tokenformer")
    )
    return params + [
        pytest.param(case, id=str(case), marks=pytest.mark.slow)
        for case in dict.fromkeys(slow)
        if case not in set(NORMAL)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MECHANISMS.built_in)
def test_every_registered_mechanism_builds_by_default(name):
    assert name == resolve(name).registered_name()
    assert Case("llama", json.dumps({name: {}})) in NORMAL


def test_refused_combinations_say_so_in_one_sentence():
    assert REFUSED
    for case in REFUSED:
        with pytest.raises((HeadwaterError, StrictDataclassError)) as error:
            config(json.loads(case.mechanisms))
        assert str(error.value).strip().endswith(".")


def test_refused_combinations_are_those_that_contradict_each_other():
    pairs = {frozenset(json.loads(case.mechanisms)) for case in REFUSED if len(json.loads(case.mechanisms)) == 2}
    contradicting = {"svformer": ("value_residual", "neutreno")}
    contradicting["mla"] = ("value_residual", "neutreno", "value_embedding", "exclusive")
    contradicting["low_rank_kv"] = (*contradicting["mla"], "mla", "svformer", "skip_layer")
    assert pairs == {frozenset({name, other}) for name, others in contradicting.items() for other in others}


class TestEveryMechanism(Contract):
    # `make test` runs every n-th case of these, and of the others every 257th.
    SAMPLED = {
        "test_forward_equals_naive": 20,
        "test_gradients_equal_naive": 53,
        "test_attention_mask_equals_naive": 53,
        "test_contiguous_documents_equal_naive": 53,
        "test_packed_documents_equal_separate": 18,
        "test_cached_equals_uncached": 53,
        "test_cache_bytes_follow_the_plan": 12,
        "test_parameters_are_counted": 9,
        "test_every_parameter_gets_a_gradient": 18,
        "test_save_and_load": 38,
        "test_branching_rows": 78,
        "test_identity_changes_nothing": 31,
        "test_heads_and_tokens_are_computed_alone": 38,
    }

    @classmethod
    def cases(cls) -> list[Any]:
        return cases()

    @classmethod
    def traced(cls) -> list[Any]:
        return traced()

    def prepare(self, case: Case, model: HeadwaterForCausalLM) -> float:
        least = 1e-9
        for options in json.loads(case.mechanisms).values():
            if options.get("score") == "softmax":  # its weights are all but equal: tokens, and so keys, hardly differ
                least = 0
            if options.get("variant") == "clamped":  # beyond its limits a scalar rightly has no gradient
                for name, parameter in model.named_parameters():
                    if ".mechanisms." in name:
                        parameter.data.clamp_(0.1, 0.9)
        return least

    def test_half_precision_equals_full(self, case, ids):
        if any(options.get("top_k") for options in json.loads(case.mechanisms).values()):
            pytest.skip("rounding chooses other pairs")
        super().test_half_precision_equals_full(case, ids)


# Layers that differ from the model


@functools.cache
def odd() -> list:
    params = [pytest.param(case, id=str(case)) for case in of(SINGLES, *ODD_LAYERS)]
    if not Wanted.slow:
        return params
    choices = [dict(choice) for choice in VARIANTS + OF_SOME_LAYERS]
    slow = of(choices, *ODD_LAYERS) + in_turn(MIXED, *ODD_LAYERS)
    return params + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in dict.fromkeys(slow)]


# Those that read other layers, and all that can be on some layers, on layers of one kind in one of the bases at least.
OF_SOME_LAYERS: list[dict] = [
    {name: {"layers": [layer]}} | more
    for layer in (1, 2)
    for more in ({}, {"kv_shift": {}})
    for name in ("value_residual", "svformer", "value_embedding", "short_conv", "exclusive", "output_gate")
] + [
    {"svformer": {"layers": [2], "share": "both"}, "value_residual": {"target": "queries", "layers": [2]}},
    {"kv_source": {"keys": [0, 1, 0], "values": [0, 1, 0]}, "kv_shift": {"variant": "half_heads"}},
    {"kv_source": {"keys": [0, 1, 1], "values": [0, 1, 2]}, "exclusive": {}, "persistent_memory": {}},
    {"kv_source": {"keys": "own", "values": [0, 0, 2]}, "neutreno": {}},
    {"value_embedding": {"tables": 1, "layers": [0, 2]}},
    {"value_embedding": {"tables": 2, "layers": [1, 2]}},
    {"value_embedding": {"tables": 1, "layers": [1]}},
    {"ngram_memory": {"target": "values", "layers": [1]}},
]


@pytest.mark.sampled(409)
class TestLayersThatDiffer(TestEveryMechanism):
    """Every mechanism in models of two kinds of layers, which differ in heads, widths, RoPE and window."""

    SAMPLED = {
        "test_forward_equals_naive": 20,
        "test_cached_equals_uncached": 80,
        "test_cache_bytes_follow_the_plan": 40,
        "test_parameters_are_counted": 20,
        "test_work_grows_with_the_tokens_alone": 40,
        "test_save_and_load": 80,
    }

    @classmethod
    def cases(cls) -> list[Any]:
        return odd()

    @classmethod
    def traced(cls) -> list[Any]:
        return [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in of([MANY], *ODD_LAYERS)]


# Compiled

compilers = ("g++", "c++", "clang++")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, compilers)), reason="torch.compile needs a C++ compiler")
MANY = {"pattention": {}, "kv_shift": {}, "value_residual": {}, "skip_layer": {}, "dense_former": {}}
SHARED = {"kv_shift": {}, "svformer": {}, "skip_layer": {}}
vanilla_and_many = pytest.mark.parametrize("mechanisms", [{}, MANY, SHARED], ids=lambda m: "+".join(m) or "vanilla")


@functools.cache
def traced() -> list:
    """Tracing takes seconds, and so is slow; test_graphs.py and test_losses.py trace some models by default."""
    every = of([*SINGLES, MANY, SHARED], "llama") + of([MANY], "alibi") + of(VARIANTS + PAIRS[::4], "llama")
    every += in_turn(SINGLES, *BASES)
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in dict.fromkeys(every)]


@pytest.mark.slow
@needs_compiler
@vanilla_and_many
def test_compiled_training_equals_eager(mechanisms):
    eager, compiled, ids = build(mechanisms).train(), build(mechanisms).train(), tokens(2, T)
    torch._dynamo.reset()
    losses = [model(ids, labels=ids).loss for model in (eager, torch.compile(compiled, fullgraph=True))]
    for loss in losses:
        loss.backward()
    assert_near(losses[1], losses[0], 1e-5)  # transformers computes the loss in fp32
    for (name, a), b in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert a.grad is not None, name
        assert_near(a.grad, b.grad, 1e-5)


def generate(model: HeadwaterForCausalLM, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=10, do_sample=False, **options)


@pytest.mark.slow
@needs_compiler
@vanilla_and_many
@pytest.mark.parametrize("padding", [0, 3])
def test_compiled_generation_equals_eager(mechanisms, padding):
    model, ids = build(mechanisms), tokens(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [padding]])).long()
    torch._dynamo.reset()
    compiling = CompileConfig(fullgraph=True, mode="default")
    compiling._compile_all_devices = True  # transformers would compile on a GPU only
    generated = generate(model, ids, attention_mask=mask, cache_implementation="static", compile_config=compiling)
    assert torch.equal(generated, generate(model, ids, attention_mask=mask, use_cache=False))
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = tokens(2, 9, seed=1)
        generated = generate(model, other, attention_mask=mask, cache_implementation="static", compile_config=compiling)
    assert torch.equal(generated, generate(model, other, attention_mask=mask, use_cache=False))
