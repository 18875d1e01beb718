import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer

from conftest import assert_near, build, config, decode, document_positions, shared, tokens
from headwater import HeadwaterConfig, HeadwaterError
from headwater.mechanisms.contract import KV
from headwater.mechanisms.shift import read_tail, shift
from headwater.models.cache import (
    HeadwaterLayer,
    HeadwaterQuantizedCache,
    HeadwaterQuantizedLayer,
    HeadwaterSlidingLayer,
    HeadwaterStaticLayer,
    HeadwaterStaticSlidingLayer,
    cache_bytes,
)

B, K, D, WINDOW, LONGEST = 3, 2, 4, 4, 16

GROWING: dict[str, Callable] = {"growing": HeadwaterLayer, "sliding": HeadwaterSlidingLayer}
LAYERS: dict[str, Callable] = GROWING | {
    "static": lambda: HeadwaterStaticLayer(max_cache_len=LONGEST),
    "static_sliding": lambda: HeadwaterStaticSlidingLayer(max_cache_len=LONGEST),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
every_growing_layer = pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)


def random_kv(length: int, batch: int = B, heads: int = K, value_heads: int | None = None) -> KV:
    k, v = torch.randn(2, batch, max(heads, K), length, D, dtype=torch.float64)
    return KV(k[:, :heads], v[:, : heads if value_heads is None else value_heads])


def extend(layer, name: str, x: Tensor, length: int) -> Tensor:
    return torch.cat((layer.update_tail(name, x, length), x), dim=2)


def feed(layer, kv: KV, tail: int = 1) -> tuple[KV, KV]:
    """What attention does with a layer: (raw tokens with the tail in front, history). Stores -kv as the history."""
    extended = KV(*(extend(layer, part, x, tail) for part, x in zip("kv", kv, strict=True))) if tail else kv
    return extended, KV(*layer.update(-kv.k, -kv.v, sliding_window=WINDOW))


def cut(kv: KV, *slots: int | None) -> KV:
    return KV(*(x[:, :, slice(*slots)] for x in kv))


def tensors(layer) -> dict[str, Tensor]:
    return {"keys": layer.keys, "values": layer.values, **layer.tails}


def tail_of(layer, name: str) -> Tensor:
    """The raw tokens stored under a name; a static layer has a buffer for each."""
    return torch.cat([tail for key, tail in layer.tails.items() if key.split(".")[0] == name], dim=2)


def contents(layer) -> dict[str, Tensor]:
    return copy.deepcopy(tensors(layer))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# The tail


@every_layer
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("chunks", [[6], [1, 1, 1, 1, 1, 1], [2, 3, 1]])
def test_tail_stands_in_front_of_each_call(make, length, chunks):
    layer, kv, start = make(), random_kv(6), 0
    padded = KV(*(torch.nn.functional.pad(x, (0, 0, length, 0)) for x in kv))
    for chunk in chunks:
        extended, _ = feed(layer, cut(kv, start, start + chunk), length)
        expected = cut(padded, start, start + length + chunk)
        assert torch.equal(extended.k, expected.k)
        assert torch.equal(extended.v, expected.v)
        start += chunk
    assert torch.equal(tail_of(layer, "k"), kv.k[:, :, -length:])
    assert torch.equal(tail_of(layer, "v"), kv.v[:, :, -length:])


