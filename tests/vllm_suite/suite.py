"""Models of headwater in vLLM itself: `make test-vllm`, in an environment of its own.

Every token must be the one that the model gives without a cache, in fp32, for that row alone: in a cache so small that
requests are preempted, in chunks, with shared prefixes, and with tokens that are tried and taken back.
"""

import ast
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)

import httpx
import openai
import pytest
import torch
import vllm
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.triton_utils import dispatcher

from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater.conversion.export import export
from headwater.cost.counts import cache_bytes_per_token
from headwater.engines.paged import Lookback
from headwater.engines.pages import Page
from headwater.integrations.vllm import register
from headwater.integrations.vllm import vllm_engine as engine
from headwater.integrations.vllm.flash import FlashEngine
from headwater.integrations.vllm.vllm_engine import CPUEngine
from headwater.plugins.mechanisms import MECHANISMS
from headwater.testing.small_models import disturb

SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
GQA = {"num_key_value_heads": 2}
GPT2 = {"gpt2": True}
ALIBI = {"position": "alibi", "feed_forward": "plain", "hidden_act": "gelu_new"}
TWO_KINDS = dict(sliding_window=40, sliding_layers=[0, 1], attention_softcap=2.0, qk_norm=True, logit_softcap=3.0)
TIED = {"tie_word_embeddings": True, "qk_norm": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
NGRAMS = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)

# Mechanisms, base, bytes a token of keys and values, and whether it speculates.
CASES: list[tuple[dict, dict, int, bool]] = [
    ({}, {}, 4096, True),
    ({}, GPT2, 4096, False),
    ({}, GQA | ALIBI, 2048, False),
    ({"value_residual": {}, "neutreno": {}, "dense_former": {}}, GQA | TWO_KINDS, 2048, False),
    ({"pattention": {}}, TIED, 4096, False),
    ({"mudd": {}}, {}, 4096, False),
    ({"skip_layer": {}}, GPT2, 3328, True),
    ({"svformer": {}}, {}, 2560, True),
    ({"kv_source": {"keys": "yoco", "values": "yoco"}}, {}, 3072, False),
    ({"kv_shift": {}}, {}, 4096, True),
    ({"svformer": {}, "kv_shift": {"window": 3, "queries": True}}, {"sliding_window": 40}, 2560, True),
    ({"value_residual": {}, "skip_layer": {}, "kv_shift": {}}, GQA, 1792, True),
    ({"kv_shift": {}, "short_conv": {}, "smear": {"weight": 0.5}, "ngram_memory": {}}, GQA, 2048, True),
    ({"short_conv": {"sites": ["attention_input", "feed_forward_hidden", "values"]}}, GQA | ALIBI, 2048, True),
    ({"mla": {}}, {"num_key_value_heads": 1, "partial_rotary_factor": 0.5}, 512, True),
    ({"low_rank_kv": {"heads": 2}}, {"sliding_window": 40}, 1024, True),
    ({"depth_attention": {"queries": 3}, "kv_shift": {}}, GQA, 2048, True),
    ({"low_rank_kv": {}, "kv_source": {}, "kv_shift": {}}, GQA | TWO_KINDS | {"qkv_bias": True}, 512, False),
]


_rebind = dispatcher._rebind_kernels


def _rebind_once(pairs: Any) -> None:
    """vLLM's own looks at every object of every module, and fails at one of llvmlite's once a model has used numba."""
    with contextlib.suppress(AttributeError):
        _rebind(pairs)


dispatcher._rebind_kernels = _rebind_once


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[list[int]]:
    """Some begin alike, some are equal, some repeat themselves; of 1 to 140 tokens."""
    prefix = tokens(70, 1000)
    parts = [(0, 1), (70, 5), (64, 9), (40, 30), (70, 40), (33, 2), (70, 1), (64, 1), (10, 90), (0, 120), (70, 70)]
    rows = [prefix[:shared] + tokens(more, seed) for seed, (shared, more) in enumerate(parts)]
    return rows + rows[:6] + [tokens(4, seed) * 10 for seed in range(3)]


