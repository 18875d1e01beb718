"""Engines that bring their own paged cache: transformers' continuous batching, started for real."""

import ast
import inspect
import textwrap

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.modeling_utils import AttentionInterface

from conftest import assert_near, build, tokens
from headwater import HeadwaterError
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.models.input_checks import check_paged
from headwater.nn.attention import Attention
from headwater.nn.attention_kernel import eager_attention

LENGTHS = (5, 17, 3, 40, 21)
# transformers 5.17 calls a page a block.
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
PAGED = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=48, **{PAGE: 16})  # so few that prompts are split


def paged(model, prompts: list[list[int]]) -> list[list[int]]:
    options = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1)
    made = model.generate_batch(prompts, generation_config=options, continuous_batching_config=PAGED)
    assert not [output.error for output in made.values() if output.error]
    return [output.generated_tokens for output in made.values()]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.slow  # the engine runs below; what differs between bases is tried without it
@pytest.mark.parametrize(
    "changes",
    [{"gpt2": True, "num_key_value_heads": 4}, {"position": "none"}, {"rope_parameters": YARN}],
    ids=["learned", "none", "yarn"],
)
def test_continuous_batching_of_other_bases(changes):
    prompts = [tokens(length, seed=length).tolist() for length in LENGTHS]
    model = build({"skip_layer": {}, "value_residual": {}}, **changes)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        given = dict(attention_mask=torch.ones_like(ids), use_cache=False, max_new_tokens=12, do_sample=False)
        expected.append(model.generate(ids, **given)[0, len(prompt) :].tolist())
    assert paged(build({"skip_layer": {}, "value_residual": {}}, **changes, materialise=True), prompts) == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "mechanisms",
    [
        {},
        {"value_residual": {}},
        {"svformer": {}},
        {"skip_layer": {}, "neutreno": {}},
        {"value_residual": {"mode": "learnable_plus"}, "dense_former": {}, "pattention": {}},
    ],
    ids=lambda mechanisms: "+".join(mechanisms) or "vanilla",
)
@pytest.mark.slow
def test_continuous_batching_equals_generate(mechanisms):
    prompts = [tokens(length, seed=length).tolist() for length in LENGTHS]
    model = build(mechanisms)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), use_cache=False, max_new_tokens=12, do_sample=False
        )
        expected.append(made[0, len(prompt) :].tolist())
    assert paged(build(mechanisms, materialise=True), prompts) == expected


@pytest.mark.parametrize(
    ("mechanisms", "changes", "message"),
    [
        ({"kv_shift": {}}, {}, "kv_shift: an engine"),
        ({"skip_layer": {}}, {}, "materialise=True"),
        ({"svformer": {}}, {}, "headwater export --materialise"),
        ({}, {}, "materialise=True"),
        ({}, {"position": "alibi"}, "ALiBi: an engine.* masks"),
        (
            {},
            {"rope_parameters": YARN | {"rope_type": "dynamic"}},
            "rope_type 'dynamic': an engine",
        ),
        (
            {"value_residual": {"target": "probabilities"}},
            {"materialise": True},
            "'value_residual' with its options: an engine",
        ),
    ],
)
def test_what_an_engine_could_not_run_exactly_is_refused(mechanisms, changes, message):
    model = build(mechanisms, **changes)
    with pytest.raises(HeadwaterError, match=message):
        model.generate_batch([[1, 2, 3]])
    with pytest.raises(HeadwaterError, match=message):
        model(tokens(1, 3), attention_instances={})


@pytest.fixture(params=["vllm", "sglang"])
def engine(request, monkeypatch):
    """An engine that says nothing in `forward` and has only put its attention in the place of transformers' own."""

    def attention(module, q, k, v, attention_mask, **kwargs):
        """Who sees whom such an engine knows itself; here, in one plain row."""
        causal = torch.zeros(q.shape[2], k.shape[2]).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1) > 0, -1e9)
        return eager_attention(module, q, k, v, causal, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, request.param, attention)
    return request.param


@pytest.mark.parametrize("mechanisms", [{"kv_shift": {}}, {"skip_layer": {}}, {}], ids=str)
def test_an_engine_is_known_by_its_attention(engine, mechanisms):
    model, ids = build(mechanisms), tokens(1, 5)
    own = model(ids, use_cache=False).logits
    model.config._attn_implementation = engine
    message = "kv_shift: an engine" if mechanisms.get("kv_shift") == {} else "materialise=True"
    for forward in (model, model.model):
        with pytest.raises(HeadwaterError, match=message):
            forward(ids, use_cache=False)
    # With a cache of ours nothing is kept elsewhere, nor while training.
    assert_near(model(ids, use_cache=True).logits, own)
    assert_near(model.train()(ids, use_cache=False).logits, own)
    if "kv_shift" not in mechanisms:
        ordinary = build(mechanisms, materialise=True)
        ordinary.config._attn_implementation = engine
        assert_near(ordinary(ids, use_cache=False).logits, own)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flex_attention", "kernels-community/some"])
def test_attention_of_transformers_itself_is_none_of_an_engine(name):
    model = build({"kv_shift": {}})
    model.config._attn_implementation = name
    assert not model.model.may_be_paged()
    model.config._attn_implementation = f"paged|{name}"
    with pytest.raises(HeadwaterError, match="kv_shift: an engine"):
        model(tokens(1, 5), use_cache=False)


def test_materialising_is_refused_where_raw_tokens_are_kept():
    with pytest.raises(HeadwaterError, match="raw tokens of kv_shift"):
        build({"value_residual": {}, "kv_shift": {}}, materialise=True)
    with pytest.raises(HeadwaterError, match="raw tokens of kv_shift and smear"):
        build({"kv_shift": {}, "smear": {}}, materialise=True)


def test_attention_is_called_where_vllm_looks_for_it():
    """Its Transformers backend takes exactly one lookup, and one call of what was looked up, in `forward` itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Attention.forward)))
    found = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(")
    ]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found
    ]
    assert len(found) == len(calls) == 1
    assert [ast.unparse(given.value) for given in calls[0].keywords if given.arg == "scaling"] == ["self.scaling"]


def test_rope_by_length_in_the_sliding_layers_alone_is_refused():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, materialise=True)
    sliding = dict(sliding_window=8, sliding_layers=[0], sliding_fields={"rope_parameters": dynamic})
    check_paged(plain := HeadwaterConfig(**sizes), plan_layers(plain))
    for fields in (sliding, {"rope_parameters": dynamic}):
        config = HeadwaterConfig(**sizes, max_position_embeddings=16, **fields)
        with pytest.raises(HeadwaterError, match="rope_type 'dynamic': an engine with paged attention"):
            check_paged(config, plan_layers(config))
