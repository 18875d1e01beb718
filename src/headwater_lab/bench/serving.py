"""Throughput in vLLM, in caches of the same bytes: its own Llama, headwater without mechanisms, and with each."""

import math
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater_lab.bench.decoding_speed import VANILLA, describe_ratios, with_llama
from headwater_lab.bench.paired import PairedTimes, describe_device, random_ids, take_turns
from headwater_lab.bench.shapes import Benchmark, ServeShape

LLAMA = "vLLM's Llama"


class ServedRun(NamedTuple):
    """One run of all requests.

    seconds: in all. step: median seconds of a step that continues every request; nan if there was none. running: how
    many requests, mean over the steps. tokens: generated, by request.
    """

    seconds: float
    step: float
    running: float
    tokens: list[list[int]]


def bench_serving(
    mechanisms: Mapping[str, dict[str, dict]],
    shape: ServeShape,
    precision: Precision,
    cache_memory: float | None = None,
) -> Benchmark:
    """Time random prompts that arrive at once, each continued greedily: by vLLM's Llama, by headwater without
    mechanisms, and by each of `mechanisms` (name -> a config's mechanisms), in turn.

    Each model has an engine in a separate process. Llama and vanilla have the same weights. No prompt is in the cache
    when a run begins. cache_memory: GiB of each engine's cache; default: as many as vanilla needs for all requests.
    Raises `HeadwaterError` if an engine does not start or fails.
    """
    length, dtype = shape.context + shape.tokens, precision.weights
    torch.manual_seed(0)
    models = with_llama({VANILLA: {}, **mechanisms}, shape, length, LLAMA)
    needed = 2 * shape.layers * shape.width * dtype.itemsize * shape.requests * (length + 2 * 128)
    settings = dict(
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=length,
        max_num_seqs=shape.requests,
        kv_cache_memory_bytes=int(needed if cache_memory is None else cache_memory * 2**30),
    )
    prompts = random_ids(shape.vocab_size, shape.requests, shape.context).tolist()
    engines, sizes = {}, {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, (name, model) in enumerate(models.items()):
            model_folder = folder / str(number)
            model.to(dtype).save_pretrained(model_folder)
            engine = stack.enter_context(_start_engine(str(model_folder), settings, name))
            sizes[name] = _receive_answer(engine, name)
            engines[name] = partial(_ask_engine, engine, name, (prompts, shape.tokens))
        del models, model
        runs = take_turns(engines, shape.turns)
    rows = [_describe_runs(name, sizes[name], runs) for name in runs]
    notes = (
        describe_ratios(LLAMA, runs[VANILLA][-1].tokens == runs[LLAMA][-1].tokens)
        + "\nrunning: requests at a time, mean over the steps. ms/step: of steps that continue all requests."
    )
    return Benchmark(f"{shape}, precision {precision}; {describe_device('cpu')}", rows, notes)


def _describe_runs(name: str, cache_tokens: int, runs: dict[str, list[ServedRun]]) -> dict[str, str]:
    """Write a model's row. cache_tokens: how many tokens fit into its cache."""
    seconds = {model: [run.seconds for run in model_runs] for model, model_runs in runs.items()}
    steps = {model: [run.step for run in model_runs] for model, model_runs in runs.items()}
    step = statistics.median(steps[name])
    row = {
        "model": name,
        "tokens in cache": f"{cache_tokens:,}",
        "running": f"{statistics.median(run.running for run in runs[name]):.1f}",
        "s": f"{statistics.median(seconds[name]):.2f}",
        "ms/step": "" if math.isnan(step) else f"{step * 1e3:.1f}",
    }
    if name != LLAMA:
        against = LLAMA if name == VANILLA else VANILLA
        of_steps = PairedTimes(steps[name], steps[against]).ratio
        row |= PairedTimes(seconds[name], seconds[against]).write_cells()
        row["ratio of steps"] = "" if math.isnan(of_steps) else f"{of_steps:.3f}"
    return row


@contextmanager
def _start_engine(folder: str, settings: dict[str, Any], name: str) -> Iterator[Connection]:
    """Start an engine in a separate process, which answers each list of prompts with a `ServedRun`."""
    method = multiprocessing.get_context("spawn")
    connection, child_connection = method.Pipe()
    process = method.Process(target=_run_engine, args=(child_connection, folder, settings), name=name, daemon=True)
    process.start()
    child_connection.close()
    try:
        yield connection
    finally:
        with suppress(OSError):
            connection.send(None)
        process.join(20)
        process.kill()
        process.join()


def _ask_engine(engine: Connection, name: str, question: Any) -> Any:
    engine.send(question)
    return _receive_answer(engine, name)


def _receive_answer(engine: Connection, name: str) -> Any:
    try:
        answer = engine.recv()
    except EOFError:
        answer = "its process ended; see vLLM's log above"
    if isinstance(answer, str):
        raise HeadwaterError(f"vLLM could not serve {name}: {answer.rstrip('.')}.")
    return answer


def _run_engine(parent: Connection, folder: str, settings: dict[str, Any]) -> None:
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

        settings |= dict(
            enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False, use_tqdm_on_load=False
        )
        engine = LLM(model=folder, **settings).llm_engine
        parent.send(engine.vllm_config.cache_config.kv_cache_size_tokens)
        while (request := parent.recv()) is not None:
            parent.send(_time_requests(engine, *request))
        engine.engine_core.shutdown()
    except Exception as error:
        parent.send(" ".join(str(error).split()) or type(error).__name__)


def _time_requests(engine: Any, prompts: list[list[int]], tokens: int) -> ServedRun:
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    generated: dict[str, list[int]] = {}
    begun: set[str] = set()
    running: list[int] = []
    steps: list[float] = []
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, options)
    while engine.has_unfinished_requests():
        step_started, is_full = time.perf_counter(), len(begun) == len(scheduler.running) == len(prompts)
        for output in engine.step():
            begun.add(output.request_id)
            if output.finished:
                generated[output.request_id] = list(output.outputs[0].token_ids)
        if is_full:
            steps.append(time.perf_counter() - step_started)
        running.append(len(scheduler.running))
    seconds = time.perf_counter() - started
    step = statistics.median(steps) if steps else float("nan")
    return ServedRun(
        seconds, step, statistics.mean(running), [generated[str(number)] for number in range(len(prompts))]
    )