def build(mechanisms: dict, gpt2: bool = False, **changes: Any) -> HeadwaterForCausalLM:
    make = HeadwaterConfig.gpt2 if gpt2 else HeadwaterConfig
    return disturb(HeadwaterForCausalLM(make(**(SIZES | dict(mechanisms=mechanisms) | changes))), 0.1).eval()


def start(folder: Path, **options: Any) -> LLM:
    given: dict[str, Any] = dict(dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32)
    given |= dict(max_model_len=192, max_num_batched_tokens=64, max_num_seqs=16, num_gpu_blocks_override=24)
    STARTED.append(LLM(model=str(folder), **(given | options)))
    return STARTED[-1]


STARTED: list[LLM] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Ends what a test has started. If memory were cleared later, that would end the process groups of the next one."""
    yield
    while STARTED:
        STARTED.pop().llm_engine.engine_core.shutdown()
    gc.collect()


def continued(llm: LLM, rows: list[list[int]], count: int = 12, adapters: Any = None) -> list[list[int]]:
    options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    given: list[Any] = [{"prompt_token_ids": row} for row in rows]
    made = llm.generate(given, options, use_tqdm=False, lora_request=adapters)
    return [list(one.outputs[0].token_ids) for one in made]


@torch.no_grad()
def right(model: Any, rows: list[list[int]], made: list[list[int]]) -> int:
    """How many rows are continued with the most likely token each time, by the model without a cache."""
    found = 0
    for row, new in zip(rows, made, strict=True):
        logits = model(torch.tensor([row + new[:-1]]), use_cache=False, logits_to_keep=len(new)).logits[0]
        found += logits.argmax(-1).tolist() == new
    return found


def inside(llm: LLM) -> Any:
    """The model as vLLM holds it."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.model


@pytest.mark.parametrize(
    ("mechanisms", "changes", "bytes_per_token", "speculates"),
    CASES,
    ids=["+".join(one[0]) + "-" + "+".join(one[1]) for one in CASES],
)
def test_tokens_and_bytes(mechanisms, changes, bytes_per_token, speculates, tmp_path):
    model, rows = build(mechanisms, **changes), prompts()
    model.save_pretrained(tmp_path)
    llm = start(tmp_path, **({"speculative_config": NGRAMS} if speculates else {}))
    assert right(model, rows, continued(llm, rows)) == len(rows)
    page = Page(model.config, model.plans, 32, 4, NGRAMS["num_speculative_tokens"] if speculates else 0)
    positions = 4 * sum(plan.stores_positions(model.config) for plan in model.plans)  # which vLLM counts
    assert page.history == 32 * bytes_per_token == 32 * (cache_bytes_per_token(model.config) - positions)
    assert inside(llm).blocks.kv_cache.untyped_storage().nbytes() == 24 * page.size


# In half precision vLLM has other kernels. Every mechanism that can be served, and those that read some channels of x.
HALF: list[dict] = [
    {},
    {"pattention": {}},
    {"kv_shift": {}},
    {"kv_shift": {"window": 3, "queries": True}},
    {"short_conv": {}},
    {"short_conv": {"sites": ["attention_input", "feed_forward_hidden", "keys"], "dynamic": ["keys"]}},
    {"value_residual": {"mode": "learnable"}},
    {"value_embedding": {}},
    {"value_embedding": {"tables": 2, "rank": 8, "channels": 20}},
    {"ngram_memory": {"rank": 16, "gate": "match"}},
    {"ngram_memory": {"target": "values", "gate": "scalar"}},
    {"svformer": {}},
    {"kv_source": {"keys": "yoco", "values": "yoco"}},
    {"skip_layer": {}},
    {"mla": {}},
    {"low_rank_kv": {}},
    {"neutreno": {}},
    {"exclusive": {}},
    {"output_gate": {}},
    {"output_gate": {"channels": 12}},
    {"depth_attention": {}},
    {"depth_attention": {"queries": 3, "variant": "inkling_2"}},
    {"mudd": {}},
    {"dense_former": {}},
    {"smear": {"weight": 0.7}},
    {"embedding_residual": {}},
    {"backout": {}},
]


