"""Several models on the same tasks and texts: figures, paired differences, tables, JSON."""

import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json as to_json_bytes
from transformers import PreTrainedModel
from transformers.utils import is_optimum_quanto_available

import headwater
from headwater.conversion import from_transformers
from headwater.kernels.autotune import forbid_autotuning
from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.data.corpus import check_column_is_read
from headwater_lab.data.tokenizer import Encoder
from headwater_lab.evaluation import text_likelihood as texts
from headwater_lab.evaluation.candidates import CONTEXT, DTYPES, Candidate, find_candidates, same_tokenizer
from headwater_lab.evaluation.core_suite import CoreSuite, load_suites
from headwater_lab.evaluation.paired_differences import Difference, Items, compare_items
from headwater_lab.evaluation.quantized_reading import KEPT, CacheBits, make_quantized_cache, read_quantized
from headwater_lab.evaluation.tasks import RunOptions, Score, Tasks
from headwater_lab.util.machine import usable_device
from headwater_lab.util.terminal import Table, lined

# Measures of a text: the form of the figure, and the weight of `paired_differences.Items`.
MEASURES = {
    "bits-per-byte": ("bits", "bytes"),
    "loss": ("loss", "tokens"),
    "perplexity": ("perplexity", "tokens"),
}
SEED = 1234  # lm-eval's own seed for choosing few-shot examples


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
    """Facts about each model and text, figures, lm-eval's task versions and hashes, and the command."""

    models: dict[str, dict[str, Any]]
    rows: list[ScoreRow]
    tasks: list[dict[str, Any]]
    texts: list[dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, str]

    def add_scores(self, model: str, scores: Iterable[Score]) -> None:
        """Add a model's scores to the rows of their figures, and their tasks' facts."""
        for score in scores:
            key = score.task, score.metric, score.shots
            row = next((row for row in self.rows if (row.task, row.metric, row.shots) == key), None)
            if row is None:
                self.rows.append(row := ScoreRow(*key, score.higher_is_better))
            row.figures[model] = score
            if score.facts and score.facts not in self.tasks:
                self.tasks.append(score.facts)

    def compare_models(self) -> None:
        """Fill in the differences of each row."""
        for row in self.rows:
            (baseline, reference), *compared = ((name, score.items) for name, score in row.figures.items())
            row.differences = [
                compare_items(name, items, baseline, reference)
                for name, items in compared
                if reference is not None and items is not None and len(items.values) == len(reference.values)
            ]


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
    cache_bits: CacheBits | None = None,
    on_progress: Callable[[str, int, int | None], None] = lambda name, done, total: None,
) -> EvaluationResult:
    """Measure models, one at a time, on tasks of lm-evaluation-harness and on texts; the first is the baseline.

    models: headwater checkpoints or runs, folders or hub names of Hugging Face causal language models.
    tasks: lm-eval's names, `name@shots`, one of `tasks.GROUPS`, or those of `core_suite.CoreSuite`; default: all of
    `task_files`.
    shots: few-shot examples, for tasks that do not set them. limit: items of a task, the first, or of CORE's drawn at
    random, and documents of a text.
    text: files, folders, globs of text, JSONL, CSV or parquet, or datasets of the hub. text_column: the column of
    tables. context: tokens that a model sees at a time; default for texts the most that all take, up to 2048, and for
    tasks each model's own. stride: tokens that each window adds, default context // 2.
    cache_bits: 2 or 4: read texts and prompts through a quantized cache, as `read_quantized` says: headwater's for its
    own models and those that it can convert, and transformers' for others.
    on_progress: called after each batch with (name, done, of how many): windows of a text, or batches of tasks, whose
    number is not known.
    Raises `HeadwaterError` for anything that is missing or inconsistent, before any model runs.
    """
    if not models:
        raise HeadwaterError("Name at least one checkpoint or model to evaluate.")
    has_tasks = bool(tasks or task_files)
    if not (has_tasks or text):
        raise HeadwaterError("Choose what to evaluate on: --tasks, --task-files or --text.")
    check_column_is_read(text_column, text, "--text-column")
    if dtype not in DTYPES:
        raise HeadwaterError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    usable_device(device)
    candidates = find_candidates(models, trust_remote_code)
    measures = choose_measures(candidates) if text else []
    window, stride = _choose_window(candidates, context, stride)
    _check_quantized_cache(cache_bits, candidates, window if text else None)
    contents = [texts.read_text(source, limit, text_column) for source in text]
    options = RunOptions(batch_size, limit, context, seed)
    suites = load_suites(tasks, task_files, shots) if has_tasks else []

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
        "cache_bits": cache_bits,
    }
    result = EvaluationResult({}, [], [], [content.facts for content in contents], settings, _read_versions(has_tasks))
    for candidate in candidates:
        _score_model(result, candidate, suites, options, contents, on_progress)
    result.compare_models()
    return result


