"""Several models on the same tasks and texts: figures, paired differences, tables, JSON."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import headwater
from headwater.kernels.autotune import forbid_autotuning
from headwater.util.errors import HeadwaterError
from headwater_lab.data.corpus import check_column_is_read
from headwater_lab.data.tokenizer import Encoder
from headwater_lab.evaluation import text as texts
from headwater_lab.evaluation.candidates import CONTEXT, DTYPES, Candidate, candidates, same_tokenizer
from headwater_lab.evaluation.paired import Difference, Items, difference
from headwater_lab.evaluation.tasks import Score, Tasks
from headwater_lab.util.machine import usable_device
from headwater_lab.util.terminal import Table, lined

# The measures of a text, by the form and weight of `paired.Items`.
MEASURES = {
    "bits-per-byte": ("bits", "bytes"),
    "loss": ("loss", "tokens"),
    "perplexity": ("perplexity", "tokens"),
}
SEED = 1234  # lm-eval's own for examples in prompts


@dataclass
class ScoreRow:
    """One figure, by model. shots: examples in the prompt, None for text; differences: from the first model."""

    task: str
    metric: str
    shots: int | None
    higher_is_better: bool | None
    figures: dict[str, Score] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)


@dataclass
class EvaluationResult:
    """Facts of each model and text, the figures, lm-eval's versions and hashes of tasks, and what makes them again."""

    models: dict[str, dict[str, Any]]
    rows: list[ScoreRow]
    tasks: list[dict[str, Any]]
    texts: list[dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, str]


