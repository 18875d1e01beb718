"""Scaled rotary positions, and histories much longer than the window of any other test."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conftest import SIZES, assert_near, config, disturb, document_positions, shared, tokens
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.cost import counts as costs
from headwater.models.cache import ROOM, HeadwaterLayer, cache_bytes
from headwater.nn.position import RotaryEmbedding
from headwater.util.errors import HeadwaterError

# Rotary positions. Beyond BORDER tokens the kinds that change with length do so.

BASE, BORDER, LONGEST = 10_000.0, 16, 64
SHORT, LONG = [1.0, 1.1, 1.25, 1.5], [1.0, 2.0, 3.5, 5.0]
ORIGINAL = dict(original_max_position_embeddings=BORDER)
ROPES = {
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, **ORIGINAL),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    "dynamic": dict(factor=4.0),
    "longrope": dict(short_factor=SHORT, long_factor=LONG, **ORIGINAL),
    "longrope with a factor": dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=2.0, **ORIGINAL),
    "proportional": dict(partial_rotary_factor=0.5),
}
every_rope = pytest.mark.parametrize("kind", ROPES)


def rope(kind: str) -> dict:
    """What both models are given: `dynamic` changes beyond max_position_embeddings, the others where they say."""
    parameters = dict(rope_type=kind, rope_theta=BASE) | ROPES[kind]
    return dict(rope_parameters=parameters, max_position_embeddings=BORDER if kind == "dynamic" else LONGEST)


def pair(kind: str) -> tuple[HeadwaterForCausalLM, LlamaForCausalLM]:
    endless = dict(bos_token_id=None, eos_token_id=None)
    theirs = LlamaForCausalLM(LlamaConfig(**(SIZES | rope(kind) | endless), rms_norm_eps=1e-5)).eval()
    ours = HeadwaterForCausalLM(config(**rope(kind))).eval()
    ours.load_state_dict(disturb(theirs).state_dict())
    return ours, theirs


def renew(llama: LlamaForCausalLM) -> None:
    """Forget the frequencies of an earlier request."""
    llama.model.rotary_emb = LlamaRotaryEmbedding(llama.config)


def thetas(dim: int) -> list[float]:
    return [BASE ** (-2 * i / dim) for i in range(dim // 2)]


def linear(dim: int, factor: float) -> tuple[list[float], float]:
    return [theta / factor for theta in thetas(dim)], 1.0


def yarn(dim: int, factor: float, original: int, fast: float = 32, slow: float = 1) -> tuple[list[float], float]:
    """arXiv 2309.00071, with the ramp over channels as in its code and not over rotations as in equation 18."""

    def channel(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(BASE))

    low, high = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), dim - 1)
    kept = [1 - min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    blended = [theta * (keep + (1 - keep) / factor) for theta, keep in zip(thetas(dim), kept, strict=True)]
    return blended, 0.1 * math.log(factor) + 1


def llama3(dim: int, factor: float, original: int, low: float, high: float) -> tuple[list[float], float]:
    def scaled(theta: float) -> float:
        smooth = min(max((original * theta / (2 * math.pi) - low) / (high - low), 0), 1)
        return theta * (smooth + (1 - smooth) / factor)

    return [scaled(theta) for theta in thetas(dim)], 1.0


def dynamic(dim: int, factor: float, original: int, length: int) -> tuple[list[float], float]:
    stretched = BASE * (factor * max(length, original) / original - (factor - 1)) ** (dim / (dim - 2))
    return [stretched ** (-2 * i / dim) for i in range(dim // 2)], 1.0


def longrope(dim: int, factors: list[float], factor: float, original: int) -> tuple[list[float], float]:
    divided = [theta / by for theta, by in zip(thetas(dim), factors, strict=True)]
    return divided, math.sqrt(1 + math.log(factor) / math.log(original))


def rotary(dim: int, longest: int, **parameters) -> RotaryEmbedding:
    given = dict(rope_theta=BASE) | parameters
    return RotaryEmbedding(
        HeadwaterConfig(hidden_size=dim, num_attention_heads=1, max_position_embeddings=longest, rope_parameters=given)
    )


def assert_turns(made: RotaryEmbedding, expected: tuple[list[float], float], length: int = 16) -> None:
    """The angles of the last 16 of `length` positions; each frequency was rounded to fp32."""
    frequencies, scale = expected
    where = torch.arange(length)[-16:]
    cos, sin = made(torch.zeros(1, dtype=torch.float64), where[None])
    angles = where[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    tolerance = 1e-6 * max(1.0, length / 16)
    assert_near(cos[0], scale * torch.cat((angles.cos(), angles.cos()), -1), tolerance)
    assert_near(sin[0], scale * torch.cat((angles.sin(), angles.sin()), -1), tolerance)


FORMULAS = {
    "linear": (dict(rope_type="linear", factor=4.0), linear(64, 4.0)),
    "yarn": (dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512), yarn(64, 8.0, 512)),
    "llama3": (
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
        llama3(64, 8.0, 512, 1.0, 4.0),
    ),
}


@pytest.mark.parametrize("length", [16, 600, 4096])
@pytest.mark.parametrize(("given", "expected"), FORMULAS.values(), ids=FORMULAS)
def test_frequencies_of_the_published_formulas(given, expected, length):
    assert_turns(rotary(64, 4096, **given), expected, length)


def test_dynamic_frequencies_follow_each_request():
    made = rotary(64, 32, rope_type="dynamic", factor=4.0)
    for length in (20, 33, 100, 40, 20, 40):
        assert_turns(made, dynamic(64, 4.0, 32, length), length)


@pytest.mark.parametrize(("given", "factor"), [({}, 4.0), (dict(factor=2.0), 2.0)], ids=["of lengths", "given"])
def test_longrope_frequencies_follow_each_request(given, factor):
    made = rotary(
        8, 128, rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=32, **given
    )
    for length in (20, 32, 33, 100, 32, 100, 20):
        assert_turns(made, longrope(8, LONG if length > 32 else SHORT, factor, 32), length)


@every_rope
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_requests_of_any_order_turn_as_llamas(kind, dtype):
    """A new Llama each time, since a longer request leaves its `dynamic` frequencies behind there."""
    ours = RotaryEmbedding(config(**rope(kind))).to(dtype)
    x = torch.zeros(1, dtype=dtype)
    for length in (5, 16, 17, 40, 17, 16, 15, 16, 64, 3, 30):
        theirs = LlamaRotaryEmbedding(LlamaConfig(**(SIZES | rope(kind))))
        where = torch.arange(length)[None]
        for a, b in zip(ours(x, where), theirs(x, where), strict=True):
            assert_near(a, b, 1e-5)


@pytest.mark.sampled(2)
@every_rope
def test_logits_are_llamas_for_requests_of_any_order(kind):
    ours, theirs = pair(kind)
    ids = tokens(2, 40)
    for length in (5, 16, 17, 40, 16, 5, 40, 17):
        renew(theirs)
        assert_near(ours(ids[:, :length]).logits, theirs(ids[:, :length]).logits, 1e-5)


def generation(model: torch.nn.Module, ids: Tensor, new: int, **given) -> tuple[Tensor, Tensor]:
    options = dict(
        max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    made = model.generate(ids, **options, **given)
    return made.sequences, torch.stack(made.logits, 1)


@pytest.mark.slow
@pytest.mark.sampled(12)
@every_rope
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_generation_across_the_border_is_llamas(kind, dtype):
    """One request after the other on the same models: short, across the border, beyond it, short again.

    Llama's own cache is wrong across the border of the kinds that change with length, and so is a short row beside a
    long one.
    """
    changes = kind.startswith(("dynamic", "longrope"))
    ours, theirs = (model.to(dtype) for model in pair(kind))
    padded = (torch.arange(10) >= torch.tensor([[0], [4]])).long()
    requests = [(4, 3, None), (10, 30, None), (30, 5, None), (4, 6, None), (10, 20, padded), (5, 3, None)]
    for seed, (length, new, mask) in enumerate(requests):
        ids = tokens(2, length, seed=seed)
        mask = torch.ones_like(ids) if mask is None else mask
        sequences, logits = generation(ours, ids, new, attention_mask=mask)
        rows = [[row] for row in range(2)] if changes else [[0, 1]]
        for row in rows:
            real = mask[row].any(0)
            renew(theirs)
            expected, expected_logits = generation(
                theirs, ids[row][:, real], new, attention_mask=mask[row][:, real], use_cache=not changes
            )
            assert torch.equal(sequences[row][:, -new:], expected[:, -new:])
            assert_near(logits[row], expected_logits, 1e-5)


every_changing = pytest.mark.parametrize("kind", ["dynamic", "longrope"])
LOOKS_BACK = {"kv_shift": {}}


def across(kind: str, mechanisms: dict, **changes) -> HeadwaterForCausalLM:
    """A model whose frequencies change at BORDER tokens."""
    return shared(mechanisms, **rope(kind), attn_implementation="sdpa", **changes)


@every_changing
@pytest.mark.parametrize("mechanisms", [{}, LOOKS_BACK], ids=["plain", "kv_shift"])
@pytest.mark.parametrize("given", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_a_cache_changes_nothing_across_the_border(kind, mechanisms, given):
    """Rows cross it at different tokens, each as it does alone."""
    model, ids = across(kind, mechanisms), tokens(2, 13)
    mask = (torch.arange(13) >= torch.tensor([[0], [4]])).long()
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    made = model.generate(ids, attention_mask=mask, **options, **given)
    beams = {name: value for name, value in given.items() if name == "num_beams"}
    for row, begin in ((0, 0), (1, 4)):
        alone = model.generate(ids[row : row + 1, begin:], use_cache=False, **options, **beams)
        assert torch.equal(made[row : row + 1, begin:], alone)


@every_changing
@torch.no_grad()
def test_rows_and_documents_have_the_frequencies_of_their_own_length(kind):
    model, ids = across(kind, LOOKS_BACK), tokens(2, 30)
    mask = (torch.arange(30) >= torch.tensor([[0], [20]])).long()
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(padded[1, 20:], model(ids[1:, 20:], use_cache=False).logits[0], 1e-9)
    assert_near(padded[0], model(ids[:1], use_cache=False).logits[0], 1e-9)
    packed = model(ids, position_ids=document_positions([[22, 8], [10, 20]]), use_cache=False).logits
    for row, (begin, end) in ((0, (0, 22)), (0, (22, 30)), (1, (0, 10)), (1, (10, 30))):
        alone = model(ids[row : row + 1, begin:end], use_cache=False).logits
        assert_near(packed[row : row + 1, begin:end], alone, 1e-9)


@every_changing
@torch.no_grad()
def test_a_second_turn_across_the_border_fills_the_cache_anew(kind):
    model, ids = across(kind, LOOKS_BACK), tokens(1, 24)
    options = dict(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    cache = DynamicCache(config=model.config)
    model.generate(ids[:, :10], past_key_values=cache, **options)
    made = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(made, model.generate(ids, use_cache=False, **options))
    assert cache.get_seq_length() == 25


@every_changing
@torch.no_grad()
def test_a_cache_that_the_new_tokens_make_wrong_is_refused(kind):
    model, ids = across(kind, {}), tokens(2, 20)
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], past_key_values=cache)
    model(ids[:, 12:16], past_key_values=cache)  # as long as the border
    with pytest.raises(HeadwaterError, match="other frequencies"):
        model(ids[:, 16:17], past_key_values=cache)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with pytest.raises(HeadwaterError, match="prefill_chunk_size"):
        model.generate(ids, prefill_chunk_size=6, **options)
    with pytest.raises(HeadwaterError, match="without an assistant"):
        model.generate(ids[:1, :12], prompt_lookup_num_tokens=2, **options)
    short = model.generate(ids[:1, :8], prompt_lookup_num_tokens=2, **options)
    assert torch.equal(short, model.generate(ids[:1, :8], **options))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_a_long_request_leaves_nothing_behind(kind):
    ours, _ = pair(kind)
    fresh, ids = copy.deepcopy(ours), tokens(1, 10)
    ours.generate(tokens(1, 30), max_new_tokens=10, do_sample=False)
    assert torch.equal(generation(ours, ids, 30)[1], generation(fresh, ids, 30)[1])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_saved_model_has_the_frequencies_it_started_with(tmp_path, kind):
    ours, _ = pair(kind)
    ids = tokens(2, 40)
    expected = [ours(ids[:, :length]).logits for length in (10, 40)]
    ours.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    for length, logits in zip((10, 40), expected, strict=True):
        assert torch.equal(loaded(ids[:, :length]).logits, logits)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_of_inference_mode_serve_training(kind):
    models, ids = pair(kind), tokens(2, 30)
    gradients = []
    for model in models:
        with torch.inference_mode():
            model(tokens(1, 40))
        renew(models[1])
        model(ids, labels=ids).loss.backward()
        gradients.append(dict(model.named_parameters()))
    for name, parameter in gradients[0].items():
        assert_near(parameter.grad, gradients[1][name].grad, 1e-5)


# Long histories

SHALLOW = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)
HISTORIES = {
    "vanilla": ({}, {}),
    "kv_shift": ({"kv_shift": {}}, {}),
    "wide kv_shift": ({"kv_shift": {"window": 4, "queries": True}, "value_residual": {}}, {}),
    "skip_layer": ({"kv_shift": {}, "value_residual": {}, "skip_layer": {"layers": 1, "heads": 1}}, {}),
    "svformer": ({"kv_shift": {}, "svformer": {}}, {}),
    "shared and skipped": ({"svformer": {}, "skip_layer": {"layers": 1, "heads": 1}}, {}),
    "one key head": ({"kv_shift": {}, "svformer": {}}, dict(num_key_value_heads=1)),
    "keys and values shared": ({"svformer": {"share": "both"}}, {}),
    "window": ({"value_residual": {}}, dict(sliding_window=300)),
    "window of kv_shift": ({"kv_shift": {}, "value_residual": {}}, dict(sliding_window=300)),
    "window of svformer": ({"kv_shift": {}, "svformer": {}}, dict(sliding_window=300)),
}
every_history = pytest.mark.parametrize(("mechanisms", "changes"), HISTORIES.values(), ids=HISTORIES)


def long_model(mechanisms: dict, changes: dict, length: int) -> HeadwaterForCausalLM:
    return shared(mechanisms, **SHALLOW | changes | dict(max_position_embeddings=length))


def prefilled(model: HeadwaterForCausalLM, ids: Tensor, chunk: int) -> Cache:
    cache = DynamicCache(config=model.config)
    for part in ids.split(chunk, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def check_long_generation(model: HeadwaterForCausalLM, prompt: int, length: int, chunk: int) -> None:
    given = dict(max_new_tokens=length - prompt, do_sample=False, prefill_chunk_size=chunk)
    made = model.generate(tokens(1, prompt), return_dict_in_generate=True, **given)
    cache, ids = made.past_key_values, made.sequences
    assert cache.get_seq_length() == length - 1
    assert cache_bytes(cache) == costs.cache_bytes(model.config, length - 1, element_size=8)
    last = model(ids[:, -1:], past_key_values=cache).logits
    assert cache_bytes(cache) == costs.cache_bytes(model.config, length, element_size=8)
    assert_near(last, model(ids, use_cache=False, logits_to_keep=1).logits)


@every_history
@torch.no_grad()
@pytest.mark.slow
def test_long_generation(mechanisms, changes):
    check_long_generation(long_model(mechanisms, changes, 1024), 1000, 1024, 256)


@pytest.mark.slow
@every_history
@torch.no_grad()
def test_longer_generation(mechanisms, changes):
    check_long_generation(long_model(mechanisms, changes, 16_384), 16_000, 16_384, 1024)


# Memory


def allocated(layers: list) -> int:
    """Bytes of all memory that cache layers keep alive."""
    storages = {}
    for layer in layers:
        growing = [t for g in getattr(layer, "growing", ()) for t in (g.memory, g.latest)]
        for tensor in (layer.keys, layer.values, *getattr(layer, "tails", {}).values(), *growing):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def room(model: HeadwaterForCausalLM, batch: int = 1) -> int:
    return batch * ROOM * costs.cache_bytes_per_token(model.config, 8)


@pytest.mark.slow
@pytest.mark.sampled(9)
@every_history
@torch.no_grad()
def test_memory_stays_near_what_is_stored(mechanisms, changes):
    model = long_model(mechanisms, changes, 2048)
    cache = prefilled(model, tokens(1, 1000), 1000)
    for step in range(300):
        model(tokens(1, 1, seed=step), past_key_values=cache)
        assert 0 <= allocated(cache.layers) - cache_bytes(cache) <= room(model)


@pytest.mark.slow
@torch.no_grad()
def test_memory_is_taken_ahead_and_not_at_every_token():
    model = long_model({"kv_shift": {}}, {}, 2048)
    cache = prefilled(model, tokens(1, 1000), 1000)
    places = []
    for step in range(300):
        model(tokens(1, 1, seed=step), past_key_values=cache)
        places.append(cache.layers[0].keys.data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves <= 300 // ROOM + 1


MOVES = {
    "reordered": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "selected": lambda layer: layer.batch_select_indices(torch.tensor([1, 0])),
    "offloaded": lambda layer: layer.offload(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_memory_that_a_history_leaves_is_freed(move, monkeypatch):
    """As between two steps of beam search, or of a cache that is offloaded."""
    layer, x = HeadwaterLayer(), torch.zeros(2, 2, 1000, 8)
    layer.update(x, x.clone())
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", lambda self, *args, **kwargs: self.clone())  # another device
        move(layer)
    stored = 2 * x.untyped_storage().nbytes()
    assert stored <= allocated([layer]) <= stored + 2 * ROOM * x[:, :, :1].numel() * 4