def test_every_mechanism_that_can_be_served_is_tested():
    tested, refused = {name for mechanisms in HALF for name in mechanisms}, {"persistent_memory"}
    assert tested | refused == {*MECHANISMS.built_in}


@torch.no_grad()
def log_probabilities(model: Any, row: list[int]) -> torch.Tensor:
    """Of each token of a row but the first."""
    logits = model(torch.tensor([row]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]


@pytest.mark.parametrize("mechanisms", HALF, ids=json.dumps)
def test_half_precision_is_as_near_as_transformers(mechanisms, tmp_path):
    model, rows = build(mechanisms, **GQA, initializer_range=0.1), [tokens(count, count) for count in (5, 33, 64)]
    model.save_pretrained(tmp_path)
    half = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact, near = (torch.cat([log_probabilities(one, row) for row in rows]) for one in (model, half))
    options = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    llm = start(tmp_path, dtype="bfloat16")
    given: list[Any] = [{"prompt_token_ids": row} for row in rows]
    made = llm.generate(given, options, use_tqdm=False)
    served = torch.tensor(
        [
            known[token].logprob
            for one, row in zip(made, rows, strict=True)
            for known, token in zip(one.prompt_logprobs[1:], row[1:], strict=True)
        ]
    )

    def rms(found: torch.Tensor) -> float:
        return float((found - exact).pow(2).mean().sqrt())

    assert rms(served) <= 2 * rms(near)


def test_kernels_are_given_contiguous_tensors(tmp_path, monkeypatch):
    """Some read others as if they were, in half precision on processors with AMX."""
    mechanisms = {"smear": {"weight": 0.5}, "kv_shift": {}, "output_gate": {"channels": 12}, "value_embedding": {}}
    build(mechanisms | {"mudd": {}}, **GQA).save_pretrained(tmp_path)
    llm, seen = start(tmp_path), []

    def watch(owner: Any, name: str, first: int = 0) -> None:
        function = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            inputs = given[:first] if given else (named["query"], named["output"])
            seen.append((name, all(x.is_contiguous() for x in inputs)))
            return function(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(engine.kernels, "cpu_attn_reshape_and_cache", 2)
    watch(engine.kernels, "cpu_attention_with_kv_cache")
    for layer in inside(llm).language.modules():
        if hasattr(layer, "cpu_linear"):
            watch(layer, "cpu_linear", 1)
    continued(llm, prompts())
    assert {name for name, _ in seen} == {"cpu_linear", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache"}
    assert all(contiguous for _, contiguous in seen)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: HeadwaterForCausalLM, folder: Path, targets: list[str], seed: int) -> None:
    """Save an adapter of PEFT's for these layers, with random weights."""
    made = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=targets))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=draw)
    made.save_pretrained(str(folder))
    made.unload()


@pytest.mark.parametrize(
    ("mechanisms", "changes"),
    [
        ({}, GPT2),
        ({"value_residual": {}, "skip_layer": {}, "kv_shift": {}}, GQA),
        ({"value_embedding": {}, "output_gate": {}, "short_conv": {}}, TIED),
    ],
)
def test_adapters(mechanisms, changes, tmp_path):
    """Two adapters and the model without one in one batch, whose requests have prefixes in common."""
    model, rows = build(mechanisms, **changes), prompts()
    model.save_pretrained(tmp_path)
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    requests: list[LoRARequest | None] = [None]
    for number, few in enumerate((LINEAR, LINEAR[1:3]), 1):
        folder = tmp_path / f"adapter-{number}"
        adapted(model, folder, [name for name in few if name in there], seed=number)
        requests.append(LoRARequest(folder.name, number, str(folder)))
    llm = start(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8)
    made = continued(llm, rows * 3, adapters=[one for one in requests for _ in rows])
    parts = [made[number * len(rows) : (number + 1) * len(rows)] for number in range(3)]
    assert right(model, rows, parts[0]) == len(rows)
    for request, part in zip(requests[1:], parts[1:], strict=True):
        assert part != parts[0]
        adapter = PeftModel.from_pretrained(model, request.path)
        assert right(adapter, rows, part) == len(rows)
        adapter.unload()


