"""A cache under both of its names, whichever transformers is installed: `past_key_values`, and `cache` from 5.24 on."""

import inspect
import logging
import warnings

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from conftest import assert_near, build, decode, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.models.cache import HeadwaterStaticLayer
from headwater.nn.cache_name import CACHE, cache_of, is_paged
from headwater_lab.bench.decoding_speed import decode_in_turns

NAMES = ("past_key_values", "cache")
BOTH = dict.fromkeys(NAMES)
MIXED = {"kv_shift": {}, "skip_layer": {}}


def caches(model: HeadwaterForCausalLM) -> dict[str, DynamicCache]:
    return {name: DynamicCache(config=model.config) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("base", [False, True])
def test_models_take_either_name_and_return_the_installed_one(name, base):
    whole, ids = build(MIXED), tokens(2, 9)
    model = whole.model if base else whole
    cache = DynamicCache(config=whole.config)
    expected = model(ids, use_cache=False)[0]
    outs = [model(part, **{name: cache}) for part in (ids[:, :5], ids[:, 5:])]
    assert_near(torch.cat([out[0] for out in outs], 1), expected)
    assert cache.get_seq_length() == 9
    for out in outs:
        assert out[CACHE] is cache_of(out) is out.past_key_values is cache
    assert CACHE in model(ids)
    assert CACHE not in model(ids, use_cache=False)


@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_either_name(name):
    model, ids = build(MIXED), tokens(2, 9)
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    expected = model.generate(ids, use_cache=False, **options).sequences
    cache = DynamicCache(config=model.config)
    made = model.generate(ids, **{name: cache}, **options)
    assert cache_of(made) is cache
    assert torch.equal(made.sequences, expected)
    static = StaticCache(config=model.config, max_cache_len=16)
    assert torch.equal(model.generate(ids, **{name: static}, disable_compile=True, **options).sequences, expected)


def test_both_names_are_refused():
    model, ids = build(MIXED), tokens(1, 4)
    for call in (model, model.model, lambda ids, **both: model.generate(ids, max_new_tokens=2, **both)):
        with pytest.raises(HeadwaterError, match="two names for the same argument"):
            call(ids, **caches(model))
        call(ids, **BOTH)  # None under both is no cache
        call(ids, **BOTH | {"cache": DynamicCache(config=model.config)})
    with pytest.raises(HeadwaterError, match="two names for the same argument"):
        model.create_masks_for_generate(model.config, torch.zeros(1, 4, 32), None, **caches(model))


def test_masks_are_made_under_either_name():
    model = build({"kv_shift": {}}, sliding_window=3)
    cache = DynamicCache(config=model.config)
    model(tokens(2, 4), past_key_values=cache)
    embeds = torch.zeros(2, 2, 32)
    made = [model.create_masks_for_generate(model.config, embeds, None, **{name: cache}) for name in NAMES]
    assert all(torch.equal(one, other) for one, other in zip(*(masks.values() for masks in made), strict=True))


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_under_the_other_name_too():
    model, ids = build({"kv_shift": {}}, num_hidden_layers=1), tokens(2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        logits = [compiled(part, cache=cache).logits for part in (ids[:, :5], ids[:, 5:])]
    assert_near(torch.cat(logits, 1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_not_cached_twice(reentrant):
    model, ids = build(MIXED).train(), tokens(2, 6)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    cache = DynamicCache(config=model.config)
    loss = model(ids, labels=ids, use_cache=True, **{CACHE: cache}).loss
    loss.backward()
    assert cache.get_seq_length() == 0
    assert_near(loss.detach(), build(MIXED)(ids, labels=ids).loss.detach())


def test_our_own_calls_are_not_deprecated(monkeypatch):
    """Not with a warning, and not with a line in transformers' log."""
    said: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda log, text, *args: said.append(text))
    model, ids = build(MIXED), tokens(2, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        decode(model, ids, [5, 4])
        cache = DynamicCache(config=model.config)
        model.generate(ids, max_new_tokens=3, do_sample=False, num_beams=2, past_key_values=cache)
        model.generate(ids[:1], max_new_tokens=3, prompt_lookup_num_tokens=2)
        model.generate(ids, max_new_tokens=3, cache_implementation="static", disable_compile=True)
        shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=97)
        decode_in_turns({"ours": model, "llama": LlamaForCausalLM(LlamaConfig(**shape)).eval()}, ids[:1], 3, 1)
    assert not [text for text in said if "deprecated" in text]


def test_both_names_can_be_asked_for():
    """PEFT and others look for one of them among a model's arguments."""
    for model in (build(), build().model):
        assert set(NAMES) <= set(inspect.signature(model.forward).parameters)
        assert set(NAMES) <= set(model._skip_keys_device_placement)
    assert set(NAMES) <= set(build().config.keys_to_ignore_at_inference)


def test_static_layers_with_raw_tokens_cannot_be_cropped():
    """transformers crops static caches in assisted decoding from 5.24 on, and asks for it before."""
    ids = tokens(1, 3).repeat(1, 4)
    options = dict(max_new_tokens=6, do_sample=False)
    lookup = dict(prompt_lookup_num_tokens=3, cache_implementation="static", disable_compile=True)
    shifted, shared = build({"kv_shift": {}}), build({"svformer": {}})
    with pytest.raises(ValueError, match=r"cropped|not supported with Static"):
        shifted.generate(ids, **lookup, **options)
    if CACHE == "cache":
        expected = shared.generate(ids, use_cache=False, **options)
        assert torch.equal(shared.generate(ids, **lookup, **options), expected)
    for model in (shifted, shared):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids, past_key_values=cache)
        layer = next(layer for layer in cache.layers if isinstance(layer, HeadwaterStaticLayer))
        assert layer.is_croppable == (model is shared and CACHE == "cache")
    layer = HeadwaterStaticLayer(8)
    layer.update_tail("keys", torch.zeros(1, 1, 3, 2), 1)
    with pytest.raises(RuntimeError, match="cannot take tokens back"):
        layer.crop(-1)


def test_only_an_engines_cache_is_paged():
    assert not any(map(is_paged, (None, (), DynamicCache(), {"cache": None})))
