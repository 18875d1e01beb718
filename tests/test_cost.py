"""Counted equals computed: parameters, FLOPs, cache bytes and activations are those of the real modules and tensors."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.config.plan import Source
from headwater.config.planner import plan_layers
from headwater.config.presets import preset
from headwater.cost import estimate_model
from headwater.cost.counts import (
    KEPT_BY_ACTIVATION,
    activation_bytes,
    cache_bytes,
    cache_bytes_per_token,
    cache_bytes_read,
    forward_flops,
    parameters,
    state_bytes,
    training_flops,
    weights_read,
)
from headwater.kernels.fused_loss import DISTILLED_CHUNK
from headwater.mechanisms import Cost, Mechanism
from headwater.models import cache as caches
from headwater.plugins.mechanisms import MECHANISMS
from headwater.testing import model_measures
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
BASES = {
    "llama": {},
    "heads of their own": dict(num_key_value_heads=4),
    "one key head": dict(num_key_value_heads=1, head_dim=12),
    "gpt2": dict(gpt2=True),
    "plain": dict(feed_forward="plain", qkv_bias=True, position="none"),
    "biases": dict(qkv_bias=True, output_bias=True, mlp_bias=True, position="alibi"),
    "qk_norm": dict(qk_norm=True, norm="layer_norm"),
    "tied": dict(tie_word_embeddings=True, parallel_residual=True, norm_weight=False, final_norm_weight=True),
    "bare norms": dict(norm="layer_norm", norm_weight=False, norm_bias=False, qk_norm=True, first_residual=False),
    "sliding": dict(sliding_window=6),
}
# At least one entry for each mechanism, its defaults first.
VARIANTS = {
    "kv_shift": [{}, {"queries": True}, {"values": False, "window": 3}, {"variant": "gate"}],
    "value_residual": [
        {},
        *({"mode": mode} for mode in ("identity", "constant", "sparse", "learnable_plus", "dense")),
        *({"target": target} for target in ("queries", "keys", "probabilities", "hidden")),
        {"source": 1, "layers": [3]},
        {"target": "keys", "mode": "learnable"},
        {"mode": "dense", "recursive": True},
    ],
    "svformer": [{}, {"share": "keys"}, {"share": "both"}, {"source": 1, "layers": [3]}],
    "kv_source": [
        {},
        {"keys": "yoco", "values": "last", "num_shared_layers": 3},
        {"keys": [0, 1, 1, 0], "values": "own"},
    ],
    "mla": [{}],
    "low_rank_kv": [{}, {"heads": 1}],
    "skip_layer": [{}, {"source": "alias"}, {"layers": 1, "heads": 2}, {"layers": 0}],
    "pattention": [
        {},
        {"attention_pairs": 24, "ffn_pairs": 56},
        {"query_pairs": 8, "value_pairs": 7},
        *({"score": score} for score in ("softmax", "exp_l1_norm", "gelu_l2_norm", "l1_norm_gelu")),
        *({"top_k": 6, "score": score} for score in ("softmax", "l2_norm_gelu")),
        {"ffn_pairs": 49, "top_k": {"feed_forward": 6}, "product_keys": ["feed_forward"], "product_heads": 3},
    ],
    "short_conv": [{}, {"sites": ["queries", "attention_input"], "window": 3}, {"layers": [1], "dynamic": ["keys"]}],
    "value_embedding": [{}, {"tables": 2, "rank": 3}, {"rank": 5, "gate": "scalar"}, {"tables": 1, "gate": "none"}],
    "ngram_memory": [
        {},
        {"target": "values", "gate": "scalar", "rank": 16},
        {"gate": "match", "rank": 24, "orders": [3], "layers": [0, 2]},
        {"target": "values", "gate": "match", "rows": 300, "layers": [1]},
    ],
    "persistent_memory": [{}, {"pairs": 3, "layers": [1]}],
    "neutreno": [{}, {"learnable": True}],
    "exclusive": [{}, {"learnable": True}, {"layers": [1]}],
    "output_gate": [{}, {"granularity": "channel", "channels": 5}, {"scale": 2.0, "layers": [0, 2]}],
    "smear": [{}, {"norm": "before", "channels": 5}],
    "embedding_residual": [{}, {"layers": [2]}],
    "backout": [{}, {"layer": 0}],
    "depth_attention": [{}, {"queries": 3, "variant": "inkling_2", "block": 2}, {"layers": [2]}],
    "mudd": [{}],
    "dense_former": [{}, {"dilation": 2}, {"period": 2}],
}
SINGLE = [{name: options} for name in MECHANISMS.built_in for options in VARIANTS.get(name, [{}])]
PAIRS = [{a: {}, b: {}} for a, b in itertools.combinations(MECHANISMS.built_in, 2)]


def kept_by_autograd(
    config, context, batch_size, precision: Precision = Precision.FP32, checkpointing: bool = False, **inputs
) -> int:
    """The bytes that autograd keeps of a training step of a new model."""
    model = precision.cast_activations(HeadwaterForCausalLM(config).to(precision.weights)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with precision.autocast("cpu"):
        return model_measures.kept_by_autograd(model, batch_size, context, **inputs)


def config(mechanisms: dict | None = None, gpt2: bool = False, **changes) -> HeadwaterConfig:
    make = HeadwaterConfig.gpt2 if gpt2 else HeadwaterConfig
    return make(**(SHAPE | {"mechanisms": mechanisms or {}} | changes))


def is_refused(mechanisms: dict) -> bool:
    try:
        plan_layers(config(mechanisms))
    except HeadwaterError:
        return True
    return False


def label(mechanisms) -> str | None:
    if not isinstance(mechanisms, dict):
        return None
    return "+".join(name + "".join(f",{k}={v}" for k, v in options.items()) for name, options in mechanisms.items())


CASES = dict(BASES)
CASES |= {label(m): {"mechanisms": m} for m in SINGLE + PAIRS if not is_refused(m)}
CASES |= {
    f"{name}, {base}": {"mechanisms": {name: {}}} | BASES[base]
    for name in ("kv_shift", "svformer")
    for base in ("gpt2", "sliding")
}


def test_every_mechanism_is_counted():
    assert VARIANTS.keys() == MECHANISMS.built_in.keys()
    refused = [m for m in PAIRS if is_refused(m)]
    assert len(refused) < len(PAIRS) / 5


@pytest.fixture(params=CASES)
def case(request) -> dict:
    return CASES[request.param]


def part_of(name: str) -> str:
    if "mechanisms." in name:
        return "mechanisms"
    parts = {
        "self_attn.": "attention",
        "mlp.": "feed-forward",
        "norm": "norms",
        "embed_": "embedding",
        "lm_head": "output head",
    }
    return next(part for key, part in parts.items() if key in name)


@pytest.mark.sampled(31)
def test_parameters_and_flops_are_those_of_the_real_model(case):
    compare_with_the_real_model(config(**case, attn_implementation="eager"), 24)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanisms", [{name: VARIANTS[name][0]} for name in MECHANISMS.built_in], ids=label)
def test_each_mechanism_costs_what_the_real_model_does(mechanisms):
    compare_with_the_real_model(config(mechanisms, attn_implementation="eager"), 24)


class Projected(Mechanism):
    """Adds the rows of a table, projected once for all layers."""

    needs_input_ids = True

    class Options:
        rank: int = 6

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [
            plan.reading(Source("shared", cls.registered_name(), -1)).acting(cls, cls.transform_block_output)
            for plan in plans
        ]

    @classmethod
    def build_module(cls, options, config, plan):
        made = cls()
        made.slot = plan.slot(Source("shared", cls.registered_name(), -1))
        return made

    @classmethod
    def build_shared_module(cls, options, config):
        rank = options["rank"]
        return nn.Sequential(nn.Embedding(config.vocab_size, rank), nn.Linear(rank, config.hidden_size, bias=False))

    @classmethod
    def count_shared_cost(cls, options, config):
        rank, width = options["rank"], config.hidden_size
        return Cost(rank * (config.vocab_size + width), 2 * rank * width, saved=rank)

    def transform_block_output(self, x, context):
        return x + context.sources[self.slot]


def test_what_all_layers_share_is_counted_once(monkeypatch):
    monkeypatch.setattr(MECHANISMS, "added", {"projected": Projected})
    made = config({"projected": {}}, attn_implementation="eager")
    compare_with_the_real_model(made, 24)
    with_it, without = config({"projected": {"rank": 40}}), config()
    more = activation_bytes(with_it, 32)["kept"] - activation_bytes(without, 32)["kept"]
    assert more == kept_by_autograd(with_it, 32, 1) - kept_by_autograd(without, 32, 1) == 32 * 40 * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2-124m-sla", "svformer-82m", "tokenformer-124m", "kv-shifting-2.9b"])
@pytest.mark.slow
def test_the_same_at_the_size_of_the_papers(name):
    compare_with_the_real_model(preset(name, attn_implementation="eager"), 512)


def compare_with_the_real_model(made: HeadwaterConfig, context: int) -> None:
    """On the meta device, which counts without computing."""
    with torch.device("meta"):
        model = HeadwaterForCausalLM(made)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, context, dtype=torch.long), use_cache=False)
    real: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        real[part_of(name)] += parameter.numel()
    assert {part: count for part, count in parameters(model.config).items() if count} == real
    # The eager kernel computes the whole square of scores.
    assert sum(forward_flops(model.config, context, causal=False).values()) * context == counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_causally_what_is_attended_to_counts(name):
    made = config(**BASES[name])
    attended = sum(min(t, made.sliding_window or 20) for t in range(1, 21)) / 20
    full, causal = forward_flops(made, 20, causal=False), forward_flops(made, 20)
    assert causal["attention"] == pytest.approx(full["attention"] * attended / 20)
    assert causal["maps"] == full["maps"]
    assert training_flops(made, 20) == 3 * sum(causal.values())


@pytest.mark.sampled(13)
def test_cache_bytes_are_those_of_the_tensors(case):
    model = HeadwaterForCausalLM(config(**case)).eval()
    cache = model(torch.zeros(2, 11, dtype=torch.long), use_cache=True).past_key_values
    assert caches.cache_bytes(cache) == cache_bytes(model.config, tokens=11, batch_size=2)
    more = model(torch.zeros(2, 1, dtype=torch.long), past_key_values=cache).past_key_values
    growth = 0 if model.config.sliding_window else 2 * cache_bytes_per_token(model.config)
    assert caches.cache_bytes(more) - cache_bytes(model.config, 11, 2) == growth


@pytest.mark.parametrize(
    ("mechanisms", "share"),
    [({"skip_layer": {"layers": 9, "heads": 9}}, 13 / 16), ({"skip_layer": {}}, 13 / 16), ({"svformer": {}}, 13 / 24)],
    ids=label,
)
def test_sharing_stores_as_little_as_the_papers_say(mechanisms, share):
    shape = dict(hidden_size=48, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12)

    def stored(mechanisms: dict) -> int:
        model = HeadwaterForCausalLM(config(mechanisms, **shape)).eval()
        return caches.cache_bytes(model(torch.zeros(1, 8, dtype=torch.long), use_cache=True).past_key_values)

    assert stored(mechanisms) == share * stored({})
    shared = config(mechanisms, **shape)
    assert cache_bytes(shared, 8) == stored(mechanisms)
    # What is stored once is still read in every layer.
    assert cache_bytes_read(shared, 8) == cache_bytes_read(config(**shape), 8) == stored({})


MIXED = Precision.BF16_MIXED
WIDE = dict(hidden_size=64, num_key_value_heads=4, norm="layer_norm", max_position_embeddings=128)
KEPT = {
    "vanilla": {},
    "plain": dict(feed_forward="plain"),
    "qk_norm, parallel": dict(qk_norm=True, parallel_residual=True, num_key_value_heads=2),
    "gpt2": dict(gpt2=True),
    **{f"{act}, plain": dict(hidden_act=act, feed_forward="plain") for act in (*KEPT_BY_ACTIVATION, "gelu", "relu2")},
    **{label(m): dict(mechanisms=m) for m in SINGLE},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KEPT)
def test_activations_are_those_autograd_keeps(name):
    # In fp32 the fused kernel runs. What norms and softmaxes keep per row is not counted.
    made = config(**(WIDE | KEPT[name]))
    planned = activation_bytes(made, 128, 2)
    kept = planned["kept"] + planned["masks"]
    assert kept == pytest.approx(kept_by_autograd(made, 128, 2), rel=0.03)


def test_rms_norm_keeps_no_more():
    made = config(**WIDE | dict(norm="rms_norm"))
    assert activation_bytes(made, 128, 2)["kept"] == pytest.approx(kept_by_autograd(made, 128, 2), rel=0.02)


@pytest.mark.parametrize("precision", [MIXED, Precision.BF16_STREAM])
@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}}, {"pattention": {}}], ids=label)
def test_activations_of_weights_that_are_cast(mechanisms, precision):
    made = config(mechanisms, **WIDE)
    # The copies of the weights do not grow with the batch.
    measured = kept_by_autograd(made, 128, 3, precision) - kept_by_autograd(made, 128, 1, precision)
    assert activation_bytes(made, 128, 2, precision)["kept"] == pytest.approx(measured, rel=0.05)
    copies = kept_by_autograd(made, 128, 1, precision) - measured / 2
    assert state_bytes(made, precision)["copies"] == pytest.approx(copies, rel=0.05)


def test_a_stream_in_bf16_keeps_less_than_autocast():
    made = config(**WIDE)
    kept = [activation_bytes(made, 128, 2, precision)["kept"] for precision in (MIXED, Precision.BF16_STREAM)]
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, MIXED, Precision.BF16_STREAM])
def test_masks_of_packed_rows_are_those_autograd_keeps(precision):
    made = config(**WIDE)
    positions = {"position_ids": (torch.arange(128) % 50)[None].expand(2, -1)}
    with_mask, without = (kept_by_autograd(made, 128, 2, precision, **options) for options in (positions, {}))
    masks = activation_bytes(made, 128, 2, precision, masked=True)["masks"]
    # The mask itself, of booleans, is not stored for the backward pass, but its copies are; so are the rotary angles.
    assert with_mask - without == pytest.approx(masks - 2 * 128 * 128, rel=0.02, abs=2 * 128 * 64 * 8)
    assert masks - 2 * 128 * 128 == made.num_hidden_layers * 2 * 128 * 128 * precision.compute.itemsize
    # A layer at a time makes its copy again.
    assert activation_bytes(made, 128, 2, precision, True, masked=True)["masks"] < masks / 2
    assert activation_bytes(made, 128, 2, precision)["masks"] == 0


@pytest.mark.parametrize("chunk", [16, 100, 10**6])
def test_chunks_of_the_loss_keep_no_logits(chunk):
    made = config(**WIDE)
    whole, parts = (activation_bytes(made, 128, 2, loss_chunk_tokens=options) for options in (None, chunk))
    head = 4 * made.vocab_size * made.hidden_size
    kept = kept_by_autograd(made, 128, 2, loss_chunk_tokens=chunk, skip_logits=True)
    assert parts["kept"] + head == pytest.approx(kept, rel=0.03)
    assert parts["kept"] < whole["kept"]
    assert parts["loss"] == min(chunk, 256) * 8 * made.vocab_size + head
    # With a teacher: its logits, both distributions, and a gradient.
    taught = activation_bytes(made, 128, 2, loss_chunk_tokens=chunk, distilled=True)
    assert taught["kept"] == parts["kept"]
    assert taught["loss"] == min(chunk, 256) * 24 * made.vocab_size + head


def test_a_teacher_without_a_stated_chunk_has_the_default():
    made = config(**WIDE)
    assert activation_bytes(made, 128, 20, distilled=True) == activation_bytes(
        made, 128, 20, loss_chunk_tokens=DISTILLED_CHUNK, distilled=True
    )


def test_gradient_checkpointing_keeps_a_block_at_a_time():
    made = config(**WIDE)
    whole = activation_bytes(made, 128, 2)["kept"]
    head = 256 * (2 * 64 * 4 + 4 * made.vocab_size)
    inputs = made.num_hidden_layers * 64 * 4 * 256
    assert activation_bytes(made, 128, 2, gradient_checkpointing=True)["kept"] == inputs + (whole - head) / 4 + head
    assert inputs + head == pytest.approx(kept_by_autograd(made, 128, 2, checkpointing=True), rel=0.05)


def test_state_is_weights_gradients_and_two_averages():
    made = config()
    count = sum(parameters(made).values())
    assert sum(state_bytes(made, Precision.FP32).values()) == 16 * count
    assert sum(state_bytes(made, Precision.BF16).values()) == 8 * count
    assert sum(state_bytes(made, Precision.FP32, averages=True).values()) == 20 * count


def test_generating_reads_the_output_head_but_not_the_whole_embedding():
    for tied in (False, True):
        model = HeadwaterForCausalLM(config(gpt2=True, tie_word_embeddings=tied))
        embeddings = sum(p.numel() for n, p in model.named_parameters() if "embed_" in n or "lm_head" in n)
        total = sum(p.numel() for p in model.parameters())
        assert weights_read(model.config) == total - embeddings + model.lm_head.weight.numel()


@pytest.mark.parametrize("mechanisms", [{"svformer": {}}, {"skip_layer": {}}, {"kv_source": {}}], ids=label)
def test_materialised_layers_cache_all_heads(mechanisms):
    made, vanilla = config(mechanisms, materialise=True), config()
    cache = HeadwaterForCausalLM(made)(torch.ones(1, 10, dtype=torch.long), use_cache=True).past_key_values
    assert caches.cache_bytes(cache) == cache_bytes(made, 10) == cache_bytes(vanilla, 10)
    assert cache_bytes_per_token(made) == cache_bytes_per_token(vanilla)
    assert estimate_model(made).at[0].cache_bytes == estimate_model(vanilla).at[0].cache_bytes
