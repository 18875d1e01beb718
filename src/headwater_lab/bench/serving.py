"""Throughput in vLLM, in caches of the same bytes: its own Llama, headwater without mechanisms, and with each."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.config.text import HeadwaterConfig
from headwater.conversion import to_transformers
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.bench.decoding import VANILLA
from headwater_lab.bench.paired import PairedTimes, take_turns
from headwater_lab.bench.shapes import ServeShape

LLAMA = "vLLM's Llama"
GIB = 2**30


class ServedRun(NamedTuple):
    """One run of all requests.

    seconds: in all. step: median seconds of a step that continues every request; nan if there was none. running: how
    many requests, mean over the steps. tokens: generated, by request.
    """

    seconds: float
    step: float
    running: float
    tokens: list[list[int]]


@dataclass
class Serving:
    """The results of one model.

    cache_tokens: how many tokens fit into the cache. runs: one a turn. against: the model that ratios divide by, turn
    by turn; None for the first.
    """

    model: str
    cache_tokens: int
    against: Serving | None
    runs: list[ServedRun] = field(default_factory=list)

    def paired(self, of: str = "seconds") -> PairedTimes | None:
        """Its times over those of `against`; of: "seconds" or "step"."""
        if self.against is None:
            return None
        return PairedTimes(*([getattr(run, of) for run in one.runs] for one in (self, self.against)))

    def median(self, of: str) -> float:
        return statistics.median(getattr(run, of) for run in self.runs)

    @property
    def same_tokens(self) -> bool:
        return self.against is not None and self.runs[-1].tokens == self.against.runs[-1].tokens


def bench_serving(
    mechanisms: Mapping[str, dict[str, dict]],
    shape: ServeShape,
    *,
    cache_memory: float | None = None,
    dtype: str = "float32",
) -> list[Serving]:
    """Random prompts at once, each continued greedily: by vLLM's Llama, by
    headwater without mechanisms, and by each of `mechanisms` (name -> a config's mechanisms), in turn.

    Each model has an engine in a process of its own. Llama and vanilla have the same weights. No prompt is in the cache
    when a run begins. cache_memory: bytes of each engine's cache; default: as many as vanilla needs for all requests.
    Raises `HeadwaterError` if an engine does not start or fails.
    """
    length = shape.context + shape.tokens
    torch.manual_seed(0)
    models: dict[str, Any] = {
        name: HeadwaterForCausalLM(HeadwaterConfig(**shape.config(length), norm_eps=1e-6, mechanisms=given))
        for name, given in {VANILLA: {}, **mechanisms}.items()
    }
    models = {LLAMA: to_transformers(models[VANILLA], "llama"), **models}
    needed = 2 * shape.layers * shape.width * getattr(torch, dtype).itemsize * shape.requests * (length + 2 * 128)
    settings = dict(
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=shape.requests,
        kv_cache_memory_bytes=int(needed if cache_memory is None else cache_memory),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(shape.vocab_size, (shape.requests, shape.context), generator=generator).tolist()
    found: dict[str, Serving] = {}
    with ExitStack() as stack:
        engines = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, (name, model) in enumerate(models.items()):
            place = folder / str(number)
            model.to(getattr(torch, dtype)).save_pretrained(place)
            engines[name] = stack.enter_context(_engine(str(place), settings, name))
            found[name] = Serving(name, _answer(engines[name], name), found.get(VANILLA, found.get(LLAMA)))
        del models, model
        for name, counts in take_turns(engines, shape.turns):
            engines[name].send((prompts, shape.tokens))
            run = _answer(engines[name], name)
            if counts:
                found[name].runs.append(run)
    return list(found.values())


@contextmanager
def _engine(folder: str, settings: dict[str, Any], name: str) -> Iterator[Connection]:
    """An engine in a process of its own, which answers each list of prompts with a `ServedRun`."""
    method = multiprocessing.get_context("spawn")
    ours, theirs = method.Pipe()
    process = method.Process(target=_work, args=(theirs, folder, settings), name=name, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(20)
        process.kill()
        process.join()


def _answer(engine: Connection, name: str) -> Any:
    try:
        answer = engine.recv()
    except EOFError:
        answer = "its process ended; vLLM's log above says why"
    if isinstance(answer, str):
        raise HeadwaterError(f"vLLM could not serve {name}: {answer.rstrip('.')}.")
    return answer


def _work(parent: Connection, folder: str, settings: dict[str, Any]) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    warnings.simplefilter("ignore", FutureWarning)  # of vLLM's own code
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # which would count instead of kv_cache_memory_bytes
    try:
        from vllm import LLM

        given = dict(enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False, use_tqdm_on_load=False)
        engine = LLM(model=folder, **given, **settings).llm_engine
        parent.send(engine.vllm_config.cache_config.kv_cache_size_tokens)
        while (asked := parent.recv()) is not None:
            parent.send(_timed(engine, *asked))
        engine.engine_core.shutdown()
    except Exception as error:
        parent.send(" ".join(str(error).split()) or type(error).__name__)


def _timed(engine: Any, prompts: list[list[int]], tokens: int) -> ServedRun:
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    made: dict[str, list[int]] = {}
    begun: set[str] = set()
    running: list[int] = []
    steps: list[float] = []
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, options)
    while engine.has_unfinished_requests():
        before, whole = time.perf_counter(), len(begun) == len(scheduler.running) == len(prompts)
        for output in engine.step():
            begun.add(output.request_id)
            if output.finished:
                made[output.request_id] = list(output.outputs[0].token_ids)
        if whole:
            steps.append(time.perf_counter() - before)
        running.append(len(scheduler.running))
    seconds = time.perf_counter() - started
    step = statistics.median(steps) if steps else float("nan")
    return ServedRun(seconds, step, statistics.mean(running), [made[str(number)] for number in range(len(prompts))])