@every_layer
def test_shifted_one_token_at_a_time(make):
    """A static layer gives its tokens one by one, the oldest first."""
    layer, x, taps = make(), random_kv(6).k, torch.randn(4, K, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    expected = sum(taps[back, :, None, None] * padded[:, :, 3 - back : 9 - back] for back in range(4))
    tokens = x.split(1, dim=2)
    shifted = [shift(token, taps, previous=read_tail(layer, "k", token, 3)) for token in tokens]
    assert torch.allclose(torch.cat(shifted, dim=2), expected, rtol=0, atol=1e-12)


@every_layer
def test_tail_is_raw_whatever_is_cached(make):
    layer, kv = make(), random_kv(3)
    feed(layer, kv)
    assert torch.equal(tail_of(layer, "k"), kv.k[:, :, -1:])
    assert torch.equal(layer.keys[:, :, 2], -kv.k[:, :, 2])


@every_layer
def test_tail_does_not_keep_the_prefill_alive(make):
    layer = make()
    feed(layer, random_kv(12))
    for tail in layer.tails.values():
        assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


@every_layer
def test_tails_have_their_own_lengths(make):
    layer, kv = make(), random_kv(7)
    for begin, end in ((0, 1), (1, 4), (4, 7)):
        long, short = extend(layer, "k", kv.k[:, :, begin:end], 3), extend(layer, "v", kv.v[:, :, begin:end], 1)
    assert torch.equal(long, kv.k[:, :, 1:])
    assert torch.equal(short, kv.v[:, :, 3:])


@every_layer
@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (K, 0), (0, K), (0, 0), (K, 1)])
def test_fewer_heads_and_other_heads_of_values(make, heads, value_heads):
    layer, kv = make(), random_kv(5, heads=heads, value_heads=value_heads)
    lengths = []
    for part in (cut(kv, 0, 3), cut(kv, 3, 4), cut(kv, 4, 5)):
        extended, history = feed(layer, part)
        lengths.append(int(layer.get_seq_length()))
    assert lengths == [3, 4, 5]
    assert history.k.shape[:2] == (B, heads)
    assert history.v.shape[:2] == (B, value_heads)
    assert torch.equal(extended.v, kv.v[:, :, 3:])


def test_recording_keeps_the_whole_tail():
    layer, kv = HeadwaterLayer(), random_kv(6)
    feed(layer, cut(kv, 0, 2))
    layer.activate_past_recording()
    for start in (2, 4):
        extended, _ = feed(layer, cut(kv, start, start + 2))
        assert torch.equal(extended.k, kv.k[:, :, start - 1 : start + 2])
    assert torch.equal(tail_of(layer, "k"), kv.k[:, :, 1:])


# The history


def test_growing_layer_keeps_everything():
    layer, kv = HeadwaterLayer(), random_kv(9)
    for slots in ((0, 5), (5, 6), (6, 9)):
        _, history = feed(layer, cut(kv, *slots))
    assert torch.equal(history.k, -kv.k)
    assert torch.equal(history.v, -kv.v)


def test_sliding_layer_keeps_the_window():
    layer, kv = HeadwaterSlidingLayer(), random_kv(9)
    feed(layer, cut(kv, 0, 7))
    _, history = feed(layer, cut(kv, 7, 9))
    assert torch.equal(history.k, -kv.k[:, :, 4:])
    assert torch.equal(layer.keys, -kv.k[:, :, -(WINDOW - 1) :])
    assert torch.equal(layer.values, -kv.v[:, :, -(WINDOW - 1) :])
    assert layer.get_seq_length() == 9


def test_static_layer_keeps_its_buffers():
    layer, kv = HeadwaterStaticLayer(max_cache_len=LONGEST), random_kv(9)
    feed(layer, cut(kv, 0, 5))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(layer).items()}
    feed(layer, cut(kv, 5, 9))
    assert {name: tensor.data_ptr() for name, tensor in tensors(layer).items()} == addresses
    assert torch.equal(layer.keys[:, :, :9], -kv.k)
    assert not layer.keys[:, :, 9:].any()


# The batch dimension


@every_layer
def test_reorder_cache(make):
    layer, kv, order = make(), random_kv(6), torch.tensor([2, 0, 0])
    feed(layer, kv)
    before = contents(layer)
    layer.reorder_cache(order)
    assert_same(contents(layer), {name: value[order] for name, value in before.items()})


@every_growing_layer
def test_batch_repeat_interleave(make):
    layer = make()
    feed(layer, random_kv(6))
    before = contents(layer)
    layer.batch_repeat_interleave(2)
    expected = {name: value[torch.tensor([0, 0, 1, 1, 2, 2])] for name, value in before.items()}
    assert_same(contents(layer), expected)


@every_growing_layer
@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])], ids=["indices", "mask"])
def test_batch_select_indices(make, indices):
    layer = make()
    feed(layer, random_kv(6))
    before = contents(layer)
    layer.batch_select_indices(indices)
    assert_same(contents(layer), {name: value[indices] for name, value in before.items()})


