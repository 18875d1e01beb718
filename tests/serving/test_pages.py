"""What a block of a server's cache holds, and tokens through such blocks: without any server."""

from importlib.util import find_spec

import pytest
import torch

from conftest import assert_near, build, config
from headwater import HeadwaterError
from headwater.config.planner import plan_layers
from headwater.cost.counts import cache_bytes, cache_bytes_per_token
from headwater.engines.gathering import GatheringEngine
from headwater.engines.paged import FlatBatch
from headwater.engines.pages import Page, check_servable
from headwater.mechanisms import KVShift
from headwater.testing.served import NaiveEngine, Server, make_prompts

EVERYTHING = {"value_residual": {}, "skip_layer": {}, "kv_shift": {"window": 3}, "smear": {}, "ngram_memory": {}}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CASES = [
    ({}, {}),
    ({"svformer": {}}, {}),
    ({"kv_source": {"keys": "yoco", "values": "last"}}, {}),
    (EVERYTHING, {"num_key_value_heads": 4}),
    ({"mla": {}, "kv_source": {}}, {"num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    ({"low_rank_kv": {"heads": 1}}, {"sliding_window": 5, "sliding_layers": [1], "attention_softcap": 2.0}),
    ({"low_rank_kv": {}, "kv_source": {}, "kv_shift": {}}, {"qkv_bias": True, "qk_norm": True}),
    ({"low_rank_kv": {}}, {"position": "alibi", "num_key_value_heads": 2}),
    ({"mudd": {}, "short_conv": {"sites": ["attention_input", "feed_forward_hidden"]}}, {"sliding_window": 5}),
]


@pytest.mark.parametrize(("mechanisms", "changes"), CASES, ids=lambda one: "+".join(one) or "vanilla")
@pytest.mark.parametrize("element", [2, 4])
def test_a_block_has_the_bytes_of_the_plan(mechanisms, changes, element):
    asked = config(mechanisms, **changes)
    page = Page(asked, plan_layers(asked), 16, element)
    positions = 4 * sum(plan.stores_positions(asked) for plan in plan_layers(asked))  # which a server counts
    assert page.history == 16 * (cache_bytes_per_token(asked, element) - positions)
    # Of one token's cache what is no history are the raw tokens; each begins at a multiple of 8 bytes.
    raw = cache_bytes(asked, 0, element_size=element)
    tails = sum(len(plan.inputs) if part == "input" else 1 for plan in plan_layers(asked) for part, *_ in plan.tails)
    assert raw <= page.size - page.history <= raw + 8 * (tails + 1)
    spans = [(one.offset, one.heads * one.width * 16 * element) for one in page.stores.values()]
    spans = sorted([*spans, *((room.start, len(room)) for room in page.rooms.values())])
    assert [first + size for first, size in spans[:-1]] == [first for first, _ in spans[1:]]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mechanisms", "changes"), CASES[1:], ids=lambda one: "+".join(one))
def test_tokens_through_a_server_in_miniature(mechanisms, changes, seed):
    model, rows = build(mechanisms, **changes), make_prompts(97, seed)[:6]
    with torch.no_grad():
        alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    for row, position, logits in Server(model, seed=seed).run_rows(rows):
        assert_near(logits, alone[row][position])


def test_raw_tokens_of_a_shared_block_are_read_in_the_step_that_writes_them():
    """Two sequences, both new, of which the second has its first block from the first."""
    model, row = build({"kv_shift": {}}), list(range(1, 8))
    engine = NaiveEngine(Page(model.config, model.plans, 4, 8))
    engine.bind_memory(torch.full((4, engine.page.size), 0xFF, dtype=torch.uint8))
    engine.batch = FlatBatch(torch.tensor([0, 7, 10]), torch.tensor([7, 7]), torch.tensor([[1, 2], [1, 3]]), 4)
    with torch.no_grad():
        hidden = model.model.serve_tokens(torch.tensor([*row, *row[4:]]), engine.batch.position, engine)
        alone = model(torch.tensor([row]), use_cache=False).logits[0]
    assert_near(model.logits(hidden), torch.cat((alone, alone[4:])))


@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}}])
def test_layers_with_more_heads_are_served_as_alone(mechanisms):
    more = dict(num_attention_heads=8, num_key_value_heads=4)
    model = build(mechanisms, sliding_window=5, sliding_layers=[1], sliding_fields=more)
    rows = make_prompts(model.config.vocab_size)[:3]
    with torch.no_grad():
        alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    for row, position, logits in Server(model).run_rows(rows):
        assert_near(logits, alone[row][position])