def _score_model(
    result: EvaluationResult,
    candidate: Candidate,
    suites: Sequence[Tasks | CoreSuite],
    options: RunOptions,
    contents: Sequence[texts.Text],
    on_progress: Callable[[str, int, int | None], None],
) -> None:
    """Add the scores and facts of one model."""
    settings, name = result.settings, candidate.name
    model = candidate.load_model(settings["device"], settings["dtype"])
    if settings["cache_bits"] is not None and not candidate.is_headwater and candidate.own_config is not None:
        model = from_transformers(model).eval()
    facts = result.models[name] = {
        "source": candidate.source,
        "family": candidate.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": len(candidate.tokenizer),
        "begins_with": candidate.tokenizer.convert_ids_to_tokens(candidate.begin),
    }
    batches = itertools.count(1)
    # All models use the same linear kernel, not the one timed to be fastest here.
    with forbid_autotuning(), read_quantized(model, settings["cache_bits"]) as count:
        with model.register_forward_hook(lambda *_: on_progress(f"{name}: tasks", next(batches), None)):
            for suite in suites:
                result.add_scores(name, suite.run_tasks(candidate, model, options))
        of_tasks = count.rows, count.quantized
        result.add_scores(name, _score_texts(candidate, model, contents, settings, facts, on_progress))
        if settings["cache_bits"] is not None:
            of_texts = count.rows - of_tasks[0], count.quantized - of_tasks[1]
            read = {"tasks": of_tasks, "text": of_texts}
            facts["rows"] = {kind: {"read": n, "quantized": small} for kind, (n, small) in read.items() if n}


def _check_quantized_cache(bits: CacheBits | None, candidates: Sequence[Candidate], window: int | None) -> None:
    """Raise `HeadwaterError` if a quantized cache cannot be used. window: tokens that are read of text, if any is."""
    if bits is None:
        return
    if window is not None and window <= KEPT:
        raise HeadwaterError(f"A cache is quantized every {KEPT} tokens; with --cache-bits, use a longer --context.")
    if not is_optimum_quanto_available():
        raise HeadwaterError("--cache-bits needs optimum-quanto; install it with `pip install optimum-quanto`.")
    others = [candidate for candidate in candidates if candidate.own_config is None]
    if others and len(others) < len(candidates):
        raise HeadwaterError(
            f"{others[0].source!r} can only be read through transformers' quantized cache, and another of these models "
            "only through headwater's, which loses less; evaluate them apart."
        )
    for candidate in candidates:
        try:
            make_quantized_cache(candidate.own_config or candidate.config, bits)
        except (ValueError, HeadwaterError) as error:
            raise HeadwaterError(
                f"{candidate.source!r} cannot be read through a quantized cache: {first_line(error)}"
            ) from error


def _read_versions(of_tasks: bool) -> dict[str, str]:
    packages = ["torch", "transformers", *(["lm_eval"] if of_tasks else [])]
    return {"headwater": headwater.__version__} | {name: importlib.metadata.version(name) for name in packages}