@every_growing_layer
def test_batch_operations_without_values(make):
    layer, kv = make(), random_kv(6, value_heads=0)
    feed(layer, kv)
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(tail_of(layer, "k"), kv.k[[2, 0], :, -1:])
    assert layer.values.shape[:2] == tail_of(layer, "v").shape[:2] == (2, 0)


# Taking back


@every_growing_layer
@pytest.mark.parametrize("before", [1, 3, 8])
@pytest.mark.parametrize("removed", [1, 2, 4])
def test_crop_restores_an_earlier_state(make, before, removed):
    kv = random_kv(before + 5)
    cropped, expected = make(), make()
    for layer in (cropped, expected):
        feed(layer, cut(kv, 0, before))
        layer.activate_past_recording()
    feed(cropped, cut(kv, before, before + 2))
    feed(cropped, cut(kv, before + 2, before + 4))
    feed(expected, cut(kv, before, before + 4 - removed))
    cropped.crop(-removed)
    expected.crop(0)
    assert_same(contents(cropped), contents(expected))
    assert cropped.get_seq_length() == before + 4 - removed
    for a, b in zip(*(feed(layer, cut(kv, before + 4, None)) for layer in (cropped, expected)), strict=True):
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)


@every_growing_layer
def test_crop_to_the_first_token(make):
    layer, kv = make(), random_kv(6)
    layer.activate_past_recording()
    feed(layer, kv)
    layer.crop(-5)
    assert torch.equal(layer.keys, -kv.k[:, :, :1])
    assert torch.equal(tail_of(layer, "k"), kv.k[:, :, :1])


@every_growing_layer
def test_crop_to_nothing(make):
    layer, kv = make(), random_kv(6)
    layer.activate_past_recording()
    feed(layer, kv)
    layer.crop(-6)
    extended, history = feed(layer, cut(kv, 0, 2))
    assert layer.get_seq_length() == 2
    assert torch.equal(extended.k, torch.nn.functional.pad(kv.k, (0, 0, 1, 0))[:, :, :3])
    assert torch.equal(history.k, -kv.k[:, :, :2])


@every_growing_layer
def test_crop_that_cannot_be_restored_changes_nothing(make):
    layer = make()
    feed(layer, random_kv(3))
    before = contents(layer)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)
    assert_same(contents(layer), before)
    assert layer.get_seq_length() == 3


@every_growing_layer
@pytest.mark.parametrize("length", [3, 8])
def test_crop_past_the_recording_changes_nothing(make, length):
    layer = make()
    feed(layer, random_kv(length))
    layer.activate_past_recording()
    feed(layer, random_kv(2))
    before = contents(layer)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-3)
    assert_same(contents(layer), before)


@every_growing_layer
def test_crop_of_nothing_without_recording(make):
    layer = make()
    feed(layer, random_kv(3))
    before = contents(layer)
    layer.crop(0)
    assert_same(contents(layer), before)


@every_growing_layer
def test_crop_of_nothing_ends_the_recording(make):
    layer, kv = make(), random_kv(8)
    layer.activate_past_recording()
    feed(layer, kv)
    layer.crop(0)
    assert torch.equal(tail_of(layer, "k"), kv.k[:, :, -1:])
    assert torch.equal(tail_of(layer, "v"), kv.v[:, :, -1:])


def test_crop_before_the_first_token():
    layer = HeadwaterLayer()
    layer.crop(0)
    layer.crop(-2)
    assert layer.get_seq_length() == 0


def test_a_recording_window_returns_what_the_mask_is_for():
    layer, x = HeadwaterSlidingLayer(sliding_window=4), torch.randn(1, 2, 5, 4)
    layer.activate_past_recording()
    for _ in range(3):
        length, _ = layer.get_mask_sizes(5)
        for seen in layer.update(x, x, sliding_window=4):
            assert seen.shape[2] == length
            assert torch.equal(seen[:, :, -5:], x)


@every_growing_layer
def test_crop_to_a_length_is_refused(make):
    layer = make()
    feed(layer, random_kv(3))
    with pytest.raises(ValueError, match="negative"):
        layer.crop(2)


