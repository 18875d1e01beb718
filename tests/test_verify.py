"""`headwater verify` and `headwater bench decode`, and that the first of them can fail."""

import functools
import itertools
from functools import partial
from importlib.metadata import version

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import Wanted, build
from headwater import verification as verify
from headwater.mechanisms import kv_shift
from headwater.models import cache, inputs
from headwater.plugins.mechanisms import MECHANISMS
from headwater.plugins.registry import Registry
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater.verification import Verified, own, verdicts
from headwater.verification.own import OWN_WAYS, build_tiny
from headwater.verification.subject import Subject
from headwater.verification.ways import WAYS, Parting, Probe, texts_for
from remade import remade

ALONE, PAIRS, TRIPLES = (
    [{name: {} for name in names} for names in itertools.combinations(MECHANISMS.names, size)] for size in (1, 2, 3)
)
SMALL = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CHECKS = [one.name for one in [*WAYS, *OWN_WAYS]]


# Of each kind one, for models of which not every way need be run.
SOME = {"1 by 1", "mixed", "packing", "padding", "padded, 1 by 1", "static, padded", "reorder", "greedy", "beams"}
SOME |= {"generate, padded", "cache bytes"}


def test_unknown_ways_are_refused():
    with pytest.raises(HeadwaterError, match="There is no way of decoding 'one by one'"):
        verify.verify(build(), ways=["one by one"])


def test_a_model_without_logits_or_with_an_encoder_is_refused():
    from transformers import BartConfig, BartForConditionalGeneration

    model = build()
    model.lm_head.weight.data.zero_()
    with pytest.raises(HeadwaterError, match="All logits of this model are 0"):
        verify.verify(model, ways="1 by 1")
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1)
    with pytest.raises(HeadwaterError, match="is an encoder-decoder"):
        verify.verify(BartForConditionalGeneration(BartConfig(vocab_size=50, **sizes)).eval())


def test_a_name_in_place_of_a_list_runs_that_way_alone():
    checks = {verdict.check for verdict in verify.verify(build(), ways="static, chunks")}
    assert "static, chunks" in checks
    assert "static" not in checks


def failed(model) -> set[str]:
    return {one.check for one in verify.verify(model, ways=SOME) if one.ok is False}


@pytest.mark.slow
@pytest.mark.sampled(15)
@pytest.mark.parametrize("mechanisms", [{}, *ALONE], ids=lambda one: "+".join(one) or "vanilla")
def test_every_mechanism_verifies(mechanisms):
    found = verify.verify(build_tiny(mechanisms, layers=3))
    assert [one.check for one in found] == [*CHECKS, "bf16"]
    assert not [one for one in found if one.ok is False]
    keeps = {"kv_shift", "smear", "short_conv", "ngram_memory"} & set(mechanisms)  # raw tokens: not to be materialised
    assert {one.check for one in found if one.ok is None} <= ({"packing+", "materialised"} if keeps else {"packing+"})
    assert all(one.error < 1e-12 for one in found if one.error is not None)


@pytest.mark.slow
@pytest.mark.parametrize("mechanisms", [*PAIRS, *TRIPLES], ids="+".join)
def test_pairs_and_triples_verify(mechanisms):
    model = build_tiny(mechanisms)
    if model is not None:
        assert not [one for one in verify.verify(model) if one.ok is False]


# Mistakes that published implementations make; each must be seen, and nothing else.

# What transformers' own cache does wrong for a layer with both keys and a convolution: `batch_select_indices` of such
# a layer leaves the convolution's rows where they were. Version 5.17 keeps its state in `reset` too.
OF_TRANSFORMERS = {"permute", "reset"} if version("transformers").startswith("5.17.") else {"permute"}
CHUNKS = {"chunks of 3", "chunks of 8", "mixed", "only cache", "padded, chunks", "static, chunks", "generate, chunked"}
CHUNKS |= {"static, chunked", "crop", "reorder", "prefix reuse", "two streams", "reset", "second turn", "bf16"}
PADDED = {"padding", "padded, 1 by 1", "padded, chunks", "static, padded", "generate, padded"}
UNCACHED = {"prefixes", "rows alone", "padding", "packing", "packing+"}


