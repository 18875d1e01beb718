"""Check that decoding with a cache matches decoding without one, for every way of decoding and each mechanism.

Everything runs in fp64, where only a bug exceeds 1e-9, token for token; the logits also run once in fp32.
"""

from __future__ import annotations

import copy
import itertools
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from headwater import cost
from headwater.config import HeadwaterConfig
from headwater.errors import HeadwaterError
from headwater.models.cache import cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.registry import MECHANISMS

# Tokens of the prompts, tokens to generate, and the longest row that results.
PROMPT, NEW = 13, 8
LONGEST = PROMPT + NEW + 3 + NEW
EXACT = 1e-9
# `generate` returns logits in fp32, whatever the model's precision.
ROUNDED = 1e-6


def combinations(size: int) -> list[dict[str, dict]]:
    """Every choice of `size` registered mechanisms with their defaults, in the registry's order."""
    return [{name: {} for name in chosen} for chosen in itertools.combinations(MECHANISMS.names, size)]


def tiny(mechanisms: dict[str, dict], layers: int = 4, seed: int = 0) -> HeadwaterForCausalLM | None:
    """A small fp64 model with perturbed parameters (zeros and ones would hide bugs); None if the config is invalid."""
    try:
        config = HeadwaterConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_seed=seed,
            mechanisms=mechanisms,
        )
    except (HeadwaterError, StrictDataclassError):
        return None
    model = HeadwaterForCausalLM(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    kernels, _ = config.attention_kernels
    if kernels is not None:
        model.set_attn_implementation(kernels[0])
    return model.double().eval()


@dataclass(frozen=True)
class Verified:
    """One way of decoding with one model. error: relative difference of logits if logits are compared (None
    for tokens or bytes); ok: whether it matches decoding without a cache; None if it does not apply.
    """

    check: str
    ok: bool | None
    error: float | None = None


def verify(model: HeadwaterForCausalLM, seed: int = 0) -> list[Verified]:
    """Compare every way of decoding with the model without a cache. The model should be fp64; it is not changed.

    Raises `HeadwaterError` for a model with too few learned positions.
    """
    positions = model.config.max_position_embeddings
    if model.config.position == "learned" and positions < LONGEST:
        raise HeadwaterError(f"Verifying needs {LONGEST} positions, but this model has only {positions} learned ones.")
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (3, PROMPT), generator=draw)
    with _without_end(model):
        return [_run(name, check, model, ids) for name, check in CHECKS.items()]


@contextmanager
def _without_end(model: HeadwaterForCausalLM) -> Iterator[None]:
    """In this context, `generate` ignores the model's stop settings, so all rows have one length."""
    before = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = before


def _run(name: str, check: Callable[..., Any], model: HeadwaterForCausalLM, ids: Tensor) -> Verified:
    found = check(model, ids)
    if isinstance(found, float):
        return Verified(name, found <= (1e-4 if name == FP32 else EXACT), found)
    return Verified(name, found)


def _difference(cached: Tensor, uncached: Tensor) -> float:
    return float((cached - uncached).abs().max() / uncached.abs().max())


@torch.no_grad()
def _chunked(model: HeadwaterForCausalLM, ids: Tensor, chunks: Sequence[int]) -> float:
    cache, logits = DynamicCache(config=model.config), []
    for part in ids.split(list(chunks), dim=1):
        logits.append(model(part, past_key_values=cache).logits)
    return _difference(torch.cat(logits, dim=1), model(ids, use_cache=False).logits)


def _same(model: HeadwaterForCausalLM, ids: Tensor, uncached: dict[str, Any] | None = None, **options: Any) -> bool:
    """Whether `generate` with `options` gives the same tokens with a cache and (with `uncached`) without."""
    made = []
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0) | options
    alone = {"use_cache": False, "prefill_chunk_size": None} if uncached is None else uncached
    for changes in ({}, alone):
        torch.manual_seed(0)
        made.append(model.generate(ids, **(given | changes)))
    return torch.equal(*made)


def _left_padded(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    """Rows of three lengths in one batch, each compared with running alone without a cache."""
    mask = (torch.arange(PROMPT) >= torch.tensor([[0], [4], [PROMPT - 1]])).long()
    options: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    together = model.generate(ids, attention_mask=mask, **options)[:, PROMPT:]
    alone = []
    for row, real in zip(ids, mask.bool(), strict=True):
        prompt = row[real][None]
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **options)
        alone.append(made[0, prompt.shape[1] :])
    return torch.equal(together, torch.stack(alone))