# Starting again, and elsewhere


@every_layer
def test_reset_forgets_everything(make):
    used, new, kv = make(), make(), random_kv(4)
    feed(used, random_kv(7))
    used.reset()
    assert used.get_seq_length() == 0
    for a, b in zip(*(feed(layer, kv) for layer in (used, new)), strict=True):
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)
    assert_same(contents(used), contents(new))


@every_layer
def test_reset_before_use(make):
    layer = make()
    layer.reset()
    feed(layer, random_kv(2))
    assert layer.get_seq_length() == 2


@every_growing_layer
def test_reset_layer_takes_another_batch(make):
    layer = make()
    feed(layer, random_kv(7))
    layer.reset()
    extended, _ = feed(layer, random_kv(2, batch=1))
    assert extended.k.shape == (1, K, 3, D)


@every_layer
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_offload_and_prefetch(make, device):
    layer, kv = make(), random_kv(6)
    feed(layer, KV(*(x.to(device) for x in kv)))
    before = contents(layer)
    layer.offload()
    assert {tensor.device.type for tensor in contents(layer).values()} == {"cpu"}
    layer.prefetch()
    assert {tensor.device.type for tensor in contents(layer).values()} == {device}
    assert_same(contents(layer), before)


@every_layer
def test_offload_and_prefetch_before_use(make):
    layer = make()
    layer.offload()
    layer.prefetch()
    feed(layer, random_kv(2))
    assert layer.get_seq_length() == 2


# Which layer a model gets


@pytest.mark.parametrize(
    ("mechanism", "window", "growing", "static"),
    [
        ("value_residual", None, HeadwaterLayer, HeadwaterStaticLayer),
        ("value_residual", 5, DynamicSlidingWindowLayer, StaticLayer),
        ("kv_shift", None, HeadwaterLayer, HeadwaterStaticLayer),
        ("kv_shift", 5, HeadwaterSlidingLayer, HeadwaterStaticSlidingLayer),
    ],
)
def test_config_names_the_cache_layers(mechanism, window, growing, static):
    described = shared({mechanism: {}}, sliding_window=window).config
    assert {type(layer) for layer in DynamicCache(config=described).layers} == {growing}
    assert all(isinstance(layer, static) for layer in StaticCache(config=described, max_cache_len=8).layers)


def reloaded(described, folder):
    described.save_pretrained(folder)
    assert "layer_types" not in (folder / "config.json").read_text()
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    "copied",
    [
        lambda described, _: described,
        lambda described, _: copy.deepcopy(described),
        lambda described, _: pickle.loads(pickle.dumps(described)),
        lambda described, _: HeadwaterConfig.from_dict(described.to_dict()),
        reloaded,
    ],
    ids=["itself", "deepcopy", "pickle", "to_dict", "from_pretrained"],
)
@pytest.mark.parametrize(
    ("mechanisms", "changes"),
    [
        ({"kv_shift": {}}, {}),
        ({"kv_shift": {}}, {"sliding_window": 5, "sliding_layers": [1]}),
        ({"skip_layer": {"layers": 1, "heads": 2}}, {}),
        ({"value_residual": {}}, {"sliding_window": 5}),
        ({"svformer": {}}, {"materialise": True}),
    ],
)
def test_a_cache_made_of_a_config_that_no_model_has_seen_fits_its_model(mechanisms, changes, copied, tmp_path):
    model, ids = shared(mechanisms, **changes), tokens(2, 11)
    alone = copied(config(mechanisms, **changes), tmp_path)
    expected = model(ids, use_cache=False).logits
    for cache in DynamicCache(config=alone), StaticCache(config=alone, max_cache_len=13):
        assert_near(decode(model, ids, [6, 1, 4], cache=cache), expected)


@pytest.mark.parametrize(
    "cache", [DynamicCache(), DynamicCache(config=config(materialise=True))], ids=["unconfigured", "materialised"]
)
def test_cache_without_tails_is_refused(cache):
    with pytest.raises(HeadwaterError, match=r"DynamicCache\(config=model.config\)"):
        shared({"kv_shift": {}})(tokens(1, 3), past_key_values=cache, use_cache=True)


