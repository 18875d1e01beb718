"""Layers of two kinds: `sliding_layers` have a window, and heads and RoPE of their own (`sliding_fields`)."""

import copy
import pickle

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

from conftest import assert_near, build, config, decode, document_positions, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater.config.layers import layer_config
from headwater.cost import counts as cost
from headwater.models.cache import cache_bytes
from headwater.testing.contract_suite import DOCUMENTS, T, per_document
from headwater.testing.served import Server, make_prompts
from references import reference

HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
KINDS = dict(
    num_hidden_layers=4,
    sliding_window=5,
    sliding_layers=[0, 1, 3],
    sliding_fields=HEADS | dict(rope_parameters=dict(rope_theta=500.0)),
)
MECHANISMS = [
    {"kv_shift": {}, "value_embedding": {}, "output_gate": {}},
    {"kv_source": {"keys": [0, 0, 2, 0], "values": [0, 1, 2, 0]}, "persistent_memory": {}, "exclusive": {}},
]


@torch.no_grad()
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanisms", MECHANISMS, ids=["shift", "source"])
def test_the_equations_in_every_way_of_decoding(mechanisms):
    model, ids = build(mechanisms, **KINDS), tokens(2, T)
    logits = model(ids).logits
    assert_near(logits, torch.stack([reference(model)(row) for row in ids]), 1e-12)
    for cache in (None, StaticCache(config=model.config, max_cache_len=T)):
        assert_near(decode(model, ids, [5, 1, 6, 5], cache=cache), logits)
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = (torch.arange(T + 4) >= 4).long().expand(2, -1)
    assert_near(decode(model, padded, [7, 1, 13], attention_mask=mask)[:, 4:], logits)
    packed = document_positions(DOCUMENTS)
    assert_near(decode(model, ids, [5, 1, 6, 5], position_ids=packed), per_document(model, ids, DOCUMENTS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanisms", MECHANISMS, ids=["shift", "source"])
def test_costs_are_those_of_the_model(mechanisms):
    model, ids = build(mechanisms, **KINDS), tokens(1, T)
    assert sum(cost.parameters(model.config).values()) == model.num_parameters()
    cache = model(ids, use_cache=True).past_key_values
    assert cache_bytes(cache) == cost.cache_bytes(model.config, T, element_size=8)
    with FlopCounterMode(display=False) as counter:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    assert counter.get_total_flops() == sum(cost.forward_flops(model.config, T, causal=False).values()) * T
    # A window of 5 tokens in three layers of 32 channels, and all tokens in one: both have 32 channels.
    attended = 3 * cost.attended_tokens(layer_config(model.config, 0), T) + cost.attended_tokens(
        layer_config(model.config, 2), T
    )
    assert cost.forward_flops(model.config, T)["attention"] == 4 * 32 * attended
    # Keys and values of the one head or the two, of those tokens that the next one sees.
    assert cost.cache_bytes_read(model.config, T, 1) == 2 * (3 * 16 * 5 + 16 * T)


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="it gives all layers of the cache one size")
def test_a_static_cache_has_room_for_the_heads_of_each_layer():
    """transformers makes it before the first chunk of a prompt, with the sizes that the config gives for each layer."""
    model, ids = build({"kv_shift": {}}, **KINDS), tokens(2, 9)
    options = dict(max_new_tokens=3, do_sample=False)
    static = dict(cache_implementation="static", disable_compile=True, prefill_chunk_size=4)
    assert torch.equal(model.generate(ids, **options, **static), model.generate(ids, use_cache=False, **options))


def test_the_slopes_of_a_paged_cache_are_those_of_each_layer():
    sizes = KINDS | dict(position="alibi", sliding_fields=dict(num_attention_heads=6))
    model = build(**sizes)
    rows = make_prompts(model.config.vocab_size)
    with torch.no_grad():
        alone = [model(torch.tensor([row])).logits[0] for row in rows]
        for row, position, logits in Server(model).run_rows(rows):
            assert_near(logits, alone[row][position], 1e-6)  # slopes are in fp32


def test_the_config_is_stored_and_copied(tmp_path):
    made = config({"kv_shift": {}}, **KINDS)
    made.save_pretrained(tmp_path)
    assert HeadwaterConfig.from_pretrained(tmp_path).to_dict() == made.to_dict()
    model = HeadwaterForCausalLM(made)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    everywhere = config(num_hidden_layers=2, sliding_window=5, sliding_layers=[1, 0])
    assert everywhere.sliding_layers is None  # then all layers are alike


@torch.no_grad()
@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_change_of_the_kernel_reaches_both_kinds(kernel):
    """Each kind's mask has the form that the kernel of now takes, in a forward pass and in `generate`."""
    other = {"eager": "sdpa", "sdpa": "eager"}[kernel]
    model, ids = build(MECHANISMS[0], **KINDS, attn_implementation=other), tokens(2, T)
    mask = (torch.arange(T) >= 4).long().expand(2, -1)
    greedy = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits, chosen = model(ids, attention_mask=mask).logits[:, 4:], model.generate(ids, **greedy)
    model.set_attn_implementation(kernel)
    static = model.generate(ids, **greedy, cache_implementation="static", disable_compile=True)
    assert_near(model(ids, attention_mask=mask).logits[:, 4:], logits)
    assert torch.equal(model.generate(ids, **greedy), chosen)
    assert torch.equal(static, chosen)


def test_masks_are_given_by_kind():
    model, ids = build(**KINDS), tokens(1, T)
    ahead = torch.ones(T, T, dtype=torch.bool).tril()
    masks = {"full_attention": ahead[None, None], "sliding_attention": ahead.triu(-4)[None, None]}
    assert_near(model(ids, attention_mask=masks).logits, model(ids).logits)
    with pytest.raises(HeadwaterError, match="give a mask for each kind of layer"):
        model(ids, attention_mask=ahead[None, None])
    with pytest.raises(HeadwaterError, match="of layer 0 is 5"):
        model(ids, past_key_values=DynamicCache(config=config(num_hidden_layers=4, sliding_window=3)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(sliding_window=None), "set both, or neither"),
        (dict(sliding_layers=[4]), "between 0 and 3"),
        (dict(sliding_layers=None), "set sliding_layers, or change the fields"),
        (dict(sliding_fields=dict(head_dims=3)), "did you mean 'head_dim'"),
        (dict(sliding_fields=dict(num_key_value_heads=3)), "not divisible"),
        (dict(sliding_fields=dict(head_dim="8")), "must be a whole number"),
        (dict(sliding_fields=dict(head_dim=7)), "make it even"),
        (dict(sliding_fields=dict(rope_parameters=dict(rope_theta=-1.0))), "above zero"),
        (dict(sliding_fields=dict(rope_parameters={}), position="none"), "leave them out of sliding_fields"),
        (dict(mechanisms={"svformer": {}}), "Layer 2 would read layer 0, which has another num_key_value_heads"),
        (dict(mechanisms={"neutreno": {}}), "Layer 2 would read layer 0"),
        (
            dict(mechanisms={"kv_source": {"keys": "yoco"}}, sliding_fields=None),
            "Layer 3 would read layer 2, which has another sliding_window",
        ),
        (
            dict(mechanisms={"kv_source": {"values": "last", "num_shared_layers": 2}}, sliding_layers=[0, 1]),
            "layer 2 is of kind 'full', and none of the 2 layers",
        ),
    ],
)
def test_what_contradicts_itself(fields, message):
    with pytest.raises((HeadwaterError, StrictDataclassError), match=message):
        config(**KINDS | fields)