def evaluate(
    models: Sequence[str],
    tasks: Sequence[str] = (),
    *,
    task_files: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    text: Sequence[str] = (),
    text_column: str = "text",
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    seed: int = SEED,
    progress: bool = False,
    on_windows: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> EvaluationResult:
    """Measure models, one at a time, on tasks of lm-evaluation-harness and on texts; the first is the baseline.

    models: headwater checkpoints or runs, folders or hub names of Hugging Face causal language models.
    tasks: lm-eval's names, `name@shots`, or one of `tasks.GROUPS`; default: all of `task_files`.
    shots: few-shot examples, for tasks that do not set them. limit: items of a task, and documents of a text.
    text: files, folders, globs of text, JSONL, CSV or parquet, or datasets of the hub. text_column: that of tables.
    context: tokens a model sees at a time; default for texts the most that all take, up to 2048, and for tasks each
        model's own. stride: tokens that each window adds, default context // 2.
    on_windows: called with (what, windows done, of how many) after each batch of a text.
    Raises `HeadwaterError` for anything that is not there or does not fit together, before any model has run.
    """
    if not models:
        raise HeadwaterError("Name at least one checkpoint or model to evaluate.")
    if not (tasks or task_files or text):
        raise HeadwaterError("Choose what to evaluate on: --tasks, --task-files or --text.")
    check_column_is_read(text_column, text, "--text-column")
    if dtype not in DTYPES:
        raise HeadwaterError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    usable_device(device)
    found = candidates(models, trust_remote_code)
    measures = measures_of(found) if text else []
    for one in found:
        if context is not None and one.positions is not None and context > one.positions:
            raise HeadwaterError(
                f"{one.source!r} has only {one.positions} learned positions, but --context is {context}; use at most "
                f"{one.positions}."
            )
    window = context or min(CONTEXT, *(one.longest for one in found))
    stride = stride or max(1, window // 2)
    if stride > window:
        raise HeadwaterError(f"--stride {stride} is more than the {window} tokens of a window; use at most {window}.")
    read = [texts.read_text(source, limit, text_column) for source in text]
    ready = Tasks(tasks, task_files, shots) if tasks or task_files else None

    settings = {
        "tasks": list(tasks),
        "shots": shots,
        "limit": limit,
        "batch_size": batch_size,
        "context": context,
        "window": window if text else None,
        "stride": stride if text else None,
        "text_column": text_column if text else None,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "measures": measures,
    }
    packages = ["torch", "transformers", *(["lm_eval"] if ready is not None else [])]
    versions = {"headwater": headwater.__version__} | {name: importlib.metadata.version(name) for name in packages}
    result = EvaluationResult({}, [], [], [_text_facts(one) for one in read], settings, versions)
    rows: dict[tuple[str, str, int | None], ScoreRow] = {}
    for one in found:
        model = one.load(device, dtype)
        facts = result.models[one.name] = _facts(one, model)
        scores: list[Score] = []
        with forbid_autotuning():  # all models' linear layers use the same kernel, whatever was timed to be fast here
            if ready is not None:
                scores += ready.run(
                    one, model, batch_size=batch_size, limit=limit, context=context, seed=seed, progress=progress
                )
            for content in read:
                ids = Encoder(one.tokenizer)([document.text for document in content.documents])
                likelihoods = texts.nats(
                    model,
                    ids,
                    one.begin,
                    context=window,
                    stride=stride,
                    batch_size=batch_size,
                    on_batch=functools.partial(on_windows, f"{one.name}: {content.name}"),
                )
                tokens = np.array([len(row) for row in ids], dtype=float)
                unknown = one.tokenizer.unk_token_id
                facts.setdefault("texts", {})[content.name] = {
                    "nats": -float(likelihoods.sum()),
                    "tokens": int(tokens.sum()),
                    "unknown_tokens": 0 if unknown is None else int(sum((row == unknown).sum() for row in ids)),
                }
                for measure in measures:
                    form, weight = MEASURES[measure]
                    items = Items(form, likelihoods, content.bytes if weight == "bytes" else tokens)
                    name = measure.replace("-", " ")
                    scores.append(Score(content.name, None, name, False, items.figure, items.stderr, items, None))
        del model
        for score in scores:
            key = score.task, score.metric, score.shots
            row = rows.setdefault(key, ScoreRow(*key, score.higher_is_better))
            row.figures[one.name] = score
            if score.facts and score.facts not in result.tasks:
                result.tasks.append(score.facts)
    result.rows = list(rows.values())
    for row in result.rows:
        row.differences = _differences(row)
    return result


def measures_of(found: Sequence[Candidate]) -> list[str]:
    """The measures by which the models can be compared on text: per token, they need one tokenizer."""
    alike = all(same_tokenizer(found[0], other) for other in found[1:])
    return list(MEASURES) if alike else ["bits-per-byte"]


def _differences(row: ScoreRow) -> list[Difference]:
    (baseline, ours), *others = ((name, score.items) for name, score in row.figures.items())
    return [
        difference(name, items, baseline, ours)
        for name, items in others
        if ours is not None and items is not None and len(items.values) == len(ours.values)
    ]


def _facts(one: Candidate, model: Any) -> dict[str, Any]:
    return {
        "source": one.source,
        "family": one.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": len(one.tokenizer),
        "begins_with": one.tokenizer.convert_ids_to_tokens(one.begin),
    }


def _text_facts(one: texts.Text) -> dict[str, Any]:
    return {
        "text": one.name,
        "documents": len(one.documents),
        "bytes": int(one.bytes.sum()),
        "skipped_not_utf8": one.skipped,
    }


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """All results as plain values, not rounded, with the number of items behind each figure."""
    content = asdict(result)
    for row, plain in zip(result.rows, content["rows"], strict=True):
        plain["figures"] = {
            name: {"value": s.value, "stderr": s.stderr, "items": None if s.items is None else len(s.items.values)}
            for name, s in row.figures.items()
        }
    return {"headwater": headwater.__version__, "format": 1} | _finite(content)


def _finite(value: Any) -> Any:
    """JSON has neither infinities nor NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(result: EvaluationResult) -> list[Table]:
    """The figures ± their standard errors, one column per model, and the paired differences if there are several."""
    names = list(result.models)
    tables = [_table(result.rows, names, lambda row, name: _said(row.figures.get(name)))]
    if len(names) > 1 and any(row.differences for row in result.rows):
        known = {(id(row), one.model): one for row in result.rows for one in row.differences}

        def cell(row: ScoreRow, name: str) -> str:
            one = known.get((id(row), name))
            return _said(one, "+") + ("" if one is None else _p(one.p))

        tables.append(_table(result.rows, names[1:], cell, f" − {names[0]}"))
    return tables


def _table(
    rows: Sequence[ScoreRow], names: Sequence[str], cell: Callable[[ScoreRow, str], str], tail: str = ""
) -> Table:
    cells = []
    for row in rows:
        arrow = "" if row.higher_is_better is None else " ↑" if row.higher_is_better else " ↓"
        shots = "" if row.shots is None else str(row.shots)
        cells.append([row.task, f"{row.metric}{arrow}".strip(), shots, *(cell(row, name) for name in names)])
    columns = ("", "measure", "shots", *(f"{name}{tail}" for name in names))
    result = lined(*columns, rows=cells, left=("", "measure"))
    result.columns[0].no_wrap = True
    return result


def _said(figure: Score | Difference | None, sign: str = "") -> str:
    """Four decimals as in lm-eval, fewer for large numbers."""
    if figure is None:
        return "–"
    size = max(abs(figure.value), figure.stderr or 0.0)
    form = ".4f" if size < 100 else ",.1f" if size < 1e5 else ".3e"
    error = "" if figure.stderr is None else f" ± {figure.stderr:{form}}"
    return f"{figure.value:{sign}{form}}{error}"


def _p(p: float | None) -> str:
    return "" if p is None else "  p < 0.001" if p < 0.001 else f"  p = {p:.3f}"
