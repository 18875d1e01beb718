"""Rows of tables, read by token id, added to values."""

import pytest
import torch

from conftest import assert_near, build, config, random, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.cost import counts as cost
from headwater.mechanisms import MUDD, NGramTable, ValueEmbedding, ValueTables
from references import reference


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("gate", ["sigmoid", "scalar", "none"])
def test_a_row_is_added_to_each_value(gate, rank):
    embedding = ValueEmbedding(3, 4, 11, rank, gate, channels=2, scale=3.0).double()
    for parameter in embedding.parameters():
        parameter.data.normal_()
    v, x, ids = random(2, 3, 5, 4), random(2, 5, 8), torch.randint(11, (2, 5))
    rows = embedding.table.weight[ids]
    rows = rows if rank is None else rows @ embedding.up.weight.T
    rows = rows.view(2, 5, 3, 4)
    if gate == "sigmoid":
        rows = rows * 3 * (x[..., :2] @ embedding.gate.weight.T).sigmoid()[..., None]
    if gate == "scalar":
        rows = rows * embedding.scalar
    assert_near(embedding(v, x, ids), v + rows.transpose(1, 2), 1e-12)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_module_that_starts_at_zero_adds_nothing_outside_a_model(rank):
    v, x, ids = random(2, 3, 5, 4), random(2, 5, 8), torch.randint(11, (2, 5))
    assert torch.equal(ValueEmbedding(3, 4, 11, rank, channels=2, init="zero").double()(v, x, ids), v)
    assert not NGramTable(11, row_width=4, zero=True)(ids).any()


def test_a_mechanism_inside_another_keeps_its_start():
    outer = MUDD(8, 2, final=MUDD(8, 3))
    assert outer.last.up.weight.any()
    assert not outer.last.down.weight.any()


def test_tables_of_several_layers():
    tables = ValueTables(3, vocab_size=7, row_width=4)
    ids = torch.randint(7, (2, 5))
    for table, rows in zip(tables.table.weight.split(7), tables(ids), strict=True):
        assert torch.equal(rows, table[ids])


def test_layers_read_the_tables_in_turn():
    """As in modded-nanogpt: early layers and late ones."""
    options = {"tables": 2, "layers": [0, 1, 3, 4]}
    made = HeadwaterForCausalLM(config({"value_embedding": options}, num_hidden_layers=6))
    layers = [block.self_attn.mechanisms for block in made.model.layers]
    assert [layer["value_embedding"].index if layer else None for layer in layers] == [0, 1, None, 0, 1, None]
    table = made.model.mechanisms["value_embedding"].table.weight
    assert table.shape == (2 * 97, 16)
    assert abs(table.std() * 32**0.5 - 1) < 0.05


def test_the_gate_starts_half_open():
    made = HeadwaterForCausalLM(config({"value_embedding": {"scale": 3.0}}))
    embedding = made.model.layers[1].self_attn.mechanisms["value_embedding"]
    assert not embedding.gate.weight.any()
    v, x, ids = torch.zeros(1, 2, 5, 8), torch.randn(1, 5, 32), tokens(1, 5)
    expected = 1.5 * embedding.table.weight[ids].view(1, 5, 2, 8).transpose(1, 2)
    assert_near(embedding(v, x, ids), expected, 1e-6)


def test_it_acts_where_a_layer_has_values_of_its_own():
    both = config({"value_embedding": {}, "svformer": {"layers": [2]}})
    assert [plan.at(Stage.QKV) for plan in plan_layers(both)] == [("value_embedding",)] * 2 + [()]
    with pytest.raises(HeadwaterError, match="layer 2 has none"):
        config({"value_embedding": {"layers": [0, 2]}, "svformer": {"layers": [2]}})


def test_a_table_is_not_read_as_a_whole_to_generate_a_token():
    for options in ({}, {"tables": 2}, {"tables": 2, "rank": 3}):
        plain, more = config(), config({"value_embedding": options})
        tables = sum(p.numel() for n, p in build({"value_embedding": options}).named_parameters() if "table." in n)
        added = sum(cost.parameters(more).values()) - sum(cost.parameters(plain).values())
        assert cost.weights_read(more) - cost.weights_read(plain) == added - tables


def test_it_reads_ids():
    model = build({"value_embedding": {"tables": 1}})
    with pytest.raises(HeadwaterError, match="value_embedding reads token ids"):
        model(inputs_embeds=torch.randn(1, 3, 32, dtype=torch.float64))


def test_half_precision_keeps_its_dtype():
    for options in ({}, {"gate": "scalar"}, {"tables": 2, "rank": 4}):
        model = build({"value_embedding": options}).bfloat16()
        assert model(tokens(1, 5), use_cache=False).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": 0}, "tables must be at least 1"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"channels": 40}, "channels must be from 1 to hidden_size 32"),
        ({"layers": [3]}, "between 0 and 2"),
        ({"scale": 0}, "scale must be above 0"),
        ({"gate": "scalar", "scale": 9.0}, "scale is for gate 'sigmoid'"),
        ({"gate": "none", "channels": 3}, "channels is for gate 'sigmoid'"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"value_embedding": options})


# Layers that differ from the model

OTHERS = dict(num_hidden_layers=3, sliding_window=5, sliding_layers=[1])


@pytest.mark.parametrize(
    ("fields", "options", "width"),
    [
        (dict(num_attention_heads=8, num_key_value_heads=4), {"tables": 1, "layers": [1]}, 32),
        (dict(num_key_value_heads=1), {"tables": 2, "layers": [0, 2]}, 16),
        (dict(num_key_value_heads=4, head_dim=4), {"tables": 2}, 16),  # as many numbers, cut into the layer's heads
        (dict(head_dim=12), {"tables": 2, "rank": 5}, 5),
        (dict(head_dim=12), {}, None),
    ],
)
def test_rows_are_as_wide_as_the_values_of_the_layers_that_read_them(fields, options, width):
    model, ids = build({"value_embedding": options}, **OTHERS, sliding_fields=fields), tokens(1, 7)
    if width is not None:
        assert model.model.mechanisms["value_embedding"].table.weight.shape[1] == width
    assert sum(cost.parameters(model.config).values()) == model.num_parameters()
    assert_near(model(ids, use_cache=False).logits[0], reference(model)(ids[0]), 1e-12)


@pytest.mark.parametrize("fields", [dict(head_dim=4), dict(num_key_value_heads=1), dict(num_key_value_heads=4)])
def test_tables_of_layers_with_values_of_other_widths_are_refused(fields):
    with pytest.raises(HeadwaterError, match=r"16 numbers in layer 0 and \d+ in layer 1; set rank, or name layers"):
        config({"value_embedding": {"tables": 2}}, **OTHERS, sliding_fields=fields)