def _assisted(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    """With an assistant whose proposals are mostly rejected, because its parameters are different random ones."""
    assistant = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    alone = {"use_cache": False, "assistant_model": None}
    return _same(model, ids[:1], alone, assistant_model=assistant)


def _lookup(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    prompt = ids[:1, :4].repeat(1, 3)
    alone = {"use_cache": False, "prompt_lookup_num_tokens": None}
    return _same(model, prompt, alone, prompt_lookup_num_tokens=3)


def _turns(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    """A second turn that continues with the first one's cache."""
    options: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    first = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
    longer = torch.cat((first.sequences, ids[:, :3]), dim=1)
    return _same(model, longer, {"past_key_values": None, "use_cache": False}, past_key_values=first.past_key_values)


def _static(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    alone = {"use_cache": False, "cache_implementation": None}
    return _same(model, ids, alone, cache_implementation="static", disable_compile=True)


def _static_chunked(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    alone = {"use_cache": False, "cache_implementation": None, "prefill_chunk_size": None}
    return _same(model, ids, alone, cache_implementation="static", disable_compile=True, prefill_chunk_size=4)


@torch.no_grad()
def _materialised(model: HeadwaterForCausalLM, ids: Tensor) -> float | None:
    """With ordinary keys and values in every layer and a cache that knows nothing of this library."""
    config = copy.deepcopy(model.config)
    config.materialise = True
    try:
        ordinary = HeadwaterForCausalLM._from_config(config, attn_implementation=model.config._attn_implementation)
    except HeadwaterError:
        return None
    ordinary.to(model.dtype).load_state_dict(model.state_dict())
    ordinary.eval()
    cache, logits = DynamicCache(), []
    for part in ids.split([7, 1, PROMPT - 8], dim=1):
        logits.append(ordinary(part, past_key_values=cache).logits)
    return _difference(torch.cat(logits, dim=1), model(ids, use_cache=False).logits)


@torch.no_grad()
def _bytes(model: HeadwaterForCausalLM, ids: Tensor) -> bool:
    cache = model(ids, use_cache=True).past_key_values
    return cache_bytes(cache) == cost.cache_bytes(model.config, PROMPT, len(ids), model.dtype.itemsize)


FP32 = "fp32 logits"
CHECKS: dict[str, Callable[[HeadwaterForCausalLM, Tensor], bool | float | None]] = {
    "1 by 1": lambda model, ids: _chunked(model, ids, [1] * PROMPT),
    "6+1+6": lambda model, ids: _chunked(model, ids, [6, 1, PROMPT - 7]),
    "12+1": lambda model, ids: _chunked(model, ids, [PROMPT - 1, 1]),
    "greedy": _same,
    "left padding": _left_padded,
    "chunked prefill": lambda model, ids: _same(model, ids, prefill_chunk_size=4),
    "beams": lambda model, ids: _same(model, ids, num_beams=3),
    "sampling": lambda model, ids: _same(model, ids, do_sample=True, top_k=0, num_return_sequences=2),
    "beam sampling": lambda model, ids: _same(model, ids, do_sample=True, top_k=0, num_beams=3, num_return_sequences=2),
    "assisted": _assisted,
    "prompt lookup": _lookup,
    "second turn": _turns,
    "static cache": _static,
    "static, chunked": _static_chunked,
    "materialised": _materialised,
    "cache bytes": _bytes,
    FP32: lambda model, ids: _chunked(copy.deepcopy(model).float(), ids, [6, 1, PROMPT - 7]),
}


@dataclass(frozen=True)
class Served:
    """Statistics of `serve_requests`: requests done, those whose tokens (or sampled logits) were not the unbatched,
    uncached model's, the largest relative difference of logits, and the memory the process held, in bytes, after a
    fifth of them and at the end.
    """

    requests: int
    wrong: int
    error: float
    early_memory: int
    memory: int


def serve_requests(
    models: Sequence[HeadwaterForCausalLM], requests: int, *, sampled: bool = False, longest: int = 512, seed: int = 0
) -> Iterator[Served]:
    """Random requests in random left-padded batches, through `models` in turn; yields the state after each batch.

    Prompts have 1 to `longest` tokens, batches 1 to 16 rows, and 1 to 8 tokens are generated: greedily, each compared
    with the argmax of one uncached forward of its row alone; or sampled, the logits compared.
    """
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    done = wrong = 0
    error = 0.0
    early = resident_memory()
    for model in itertools.cycle(models):
        room = model.config.max_position_embeddings - 8 if model.config.position == "learned" else longest
        lengths = [number(1, min(longest, room)) for _ in range(min(number(1, 16), requests - done))]
        longest_row, new = max(lengths), number(1, 8)
        ids = torch.randint(model.config.vocab_size, (len(lengths), longest_row), generator=draw)
        mask = (torch.arange(longest_row) >= longest_row - torch.tensor(lengths)[:, None]).long()
        torch.manual_seed(number(0, 2**31))
        with _without_end(model):
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=sampled,
                return_dict_in_generate=True,
                output_logits=True,
            )
        for row, length in enumerate(lengths):
            tokens = made.sequences[row, longest_row - length :][None]
            with torch.no_grad():
                alone = model(tokens[:, :-1], use_cache=False, logits_to_keep=new).logits[0]
            off = _difference(torch.stack([step[row] for step in made.logits]), alone)
            error = max(error, off)
            wrong += off > ROUNDED if sampled else not torch.equal(alone.argmax(-1), tokens[0, -new:])
        done += len(lengths)
        if done <= requests // 5:
            early = resident_memory()
        yield Served(done, wrong, error, early, resident_memory())
        if done == requests:
            return


def resident_memory() -> int:
    """The memory of this process in bytes, or its peak if the system does not report the current value."""
    pages = Path("/proc/self/statm")
    if pages.is_file():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