@pytest.fixture(scope="module")
def found_in():
    return functools.cache(lambda mistake: {one.check: one for one in verify.verify(remade(mistake))})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mistake", "seen", "layer", "unseen"),
    [
        ("", set(), None, {name.name for name in WAYS} - OF_TRANSFORMERS),
        ("state dropped between chunks", {"chunks of 3", "chunks of 8", "mixed"}, 0, {"1 by 1", "prefill", *UNCACHED}),
        ("padding leaks", PADDED, 0, {one.name for one in WAYS} - PADDED - OF_TRANSFORMERS),
        ("mix lost with a cache", {"1 by 1", "prefill", "greedy", "static", "reorder", "prefix reuse"}, 1, UNCACHED),
        ("copies forget the state", {"prefix reuse"}, 0, {one.name for one in WAYS} - {"prefix reuse", "permute"}),
        pytest.param(
            "state on the module",
            {"prefix reuse", "two streams", "reorder", "crop"},
            0,
            {"1 by 1", "mixed", *UNCACHED},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_mistake_is_seen_and_told_from_others(found_in, mistake, seen, layer, unseen):
    found = found_in(mistake)
    lies = {name for name, one in found.items() if one.ok is False}
    assert seen <= lies
    assert not unseen & lies
    for name in seen:
        if name not in ("greedy", "generate, padded"):  # `generate` hides its calls
            assert found[name].parting.layer == f"layers.{layer}"
            assert 0 <= found[name].parting.position < 20
    assert {"greedy", "beams", "static"} <= {name for name, one in found.items() if one.ok is not None}


@pytest.mark.slow
def test_a_chunk_parts_at_its_first_token(found_in):
    assert found_in("state dropped between chunks")["chunks of 8"].parting.position == 8
    assert found_in("padding leaks")["padding"].parting == Parting(1, 0, "layers.0")


def test_a_call_parts_in_its_middle():
    subject = Subject(build_tiny({}, layers=2))
    texts = texts_for(subject)
    changed = texts.ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % subject.config.vocab_size
    probe = Probe(subject, texts, 1e-9)
    probe.compare_call(subject(changed), [(row, 0, row, 0, changed.shape[1]) for row in range(len(changed))])
    assert probe.parting == Parting(0, 6, "model.embed_tokens")


def test_rows_of_a_cache_selected_by_transformers(found_in):
    """If this fails, transformers selects the convolution's rows too, and docs/verify.md can say so."""
    assert {name for name, one in found_in("").items() if one.ok is False} == OF_TRANSFORMERS


@pytest.mark.slow
def test_a_tail_that_is_not_reordered_is_seen(monkeypatch):
    monkeypatch.setattr(
        cache._TailMixin, "reorder_cache", lambda self, order: super(cache._TailMixin, self).reorder_cache(order)
    )
    assert failed(build_tiny({"kv_shift": {}}, layers=2)) == {"reorder", "beams"}


@pytest.mark.slow
def test_a_shifted_token_kept_instead_of_the_raw_one_is_seen(monkeypatch):
    original = kv_shift.shift

    def shift(x, weight, reach=None, before=None):
        y = original(x, weight, reach, before)
        x.copy_(y)  # the tail holds x
        return y

    monkeypatch.setattr(kv_shift, "shift", shift)
    assert {"1 by 1", "greedy", "padded, 1 by 1"} <= failed(build_tiny({"kv_shift": {}}, layers=2))


@pytest.mark.slow
def test_a_forgotten_padding_mask_is_seen(monkeypatch):
    original = inputs.make_mask

    def forgetful(kind, row, mask, positions):  # positions tell of the padding too
        return original(kind, row, None, None)

    monkeypatch.setattr(inputs, "make_mask", forgetful)
    assert failed(build_tiny({}, layers=2)) == PADDED & SOME | {"packing"}


@pytest.mark.slow
def test_a_shift_into_the_padding_is_seen(monkeypatch):
    monkeypatch.setattr(inputs, "find_reach", lambda *args: None)
    assert failed(build_tiny({"kv_shift": {}}, layers=2)) == PADDED & SOME | {"packing"}


@pytest.mark.slow
def test_a_layer_that_stores_what_it_shares_is_seen(monkeypatch):
    monkeypatch.setattr(own, "cache_bytes", lambda held: cache.cache_bytes(held) + 1)
    assert failed(build_tiny({"svformer": {}}, layers=2)) == {"cache bytes"}


# Other people's models


def test_a_model_whose_past_depends_on_its_future_has_no_cache_to_verify(monkeypatch):
    model = remade()
    monkeypatch.setattr(model.embed, "forward", lambda ids: F.embedding(ids, model.embed.weight) + 0.1 * ids[0, -1])
    found = {one.check: one for one in verify.verify(model)}
    assert found["prefixes"].ok is False
    assert all(one.ok is None and "later tokens" in one.why for name, one in found.items() if name != "prefixes")


@pytest.mark.slow
def test_a_model_is_not_changed():
    model = remade()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify.verify(model, ways=SOME)
    assert all(value.dtype == torch.float32 and value.equal(before[name]) for name, value in model.state_dict().items())
    assert not any(one._forward_hooks for one in model.modules())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"1 by 1", "mixed"}, {"mixed"}, {"1 by 1": None, "mixed": False, "greedy": True}),
        ({"prefixes"}, {"mixed"}, {"prefixes": None, "mixed": False, "greedy": True}),
        (set(), None, {"mixed": True, "greedy": True}),
    ],
    ids=["one of two", "another", "none"],
)
def test_what_differs_once_is_no_verdict(monkeypatch, first, second, expected):
    """A tie that one text breaks otherwise is a dash; a mistake is there with the next text too."""
    runs = iter([(3, first), (4, second)])

    def verified(model, seed, ways, exact_to):
        run, differing = next(runs)
        assert seed == run
        return [Verified(way.name, way.name not in differing) for way in ways]

    monkeypatch.setattr(verdicts, "verify_model", verified)
    verdict = {one.check: one.ok for one in verdicts.verify_twice(build_tiny({}, layers=1), 3, WAYS)}
    assert {name: verdict[name] for name in expected} == expected