def _choose_window(candidates: Sequence[Candidate], context: int | None, stride: int | None) -> tuple[int, int]:
    """Choose the length and stride of windows in tokens. Raises `HeadwaterError` if they do not fit."""
    for candidate in candidates:
        if context is not None and candidate.positions is not None and context > candidate.positions:
            raise HeadwaterError(
                f"{candidate.source!r} has only {candidate.positions} learned positions, but --context is {context}; "
                f"use at most {candidate.positions}."
            )
    window = context or min(CONTEXT, *(candidate.longest for candidate in candidates))
    stride = stride or max(1, window // 2)
    if stride > window:
        raise HeadwaterError(f"--stride {stride} is more than the {window} tokens of a window; use at most {window}.")
    return window, stride


def _score_texts(
    candidate: Candidate,
    model: PreTrainedModel,
    contents: Sequence[texts.Text],
    settings: dict[str, Any],
    facts: dict[str, Any],
    on_progress: Callable[[str, int, int | None], None],
) -> Iterator[Score]:
    """Yield a model's scores by text and measure. Adds its token counts for each text to its facts."""
    for content in contents:
        ids = Encoder(candidate.tokenizer)([document.text for document in content.documents])
        likelihoods = texts.sum_log_likelihoods(
            model,
            ids,
            candidate.begin,
            context=settings["window"],
            stride=settings["stride"],
            batch_size=settings["batch_size"],
            on_batch=partial(on_progress, f"{candidate.name}: {content.name}"),
        )
        tokens = np.array([len(row) for row in ids], dtype=float)
        unknown = candidate.tokenizer.unk_token_id
        facts.setdefault("texts", {})[content.name] = {
            "nats": -float(likelihoods.sum()),
            "tokens": int(tokens.sum()),
            "unknown_tokens": 0 if unknown is None else int(sum((row == unknown).sum() for row in ids)),
        }
        for measure in settings["measures"]:
            form, weight = MEASURES[measure]
            items = Items(form, likelihoods, content.bytes if weight == "bytes" else tokens)
            metric = measure.replace("-", " ")
            yield Score(content.name, None, metric, False, items.figure, items.stderr, items, None)


def choose_measures(candidates: Sequence[Candidate]) -> list[str]:
    """Choose the measures by which models can be compared on text: measures per token need the same tokenizer."""
    have_same_tokens = all(same_tokenizer(candidates[0], candidate) for candidate in candidates[1:])
    return list(MEASURES) if have_same_tokens else ["bits-per-byte"]


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """List all results as plain values, not rounded, with the number of items behind each figure.

    Infinities and NaN, which JSON does not have, become None.
    """
    content = asdict(result)
    for row, plain in zip(result.rows, content["rows"], strict=True):
        plain["figures"] = {
            name: {"value": s.value, "stderr": s.stderr, "items": None if s.items is None else len(s.items.values)}
            for name, s in row.figures.items()
        }
    plain = json.loads(to_json_bytes(content, inf_nan_mode="null", fallback=lambda number: number.item()))
    return {"headwater": headwater.__version__, "format": 1} | plain


def build_tables(result: EvaluationResult) -> list[Table]:
    """Lay out the figures ± their standard errors, one column per model, and the paired differences of several."""
    names = list(result.models)
    tables = [_lay_out(result.rows, names, lambda row, name: _write_figure(row.figures.get(name)))]
    if len(names) > 1 and any(row.differences for row in result.rows):
        tables.append(_lay_out(result.rows, names[1:], _write_difference, f" − {names[0]}"))
    return tables


def _write_difference(row: ScoreRow, model: str) -> str:
    difference = next((difference for difference in row.differences if difference.model == model), None)
    p = None if difference is None else difference.p
    return _write_figure(difference, "+") + ("" if p is None else "  p < 0.001" if p < 0.001 else f"  p = {p:.3f}")


def _lay_out(
    rows: Sequence[ScoreRow], names: Sequence[str], cell: Callable[[ScoreRow, str], str], tail: str = ""
) -> Table:
    cells = []
    for row in rows:
        arrow = "" if row.higher_is_better is None else " ↑" if row.higher_is_better else " ↓"
        shots = "" if row.shots is None else str(row.shots)
        cells.append([row.task, f"{row.metric}{arrow}".strip(), shots, *(cell(row, name) for name in names)])
    columns = ("", "measure", "shots", *(f"{name}{tail}" for name in names))
    return lined(*columns, rows=cells, left=("", "measure"))


def _write_figure(figure: Score | Difference | None, sign: str = "") -> str:
    """Write four decimals as in lm-eval, fewer for large numbers."""
    if figure is None:
        return "–"
    size = max(abs(figure.value), figure.stderr or 0.0)
    form = ".4f" if size < 100 else ",.1f" if size < 1e5 else ".3e"
    error = "" if figure.stderr is None else f" ± {figure.stderr:{form}}"
    return f"{figure.value:{sign}{form}}{error}"