WINDOWS = {"none": None, "wide": 9, "narrow": 5}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("other", WINDOWS.values(), ids=WINDOWS)
def test_a_cache_made_for_another_window_is_exact_or_refused(window, other, static):
    model, ids = shared({"value_residual": {}}, sliding_window=window), tokens(2, 14)
    made = config({"value_residual": {}}, sliding_window=other)
    cache = StaticCache(config=made, max_cache_len=16) if static else DynamicCache(config=made)
    chunks = [4, 1, 1, 3, 1, 3, 1]
    if other is not None and window is None and not static:  # its layers have dropped what none of ours takes over
        with pytest.raises(HeadwaterError, match="still attends to"):
            decode(model, ids, chunks, cache=cache)
    else:
        assert_near(decode(model, ids, chunks, cache=cache), model(ids, use_cache=False).logits)


def test_caches_of_another_kind_are_refused():
    model, ids = shared(), tokens(1, 3)
    with pytest.raises(HeadwaterError, match="2 layers"):
        model(ids, past_key_values=DynamicCache(config=config(num_hidden_layers=2)))
    with pytest.raises(HeadwaterError, match="not tuple"):
        model(ids, past_key_values=((torch.zeros(1, 2, 0, 8),) * 2,) * 3)


def test_ordinary_layers_take_any_cache():
    model, ids = shared({"value_residual": {}}), tokens(2, 9)
    assert_near(decode(model, ids, [4, 1, 4], cache=DynamicCache()), model(ids, use_cache=False).logits)


def test_cache_bytes():
    cache = DynamicCache(config=config({"kv_shift": {}}))
    assert cache_bytes(cache) == 0
    for layer in cache.layers:
        feed(layer, random_kv(5))
    assert cache_bytes(cache) == 3 * 2 * B * K * D * (5 + 1) * 8


# Growing in place


@torch.no_grad()
def test_a_state_once_given_out_never_changes():
    """A cropped, copied or shared layer writes elsewhere."""
    layer, kv = HeadwaterLayer(), random_kv(12)
    feed(layer, cut(kv, 0, 5), tail=0)
    other = copy.copy(layer)
    first = layer.update(*cut(kv, 5, 6))[0]
    second = other.update(*cut(kv, 6, 7))[0]
    layer.crop(-2)
    third = layer.update(*cut(kv, 7, 9))[0]
    assert torch.equal(first[:, :, 5:], kv.k[:, :, 5:6])
    assert torch.equal(second[:, :, 5:], kv.k[:, :, 6:7])
    assert torch.equal(third, torch.cat((-kv.k[:, :, :4], kv.k[:, :, 7:9]), 2))


def test_gradients_through_a_cache_whose_keys_need_none():
    """Only the queries are trained, as an adapter may: attention has kept the earlier keys for its gradient."""
    model, ids = build({"kv_shift": {}}), tokens(2, 12)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" in name
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cached = torch.autograd.grad(decode(model, ids, [5, 1, 6]).square().sum(), wanted)
    for a, b in zip(cached, torch.autograd.grad(model(ids).logits.square().sum(), wanted), strict=True):
        assert_near(a, b)


