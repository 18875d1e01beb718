"""Verify every model type of transformers: a small random model of each, in a process with a limit of time and memory.

The file of results is the state: a type that is in it, verified by the same versions, is not verified again.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from headwater.errors import HeadwaterError
from headwater.outputs import SWEEP, check_replaceable, has_keys, write_json
from headwater.verify.small import TYPES, small_model
from headwater.verify.verdicts import Verified, sentence, verify_twice
from headwater.verify.ways import WAYS
from headwater.workers import Answer, Worker

# Ways of which one must run for a verdict on a cache.
CACHED = {way.name for way in WAYS} - {"prefixes", "rows alone", "padding", "packing", "packing+"}


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }


def as_data(found: Sequence[Verified]) -> list[dict[str, Any]]:
    """Verdicts for JSON; fields without a value are left out, and infinity is a string."""
    return [
        {
            key: str(value) if isinstance(value, float) and value == float("inf") else value
            for key, value in dataclasses.asdict(one).items()
            if (value is not None and value is not False) or key == "ok"
        }
        for one in found
    ]


def one_type(model_type: str, seed: int, memory: int) -> dict[str, Any]:
    """What a worker does. memory: most bytes of address space (where the system can limit it)."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    try:
        model = small_model(model_type, seed)
    except Exception as error:
        return {"type": model_type, "not_built": sentence(error)}
    try:
        found = verify_twice(model, seed, another=partial(small_model, model_type))
        return {
            "type": model_type,
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "ways": as_data(found),
        }
    except Exception as error:
        return {"type": model_type, "class": type(model).__name__, "not_verified": sentence(error)}


def sweep(
    out: Path,
    types: Sequence[str] = TYPES,
    seed: int = 0,
    seconds: float = 120,
    memory: int = 16 << 30,
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Verify types whose result is not in `out` yet; write it after each. Returns all of `out`.

    seconds: most for one type. on_result: called with each new result. Raises `HeadwaterError` if `out` is a file that
    headwater did not write.
    """
    check_replaceable(out, has_keys(SWEEP))
    results: dict[str, Any] = {"versions": versions(), "seed": seed, "types": {}}
    with suppress(OSError, ValueError):
        before = json.loads(out.read_text())
        if before.get("versions") == results["versions"] and before.get("seed") == seed:
            results["types"] = before["types"]
    answers: queue.Queue[Answer] = queue.Queue()
    worker: Worker | None = None
    try:
        for model_type in types:
            if model_type in results["types"]:
                continue
            if worker is None:
                quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
                worker = Worker(f"{__name__}:one_type", lambda _, answer: answers.put(answer), quiet)
                if answers.get() is None:
                    raise HeadwaterError(f"A process to verify in could not be started: {worker.ending}.")
            worker.call(model_type=model_type, seed=seed, memory=memory)
            try:
                answer = answers.get(timeout=seconds)
            except queue.Empty:
                answer = {"result": {"type": model_type, "not_verified": f"not within {seconds:g} seconds"}}
                worker.end(0)
                worker = None
            else:
                if answer is None:
                    answer = {"result": {"type": model_type, "not_verified": f"its process ended: {worker.ending}"}}
                    worker = None
            while worker is None and not answers.empty():  # that the last worker has ended
                answers.get()
            result = answer.get("result") or {"type": model_type, "not_verified": ": ".join(answer["error"])}
            results["types"][model_type] = result
            write_json(out, results, SWEEP)
            on_result(result)
    finally:
        if worker is not None:
            worker.end(0)
    return results


def summary(results: Mapping[str, Any]) -> Iterator[tuple[str, list[str], str | None]]:
    """Of each type in `sweep`'s results: its name, the ways that differ, and why there is no verdict, if so."""
    for name, one in results["types"].items():
        why = one.get("not_built") or one.get("not_verified")
        ways = one.get("ways", [])
        if ways and all(way["ok"] is None for way in ways if way["check"] in CACHED):
            yield name, [], f"no way with a cache runs: {ways[-1].get('why', '')}"
            continue
        yield name, [way["check"] for way in ways if way["ok"] is False], why


def as_markdown(results: Mapping[str, Any]) -> str:
    """Tables for documentation: types that differ and where, types that do not, and those without a verdict."""
    lines = [
        "| model type | ways that differ | the first of them: row, position; layer | at most off by |",
        "| --- | --- | --- | --- |",
    ]
    fine, none = [], []
    for name, lies, why in summary(results):
        if why:
            none.append(f"| {name} | {why.replace('|', '/')} |")
        elif not lies:
            fine.append(name)
        else:
            ways = [way for way in results["types"][name]["ways"] if way["ok"] is False]
            parting = ways[0].get("parting", {})
            place = f"{parting['row']}, {parting['position']}; {parting.get('layer') or '–'}" if parting else "–"
            error = max(float(way.get("error", way.get("rounded", 0.0))) for way in ways)
            lines.append(f"| {name} | {'; '.join(lies)} | {place} | {error:.0e} |")
    lines += ["", f"{len(fine)} types show no difference: {', '.join(fine)}.", ""]
    if none:
        lines += ["| no verdict | why |", "| --- | --- |", *none]
    return "\n".join(lines)
