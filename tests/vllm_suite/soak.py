"""Ten thousand requests in vLLM, to twelve models: `make soak-vllm`.

Prompts of 1 to 500 tokens, many with prefixes in common, through a cache of a few blocks: in chunks, with prefixes
found in the cache, with requests preempted, and half of them with tokens that are tried and taken back. Each token must
be the one that the model gives without a cache, in fp32, for that row alone; memory must not grow.
"""

import argparse
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from suite import GPT2, GQA, NGRAMS, build, inside, start
from vllm import SamplingParams

from headwater.cost.counts import cache_bytes_per_token
from headwater.engines.pages import Page

MECHANISMS = [
    {},
    {"skip_layer": {}},
    {"svformer": {}},
    {"kv_shift": {}},
    {"value_residual": {}, "skip_layer": {}, "kv_shift": {}},
    {"kv_shift": {}, "short_conv": {}, "smear": {"weight": 0.5}, "ngram_memory": {}},
]
BASES = {"Llama": GQA, "GPT-2": GPT2}
BLOCKS, BLOCK, LONGEST, ROUND = 48, 32, 500, 100
# Where two tokens are this close, another order of adding up may choose either.
TIE = 1e-4
COUNTED = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens")


def requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens to continue each by."""
    chance = random.Random(seed)

    def words(length: int) -> list[int]:
        return [chance.randrange(97) for _ in range(length)]

    prefixes = [words(400) for _ in range(8)]
    made: list[tuple[list[int], int]] = []
    for _ in range(count):
        kind, length = chance.random(), chance.randint(1, LONGEST)
        if kind < 0.05 and made:
            row = list(chance.choice(made)[0])
        elif kind < 0.15:
            row = (words(chance.randint(1, 8)) * LONGEST)[:length]
        elif kind < 0.65:
            row = chance.choice(prefixes)[: chance.randint(1, length)]
            row = row + words(length - len(row))
        else:
            row = words(length)
        made.append((row, min(chance.randint(1, 24), 512 - len(row))))
    return made


@torch.no_grad()
def judged(model, row: list[int], new: list[int]) -> tuple[int, int]:
    """How many of the new tokens are not the model's own, and how many of its own are ties."""
    logits = model(torch.tensor([row + new[:-1]]), use_cache=False, logits_to_keep=len(new)).logits[0]
    lost = logits.amax(-1) - logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
    return int((lost > TIE).sum()), int(((lost > 0) & (lost <= TIE)).sum())


def soak(mechanisms: dict, base: str, count: int, speculates: bool, seed: int) -> Counter:
    model = build(mechanisms, **BASES[base])
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        given = dict(num_gpu_blocks_override=BLOCKS, max_model_len=512, max_num_batched_tokens=256, max_num_seqs=16)
        given |= {"speculative_config": NGRAMS} if speculates else {}
        llm = start(Path(folder), disable_log_stats=False, **given)
    page = Page(model.config, model.plans, BLOCK, 4, NGRAMS["num_speculative_tokens"] if speculates else 0)
    assert page.history == BLOCK * cache_bytes_per_token(model.config)
    assert inside(llm).blocks.kv_cache.untyped_storage().nbytes() == BLOCKS * page.size
    found, memory = Counter(), []
    for first in range(0, count, ROUND):
        asked = requests(min(ROUND, count - first), seed + first)
        options = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in asked]
        made = llm.generate([{"prompt_token_ids": row} for row, _ in asked], options, use_tqdm=False)
        for (row, length), answer in zip(asked, made, strict=True):
            new = list(answer.outputs[0].token_ids)
            wrong, ties = judged(model, row, new)
            found.update(requests=1, tokens=len(new), wrong=wrong, ties=ties, short=length - len(new))
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    for metric in llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:")) in COUNTED:
            found[name] += int(metric.value)
    llm.llm_engine.engine_core.shutdown()
    settled = memory[min(2, len(memory) - 1)]
    found["grown"] = max(0, memory[-1] - settled) // 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000, help="to all models together")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the models, from 0")
    given = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cells = [(mechanisms, base) for base in BASES for mechanisms in MECHANISMS]
    bad = False
    for number, (mechanisms, base) in enumerate(cells):
        if given.only and number not in given.only:
            continue
        started, found = time.monotonic(), Counter()
        for half, speculates in enumerate((False, True)):
            count = -(-given.requests // (2 * len(cells)))
            found += soak(mechanisms, base, count, speculates, seed=1000 * number + 10_000_000 * half)
        bad |= bool(found["wrong"] or found["short"])
        print(
            f"{number:2} {base}, {', '.join(mechanisms) or 'no mechanism'}: {found['requests']:,} requests, "
            f"{found['tokens']:,} tokens, {found['wrong']} wrong, {found['ties']} ties, "
            f"{found['num_preemptions']:,} preemptions, {found['prefix_cache_hits']:,} tokens found in the cache, "
            f"{found['spec_decode_num_accepted_tokens']:,} speculated, {found['grown']} MiB grown, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