@pytest.mark.parametrize("mechanisms", [{"low_rank_kv": {}}, {"mla": {}}])
def test_blocks_before_a_window_may_hold_anything(mechanisms):
    """A server gives them to other sequences, which may write numbers that are not finite."""
    model, ids = build(mechanisms, num_key_value_heads=1, sliding_window=4), torch.arange(1, 14)
    engine = GatheringEngine(Page(model.config, model.plans, 4, 8))
    engine.bind_memory(torch.full((5, engine.page.size), 0xFF, dtype=torch.uint8))
    assert torch.isnan(engine.view_store(0, "k", torch.float64)).all()
    steps = [(0, 12, [1, 2, 3, 0]), (12, 13, [0, 0, 3, 4])]
    for start, end, blocks in steps:
        engine.batch = FlatBatch(torch.tensor([0, end - start]), torch.tensor([end]), torch.tensor([blocks]), 4)
        with torch.no_grad():
            hidden = model.model.serve_tokens(ids[start:end], engine.batch.position, engine)
    with torch.no_grad():
        assert_near(model.logits(hidden)[-1], model(ids[None], use_cache=False).logits[0, -1])


def test_raw_tokens_without_room_are_an_error(monkeypatch):
    model = build({"kv_shift": {}})
    engine = NaiveEngine(Page(model.config, model.plans, 4, 8))
    engine.bind_memory(torch.zeros(4, engine.page.size, dtype=torch.uint8))
    engine.batch = FlatBatch(torch.tensor([0, 2]), torch.tensor([2]), torch.tensor([[1]]), 4)
    monkeypatch.setattr(
        KVShift, "transform_qkv", lambda self, x, context: [context.tail.update_tail("x", x.q, 9), x][1]
    )
    with pytest.raises(HeadwaterError, match="leaves no room; declare them as tails"):
        model.model.serve_tokens(torch.tensor([1, 2]), engine.batch.position, engine)


@pytest.mark.parametrize(
    ("mechanisms", "changes", "message"),
    [
        ({"value_residual": {"target": "probabilities"}}, {}, "'value_residual' with its options needs masks"),
        ({"persistent_memory": {}}, {}, "'persistent_memory' with its options needs masks"),
        ({"blend": {"mechanisms": {"svformer": {}}}}, {}, "'blend' acts at the stage 'transform_attended_kv'"),
        ({}, {"rope_parameters": DYNAMIC}, "'dynamic' follow"),
        (
            {},
            {"sliding_window": 5, "sliding_layers": [1], "sliding_fields": {"rope_parameters": DYNAMIC}},
            "'dynamic' f",
        ),
    ],
)
def test_what_a_server_cannot_run_is_refused(mechanisms, changes, message):
    with pytest.raises(HeadwaterError, match=message):
        check_servable(config(mechanisms, **changes))


def test_a_mechanism_that_keeps_a_state_is_refused(monkeypatch):
    monkeypatch.setattr(KVShift, "keeps_state", True, raising=False)
    with pytest.raises(HeadwaterError, match="'kv_shift' keeps a state in the cache"):
        check_servable(config({"kv_shift": {}}))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_named(run):
    code, _, err = run("serve", "checkpoint", "--engine", "vllm")
    assert code == 2
    assert "This needs vLLM, which is not installed; install it with `pip install" in err
    assert "[vllm]'" in err