@torch.no_grad()
def test_history_survives_a_change_of_inference_mode():
    model, ids, cache = shared({"svformer": {}}), tokens(2, 9), DynamicCache(config=config({"svformer": {}}))
    with torch.inference_mode():
        first = model(ids[:, :4], past_key_values=cache).logits.clone()
    second = model(ids[:, 4:6], past_key_values=cache).logits
    with torch.inference_mode():
        third = model(ids[:, 6:], past_key_values=cache).logits.clone()
    assert_near(torch.cat((first, second, third), 1), model(ids, use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_another_number_are_refused(rows):
    layer = HeadwaterLayer()
    layer.update(*random_kv(40, batch=3))
    with pytest.raises(RuntimeError):
        layer.update(*random_kv(1, batch=rows))
    assert layer.get_seq_length() == 40


@torch.no_grad()
def test_reserved_bytes_are_those_of_the_memory():
    layer = HeadwaterLayer()
    cache = DynamicCache()
    cache.layers.append(layer)
    layer.update(*random_kv(32))
    assert cache_bytes(cache) == 2 * B * K * D * 32 * 8
    assert cache_bytes(cache, reserved=True) == 2 * B * K * D * (32 + 16) * 8
    for _ in range(2000):
        layer.update(*random_kv(1))
        assert cache_bytes(cache, reserved=True) <= 2 * B * K * D * 8 * max(layer.get_seq_length() * 9 / 8 + 16, 0)


# In a model


@pytest.mark.parametrize("window", [None, 5])
def test_model_continues_after_crop(window):
    model, ids = shared({"kv_shift": {}}, sliding_window=window), tokens(2, 14)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids[:, :8], past_key_values=cache)
    model(tokens(2, 3, seed=1), past_key_values=cache)
    cache.crop(-3)
    assert_near(model(ids[:, 8:], past_key_values=cache).logits, model(ids, use_cache=False).logits[:, 8:])


@pytest.mark.parametrize("window", [None, 5])
def test_model_continues_other_rows(window):
    model, ids = shared({"kv_shift": {}}, sliding_window=window), tokens(3, 14)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = ids[[2, 2, 0, 0]]
    assert_near(model(rows[:, 8:], past_key_values=cache).logits, model(rows, use_cache=False).logits[:, 8:])


@torch.no_grad()
def test_model_branches_from_a_copied_cache():
    model, ids, other = shared({"kv_shift": {}}), tokens(2, 8), tokens(2, 4, seed=1)
    cache = model(ids, use_cache=True).past_key_values
    branch = copy.deepcopy(cache)
    model(tokens(2, 5, seed=2), past_key_values=cache)
    whole = torch.cat((ids, other), 1)
    assert_near(model(other, past_key_values=branch).logits, model(whole, use_cache=False).logits[:, 8:])


@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}}], ids=["vanilla", "kv_shift"])
@pytest.mark.parametrize("window", [2, 3])
def test_narrowest_windows(mechanisms, window):
    model, ids = shared(mechanisms, sliding_window=window), tokens(2, 9)
    assert_near(decode(model, ids, [4, 1, 1, 3]), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}}], ids=["vanilla", "kv_shift"])
def test_static_cache_of_packed_rows_with_an_attention_mask(mechanisms):
    model, ids = shared(mechanisms), tokens(2, 9)
    given = dict(position_ids=document_positions([[4, 5], [3, 6]]), attention_mask=torch.ones(2, 9, dtype=torch.long))
    cache = StaticCache(config=model.config, max_cache_len=12)
    assert_near(decode(model, ids, [5, 4], cache=cache, **given), model(ids, use_cache=False, **given).logits)


@pytest.mark.parametrize("mechanisms", [{}, {"kv_shift": {}}], ids=["vanilla", "kv_shift"])
def test_static_generation_with_a_hole_in_the_mask(mechanisms):
    model, ids = shared(mechanisms), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[:, 3] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    generated = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(generated, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("mechanisms", [{"kv_shift": {}}, {"short_conv": {}}], ids=str)
def test_a_padding_id_between_tokens_is_a_token_where_no_mask_says_otherwise(mechanisms):
    model, ids = shared(mechanisms), tokens(2, 9)
    ids[0, :2] = ids[0, 5] = 7
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = dict(pad_token_id=7, eos_token_id=None, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, attention_mask=mask, **options))


