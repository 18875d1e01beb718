"""Prompts: layers that store nothing for later tokens run for those tokens alone whose logits are asked for."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

from conftest import assert_near, build, config, document_positions, shared, tokens
from headwater import HeadwaterError
from headwater.config.plan import Source
from headwater.config.planner import output_only_from, plan_layers
from headwater.cost.counts import prefill_flops
from headwater.mechanisms.contract import Mechanism
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.decoding import Decoder
from headwater.nn.masks import LayerKind, find_new_tokens, keep_last_rows
from headwater.plugins.mechanisms import MECHANISMS

# Of four layers, the last two attend to what the second stores.
MAP = {"kv_source": {"keys": "last", "values": "last"}}
YOCO = {"kv_source": {"keys": "yoco", "values": "yoco"}}
DEPTH, T = 4, 13


def counted(model):
    """Inside, the number of tokens that each block is called with, by call."""

    @contextmanager
    def counting():
        found: list[int] = []

        def note(block, args):
            found.append(args[0].shape[1])

        hooks = [block.register_forward_pre_hook(note) for block in model.model.layers]
        yield found
        for hook in hooks:
            hook.remove()

    return counting()


def greedy(model, ids, mask=None, new: int = 6) -> torch.Tensor:
    """The most likely continuation, by the logits of all tokens, without a cache."""
    for _ in range(new):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        mask = None if mask is None else nn.functional.pad(mask, (0, 1), value=1)
    return ids


# Which layers


class ReadsIds(Mechanism):
    """Reads what one module for all layers makes of the ids, and where each token's part is only that module knows."""

    needs_input_ids = True

    class Options:
        pass

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [
            plan.reading(Source("shared", cls.registered_name(), -1)).acting(cls, cls.transform_block_output)
            for plan in plans
        ]

    def transform_block_output(self, x, context):
        return x


def first_of(made):
    return output_only_from(made, plan_layers(made))


@pytest.mark.parametrize(
    ("mechanisms", "first"),
    [
        ({}, 4),
        (MAP, 2),
        (YOCO, 3),
        ({"kv_source": {}}, 3),
        ({"kv_source": {"keys": "last"}}, 3),
        ({"kv_source": {"keys": "last", "values": "own"}}, 4),
        ({"kv_source": {"keys": [0, 0, 2, 0], "values": [0, 0, 0, 0]}}, 3),
        ({"svformer": {"share": "both"}}, 1),
        ({"skip_layer": {"heads": 4, "layers": 1, "source": "alias"}}, 1),
        (MAP | {"kv_shift": {}}, 2),
        # Raw queries, and tokens as wide as the stream, which later tokens look back at.
        (MAP | {"kv_shift": {"queries": True}}, 4),
        (MAP | {"short_conv": {"sites": ["feed_forward_input"]}}, 4),
        (MAP | {"short_conv": {"sites": ["feed_forward_input"], "layers": [2]}}, 3),
    ],
)
def test_which_layers_are_for_the_output_only(mechanisms, first):
    assert first_of(config(mechanisms, num_hidden_layers=DEPTH)) == first


def test_no_layer_is_where_each_stores_or_what_it_reads_cannot_be_cut(monkeypatch):
    assert first_of(config(MAP, num_hidden_layers=DEPTH, materialise=True)) == DEPTH
    monkeypatch.setattr(MECHANISMS, "added", {"reads_ids": ReadsIds})
    assert first_of(config(MAP | {"reads_ids": {}}, num_hidden_layers=DEPTH)) == DEPTH


# The same numbers

OTHERS = [
    *({name: {}} for name in MECHANISMS.built_in if name != "kv_source"),
    *({"value_residual": {"target": target}} for target in ("queries", "probabilities", "hidden")),
    {"neutreno": {}, "dense_former": {}},
]


def both_orders() -> list:
    found = []
    for other in OTHERS:
        for mechanisms in (MAP | other, other | MAP):
            try:
                made = config(mechanisms, num_hidden_layers=DEPTH)
            except HeadwaterError:
                continue
            if first_of(made) < DEPTH:
                marks = () if next(iter(mechanisms)) == "kv_source" else pytest.mark.slow
                found.append(pytest.param(mechanisms, id="+".join(map(str, mechanisms.items())), marks=marks))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mechanisms", both_orders())
