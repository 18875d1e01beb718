"""What is made before the blocks run, one function at a time."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from conftest import config, document_positions
from headwater import HeadwaterError
from headwater.config.planner import plan_layers
from headwater.mechanisms.contract import Ancestors
from headwater.models import inputs
from headwater.models.input_checks import CachedLayer
from headwater.models.inputs import ForwardArguments, InputSpec, ModelInputs
from headwater.nn.cache_name import CACHE
from headwater.nn.masks import find_new_tokens

T = 6
TWO_KINDS = dict(num_hidden_layers=3, sliding_window=2, sliding_layers=[0, 2])


def spec(mechanisms=None, **changes):
    settings = config(mechanisms, **{"attn_implementation": "sdpa"} | changes)
    return InputSpec.from_config(settings, plan_layers(settings))


def row(length=T, cache=None, rows=1):
    return find_new_tokens(torch.zeros(rows, length, 4, dtype=torch.float64), cache)


def arguments(**changes):
    values = dict.fromkeys(ForwardArguments._fields) | dict(inputs_embeds=torch.zeros(1, T, 4), kwargs={})
    return ForwardArguments(**values | changes)


def filled(settings, length=4, cache=None):
    """A cache with tokens."""
    cache = DynamicCache(config=settings) if cache is None else cache
    heads = torch.zeros(1, settings.num_key_value_heads, length, settings.head_dim)
    for layer in range(settings.num_hidden_layers):
        cache.update(heads, heads, layer)
    return cache


def see(mask):
    """A boolean mask [1, 1, T, S] as rows of 0 and 1."""
    return ["".join(str(int(sees)) for sees in query) for query in mask[0, 0]]


def test_what_inputs_depend_on_is_read_from_config_and_plans():
    found = spec({"value_embedding": {}, "kv_shift": {"window": 3}}, **TWO_KINDS)
    assert {slides: kind.layer for slides, kind in found.kinds.items()} == {False: 1, True: 0}
    assert found.kinds[False].config.sliding_window is None
    assert found.layers[:2] == [CachedLayer(2, 2, 2), CachedLayer(2, 2, None)]
    assert found.id_readers == ["value_embedding"]
    assert (found.lookback.limit, found.lookback.tail_lengths, found.lookback.keeper.index) == (2, (2, 2), 0)
    assert spec({"svformer": {}}).layers[1] == CachedLayer(2, 0, None)
    assert spec({"svformer": {}}, materialise=True).layers[1] == CachedLayer(2, 2, None)


def test_masks_of_both_kinds_follow_a_change_of_the_kernel():
    found = spec(**TWO_KINDS)
    found.config._attn_implementation = "flex_attention"
    masks = inputs.prepare_inputs(found, arguments(attention_mask=torch.ones(1, T))).attention_mask
    assert {type(mask).__name__ for mask in masks.values()} == {"BlockMask"}


def test_blocks_are_called_by_kind_of_layer():
    positions = torch.arange(T)[None]
    made = ModelInputs({False: "all", True: "near"}, positions, position_embeddings={True: "turns"}, kwargs={"a": 1})
    common = {"a": 1, "reach": None, "position_ids": positions, "token_ids": None, "left_out": 0, CACHE: None}
    assert made.arguments() == {
        False: common | {"position_embeddings": None, "attention_mask": "all"},
        True: common | {"position_embeddings": "turns", "attention_mask": "near"},
    }
    cache = DynamicCache()
    assert made.cache is None
    assert made._replace(past_key_values=cache).cache is cache
    assert made._replace(past_key_values=object()).cache is None  # a server's


def test_a_cache_is_made_where_it_is_to_be_returned():
    cache = DynamicCache()
    assert inputs.make_cache(config(), cache, use_cache=False) is cache
    assert inputs.make_cache(config(), None, use_cache=False) is None
    assert isinstance(inputs.make_cache(config(), None, use_cache=True), DynamicCache)


def test_an_engine_is_known_by_the_layers_that_it_passes():
    assert not inputs.is_served(arguments())
    assert inputs.is_served(arguments(kwargs={inputs.INSTANCES: {0: object()}}))


def test_a_mask_is_for_all_kinds_or_for_each():
    mask, made = torch.ones(1, T), torch.ones(1, 1, T, T)
    assert inputs.split_masks(spec(), mask) == {False: mask}
    assert inputs.split_masks(spec(**TWO_KINDS), mask) == {False: mask, True: mask}
    prepared = {inputs.MASK[False]: "all", inputs.MASK[True]: "near", inputs.REACH: None}
    assert inputs.is_prepared(prepared)
    assert inputs.split_masks(spec(**TWO_KINDS), prepared) == {False: "all", True: "near"}
    with pytest.raises(HeadwaterError, match="give a mask for each kind of layer"):
        inputs.split_masks(spec(**TWO_KINDS), made)


def test_a_mask_is_found_by_either_name_of_its_kind():
    two = spec({"kv_shift": {}}, **TWO_KINDS)
    masks = {"full_attention": 1, "headwater_sliding_attention": 2}
    assert not inputs.is_prepared(masks)
    assert [inputs.find_mask_of_kind(two, masks, slides) for slides in (False, True)] == [1, 2]
    assert inputs.find_mask_of_kind(spec(), {"any": 3}, False) == 3  # the only one, and one kind
    with pytest.raises(HeadwaterError, match="full_attention, but none is for headwater_sliding_attention or sliding"):
        inputs.find_mask_of_kind(two, {"full_attention": 1}, True)


def test_masks_of_each_kind():
    two = spec(**TWO_KINDS)
    mask, positions = torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 0]])
    masks = inputs.make_masks(two, row(4), dict.fromkeys(two.kinds, mask), positions)
    assert see(masks[False])[1:] == ["0100", "0110", "0001"]
    masks = inputs.make_masks(two, row(4), dict.fromkeys(two.kinds), None)
    assert masks[False] is None
    assert see(masks[True]) == ["1000", "1100", "0110", "0011"]


def test_generation_prepares_masks_and_the_reach():
    mask = torch.tensor([[0, 1, 1, 1]])
    prepared = inputs.prepare_generation(spec({"kv_shift": {}}), row(4), mask, None)
    assert list(prepared) == [inputs.MASK[False], inputs.REACH]
    assert prepared[inputs.REACH].shape == (1, 1, 4, 1)
    assert inputs.find_prepared_reach(prepared)[0, 1:].tolist() == [0, 1, 2]
    assert list(inputs.prepare_generation(spec(), row(4), mask, None)) == [inputs.MASK[False]]
    assert inputs.find_prepared_reach(mask) is None


def test_positions_count_real_tokens():
    settings = config()
    ids = torch.arange(T)[None]
    assert inputs.find_positions(row(), None, ids) == (ids, False)
    counted = inputs.find_positions(row(2, filled(settings)), None, None)
    assert (counted.ids.tolist(), counted.are_slots) == ([[4, 5]], True)
    padded = inputs.find_positions(row(4), torch.tensor([[0, 0, 1, 1]]), None)
    assert (padded.ids.tolist(), padded.are_slots) == ([[0, 0, 0, 1]], False)
    static = filled(settings, cache=StaticCache(config=settings, max_cache_len=9))
    assert inputs.find_positions(row(2, static), None, None).are_slots is False  # it may have been reset


def test_documents_give_positions():
    borders, ids = torch.tensor([0, 4, 6], dtype=torch.int32), document_positions([[4, 2]])
    assert inputs.find_document_positions(None, row(), None, ids) is ids
    assert inputs.find_document_positions(borders, row(), None, None).tolist() == ids.tolist()
    assert inputs.find_document_positions(borders, row(), None, ids) is ids
    assert inputs.find_document_positions(borders, row(), torch.ones(1, T), ids) is ids
    with pytest.raises(HeadwaterError, match="disagree about where documents begin"):
        inputs.find_document_positions(borders, row(), None, torch.arange(T)[None])
    with pytest.raises(HeadwaterError, match="pass position_ids too"):
        inputs.find_document_positions(borders, row(), torch.ones(1, T), None)


def test_a_kernel_takes_borders_without_a_mask_and_a_cache():
    varlen = spec(attn_implementation="varlen")
    assert inputs.runs_by_document(varlen, arguments())
    assert not inputs.runs_by_document(spec(), arguments())
    assert not inputs.runs_by_document(varlen, arguments(attention_mask=torch.ones(1, T)))
    assert not inputs.runs_by_document(varlen, arguments(past_key_values=DynamicCache()))


def test_borders_are_passed_on_or_taken_away():
    borders = torch.tensor([0, 4, 6])
    assert inputs.choose_borders({}, None, T, by_document=False) == {}
    taken = inputs.choose_borders({"max_length_q": 4}, borders, T, by_document=True)
    assert list(taken.values()) == [borders, borders, 4, 4]
    assert inputs.choose_borders({}, borders, T, by_document=True)["max_length_k"] == T
    assert set(inputs.choose_borders({}, borders, T, by_document=False).values()) == {None}


def test_how_far_back_each_token_may_look():
    shift = spec({"kv_shift": {"window": 3}})

    def reach(cache=None, mask=None, positions=None, length=T, found=shift, **changes):
        tokens = row(length, cache)
        given = arguments(attention_mask=mask, **changes)
        common = None if inputs.is_prepared(mask) else mask
        return inputs.prepare_reach(found, given, tokens, common, inputs.find_positions(tokens, common, positions))

    starts = torch.tensor([[True, False, False, True, False, False]])
    assert reach(found=spec()) is None  # nothing looks back
    assert reach() is None  # each row is one document
    assert reach(positions=document_positions([[4, 2]])).tolist() == [[0, 1, 2, 2, 0, 1]]
    assert reach(document_starts=starts).tolist() == [[0, 1, 2, 0, 1, 2]]
    assert (
        reach(mask={inputs.MASK[False]: None, inputs.REACH: torch.full((1, 1, T, 1), 9)}, positions=starts).max() == 9
    )
    causal = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    assert isinstance(reach(mask=causal), Ancestors)
    settings = shift.config
    cache = filled(settings)
    reach(cache, positions=torch.tensor([[4, 5]]), length=2)
    assert cache.layers[0].positions().tolist() == [[5, 6]]  # counted from 1
    with pytest.raises(HeadwaterError, match="document_starts only without a cache"):
        reach(cache, document_starts=starts)


def test_the_column_of_the_first_new_token():
    settings = config()
    assert inputs.find_first_column(spec(), row(), torch.ones(1, 1, T, T)) == 0
    cache = filled(settings)
    assert inputs.find_first_column(spec(), row(2, cache), torch.ones(1, 1, 2, T)) == 4
    with pytest.raises(HeadwaterError, match="is for 2 new tokens among 5, but there are 2 among 6"):
        inputs.find_first_column(spec(), row(2, cache), torch.ones(1, 1, 2, 5))


def test_the_last_tokens_alone():
    two, x = spec(**TWO_KINDS), torch.zeros(1, T, 4)
    near = torch.ones(1, 1, T, T, dtype=torch.bool).tril().triu(-1)
    angles = {slides: (torch.zeros(1, 1, T, 2),) * 2 for slides in two.kinds}
    ids = torch.arange(T)[None]
    whole = ModelInputs({False: None, True: near}, ids, ids, position_embeddings=angles, token_ids=ids)
    kept = inputs.keep_last_tokens(two, whole, x, 1)
    assert kept.attention_mask[False] is None
    assert see(kept.attention_mask[True]) == ["000011"]
    assert [kept.position_ids.item(), kept.reach.item(), kept.token_ids.item()] == [5, 5, 5]
    assert kept.left_out == 5
    assert kept.position_embeddings[True][0].shape == (1, 1, 1, 2)
    assert inputs.keep_last_tokens(two, whole._replace(has_borders=True), x, 1) is None
    assert inputs.keep_last_tokens(two, whole._replace(reach=Ancestors(ids[None])), x, 1) is None
    assert inputs.keep_last_tokens(two, whole._replace(attention_mask={False: object(), True: near}), x, 1) is None


def test_the_last_columns():
    assert inputs.select_last(None, 2) is None
    assert inputs.select_last(torch.arange(T)[None], 2).tolist() == [[4, 5]]


def test_all_inputs_of_a_call():
    borders = torch.tensor([0, 4, 6], dtype=torch.int32)
    varlen = spec({"kv_shift": {}}, attn_implementation="varlen")
    made = inputs.prepare_inputs(varlen, arguments(input_ids=torch.zeros(1, T), kwargs={"cu_seq_lens_q": borders}))
    assert made.attention_mask == {False: None}
    assert made.has_borders
    assert made.position_ids.tolist() == document_positions([[4, 2]]).tolist()
    assert made.reach.tolist() == [[0, 1, 1, 1, 0, 1]]
    assert made.kwargs["cu_seq_lens_k"] is borders
    plain = inputs.prepare_inputs(spec(), arguments(input_ids=torch.zeros(1, T), kwargs={"use_cache": False}))
    assert plain[2:] == (None, None, {}, None, 0, {"use_cache": False}, False)
