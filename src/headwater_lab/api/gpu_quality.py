"""The phases of `headwater bench gpu` that train to a result: the recommended recipe on prose, and smaller caches.

They need the packages of headwater[compare]. No weights outlast a call: they are in a folder `scratch` or removed, so
that all that remains is small. A training run and its measurement are short enough for one call.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from headwater.config.text import HeadwaterConfig
from headwater.conversion.latent import latent_config
from headwater.mechanisms.capabilities import ChoosesSources
from headwater.models.load import read_object
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater.util.extras import check_extra
from headwater_lab.api.converting import convert
from headwater_lab.bench.gpu import Measurement, Phase
from headwater_lab.bench.gpu_queue import append_line, read_lines
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.trials import Job
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.shards import EVALUATION, read_manifest
from headwater_lab.data.stream import TextSource
from headwater_lab.evaluation import evaluate
from headwater_lab.evaluation.core_suite import load_suites
from headwater_lab.evaluation.paired_differences import Items, compare_items
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import read_recipe
from headwater_lab.reports import read_comparisons
from headwater_lab.reports.numbers import list_arms
from headwater_lab.training.records import CONTROL, CONVERSION, RECORD, read_record
from headwater_lab.training.run_folder import MARK, METRICS
from headwater_lab.training.trained_models import open_source

RECIPE = "recommended/gpu-prose"
# On a CPU.
TINY = ("num_hidden_layers=2", "hidden_size=32", "num_attention_heads=2", "intermediate_size=64")
TINY_PROSE = (
    *("data.context=16", "data.held_out_bytes=2000", "training.batch_size=2", "training.warmup_steps=1"),
    *("training.precision=32-true", "compare.seeds=[10, 11]", "compare.learning_rates=[1.0e-3]", "compare.workers=1"),
    *(f"compare.sizes.{size}.training.steps=4" for size in ("small", "middle", "large")),
    *(f"compare.sizes.{size}.arms.recommended.training.steps=3" for size in ("small", "middle", "large")),
    *(f"{section}.{field}" for section in ("model", "compare.sizes.large.model") for field in TINY),
    "compare.sizes.large.training.batch_size=3",
)
# Figures of an arm, see `list_arms`.
FIGURES = ("metric", "mean", "seeds", "difference", "low", "high", "p", "verdict", "learning_rate", "tokens", "seconds")

# The mechanism whose layers share the keys and values of others.
SHARING = next(name for name in MECHANISMS.built_in if isinstance(MECHANISMS.resolve(name), ChoosesSources))
ORIGINAL, TRAINED_ON = "original", "original, trained on"
HEALING = ("data.context=512", "data.held_out_bytes=1000000", "training.batch_size=32", "training.precision=bf16-mixed")
TINY_HEALING = ("data.context=16", "data.held_out_bytes=2000", "training.batch_size=2")
# Items of a task, and documents.
ITEMS = 500
TASKS = ("core/piqa@0", "core/arc_easy@0", "core/lambada_openai@0")


@contextlib.contextmanager
def _prepare_text(phase: Phase, text: str, tokenizer: str) -> Iterator[None]:
    """Work in a folder for what is large, removed at the end, with the tokenized text in `data`.

    Recipes name this folder relative to it, so that runs are the same wherever the report is.
    """
    scratch = phase.report.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # of a call that was killed
    scratch.mkdir()
    try:
        with contextlib.chdir(scratch):
            prepare(TextSource(text), Path("data"), tokenizer, Options(held_out=0.02 if phase.on_gpu else 0.2))
            manifest = read_manifest(Path("data"))
            row = {"text": manifest.sha256[:12], "tokenizer": manifest.tokenizer.sha256[:12]}
            phase.put(row, {"documents": manifest.documents, "bytes": manifest.bytes, "tokens": manifest.train.tokens})
            yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def prose(phase: Phase, inputs: Mapping[str, str]) -> None:
    """Compare the recommended recipe with vanilla on prose, a size after another. The records stay beside the report,
    so runs that have finished are not repeated."""
    overrides = ["data.source=data", *(() if phase.on_gpu else TINY_PROSE)]
    recipe = read_recipe(RECIPE, overrides)
    assert recipe.compare is not None
    with _prepare_text(phase, inputs["prose"], inputs["tokenizer"]):
        for size in recipe.compare.sizes:
            if not all({"size": size, "arm": arm} in phase.measured for arm in recipe.compare.arms):
                _compare_size(phase, recipe, size)


def _compare_size(phase: Phase, recipe: Recipe, size: str) -> None:
    """Train the runs of a size that are missing, and write a row for each, and then for each arm."""
    runs = phase.report.parent / "runs"
    assert recipe.compare is not None

    def put_run(job: Job, step: int, status: str) -> None:
        row = {"run": job.folder.relative_to(runs / recipe.name).as_posix()}
        if status == "finished" and row not in phase.measured:
            record = read_record(job.folder)
            for path in job.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in (RECORD, METRICS, MARK):
                    path.unlink()
            phase.measured.append(row)
            phase.put(row, {"status": record.status, record.metric: record.result, "seconds": record.seconds})

    outcomes = run_comparison(recipe, runs, None, put_run, {(arm, size) for arm in recipe.compare.arms})
    if failed := [outcome for outcome in outcomes if outcome.record is None]:
        raise HeadwaterError(f"{failed[0].label}: {failed[0].error}")
    (comparison,) = (comparison for comparison in read_comparisons(runs) if comparison.size == size)
    for arm in list_arms(comparison):
        figures = {name: arm[name] for name in FIGURES} | {"rate tuned at": next(iter(recipe.compare.sizes))}
        phase.put({"size": size, "arm": arm["arm"]}, figures)


def list_caches(config: HeadwaterConfig) -> dict[str, dict[str, Any]]:
    """List the smaller caches of a model, by name, as arguments of `convert`."""
    assert config.head_dim is not None
    latents: dict[str, dict[str, Any]] = {}
    width_of_half = (config.num_key_value_heads or 1) * config.head_dim
    with contextlib.suppress(HeadwaterError):
        latent_config(config, width_of_half)
        latents["a latent"] = {"mechanisms": {}, "latent_width": width_of_half}
    return latents | {
        "pairs of layers": {"mechanisms": {SHARING: {}}},
        "one head": {"mechanisms": {}, "num_key_value_heads": 1},
        "threes of layers": {"mechanisms": {SHARING: {"group_size": 3}}},
        "one head, pairs of layers": {"mechanisms": {SHARING: {}}, "num_key_value_heads": 1},
    }


def conversion(phase: Phase, inputs: Mapping[str, str]) -> None:
    """Heal smaller caches of a pretrained model, and the original on the same tokens, and measure their quality."""
    model, text, task_files = inputs["model"], inputs["prose"], inputs.get("task_files")
    name, budgets = Path(model).name, ("4M", "16M") if phase.on_gpu else ("256",)
    overrides = [*(HEALING if phase.on_gpu else TINY_HEALING), "data.source=data", "reporting.save_every=null"]
    overrides.append(f"training.device={phase.device.type}")
    if task_files:  # before hours of healing
        check_extra("evaluate")
        load_suites(TASKS, Path(task_files), None)

    def score_model(path: str, tokens: str, cache: str) -> Measurement:
        tasks, files = (TASKS, Path(task_files)) if task_files else ((), None)
        result = evaluate(
            [path],
            tasks,
            task_files=files,
            limit=ITEMS,
            text=[f"data/{EVALUATION}"],
            batch_size=32,
            device=str(phase.device),
        )
        scores = {
            f"{row.task.removesuffix(EVALUATION)} {row.metric}".strip(): next(iter(row.figures.values()))
            for row in result.rows
            if row.metric in ("acc", "bits per byte")
        }
        items = {name: score.items for name, score in scores.items() if score.items is not None}
        control = _read_items(phase, [name, tokens, TRAINED_ON])
        saved = {key: _list_scores(each) for key, each in items.items()}
        append_line(phase.report, {"phase": phase.name, "scored": [name, tokens, cache], "items": saved})
        row: Measurement = {}
        for key, score in scores.items():
            row |= {key: score.value, f"{key}, ±": score.stderr}
            if key in control:
                difference = compare_items(cache, items[key], TRAINED_ON, control[key])
                row |= {f"{key}, difference": difference.value, f"{key}, difference, ±": difference.stderr}
        return row

    def convert_model(tokens: str, cache: str) -> Measurement:
        folder, started = Path("converted"), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        labels = {"model": name, "tokens": tokens, "cache": TRAINED_ON}
        control = labels not in phase.measured
        convert(model, folder, **caches[cache], heal=tokens, text=text, control=control, overrides=overrides)
        seconds = time.monotonic() - started
        phase.attempt(partial(score_model, str(folder / CONTROL), tokens, TRAINED_ON), least=0, **labels)
        price = read_object(folder / CONVERSION)["price"]
        share = price["after"]["cache_bytes_per_token"] / price["before"]["cache_bytes_per_token"]
        return {"of the cache": share, "s": seconds, **score_model(str(folder), tokens, cache)}

    caches = list_caches(open_source(model).model.config)
    with _prepare_text(phase, text, model):
        phase.attempt(partial(score_model, model, "0", ORIGINAL), model=name, tokens="0", cache=ORIGINAL)
        for tokens, cache in product(budgets, caches):
            least = 150 if phase.on_gpu else 0
            phase.attempt(partial(convert_model, tokens, cache), least=least, model=name, tokens=tokens, cache=cache)


def _list_scores(items: Items) -> list[Any]:
    """List the fields of items as JSON has them."""
    strata = None if items.strata is None else items.strata.tolist()
    return [items.form, items.values.tolist(), items.weights.tolist(), strata]


def _read_items(phase: Phase, scored: list[str]) -> dict[str, Items]:
    """Read the scores behind a row of the report, by figure; none if it has none."""
    lines = [line["items"] for line in read_lines(phase.report) if line.get("scored") == scored]
    return {
        key: Items(form, np.array(values), np.array(weights), None if strata is None else np.array(strata))
        for key, (form, values, weights, strata) in (lines[-1] if lines else {}).items()
    }


MEASUREMENTS = {"prose": prose, "conversion": conversion}