@pytest.mark.parametrize("target", ["lm_head", "gate"])
def test_adapters_of_other_layers_are_refused(target, tmp_path):
    model = build({"output_gate": {}})
    model.save_pretrained(tmp_path)
    adapted(model, tmp_path / "adapter", [target], seed=0)
    llm = start(tmp_path, enable_lora=True, max_lora_rank=8)
    with pytest.raises(ValueError, match=f"received .*{target}"):
        continued(llm, prompts(), adapters=LoRARequest("adapter", 1, str(tmp_path / "adapter")))


def as_described(q, k, v, cu_seqlens_q, seqused_k, block_table, alibi_slopes, **given):
    """What vLLM's FlashAttention says that it computes."""
    out, bounds = torch.empty_like(q), cu_seqlens_q.tolist()
    assert given["causal"]
    assert given["max_seqlen_q"] >= cu_seqlens_q.diff().max()
    assert given["max_seqlen_k"] >= seqused_k.max()
    for row, (length, first, end) in enumerate(zip(seqused_k.tolist(), bounds, bounds[1:], strict=False)):
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], keys) * given["softmax_scale"]
        if given["softcap"] > 0:
            scores = given["softcap"] * torch.tanh(scores / given["softcap"])
        back = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * back.abs()
        left, right = given["window_size"] or (length, 0)
        scores = scores.masked_fill((back < -right) | (back > left), -torch.inf)
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize(
    ("mechanisms", "changes"),
    [
        ({}, GQA | ALIBI),
        ({"value_residual": {}, "kv_shift": {}}, GQA | TWO_KINDS),
        ({"svformer": {}, "skip_layer": {}}, GQA),
    ],
)
def test_blocks_as_flash_attention_reads_them(mechanisms, changes, tmp_path, monkeypatch):
    file = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    (args,) = [one.args for one in functions if one.name == "flash_attn_varlen_func"]
    calls = []

    def kernel(**given):
        calls.append({*given, "fa_version"} <= {one.arg for one in (*args.args, *args.kwonlyargs)})
        return as_described(**given)

    monkeypatch.setattr("headwater.integrations.vllm.flash.kernel", kernel)
    monkeypatch.setattr("headwater.integrations.vllm.vllm_engine.CPUEngine", FlashEngine)
    model, rows = build(mechanisms, **changes), prompts()
    model.save_pretrained(tmp_path)
    assert right(model, rows, continued(start(tmp_path), rows)) == len(rows)
    assert calls
    assert all(calls)


def test_adapters_need_linear_layers(tmp_path):
    build({"pattention": {}}).save_pretrained(tmp_path)
    with pytest.raises(HeadwaterError, match="no linear layers for LoRA adapters to change"):
        start(tmp_path, enable_lora=True)


def test_other_weights_are_refused_in_a_started_engine(tmp_path):
    """vLLM would report success, and go on with the old ones."""
    build({"pattention": {}}).save_pretrained(tmp_path)
    llm = start(tmp_path)
    with pytest.raises(HeadwaterError, match="loads weights once; start vLLM again"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})