@pytest.mark.parametrize("mechanisms", [{}, {"short_conv": {}, "svformer": {}}], ids=["vanilla", "own layers"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "growing"])
def test_a_cache_says_for_how_many_rows_it_was_made(mechanisms, static):
    model = shared(mechanisms)
    cache = StaticCache(config=model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    model(tokens(3, 4), past_key_values=cache)
    if static:
        cache.reset()
    with pytest.raises(HeadwaterError, match="made for 3 rows, and the input has 2"):
        model(tokens(2, 4), past_key_values=cache)
    cache.reset()
    assert_near(decode(model, tokens(3, 5), [2, 3], cache=cache), model(tokens(3, 5), use_cache=False).logits)


QUANTIZED = [{}, {"kv_shift": {}}, {"svformer": {}}, {"kv_source": {}}, {"kv_source": {"values": "own"}}]
QUANTIZED += [{"low_rank_kv": {}}, {"low_rank_kv": {}, "kv_shift": {}}]


@pytest.mark.parametrize("mechanisms", QUANTIZED, ids=str)
def test_a_quantized_cache_holds_what_layers_store_in_few_bits(mechanisms):
    pytest.importorskip("optimum.quanto")
    model, ids = build(mechanisms, hidden_size=256, num_attention_heads=4, num_key_value_heads=2).float(), tokens(2, 40)
    whole, cache = DynamicCache(config=model.config), HeadwaterQuantizedCache(model.config, residual_length=8)
    model(ids, past_key_values=whole)
    for piece in ids.split(5, dim=1):
        model(piece, past_key_values=cache)
    assert cache_bytes(cache, reserved=True) == cache_bytes(cache)
    for plain, layer in zip(whole.layers, cache.layers, strict=True):
        keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
        kv = torch.cat((keys, layer.keys), dim=2), torch.cat((values, layer.values), dim=2)
        for stored, exact in zip(kv, (plain.keys, plain.values), strict=True):
            assert stored.shape == exact.shape
            if not exact.is_floating_point():
                assert torch.equal(stored, exact), "positions stay whole"
            elif exact.numel() and layer is cache.layers[0]:  # later ones store what was made of rounded numbers
                assert 0 < (stored - exact).abs().max() < (exact.max() - exact.min()) / 15
    assert cache_bytes(cache) < 0.5 * cache_bytes(whole), "of fp32, with scales, tails and the last tokens whole"
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits, 1e-4)


def test_heads_that_cannot_be_quantized_are_not_left_whole_without_a_word():
    pytest.importorskip("optimum.quanto")
    model = build(head_dim=6, num_key_value_heads=1).float()
    with pytest.raises(HeadwaterError, match="1 heads of 6 numbers cannot be quantized"):
        model(tokens(1, 21), past_key_values=HeadwaterQuantizedCache(model.config, residual_length=4))


@pytest.mark.parametrize("heads", [{"head_dim": 80, "num_key_value_heads": 1}, {"head_dim": 24}])
def test_heads_of_other_widths_are_quantized(heads):
    pytest.importorskip("optimum.quanto")
    model, ids = build(**heads).float(), tokens(1, 21)
    cache = HeadwaterQuantizedCache(model.config, residual_length=4)
    for piece in ids.split([7, 3, 5, 1, 5], dim=1):
        logits = model(piece, past_key_values=cache).logits
    whole = model(ids, use_cache=False).logits[:, -5:]
    assert (logits - whole).abs().max() < 0.3 * whole.abs().max()


@pytest.mark.parametrize("mechanisms", QUANTIZED, ids=str)
def test_a_quantized_cache_follows_beams_and_refuses_other_changes(mechanisms):
    pytest.importorskip("optimum.quanto")
    model = build(mechanisms, hidden_size=256, num_attention_heads=4).float()
    ids, ending, order = tokens(3, 20), tokens(3, 4), torch.tensor([2, 0, 0])
    logits = []
    for rows, reordered in ((ids, True), (ids[order], False)):
        cache = HeadwaterQuantizedCache(model.config, residual_length=8)
        for piece in rows.split([13, 7], dim=1):
            model(piece, past_key_values=cache)
            if piece.shape[1] == 13:
                assert cache_bytes(cache, reserved=True) == cache_bytes(cache), "the prefill is not kept"
        if reordered:
            cache.reorder_cache(order)
        logits.append(model(ending, past_key_values=cache).logits)
    assert_near(*logits, 0.05)
    for change, argument in (("crop", -1), ("batch_repeat_interleave", 2), ("batch_select_indices", order)):
        with pytest.raises(HeadwaterError, match="A quantized cache cannot "):
            getattr(cache, change)(argument)
    with pytest.raises(HeadwaterError, match="made for 3 rows, and the input has 2"):
        model(tokens(2, 4), past_key_values=cache)
    with pytest.raises(HeadwaterError, match="cannot have sliding windows"):
        HeadwaterQuantizedCache(config(sliding_window=4))
    with pytest.raises(HeadwaterError, match="not for a LlamaConfig"):
        HeadwaterQuantizedCache(LlamaConfig())
    with pytest.raises(HeadwaterError, match="2 or 4 bits a number, not 8"):
        HeadwaterQuantizedCache(config(), 8)


