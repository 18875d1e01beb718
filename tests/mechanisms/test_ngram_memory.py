"""Rows of tables, found by hashes of the last tokens' ids."""

import importlib

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache

from conftest import assert_near, build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.cost import counts as cost
from headwater.mechanisms import NGramMemory, NGramTable
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.mechanisms.ngram_memory import draw_multipliers, list_primes
from headwater.models.cache import HeadwaterLayer, HeadwaterStaticLayer, cache_bytes
from headwater.testing.small_models import decode, document_positions

QWEN = "transformers.models.qwen4_exp"


def test_the_hash_never_changes():
    """Numbers of this version: with others, the tables of trained models would be read at other rows."""
    assert draw_multipliers(3, 50257) == [38575058880125, 170353649319747, 84843994628913]
    assert draw_multipliers(2, 50257, seed=1, table_index=2) == [113245953979535, 135456396065209]
    assert list_primes(1000, 2, 4) == [1019, 1021, 1031, 1033]
    table = NGramTable(1000, 1, heads=2)
    found = table.find_rows(table.list_previous_ids(torch.tensor([[7, 999, 7]]), None, None))
    assert found.tolist() == [[[475, 1111, 2443, 3357], [399, 1137, 2203, 3396], [415, 1050, 2023, 3560]]]


@pytest.mark.parametrize("vocabulary", [2, 97, 50257, 2**20, 2**31])
def test_products_fit_into_64_bits(vocabulary):
    for seed in range(20):
        assert all(factor % 2 and factor * vocabulary < 2**63 for factor in draw_multipliers(4, vocabulary, seed))


@pytest.mark.parametrize("chunks", [None, [1, 5, 1, 1, 9]])
def test_it_is_qwens(chunks):
    """With Qwen's own cache, and end-of-text tokens in the rows."""
    try:
        made = importlib.import_module(f"{QWEN}.configuration_qwen4_exp").Qwen4ExpTextConfig(
            vocab_size=1000,
            hidden_size=32,
            num_hidden_layers=2,
            layer_types=["linear_attention"] * 2,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=50,
            ple_layer_ids=[1, 2],
            ple_embed_dim=32,
            eos_token_id=7,
        )
        theirs = importlib.import_module(f"{QWEN}.modeling_qwen4_exp").Qwen4ExpTextNGramEmbedding(made, 32, 1, 1)
    except ImportError:
        pytest.skip("This version of transformers has no Qwen4Exp.")
    ours = NGramTable(1000, 8, [2, 3], 2, 50, end_of_text=7, seed=made.seed, table_index=1)
    ours.table.weight.data.copy_(theirs.ngram_embedding.weight[: len(ours.table.weight)])
    ids = torch.randint(1000, (2, 17))
    ids[0, 4] = ids[1, 0] = ids[1, 8] = ids[1, 9] = 7
    if chunks is None:
        assert_near(ours(ids), theirs(ids, None), 5e-6)
        return
    cache, layer = DynamicCache(config=made), HeadwaterLayer()
    for part in ids.split(chunks, dim=1):
        assert_near(ours(part, tail=layer), theirs(part, cache), 5e-6)


@pytest.mark.parametrize("where", ["stream", "values"])
@pytest.mark.parametrize("gate", ["none", "scalar", "match"])
def test_rows_are_added_through_the_gate(gate, where):
    heads = {"stream": None, "values": 4}[where]
    memory = NGramMemory(NGramTable(50, 3), 8, 24, gate, channels=6, head_dim=heads).double()
    for parameter in memory.parameters():
        parameter.data.normal_()
    ids, x = torch.randint(50, (2, 5)), torch.randn(2, 5, 6, dtype=torch.float64)
    rows = memory.table(ids)
    added = rows @ memory.up.weight.T
    if gate == "scalar":
        added = memory.scalar * added
    if gate == "match":
        key = rows @ memory.key.weight.T
        match = torch.cosine_similarity(x, key, dim=2).unsqueeze(2) * 6**0.5
        added = added * (match.sign() * match.abs().sqrt()).sigmoid()
    y = torch.randn(2, 5, 8, dtype=torch.float64)
    if where == "stream":
        assert_near(memory(y, x, rows), y + added, 1e-5)
    else:
        values = y.view(2, 5, 2, 4).transpose(1, 2)
        assert_near(memory(values, x, rows), values + added.view(2, 5, 2, 4).transpose(1, 2), 1e-5)