def test_whole_prompts_and_seeds(tmp_path):
    """With prompts in parts, vLLM crashes at a seed. A request is preempted."""
    model, rows = build({"kv_shift": {}}, **GQA), prompts()
    model.save_pretrained(tmp_path)
    llm = start(tmp_path, enable_chunked_prefill=False, max_num_batched_tokens=192, num_gpu_blocks_override=12)
    assert right(model, rows, continued(llm, rows)) == len(rows)
    options = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, detokenize=False)
    drawn = llm.generate([{"prompt_token_ids": row} for row in rows], options, use_tqdm=False)
    again = llm.generate([{"prompt_token_ids": row} for row in rows], options, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in drawn] == [one.outputs[0].token_ids for one in again]


PARALLEL = [
    ({"value_residual": {}, "skip_layer": {}, "kv_shift": {}}, GQA),
    ({"pattention": {}, "svformer": {}}, TIED),
]


@pytest.mark.parametrize(("mechanisms", "changes"), PARALLEL, ids=["+".join(one[0]) for one in PARALLEL])
def test_two_processes(mechanisms, changes, tmp_path, monkeypatch):
    """Each has half of the heads."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model, rows = build(mechanisms, **changes), prompts()
    model.save_pretrained(tmp_path)
    llm = start(tmp_path, tensor_parallel_size=2, speculative_config=NGRAMS)
    assert right(model, rows, continued(llm, rows)) == len(rows)


def test_as_many_tokens_as_planned(tmp_path, monkeypatch):
    """vLLM's own count of tokens, of a cache of 16 MiB."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # which would count instead
    model = build({"skip_layer": {}, "kv_shift": {}})
    model.save_pretrained(tmp_path)
    llm = start(tmp_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=2**24, max_model_len=256)
    cache, page = llm.llm_engine.vllm_config.cache_config, Page(model.config, model.plans, 32)
    blocks = 2**24 // page.size
    assert cache.num_gpu_blocks == blocks
    assert cache.kv_cache_size_tokens == blocks * 32


CONTROLS = {
    "raw tokens zeroed": (Lookback, "gather_tokens", lambda old: lambda *given: old(*given) * 0),
    "values swapped": (
        CPUEngine,
        "write_tokens",
        lambda old: lambda self, layer, k, v: old(self, layer, k.contiguous(), v.flip(1)),
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_mistakes_would_be_noticed(name, tmp_path, monkeypatch):
    owner, method, change = CONTROLS[name]
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))
    model, rows = build({"kv_shift": {}}), prompts()[:8]
    model.save_pretrained(tmp_path)
    assert right(model, rows, continued(start(tmp_path), rows)) <= 1


def test_half_precision_and_an_exported_checkpoint(tmp_path):
    """Most tokens are those of fp32; the folder has its own code, which vLLM need not trust."""
    model, rows = build({"svformer": {}, "smear": {"weight": 0.5}}), prompts()
    folder = export(model, tmp_path / "exported")
    made = continued(start(folder, dtype="bfloat16"), rows)
    exact = continued(start(folder), rows)
    assert right(model, rows, exact) == len(rows)
    same = sum(a == b for one, two in zip(made, exact, strict=True) for a, b in zip(one, two, strict=True))
    assert same > 0.5 * 12 * len(rows)


