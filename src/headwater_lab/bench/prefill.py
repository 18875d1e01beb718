"""Time to read a prompt into a cache, up to the logits of its last token."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import seconds
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.precision import Precision
from headwater_lab.bench.decoding import VANILLA
from headwater_lab.bench.paired import PairedTimes, describe_device, random_ids, take_turns
from headwater_lab.bench.shapes import Benchmark, PrefillShape


def bench_prefill(
    mechanisms: Mapping[str, dict[str, dict]], shape: PrefillShape, precision: Precision, device: str
) -> Benchmark:
    """Time prompts of random tokens, read by headwater without mechanisms and with each of `mechanisms` (name -> a
    config's mechanisms), in turn.
    """
    sizes = shape.config(shape.context)
    compared = {VANILLA: {}, **mechanisms}
    configs = {name: HeadwaterConfig(**sizes, mechanisms=options) for name, options in compared.items()}
    ids = random_ids(shape.vocab_size, shape.batch_size, shape.context).to(device)
    runs = {}
    for name, config in configs.items():
        model = HeadwaterForCausalLM(config).to(device, precision.weights).eval()
        runs[name] = partial(seconds, partial(_read_prompt, model, ids))
    times = take_turns(runs, shape.turns)
    flops = {name: cost.prefill_flops(config, shape.context) for name, config in configs.items()}
    rows = []
    for name, config in configs.items():
        skipped = shape.layers - output_only_from(config, plan_layers(config))
        milliseconds = f"{statistics.median(times[name]) * 1e3:.1f}"
        rows.append({"model": name, "layers skipped": str(skipped), "ms/prompt": milliseconds})
        if name != VANILLA:
            planned = f"{flops[name] / flops[VANILLA]:.3f}"
            rows[-1] |= PairedTimes(times[name], times[VANILLA]).cells() | {"planned": planned}
    return Benchmark(
        f"{shape}, precision {precision}; {describe_device(device)}",
        rows,
        "layers skipped: by all tokens but the last. "
        f"ratio: time over {VANILLA}'s, median over the turns. planned: the same of FLOPs.",
    )


@torch.no_grad()
def _read_prompt(model: HeadwaterForCausalLM, ids: Tensor) -> None:
    """Read ids [B, T] into a new cache."""
    model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