def test_n_grams_begin_with_the_document():
    """However rows are packed and decoded: the same rows of the table as for the document alone."""
    table, ids = NGramTable(97, 2, [2, 4], 3), tokens(2, 17)
    lengths = [[1, 5, 1, 1, 2, 7], [6, 1, 9, 1]]
    alone = [
        torch.cat([table(document[None]) for document in row.split(sizes)], 1)
        for row, sizes in zip(ids, lengths, strict=True)
    ]
    positions = document_positions(lengths)
    for chunks in ([17], [1] * 17, [2, 1, 9, 5]):
        layer = HeadwaterLayer()
        parts = zip(ids.split(chunks, 1), positions.split(chunks, 1), strict=True)
        assert torch.equal(torch.cat([table(part, reach, layer) for part, reach in parts], 1), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_keep_ids_exactly(dtype):
    """Those of half precision too, one of which has no memory but that of values."""
    ids = torch.tensor([[0, 255, 256, 257, 65_537, 2**31 - 1, 2**32 - 1]])[:, None, :, None]
    early = HeadwaterStaticLayer(max_cache_len=20)
    early.lazy_initialization(*(torch.zeros(1, 2, 0, 8, dtype=dtype) for _ in range(2)))
    for layer in (early, HeadwaterStaticLayer(max_cache_len=20), HeadwaterLayer()):
        for at in range(7):
            kept = layer.update_tail("ids", ids[:, :, at : at + 1], 2)
            assert kept.flatten().tolist() == [0, 0, *ids.flatten().tolist()][at : at + 2]


def test_a_cache_initialized_early_decodes_in_half_precision():
    """As exported programs do. Ids beyond 256, which bfloat16 rounds."""
    model = build({"ngram_memory": {"gate": "match"}}, vocab_size=5000).bfloat16()
    ids = torch.randint(5000, (2, 9))
    cache = StaticCache(config=model.config, max_cache_len=12)
    cache.early_initialization(2, 2, 8, torch.bfloat16, "cpu")
    table, seen = model.model.layers[0].mechanisms["ngram_memory"].table, []
    table.register_forward_hook(lambda module, inputs, output: seen.append(output))
    whole = table(ids)
    decode(model, ids, [3, 1, 1, 4], cache=cache)
    assert torch.equal(torch.cat(seen[1:], 1), whole)


def test_a_layers_cache_counts_its_ids():
    made = config({"ngram_memory": {"orders": [3], "layers": [1], "heads": 2}})
    cache = DynamicCache(config=made)
    HeadwaterForCausalLM(made).bfloat16()(tokens(2, 9), past_key_values=cache)
    plain = cost.cache_bytes(config(), 9, 2, element_size=2)
    assert cache_bytes(cache) == cost.cache_bytes(made, 9, 2, element_size=2) == plain + 2 * 2 * 8


def test_each_layer_has_its_own_hash():
    model = build({"ngram_memory": {"layers": [0, 2]}})
    first, last = (model.model.layers[layer].mechanisms["ngram_memory"].table for layer in (0, 2))
    assert not set(first.sizes) & set(last.sizes)
    assert not set(first.multipliers) & set(last.multipliers)
    assert "ngram_memory" not in model.model.layers[1].mechanisms


def test_a_table_is_not_read_as_a_whole_to_generate_a_token():
    plain, more = config(), config({"ngram_memory": {"rank": 24, "gate": "match"}})
    added = sum(cost.parameters(more).values()) - sum(cost.parameters(plain).values())
    maps = 24 * 32 * 2
    assert added == sum(list_primes(97, 0, 8)) * 3 + maps
    assert cost.weights_read(more) - cost.weights_read(plain) == maps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"orders": [1, 2]}, "orders must be increasing numbers from 2 on"),
        ({"orders": [3, 2]}, "orders must be increasing"),
        ({"orders": []}, "orders must be increasing"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"rows": 1}, "rows must be at least 2"),
        ({"rank": 12}, "12 numbers cannot be divided among 2 orders of 4 heads; choose a rank that is a multiple of 8"),
        ({"end_of_text": 97}, "from 0 to 96"),
        ({"layers": []}, "name a layer, or leave it out"),
        ({"layers": [3]}, "between 0 and 2"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"ngram_memory": options})


def test_it_acts_where_a_layer_has_values_of_its_own():
    both = config({"ngram_memory": {"target": "values"}, "svformer": {"layers": [2]}})
    assert [plan.at(Stage.QKV) for plan in plan_layers(both)] == [("ngram_memory",)] * 2 + [()]
    with pytest.raises(HeadwaterError, match="layer 2 has none"):
        config({"ngram_memory": {"target": "values", "layers": [0, 2]}, "svformer": {"layers": [2]}})


class Foreign(PreTrainedModel):
    """Somebody else's model with headwater's table in it."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.ngrams = NGramTable(50, row_width=4)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, KeepsPrecision):
            module.restore_constants()


def test_a_table_in_another_model_keeps_its_hash(tmp_path):
    model, ids = Foreign(PreTrainedConfig()), torch.arange(18).view(2, 9)
    model.save_pretrained(tmp_path)
    loaded = Foreign.from_pretrained(tmp_path)
    assert torch.equal(loaded.ngrams(ids), model.ngrams(ids))