REFUSED = {
    "attention weights": ({"value_residual": {"target": "probabilities"}}, {}, {}, "needs masks or attention weights"),
    "pairs beside": ({"persistent_memory": {}}, {}, {}, "'persistent_memory' with its options needs masks"),
    "values that are keys": ({"mla": {}}, {}, {"tensor_parallel_size": 2}, "keys as values, in one process only"),
    "a latent": ({"low_rank_kv": {}}, {}, {"tensor_parallel_size": 2}, "read latents, or keys as values, in one"),
    "dynamic RoPE": ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "follow the longest"),
    "narrow heads": ({}, {"hidden_size": 64}, {}, "takes heads of 32, 64"),
    "blocks": ({}, {}, {"block_size": 16}, "multiple of 32"),
    "parts of blocks": ({"kv_shift": {}}, {}, {"prefix_match_unit": 16}, "whole blocks"),
    "pipeline": ({}, {}, {"pipeline_parallel_size": 2}, "by heads only|Pipeline parallelism is not supp"),
    "heads": ({"value_embedding": {"tables": 1}}, {}, {"tensor_parallel_size": 2}, "value_embedding' does not declare"),
    "adapters": ({}, {}, {"tensor_parallel_size": 2, "enable_lora": True}, "LoRA adapters in one process only"),
    "fp8": ({}, {}, {"kv_cache_dtype": "fp8"}, "not in fp8"),
    "another precision": ({}, {}, {"kv_cache_dtype": "bfloat16"}, "not in bfloat16"),
    "random weights": ({}, {}, {"load_format": "dummy"}, "weights, not random ones"),
    "embeddings": ({}, {}, {"enable_prompt_embeds": True}, "takes tokens, not embeddings"),
    "long": ({}, GPT2, {"max_model_len": 1024}, "512 learned positions; set max_model_len"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_loaded(case, tmp_path, monkeypatch):
    mechanisms, changes, options, message = REFUSED[case]
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    make = HeadwaterConfig.gpt2 if "gpt2" in changes else HeadwaterConfig
    given = SIZES | dict(mechanisms=mechanisms, architectures=["HeadwaterForCausalLM"]) | changes
    given.pop("gpt2", None)
    config = make(**given)
    config.save_pretrained(tmp_path)
    given: dict[str, Any] = dict(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True) | options
    with pytest.raises((HeadwaterError, ValueError), match=message):
        EngineArgs(**given).create_engine_config()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.31.2", "needs vLLM 0.32 or newer, but 0.31.2 is installed"),
        ("0.33.1", "was tested with vLLM 0.32, not yet with 0.33.1"),
        ("0.33.1", "does not fit vLLM 0.33.1"),
    ],
)
def test_another_version_of_vllm_says_so_and_serves_other_models(version, message, monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setitem(sys.modules, "headwater.integrations.vllm.option_checks", None)  # cannot be imported
    with caplog.at_level("WARNING", "vllm"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        register()
    assert message in caplog.text


def test_options_are_refused_in_one_sentence(tmp_path, server):
    command = [
        sys.executable,
        "-m",
        "headwater_lab",
        "serve",
        str(server.folder),
        "--engine",
        "vllm",
        "--block_size",
        "16",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1] == "headwater: block_size must be a multiple of 32, not 16."
    assert "Traceback" not in ended.stderr


def test_an_unknown_mechanism_is_refused_by_name(tmp_path):
    HeadwaterConfig(**SIZES, architectures=["HeadwaterForCausalLM"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mechanisms": {"value_residul": {}}}))
    with pytest.raises((HeadwaterError, ValueError), match=r"value_residul.*did you mean 'value_residual'"):
        EngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True).create_engine_config()


# The Transformers backend. In a process of its own, since vLLM changes the model's classes there.
BACKEND = """
import json, sys
from suite import continued, prompts, start

for folder in sys.argv[1:]:
    try:
        made = continued(start(folder, model_impl="transformers", trust_remote_code=True), prompts()[:8])
    except Exception as error:
        made = str(error)
    print("made " + json.dumps(made), flush=True)
"""


def test_materialised_in_the_transformers_backend(tmp_path):
    """Exact, and what could not be exact is refused: vLLM itself notices nothing."""
    model, rows = build({"skip_layer": {}, "value_residual": {}}), prompts()[:8]
    folders = [
        export(model, tmp_path / "materialised", materialise=True),
        export(model, tmp_path / "ordinary"),
        export(build({"kv_shift": {}}), tmp_path / "looks-back"),
    ]
    command = [sys.executable, "-c", BACKEND, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    made = [json.loads(line.removeprefix("made ")) for line in run.stdout.splitlines() if line.startswith("made ")]
    assert len(made) == len(folders), run.stderr[-3000:]
    assert right(model, rows, made[0]) == len(rows), made[0]
    assert "materialise=True" in made[1]
    assert "lacks the raw tokens that it looks back to" in made[2]


# The server, and a client that is not ours.


class Server:
    """`headwater serve --engine vllm` in a process group of its own, and a client."""

    def __init__(self, folder: Path, model: HeadwaterForCausalLM) -> None:
        self.folder, self.model = folder, model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)
        self.client.name = str(folder)

    def start(self) -> None:
        command = [sys.executable, "-m", "headwater_lab", "serve", str(self.folder), "--engine", "vllm"]
        command += ["--port", str(self.port), "--max-model-len", "128", "--block-size", "32"]
        log = self.folder / "log"
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            start_new_session=True,
        )
        until = time.monotonic() + 900
        while True:
            try:
                self.client.models.list()
                return
            except openai.APIConnectionError:
                assert self.process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(1)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model = build({"svformer": {}, "kv_shift": {}})
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(96)} | {"</s>": 96}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="w0")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    made = Server(folder, model)
    try:
        made.start()
        yield made
    finally:
        made.process.terminate()
        made.process.wait(60)


