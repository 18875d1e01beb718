"""`headwater verify` and `headwater bench decode`, and that the first of them can fail."""

from functools import partial

import pytest
import torch

from conftest import Wanted, build
from headwater import verify
from headwater.mechanisms import kv_shift
from headwater.models import cache, causal_lm
from headwater.verify import CHECKS, combinations, serve_requests, tiny


def failed(mechanisms: dict) -> set[str]:
    return {one.check for one in verify.verify(tiny(mechanisms, layers=2)) if one.ok is False}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mechanisms", [{}, *combinations(1)], ids=lambda one: "+".join(one) or "vanilla")
def test_every_mechanism_verifies(mechanisms):
    found = verify.verify(tiny(mechanisms))
    assert [one.check for one in found] == list(CHECKS)
    assert not [one for one in found if one.ok is False]
    assert [one.check for one in found if one.ok is None] == (["materialised"] if "kv_shift" in mechanisms else [])


@pytest.mark.slow
@pytest.mark.parametrize("mechanisms", [*combinations(2), *combinations(3)], ids="+".join)
def test_pairs_and_triples_verify(mechanisms):
    model = tiny(mechanisms)
    if model is not None:
        assert not [one for one in verify.verify(model) if one.ok is False]


# Mistakes that published implementations make; each must be seen.


def test_a_tail_that_is_not_reordered_is_seen(monkeypatch):
    monkeypatch.setattr(
        cache._TailMixin, "reorder_cache", lambda self, order: super(cache._TailMixin, self).reorder_cache(order)
    )
    assert failed({"kv_shift": {}}) == {"beams", "beam sampling"}


def test_a_shifted_token_kept_instead_of_the_raw_one_is_seen(monkeypatch):
    original = kv_shift.shift

    def shift(x, weight, reach=None, before=None):
        y = original(x, weight, reach, before)
        x.copy_(y)  # the tail holds x
        return y

    monkeypatch.setattr(kv_shift, "shift", shift)
    assert {"1 by 1", "greedy", "left padding"} <= failed({"kv_shift": {}})


def test_a_forgotten_padding_mask_is_seen(monkeypatch):
    original = causal_lm.attention_mask_for

    def forgetful(config, x, mask, past, positions):  # positions tell of the padding too
        return original(config, x, None, past, None)

    monkeypatch.setattr(causal_lm, "attention_mask_for", forgetful)
    assert failed({}) == {"left padding"}


def test_a_shift_into_the_padding_is_seen(monkeypatch):
    monkeypatch.setattr(causal_lm, "reach", lambda *args: None)
    assert failed({"kv_shift": {}}) == {"left padding"}


def test_a_layer_that_stores_what_it_shares_is_seen(monkeypatch):
    monkeypatch.setattr(verify, "cache_bytes", lambda held: cache.cache_bytes(held) + 1)
    assert failed({"svformer": {}}) == {"cache bytes"}


# Requests


@pytest.mark.parametrize("sampled", [False, True])
def test_random_requests(sampled):
    models = [tiny(one) for one in combinations(1)]
    *_, last = serve_requests(models, 60, sampled=sampled, longest=40)
    assert (last.requests, last.wrong) == (60, 0)
    assert 0 < last.error < 1e-6


def test_wrong_requests_are_counted(monkeypatch):
    monkeypatch.setattr(causal_lm, "reach", lambda *args: None)
    *_, last = serve_requests([tiny({"kv_shift": {}})], 20, sampled=True, longest=20)
    assert last.wrong > 0


@pytest.mark.slow
def test_ten_thousand_random_requests():
    models = [tiny(one) for one in ({}, *combinations(1))]
    for count, sampled in ((10_000, False), (1_000, True)):
        *_, last = serve_requests(models, count, sampled=sampled)
        assert (last.requests, last.wrong) == (count, 0)
        assert last.memory < 1.2 * last.early_memory


# The commands


def test_verify_command(run, monkeypatch):
    wanted = combinations(1) if Wanted.slow else [{"skip_layer": {}}]
    monkeypatch.setattr(verify, "combinations", lambda size: wanted)
    if not Wanted.slow:
        monkeypatch.setattr(verify, "tiny", partial(tiny, layers=2))
    code, out, _ = run("verify", "--requests", 10, "--sampled", 5, "--longest", 30)
    assert code == 0
    assert "✗" not in out
    assert all(name in out for one in wanted for name in one)
    assert "10 greedy requests in random batches: 0 differ from running alone" in " ".join(out.split())


def test_verify_command_on_a_checkpoint(run, tmp_path):
    model = build({"kv_shift": {}, "skip_layer": {}}, gpt2=True, max_position_embeddings=48).float()
    model.generation_config.eos_token_id = list(range(0, 97, 2))  # which most rows meet at once
    model.save_pretrained(tmp_path / "model")
    code, out, _ = run("verify", tmp_path / "model", "--requests", 20, "--sampled", 10)
    assert code == 0
    assert "kv_shift + skip_layer" in out
    assert run("verify", tmp_path / "model", "--size", 2)[0] == 2
    build(gpt2=True, max_position_embeddings=16).save_pretrained(tmp_path / "short")
    assert "this model has only 16 learned ones" in run("verify", tmp_path / "short")[2]


def test_verify_command_fails(run, monkeypatch, tmp_path):
    monkeypatch.setattr(causal_lm, "reach", lambda *args: None)
    tiny({"kv_shift": {}}, layers=1).save_pretrained(tmp_path)
    code, out, err = run("verify", tmp_path)
    assert code == 2
    assert "✗" in out
    assert err.splitlines()[-1].startswith("headwater: Decoding with a cache differs")


@pytest.mark.slow
def test_bench_decode_command(run):
    shape = (
        "--layers",
        4,
        "--width",
        128,
        "--vocabulary",
        97,
        "--batch",
        2,
        "--context",
        9,
        "--tokens",
        6,
        "--turns",
        2,
    )
    code, out, err = run("bench", "decode", "kv_shift", "skip_layer", "svformer", "--precision", "32-true", *shape)
    assert code == 0
    assert "the same tokens as transformers' Llama" in err
    held = 4 * 2 * 128 * 4 * 2 * (9 + 5)  # layers, k and v, width, bytes, rows, tokens
    assert f"{held:,} B" in out
    assert f"× {1 + 1 / 14:.5f}" in out  # the shift's one token more
    assert "× 0.62500" in out  # SVFormer: (L + 1) / 2L
    assert run("bench", "decode", "--precision", "fp8")[0] == 2


def test_the_baseline_of_bench_decode_is_transformers_own():
    from headwater.bench import bench_decode

    found = bench_decode({}, layers=2, width=64, vocabulary=97, context=5, tokens=8, turns=2, dtype=torch.float64)
    assert [one.arm for one in found] == ["transformers' Llama", "vanilla"]
    assert found[1].same_tokens
    assert len(found[1].paired.ratios) == 2
