"""Programs that `torch.export` makes of a model and its cache: token by token as the model itself, uncached."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.exporters import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode
from transformers.integrations.executorch import (
    TorchExportableModuleForDecoderOnlyLM,
    TorchExportableModuleWithStaticCache,
    convert_and_export_with_cache,
)

from conftest import Wanted, assert_near, build, tokens
from headwater import HeadwaterError
from headwater.nn.cache_name import CACHE, cache_of
from headwater.plugins.mechanisms import MECHANISMS

LONGEST = 16
MODELS: list[dict] = [
    {},
    *({name: {"layer": 0} if name == "backout" else {}} for name in MECHANISMS.built_in),  # of two layers
    {"pattention": {}, "value_residual": {}, "skip_layer": {}, "dense_former": {}},
    {"svformer": {"share": "both"}},
]
NEED_GROWING_CACHE = {"kv_shift", "short_conv", "smear", "ngram_memory", "low_rank_kv"}
every_model = pytest.mark.parametrize("mechanisms", MODELS, ids=lambda m: "+".join(m) + str(len(str(m))))


def exportable(mechanisms: dict, batch: int = 1, **changes):
    model = build(mechanisms, **changes).requires_grad_(False)
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        cache_config={"batch_size": batch, "max_cache_len": LONGEST},
    )
    return model


def stepped(program, ids: Tensor, chunks: list[int]) -> Tensor:
    logits, start = [], 0
    for chunk in chunks:
        where = torch.arange(start, start + chunk)
        logits.append(program(input_ids=ids[:, start : start + chunk], cache_position=where))
        start += chunk
    return torch.cat(logits, 1)


@pytest.mark.sampled(12)
@every_model
@pytest.mark.slow
def test_static_cache(mechanisms):
    """Two sequences, since nothing but the position tells the program that a new one begins."""
    model = exportable(mechanisms, num_hidden_layers=2)
    if NEED_GROWING_CACHE & mechanisms.keys():
        with pytest.raises(Exception, match="export it with a growing cache") as error:
            convert_and_export_with_cache(model)
        assert isinstance(error.value, HeadwaterError) or "HeadwaterError" in str(error.value)
        return
    exported = convert_and_export_with_cache(model)
    for program in (exported, exported.run_decompositions()) if Wanted.slow else (exported,):
        for seed in (0, 1):
            ids = tokens(1, 11, seed=seed)
            assert_near(stepped(program.module(), ids, [1] * 11), model(ids, use_cache=False).logits, 1e-9)


@pytest.mark.slow
@pytest.mark.sampled(9)
@pytest.mark.parametrize("changes", [{"sliding_window": 5}, {"position": "alibi"}, {"gpt2": True}], ids=str)
@pytest.mark.parametrize("mechanisms", [{}, {"value_residual": {}}, {"svformer": {}}], ids=str)
def test_static_cache_on_other_bases(mechanisms, changes):
    changes = changes | ({"num_key_value_heads": 4} if "gpt2" in changes else {})
    model, ids = exportable(mechanisms, batch=2, **changes), tokens(2, 11)
    with torch.no_grad():
        module = TorchExportableModuleWithStaticCache(model)
        program = torch.export.export(
            module, (), {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}, strict=False
        ).module()
    assert_near(stepped(program, ids, [1] * 11), model(ids, use_cache=False).logits, 1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanisms", [{}, {"skip_layer": {}}], ids=str)
@pytest.mark.slow
def test_static_cache_with_chunks_of_any_length(mechanisms):
    model, ids = exportable(mechanisms), tokens(1, 11)
    length = torch.export.Dim("length", max=LONGEST - 1)
    exported = TorchExportableModuleForDecoderOnlyLM(model).export(
        input_ids=ids[:, :3],
        cache_position=torch.arange(3),
        dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
        strict=False,
    )
    for chunks in ([5, 2, 4], [11]):
        assert_near(stepped(exported.module(), ids, chunks), model(ids, use_cache=False).logits, 1e-9)


# With a growing cache


CROWD: dict = {"kv_shift": {}, "skip_layer": {}, "svformer": {}}


@pytest.mark.slow  # seconds each; programs with a static cache are exported above
@pytest.mark.parametrize("multi_token", [False, True])
@pytest.mark.parametrize(
    "mechanisms", [{}, CROWD, *({name: {}} for name in CROWD), {"kv_shift": {"window": 3, "queries": True}}], ids=str
)
def test_an_exported_prefill_feeds_an_exported_decode(mechanisms, multi_token):
    """The state that goes from one to the other is keys, values and tails, of any length."""
    model = build(mechanisms, num_hidden_layers=2).requires_grad_(False)
    greedy = GenerationConfig(do_sample=False)
    parts = decompose_prefill_decode(model, {"input_ids": tokens(1, 5)}, greedy, multi_token_decode=multi_token)
    programs = {}
    for name, (module, inputs) in parts.items():
        exported = DynamoExporter().export(module, copy.deepcopy(inputs), config=DynamoConfig(dynamic=True))
        # transformers 5.17 returns PyTorch's own program, which cannot be called as it is.
        programs[name] = exported.module() if isinstance(exported, torch.export.ExportedProgram) else exported

    ids = tokens(1, 12, seed=3)
    where = torch.arange(12)[None]
    mask = torch.ones_like(ids)
    cache, logits, start = parts["prefill"][1][CACHE], [], 0
    steps = (1, 3, 1) if multi_token else (1,) * 5
    for name, length in [("prefill", 7), *(("decode", step) for step in steps)]:
        now, start = slice(start, start + length), start + length
        out = programs[name](
            input_ids=ids[:, now], attention_mask=mask[:, :start], position_ids=where[:, now], **{CACHE: cache}
        )
        cache = cache_of(out)
        logits.append(out.logits)
    assert_near(torch.cat(logits, 1), model(ids, use_cache=False).logits, 1e-12)


def test_joined_decoding_steps_keep_what_the_mask_does_not_say():
    """Two steps of a static cache as one: how far each goes back without a gap is joined as the masks are."""
    model, ids = build({"kv_shift": {}}).requires_grad_(False), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    greedy = GenerationConfig(do_sample=False, cache_implementation="static", disable_compile=True)
    parts = decompose_prefill_decode(model, {"input_ids": ids, "attention_mask": mask}, greedy, multi_token_decode=True)
    _, inputs = parts["decode"]
    whole = torch.cat((ids, inputs["input_ids"]), 1)
    mask = torch.nn.functional.pad(mask, (0, 2), value=1)
    expected = model(whole, attention_mask=mask, use_cache=False).logits[:, 5:]
    assert_near(model(**inputs).logits, expected)
