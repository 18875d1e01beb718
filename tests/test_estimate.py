"""Estimates: what follows from counts and hardware, by hand."""

import json
import time
from dataclasses import replace

import pytest

from headwater import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost import estimate_model
from headwater.cost.hardware import KNOWN, Hardware
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater_lab.training.estimate_table import estimate_table
from headwater_lab.util.machine_speed import find_hardware, measure_machine
from headwater_lab.util.terminal import si

DEVICE = Hardware("toy", flops=1e12, flops_fp32=2e11, memory=1e9, bandwidth=1e11, source="made up")
SHAPE = dict(vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=128)
CONFIG = HeadwaterConfig(**SHAPE)


def test_time_follows_from_flops():
    one = estimate_model(CONFIG, hardware=DEVICE, devices=4, tokens=1e9, mfu=0.5)
    limits = one.at[0].limits
    ceiling = 4 * 1e12 / cost.training_flops(CONFIG, 128)
    assert one.at[0].context == 128
    assert limits.training_ceiling == pytest.approx(ceiling)
    assert limits.days == pytest.approx(1e9 / (ceiling * 0.5) / 86400)
    assert limits.device_hours == pytest.approx(limits.days * 24 * 4)
    assert estimate_model(CONFIG, hardware=DEVICE, precision="32-true").at[0].limits.training_ceiling == pytest.approx(
        ceiling / 20
    )
    assert estimate_model(CONFIG, hardware=DEVICE).at[0].limits.days is None
    assert estimate_model(CONFIG).at[0].limits is None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED, Precision.BF16_STREAM])
def test_the_largest_batch_is_the_largest(precision, checkpointed):
    limits = estimate_model(CONFIG, hardware=DEVICE, precision=precision).at[0].limits
    batch = limits.largest_batch_checkpointed if checkpointed else limits.largest_batch

    def needed(rows: int) -> int:
        activations = cost.activation_bytes(CONFIG, 128, rows, precision, checkpointed)
        return sum(cost.state_bytes(CONFIG, precision).values()) + sum(activations.values())

    assert needed(batch) <= DEVICE.memory < needed(batch + 1)
    assert limits.largest_batch < limits.largest_batch_checkpointed


def test_a_state_that_does_not_fit_says_over_how_many_devices_it_would():
    small = replace(DEVICE, memory=2.5e6)
    one = estimate_model(CONFIG, hardware=small, precision="32-true")
    state = sum(one.state_bytes.values())
    assert one.at[0].limits.largest_batch == one.at[0].limits.largest_batch_checkpointed == 0
    assert (one.devices_needed - 1) * 2.5e6 < state <= one.devices_needed * 2.5e6
    assert estimate_model(CONFIG, hardware=replace(DEVICE, memory=1e5)).at[0].limits.most_sequences == 0
    assert estimate_model(CONFIG, hardware=DEVICE).devices_needed == 1


def test_generation_reads_weights_once_and_every_cache():
    one, eight = (estimate_model(CONFIG, hardware=DEVICE, batch=n, precision="bf16-true").at[0].limits for n in (1, 8))
    weights, read = 2 * cost.weights_read(CONFIG), cost.cache_bytes_read(CONFIG, 128, 2)
    assert one.generation_ceiling == pytest.approx(1e11 / (weights + read))
    assert eight.generation_ceiling == pytest.approx(8 * 1e11 / (weights + 8 * read))
    computes = replace(DEVICE, bandwidth=1e30)
    limited = estimate_model(CONFIG, hardware=computes, batch=8, precision="bf16-true").at[0].limits
    peak = computes.peak(Precision("bf16-true"))
    assert limited.generation_ceiling == pytest.approx(peak / cost.decoding_flops(CONFIG, 128))
    fits = one.most_sequences
    beside = 1e9 - 2 * sum(cost.parameters(CONFIG).values())
    assert cost.cache_bytes(CONFIG, 128, fits, 2) <= beside < cost.cache_bytes(CONFIG, 128, fits + 1, 2)


