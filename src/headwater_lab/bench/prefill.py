"""Time to read a prompt into a cache, up to the logits of its last token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater_lab.bench.decoding import VANILLA
from headwater_lab.bench.paired import PairedTimes, take_turns
from headwater_lab.bench.shapes import PrefillShape


@dataclass(frozen=True)
class Prefill:
    """The results of one model.

    layers: those that run for the last token alone. paired: seconds per prompt, against vanilla's in the same turns.
    planned: the FLOPs of `cost.prefill_flops`, over vanilla's.
    """

    model: str
    layers: int
    paired: PairedTimes
    planned: float

    @property
    def second(self) -> float:
        return statistics.median(self.paired.a)


def bench_prefill(
    mechanisms: Mapping[str, dict[str, dict]],
    shape: PrefillShape,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Prefill]:
    """Prompts of random tokens, read by headwater without mechanisms and with each of `mechanisms` (name -> a
    config's mechanisms), in turn.
    """
    sizes = shape.config(shape.context)
    configs = {name: HeadwaterConfig(**sizes, mechanisms=given) for name, given in {VANILLA: {}, **mechanisms}.items()}
    models = {name: HeadwaterForCausalLM(config).to(device, dtype).eval() for name, config in configs.items()}
    ids = torch.randint(
        shape.vocab_size, (shape.batch_size, shape.context), generator=torch.Generator().manual_seed(0)
    ).to(device)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for name, counts in take_turns(models, shape.turns):
        second = read_timed(models[name], ids)
        if counts:
            seconds[name].append(second)
    flops = {name: cost.prefill_flops(config, shape.context) for name, config in configs.items()}
    return [
        Prefill(
            name,
            shape.layers - output_only_from(config, plan_layers(config)),
            PairedTimes(seconds[name], seconds[VANILLA]),
            flops[name] / flops[VANILLA],
        )
        for name, config in configs.items()
    ]


@torch.no_grad()
def read_timed(model: HeadwaterForCausalLM, ids: Tensor) -> float:
    """Seconds to read ids [B, T] into a new cache."""
    cache = DynamicCache(config=model.config)
    started = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
