"""Time per generated token: mechanisms against the model without them, and that against transformers' Llama."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.conversion import to_transformers
from headwater.cost import counts as cost
from headwater.models.cache import cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.cache_name import CACHE, cache_of
from headwater_lab.bench.paired import PairedTimes, take_turns
from headwater_lab.bench.shapes import DecodeShape

LLAMA = "transformers' Llama"
VANILLA, AGAIN = "vanilla", "vanilla, again"


@dataclass(frozen=True)
class Decoding:
    """The results of one arm.

    seconds: per token, one figure a turn. against: the arm that `ratio` and `quartiles` divide by, turn by turn; None
    for the first. cache_bytes: of the tokens held at the end, without the room for more. read: bytes of weights and
    cache that a step reads, on average. tokens: what it generated, [batch, tokens].
    """

    arm: str
    seconds: list[float]
    against: Decoding | None
    cache_bytes: int
    read: float
    tokens: Tensor

    @property
    def paired(self) -> PairedTimes | None:
        return None if self.against is None else PairedTimes(self.seconds, self.against.seconds)

    @property
    def second(self) -> float:
        """Median seconds per token."""
        return statistics.median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        return self.read / self.second

    @property
    def same_tokens(self) -> bool:
        """Whether it generated the same tokens as the arm it is compared with."""
        return self.against is not None and torch.equal(self.tokens, self.against.tokens)


def bench_decode(
    mechanisms: Mapping[str, dict[str, dict]],
    shape: DecodeShape,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Decoding]:
    """Greedy generation after a prompt of random tokens: Llama, headwater without mechanisms, and each
    of `mechanisms` (name -> a config's mechanisms), in turn. The default sizes are those of GPT-2 124M, with a separate
    output head.

    Time counts from the first new token to the last, without the prompt; it includes the preparation of a long
    generation (`kernels.linear`). Llama and vanilla have the same weights, and a second copy of vanilla is timed too:
    where its weights are in memory can make a model 5 % slower or faster.
    """
    configs = {
        name: HeadwaterConfig(**shape.config(shape.context + shape.tokens), norm_eps=1e-6, mechanisms=given)
        for name, given in {VANILLA: {}, **mechanisms, AGAIN: {}}.items()
    }
    models: dict[str, Any] = {name: HeadwaterForCausalLM(config) for name, config in configs.items()}
    models[AGAIN].load_state_dict(models[VANILLA].state_dict())
    models = {LLAMA: to_transformers(models[VANILLA], "llama"), **models}
    for model in models.values():
        model.to(device, dtype).eval()
    size = (shape.batch_size, shape.context)
    ids = torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(0)).to(device)

    seconds, made, held = decode_in_turns(models, ids, shape.tokens, shape.turns)
    found: dict[str, Decoding] = {}
    for name in models:
        config = configs.get(name, configs[VANILLA])
        history = shape.context + shape.tokens // 2
        step = dtype.itemsize * cost.weights_read(config)
        step += shape.batch_size * cost.cache_bytes_read(config, history, dtype.itemsize)
        against = found.get(VANILLA, found.get(LLAMA))
        found[name] = Decoding(name, seconds[name], against, held[name], step, made[name])
    return list(found.values())


def decode_in_turns(
    models: Mapping[str, PreTrainedModel], ids: Tensor, tokens: int, turns: int
) -> tuple[dict[str, list[float]], dict[str, Tensor], dict[str, int]]:
    """Greedy generation of `tokens` tokens after ids [B, T] by each model in turn, so that a busy machine slows all.

    By model: seconds per token of each turn, the tokens [B, tokens], and bytes of the cache at the end.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    made: dict[str, Tensor] = {}
    held: dict[str, int] = {}
    read = {name: _read(model, ids) for name, model in models.items()}
    for name, counts in take_turns(models, turns):
        second, made[name], held[name] = generate_timed(models[name], ids, tokens, copy.deepcopy(read[name]))
        if counts:
            seconds[name].append(second)
    return seconds, made, held


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """The cache after all of the prompt but its last token, so that each turn need not read it again."""
    cache = DynamicCache(config=model.config)
    if ids.shape[1] > 1:
        model(ids[:, :-1], logits_to_keep=1, **{CACHE: cache})
    return cache


def generate_timed(model: PreTrainedModel, ids: Tensor, tokens: int, cache: DynamicCache) -> tuple[float, Tensor, int]:
    """Seconds per token after the first, the new tokens, and bytes of the cache at the end."""
    times: list[float] = []

    def note_time(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[note_time],
        pad_token_id=0,
        return_dict_in_generate=True,
        **{CACHE: cache},
    )
    second = (times[-1] - times[0]) / (len(times) - 1)
    return second, made.sequences[:, ids.shape[1] :], cache_bytes(cache_of(made))