# The commands


@pytest.mark.slow
def test_verify_command(run, monkeypatch):
    wanted = MECHANISMS.names if Wanted.slow else ["skip_layer"]
    monkeypatch.setattr(Registry, "names", wanted)
    if not Wanted.slow:
        monkeypatch.setattr(verify, "tiny", partial(build_tiny, layers=2))
    code, out, _ = run("verify")
    assert code == 0
    assert "✗ skip_layer" not in out
    assert all(name in out for name in wanted)


@pytest.mark.slow
def test_verify_command_on_a_checkpoint(run, tmp_path):
    model = build({"kv_shift": {}, "skip_layer": {}}, gpt2=True, max_position_embeddings=48).float()
    model.generation_config.eos_token_id = list(range(0, 97, 2))  # which most rows meet at once
    model.save_pretrained(tmp_path / "model")
    code, out, _ = run("verify", tmp_path / "model")
    assert code == 0
    assert f" {tmp_path / 'model'} " in out
    build(gpt2=True, max_position_embeddings=16).save_pretrained(tmp_path / "short")
    assert "this model has only 16 learned ones" in run("verify", tmp_path / "short")[2]


def test_a_mistake_beyond_a_long_window_is_seen(monkeypatch):
    from transformers import DynamicCache, MistralConfig, MistralForCausalLM
    from transformers.cache_utils import DynamicSlidingWindowLayer

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL.to_diff_dict() | {"sliding_window": 64})).eval()
    shortened = verify.shorten_windows(model)
    assert verify.shorten_windows(shortened) is None
    assert verify.shorten_windows(LlamaForCausalLM(SMALL)) is None
    assert model.config.sliding_window == 64
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), shortened.parameters(), strict=True))
    assert [way.ok for way in verify.verify(shortened, ways="1 by 1")] == [True, True]

    right = DynamicSlidingWindowLayer.update

    def forget(layer, *args, **kwargs):
        keys, values = right(layer, *args, **kwargs)
        if layer.cumulative_length > layer.sliding_window:
            layer.keys = torch.zeros_like(layer.keys)
        return keys, values

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", forget)
    assert isinstance(DynamicCache(config=model.config).layers[0], DynamicSlidingWindowLayer)
    assert verify.verify(model, ways="1 by 1")[0].ok is True
    assert verify.verify(shortened, ways="1 by 1")[0].ok is False


@pytest.mark.slow
def test_verify_command_fails(run, monkeypatch, tmp_path):
    monkeypatch.setattr(inputs, "find_reach", lambda *args: None)
    build_tiny({"kv_shift": {}}, layers=1).save_pretrained(tmp_path)
    code, out, err = run("verify", tmp_path)
    assert code == 1
    assert "✗" in out
    assert "row 1, position 0, first in model.layers.0" in out
    assert err.splitlines()[-1].startswith("headwater: Decoding with a cache differs")


@pytest.mark.slow
def test_verify_command_on_another_model(run, tmp_path):
    model = LlamaForCausalLM(SMALL)
    model.save_pretrained(tmp_path / "llama")
    build_tiny({"kv_shift": {}}, layers=1).save_pretrained(tmp_path / "mine")
    code, out, _ = run("verify", tmp_path / "llama", tmp_path / "mine")
    assert code == 0
    assert all(f" {tmp_path / name} " in out for name in ("llama", "mine"))
    assert "✗" not in out


def test_verify_command_refuses(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    for arguments, message in (
        ([tmp_path], "--trust-remote-code"),
        ([tmp_path / "none"], "no local file"),
    ):
        code, _, err = run("verify", *arguments)
        assert (code, message in err) == (2, True), err


@pytest.mark.slow
def test_bench_decode_command(run):
    shape = (
        "--layers",
        4,
        "--width",
        128,
        "--vocab-size",
        97,
        "--batch-size",
        2,
        "--context",
        9,
        "--tokens",
        6,
        "--turns",
        2,
    )
    code, out, _ = run("bench", "decode", "kv_shift", "skip_layer", "svformer", *shape)
    assert code == 0
    assert "the same tokens as transformers' Llama" in out
    held = 4 * 2 * 128 * 4 * 2 * (9 + 5)  # layers, k and v, width, bytes, rows, tokens
    assert f"{held:,} B" in out
    assert f"× {1 + 1 / 14:.5f}" in out  # the shift's one token more
    assert "× 0.62500" in out  # SVFormer: (L + 1) / 2L
    assert run("bench", "decode", "--precision", "fp8")[0] == 2


def test_the_baseline_of_bench_decode_is_transformers_own():
    from headwater_lab.bench.decoding_speed import bench_decode
    from headwater_lab.bench.shapes import DecodeShape

    found = bench_decode({}, DecodeShape(2, 64, 97, context=5, tokens=8, turns=2), Precision.FP32, "cpu")
    assert [row["model"] for row in found.rows] == ["transformers' Llama", "vanilla", "vanilla, again"]
    assert "vanilla: the same tokens as transformers' Llama" in found.notes
    assert ["ratio" in row for row in found.rows] == [False, True, True]