@pytest.mark.parametrize("mechanisms", QUANTIZED, ids=str)
@pytest.mark.parametrize("padding", [1, 3, 8])
def test_padding_does_not_change_what_a_quantized_cache_holds(padding, mechanisms):
    pytest.importorskip("optimum.quanto")
    model, ids = build(mechanisms, hidden_size=256, num_attention_heads=4), tokens(2, 32)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    cache, alone = (HeadwaterQuantizedCache(model.config, residual_length=4) for _ in range(2))
    for start, end in ((0, 15), (15, 20), (20, 21), (21, 32)):
        logits = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        expected = model(ids[1:, max(padding, start) : end], past_key_values=alone).logits
        assert_near(logits[1:, -expected.shape[1] :], expected, 1e-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    for start, end in ((0, 4), (4, 9)):
        mask = torch.nn.functional.pad(mask[[1, 0]] if start == 0 else mask, (0, end - start), value=1)
        logits = model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits
        assert_near(logits[:1], model(ids[:1, start:end], past_key_values=alone).logits, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("real", [1, 3, 4, 5, 40])
def test_few_tokens_after_padding_are_quantized_as_well_as_alone(real, dtype):
    pytest.importorskip("optimum.quanto")
    torch.manual_seed(0)
    x = (100 * torch.randn(1, 2, 1, 64) + torch.randn(2, 2, 1300, 64)).to(dtype)
    errors = []
    for starts, rows in ((torch.tensor([0, 900 - real]), x), (None, x[1:, :, 900 - real :])):
        layer = HeadwaterQuantizedLayer(4)
        layer.starts = starts
        for piece in (rows[:, :, : starts[1] + real if starts is not None else real], rows[:, :, -400:]):
            layer.update(piece, piece[:, :0])
        kept = layer._dequantize(layer._quantized_keys)
        errors.append((kept[-1:, :, -400:] - x[1:, :, -400:]).float().square().mean().sqrt())
    assert errors[0] < 1.5 * errors[1] + 0.2


def test_first_tokens_stay_whole_when_a_padded_prompt_comes_in_chunks():
    pytest.importorskip("optimum.quanto")
    model, ids, mask = build(num_key_value_heads=4, head_dim=16).float(), tokens(2, 40), torch.ones(2, 40)
    mask[1, :25] = 0
    cache, whole = HeadwaterQuantizedCache(model.config, 2, residual_length=4), DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=whole)
    for end in (10, 20, 30, 40):
        model(ids[:, end - 10 : end], attention_mask=mask[:, :end], past_key_values=cache)
    first = cache.layers[0]
    assert_near(first._dequantize(first._quantized_keys)[1, :, 25:29], whole.layers[0].keys[1, :, 25:29], 1e-5)
    cache.reset()  # without a mask, rows begin at once again
    model(ids, past_key_values=cache)
    assert first.starts is None


def test_a_common_direction_costs_a_quantized_layer_no_bits():
    pytest.importorskip("optimum.quanto")
    torch.manual_seed(0)
    direction, noise = torch.randn(1, 3, 1, 64), 0.1 * torch.randn(2, 3, 400, 64)
    x = noise + direction * (1 + torch.rand(2, 1, 400, 1))
    x[:, :, 0] = noise[:, :, 0]  # as an attention sink, which is unlike all others
    layer = HeadwaterQuantizedLayer(4)
    for piece in x.split((130, 70, 60, 140), dim=2):
        history, _ = layer.update(piece, piece[:, :0])
        assert_near(history[:, :, :4], x[:, :, :4], 0)
        last, earlier = history, layer._dequantize(layer._quantized_keys)
    assert (earlier - x).square().mean() < 0.02 * noise.square().mean()
    # What was quantized three times is no further off than what was quantized once.
    errors = (last - x).square()[:, :, 4:260].mean((0, 1, 3))
    assert errors[:126].mean() < 1.1 * errors[196:].mean()