def test_the_last_logits_and_what_follows_are_the_same(mechanisms):
    model, ids = shared(mechanisms, num_hidden_layers=DEPTH), tokens(2, T + 4)
    expected = model(ids, use_cache=False).logits
    short = DEPTH - first_of(model.config)
    for kept, cache in (
        (1, DynamicCache(config=model.config)),
        (3, StaticCache(config=model.config, max_cache_len=20)),
    ):
        with counted(model) as called:
            last = model(ids[:, :T], past_key_values=cache, logits_to_keep=kept).logits
        assert called == [T] * (DEPTH - short) + [kept] * short
        assert_near(last, expected[:, T - kept : T], 1e-12)
        assert [int(cache.get_seq_length(layer)) for layer in range(DEPTH)] == [T] * DEPTH
        assert_near(model(ids[:, T:], past_key_values=cache).logits, expected[:, T:], 1e-12)


TREE = "a kernel's mask"
LAYOUTS = {
    "plain": {},
    "left padded": dict(attention_mask=(torch.arange(T) >= torch.tensor([[0], [4]])).long()),
    "packed": dict(position_ids=document_positions([[4, 1, 8], [6, 7]])),
    TREE: dict(attention_mask=torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)),
}
BASES = {
    "llama": {},
    "sliding": dict(sliding_window=5),
    "alibi": dict(position="alibi"),
    "learned": dict(position="learned", parallel_residual=True),
    "eager": dict(attn_implementation="eager"),
    "matmul": dict(attn_implementation="matmul"),
}


@pytest.mark.parametrize("base", [*BASES][:2] + [pytest.param(base, marks=pytest.mark.slow) for base in [*BASES][2:]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [1, 3])
def test_in_every_layout(base, layout, kept):
    mechanisms = MAP if layout == TREE else {"kv_shift": {}} | MAP
    model, ids, given = shared(mechanisms, num_hidden_layers=DEPTH, **BASES[base]), tokens(2, T), LAYOUTS[layout]
    if (base, layout) == ("alibi", TREE):
        return  # refused
    expected = model(ids, use_cache=False, **given).logits[:, -kept:]
    for cache in (None, DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=T)):
        with counted(model) as called:
            last = model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=kept, **given).logits
        assert called == [T, T, kept, kept]
        assert_near(last, expected, 1e-12)


def test_all_tokens_run_where_rows_branch_for_a_mechanism_that_looks_back():
    model, ids = shared({"kv_shift": {}} | MAP, num_hidden_layers=DEPTH), tokens(2, T)
    with counted(model) as called:
        last = model(ids, logits_to_keep=1, use_cache=False, **LAYOUTS[TREE]).logits
    assert called == [T] * DEPTH
    assert_near(last, model(ids, use_cache=False, **LAYOUTS[TREE]).logits[:, -1:])


def test_gradients_are_those_of_the_last_token():
    whole, last = (build({"value_residual": {}} | MAP, num_hidden_layers=DEPTH) for _ in range(2))
    ids = tokens(2, T)
    whole(ids, use_cache=False).logits[:, -1].square().sum().backward()
    last(ids, use_cache=False, logits_to_keep=1).logits.square().sum().backward()
    for (name, a), b in zip(last.named_parameters(), whole.parameters(), strict=True):
        assert a.grad is not None, name
        assert_near(a.grad, b.grad, 1e-12)


def test_a_mask_that_cannot_be_cut_is_left_whole():
    row = find_new_tokens(torch.zeros(1, T, 1))
    assert keep_last_rows(LayerKind(0, config()), row, object(), 1) == (False, None)
    # Without a mask this kernel aligns queries as it likes.
    flex = LayerKind(0, config(attn_implementation="flex_attention"))
    assert keep_last_rows(flex, row, None, 3) == (False, None)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 3])
def test_it_compiles_as_one_graph(kept):
    model, ids = build({"kv_shift": {}} | MAP, num_hidden_layers=DEPTH), tokens(2, T)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for cache in (None, StaticCache(config=model.config, max_cache_len=20)):
        with torch.no_grad():
            last = compiled(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=kept).logits
        assert_near(last, model(ids, use_cache=False).logits[:, -kept:])


# In generation


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_generation(options, padded):
    model = shared({"kv_shift": {}} | MAP, num_hidden_layers=DEPTH)
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = tokens(rows, 4).repeat(1, 3)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])[-rows:]).long() if padded else torch.ones_like(ids)
    with counted(model) as called:
        made = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)
    assert torch.equal(made, greedy(model, ids, mask))
    assert called[DEPTH - 1] < called[0]