def text(row: list[int]) -> str:
    return " ".join("</s>" if token == 96 else f"w{token}" for token in row)


def test_a_client_gets_the_models_own_tokens(server):
    client, model = server.client, server.model
    rows = [row for row in prompts() if len(row) < 100 and 96 not in row][:8]
    extra = {"ignore_eos": True, "return_token_ids": True}

    def ask(row: list[int]) -> Any:
        return client.completions.create(
            model=client.name, prompt=text(row), max_tokens=8, temperature=0, logprobs=2, extra_body=extra
        )

    with ThreadPoolExecutor(8) as pool:  # at once
        answers = list(pool.map(ask, rows))
    made = [answer.choices[0].token_ids for answer in answers]
    assert right(model, rows, made) == len(rows)
    with torch.no_grad():
        logits = model(torch.tensor([rows[0]]), use_cache=False).logits[0, -1].log_softmax(-1)
    assert answers[0].choices[0].logprobs.token_logprobs[0] == pytest.approx(logits.max().item(), abs=1e-4)


def test_chat_streams_and_stops(server):
    client = server.client
    row = prompts()[4][:40]
    given = dict(model=client.name, messages=[{"role": "user", "content": text(row)}], temperature=0, max_tokens=12)
    whole = client.chat.completions.create(**given, extra_body={"ignore_eos": True}).choices[0].message.content
    stream = client.chat.completions.create(**given, stream=True, extra_body={"ignore_eos": True})
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == whole
    stop = whole.split()[3]
    stopped = client.chat.completions.create(**given, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stop not in stopped.message.content.split()


def test_bad_requests_are_answered_and_the_server_goes_on(server):
    client = server.client
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=client.name, prompt=text(tokens(200, 0)), max_tokens=8)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="w1", max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=client.name, prompt="w1", max_tokens=1, temperature=-1)
    assert client.completions.create(model=client.name, prompt="w1", max_tokens=1).choices
    assert json.loads(client.models.list().model_dump_json())["data"][0]["id"] == client.name


def test_a_killed_server_starts_again(server):
    """On its port, while a client waits for an answer; its answers are the same."""
    client = server.client
    row = [token for token in tokens(60, 3) if token != 96]
    asked = dict(model=client.name, prompt=text(row), temperature=0, extra_body={"ignore_eos": True})
    before = client.completions.create(**asked, max_tokens=12).choices[0].text
    stream = client.completions.create(**asked, max_tokens=60, stream=True)
    next(iter(stream))
    server.kill()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    server.start()
    assert client.completions.create(**asked, max_tokens=12).choices[0].text == before


def test_the_snippet_of_the_documentation_runs(server):
    """As a script, which vLLM's processes import too."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```\n(from vllm .*?)```", page, re.DOTALL)
    script = server.folder / "snippet.py"
    script.write_text(code.replace("CHECKPOINT", str(server.folder)))
    ours = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"\bw\d+", ended.stdout), ended.stdout[-3000:]