def test_keys_and_values_of_a_latent_are_made_again_for_every_token():
    latent = HeadwaterConfig(**SHAPE, num_key_value_heads=2, mechanisms={"low_rank_kv": {}})
    before, after = (cost.decoding_flops(latent, tokens) for tokens in (50, 90))
    attention, made = 4 * 64, 2 * (2 * 32) * 32  # 32 channels become two keys and two values, 64 numbers
    assert after - before == 40 * 4 * (attention + made)
    ordinary, stored = (
        HeadwaterConfig(**SHAPE, num_key_value_heads=2, **options)
        for options in ({}, dict(mechanisms={"low_rank_kv": {}}, materialise=True))
    )
    before, after = (cost.decoding_flops(stored, tokens) for tokens in (50, 90))
    assert after - before == 40 * 4 * attention
    assert cost.cache_bytes_read(stored, 50) == cost.cache_bytes_read(ordinary, 50)


def test_estimates_are_json_and_a_table():
    estimates = [
        estimate_model(CONFIG, name=name, context=[64, 128], tokens=2e9, hardware=DEVICE) for name in ("a", "b")
    ]
    content = json.loads(json.dumps([one.to_json() for one in estimates]))
    assert content[1]["name"] == "b"
    assert content[0]["total_parameters"] == sum(content[0]["parameters"].values())
    assert [at["context"] for at in content[0]["at"]] == [64, 128]
    assert len(estimate_table(estimates).columns) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"context": 0}, "context"),
        ({"batch": 0}, "batch"),
        ({"devices": 0}, "devices"),
        ({"mfu": 1.5}, "mfu"),
        ({"tokens": -1}, "tokens"),
    ],
)
def test_what_cannot_be_is_refused(changes, word):
    with pytest.raises(HeadwaterError, match=word):
        estimate_model(CONFIG, **changes)


def test_growing_pairs_leaves_the_slope_and_growing_width_does_not():
    def slope(config: HeadwaterConfig) -> float:
        return sum(
            sign * sum(cost.forward_flops(config, at, causal=False).values()) for sign, at in ((1, 1001), (-1, 1))
        )

    def tokenformer(pairs: int) -> HeadwaterConfig:
        options = {"attention_pairs": pairs, "ffn_pairs": 4 * pairs}
        return HeadwaterConfig(hidden_size=64, num_attention_heads=4, mechanisms={"pattention": options})

    small, large, wide = tokenformer(64), tokenformer(512), HeadwaterConfig(hidden_size=128, num_attention_heads=4)
    assert slope(small) == slope(large) == 4 * 12 * 64 * 1000
    assert slope(wide) == 2 * slope(small)


def test_hardware_is_known_by_name_in_any_case():
    assert find_hardware("h100") is KNOWN["H100"]
    assert all(d.flops > d.flops_fp32 and d.memory > 1e10 and d.bandwidth > 1e11 for d in KNOWN.values())
    with pytest.raises(HeadwaterError, match="did you mean 'RTX-4090'"):
        find_hardware("RTX4090")


def test_a_peak_may_be_unknown():
    assert KNOWN["H100"].peak(Precision.FP64) < KNOWN["H100"].peak(Precision.BF16)
    with pytest.raises(HeadwaterError, match=r"64-true is unknown"):
        estimate_model(CONFIG, hardware=KNOWN["L40S"], precision="64-true")
    assert estimate_model(CONFIG, precision="64-true").state_bytes["weights"] == 8 * sum(
        cost.parameters(CONFIG).values()
    )


@pytest.mark.slow
def test_this_machine_is_measured_within_seconds():
    started = time.perf_counter()
    this = measure_machine()
    assert time.perf_counter() - started < 10  # 3 s on a machine that does nothing else
    assert this.flops_fp32 > 1e8
    assert this.flops > 1e8
    assert this.bandwidth > 1e8
    assert this.memory > 1e8


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (999.96, "1 k"), (1536, "1.536 k"), (124475904, "124.5 M"), (2.5e15, "2.5 P")],
)
def test_si(value, text):
    assert si(value) == text