def test_assisted_generation_and_beams():
    model, helper, ids = shared(MAP, num_hidden_layers=DEPTH), build(num_hidden_layers=1), tokens(1, 9)
    made = model.generate(ids, assistant_model=helper, max_new_tokens=6, do_sample=False)
    assert torch.equal(made, greedy(model, ids))
    beams = dict(num_beams=3, max_new_tokens=6, do_sample=False)
    assert torch.equal(*(model.generate(ids, use_cache=use_cache, **beams) for use_cache in (True, False)))


def test_a_part_of_the_layers_is_no_assistant():
    model, ids = shared({"kv_shift": {}}, num_hidden_layers=DEPTH), tokens(1, 9)
    with pytest.raises(HeadwaterError, match="assistant_early_exit runs only some of the layers"):
        model.generate(ids, assistant_early_exit=2, max_new_tokens=3, do_sample=False)
    assert model.config.num_hidden_layers == DEPTH


def test_a_quantized_cache_is_named():
    model, ids = shared({}, num_hidden_layers=DEPTH), tokens(1, 9)
    with pytest.raises(HeadwaterError, match="cache=HeadwaterQuantizedCache"):
        model.generate(ids, cache_implementation="quantized", cache_config={"backend": "quanto"}, max_new_tokens=3)


def test_the_decoder():
    model, ids = shared({"kv_shift": {}} | MAP, num_hidden_layers=DEPTH), tokens(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    with counted(model) as called:
        made = Decoder(model)(ids, mask, max_new_tokens=5)
    assert called[:DEPTH] == [9, 9, 1, 1]
    assert torch.equal(made, greedy(model, ids, mask, 5))


@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_can_be_taken_back(window):
    model, ids = shared({"kv_shift": {}} | MAP, num_hidden_layers=DEPTH, sliding_window=window), tokens(2, T + 5)
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], past_key_values=cache, logits_to_keep=1)
    cache.activate_past_recording()
    model(tokens(2, 4, seed=9), past_key_values=cache, logits_to_keep=2)
    cache.crop(-4)
    assert_near(model(ids[:, 6:], past_key_values=cache).logits, model(ids, use_cache=False).logits[:, 6:])


# Where all tokens are needed


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"logits_to_keep": 1, "output_hidden_states": True},
        {"logits_to_keep": 1, "output_attentions": True},
        {"logits_to_keep": torch.tensor([0, T - 1])},
        {"logits_to_keep": T},
        {"labels": tokens(2, T)},
    ],
    ids=lambda given: "+".join(given) or "all logits",
)
def test_all_tokens_run_where_all_are_asked_for(given):
    model, ids = shared(MAP, num_hidden_layers=DEPTH, attn_implementation="eager"), tokens(2, T)
    with counted(model) as called:
        out = model(ids, **given)
    assert called == [T] * DEPTH
    assert all(x.shape[1] == T for x in out.hidden_states or ())


def test_training_draws_the_numbers_of_all_tokens():
    model, ids = build(MAP, num_hidden_layers=DEPTH, residual_dropout=0.5).train(), tokens(2, T)
    found = []
    for kept in (0, 1):
        torch.manual_seed(0)
        found.append(model(ids, logits_to_keep=kept).logits[:, -1])
    assert_near(*found, 1e-12)


# Its cost


@pytest.mark.parametrize(
    "mechanisms", [{}, MAP, MAP | {"low_rank_kv": {}}, YOCO | {"pattention": {}, "output_gate": {}}]
)
def test_flops_of_a_prompt_are_those_of_the_real_model(mechanisms):
    made = config(mechanisms, num_hidden_layers=DEPTH, attn_implementation="eager")
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = HeadwaterForCausalLM(made).eval()
        cache = DynamicCache(config=made)
        model(torch.zeros(1, 24, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    assert prefill_flops(made, 24, causal=False) == counter.get_total_flops()


def test_half_of_the_layers_take_half_of_the_prompt():
    shape = dict(num_hidden_layers=DEPTH, hidden_size=64, vocab_size=2)
    whole, half = (prefill_flops(config(given, **shape), 4096) for given in ({}, MAP))
    assert half == pytest.approx(whole / 2, rel=1e-3)
    window = [prefill_flops(config(MAP, sliding_window=size, **shape), 4096) for size in (2, 4096)]
    assert window[0] < window[1] == half
