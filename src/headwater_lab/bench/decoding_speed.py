"""Time to the first token and per later token: mechanisms against the model without them, and Llama."""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.conversion import to_transformers
from headwater.cost import counts as cost
from headwater.models.cache import cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.cache_name import cache_of
from headwater.util.precision import Precision
from headwater_lab.bench.paired import (
    PairedTimes,
    Show,
    TurnsInterrupted,
    describe_device,
    ignore_progress,
    random_ids,
    take_turns,
)
from headwater_lab.bench.shapes import Benchmark, DecodeShape
from headwater_lab.util.machine_speed import read_bandwidth

LLAMA = "transformers' Llama"
VANILLA, AGAIN = "vanilla", "vanilla, again"


class TimedGeneration(NamedTuple):
    """One generation of a model.

    first_token: seconds until the prompt is read and the first new token is known. seconds_per_token: of each token
    after it. tokens: [batch, tokens]. cache_bytes: of the tokens in the cache at the end, without the room for more.
    """

    first_token: float
    seconds_per_token: float
    tokens: Tensor
    cache_bytes: int


def bench_decode(
    mechanisms: Mapping[str, dict[str, dict]],
    shape: DecodeShape,
    precision: Precision,
    device: str,
    show: Show = ignore_progress,
) -> Benchmark:
    """Time greedy generation after a prompt of random tokens, by each model in turn: Llama, headwater without
    mechanisms, and with each of `mechanisms` (name -> a config's mechanisms). The default sizes are those of GPT-2
    124M, with a separate output head.

    Both times include the preparation of a long generation (`kernels.fused_linear`). Llama and vanilla have the same
    weights, and a second copy of vanilla is timed too: the position of its weights in memory can make a model 5 %
    slower or faster. show: see `take_turns`.
    """
    bandwidth, dtype = read_bandwidth(device), precision.weights
    sizes = shape.config(shape.context + shape.tokens)
    models: dict[str, Any] = {
        name: HeadwaterForCausalLM(HeadwaterConfig(**sizes, norm_eps=1e-6, mechanisms=options))
        for name, options in {VANILLA: {}, **mechanisms, AGAIN: {}}.items()
    }
    models = {LLAMA: to_transformers(models[VANILLA], "llama"), **models}
    models[AGAIN].load_state_dict(models[VANILLA].state_dict())
    for model in models.values():
        model.to(device, dtype).eval()
    ids = random_ids(shape.vocab_size, shape.batch_size, shape.context).to(device)
    is_whole = True
    try:
        runs = decode_in_turns(models, ids, shape.tokens, shape.turns, show)
    except TurnsInterrupted as signal:
        runs, is_whole = signal.results, False
    vanilla, rows = runs[VANILLA], []
    same = "the same" if torch.equal(vanilla[-1].tokens, runs[LLAMA][-1].tokens) else "not the same"
    for name, generations in runs.items():
        config = models[VANILLA if name == LLAMA else name].config
        firsts, seconds = (list(times) for times in zip(*(run[:2] for run in generations), strict=True))
        second, cache_size = statistics.median(seconds), generations[-1].cache_bytes
        size = dtype.itemsize * cost.weights_read(config)
        size += shape.batch_size * cost.cache_bytes_read(config, shape.context + shape.tokens // 2, dtype.itemsize)
        row = {"model": name, "first token, ms": f"{statistics.median(firsts) * 1e3:.1f}", "first ratio": ""}
        row |= {"ms/token": f"{second * 1e3:.2f}", "cache": f"{cache_size:,} B"}
        if name != LLAMA:
            against = runs[LLAMA if name == VANILLA else VANILLA]
            row["first ratio"] = f"{PairedTimes(firsts, [run.first_token for run in against]).ratio:.3f}"
            row |= PairedTimes(seconds, [run.seconds_per_token for run in against]).write_cells()
            row["cache"] = f"× {cache_size / vanilla[-1].cache_bytes:.5f}"
        rows.append(row | {"bandwidth": f"{size / second / bandwidth:.0%}"})
    return Benchmark(
        f"{shape}, precision {precision}; {describe_device(device)}; memory read at {bandwidth / 1e9:.1f} GB/s",
        rows,
        f"ratio: time over {VANILLA}'s, and {VANILLA}'s over that of {LLAMA}; median over the turns.\n"
        f"{VANILLA}: {same} tokens as {LLAMA}.\n"
        f"{AGAIN}: a second copy, which shows the effect of the position in memory. bandwidth: weights and cache read "
        "per second, as a share of the memory bandwidth.",
        is_whole,
    )


def decode_in_turns(
    models: Mapping[str, PreTrainedModel], ids: Tensor, tokens: int, turns: int, show: Show = ignore_progress
) -> dict[str, list[TimedGeneration]]:
    """Generate `tokens` tokens greedily after ids [B, T] with each model in turn, so that a busy machine slows all."""
    return take_turns(
        {name: partial(_time_generation, model, ids, tokens) for name, model in models.items()}, turns, show=show
    )


def _time_generation(model: PreTrainedModel, ids: Tensor, tokens: int) -> TimedGeneration:
    times: list[float] = []

    def note_time(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    started = time.perf_counter()
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[note_time],
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    second = (times[-1] - times[0]) / (len(times) - 1)
    return TimedGeneration(
        times[0] - started, second, generated.sequences[:, ids.shape[1] :], cache_bytes(cache_of(generated))
    )
