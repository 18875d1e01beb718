"""Benchmarks through lm-evaluation-harness: its tasks, prompts, scoring and figures, with headwater's models."""

import contextlib
import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError, first_line, nearest
from headwater.util.extras import MissingExtra
from headwater_lab.evaluation.candidates import Candidate
from headwater_lab.evaluation.paired_differences import Items

# name[@shots][:metric,…] of each column. Metrics as in the tables of Pythia and Mamba, which TokenFormer continues: acc
# for LAMBADA, PIQA, ARC-easy and WinoGrande; for HellaSwag and ARC-challenge acc_norm, by the answers' length.
GROUPS = {
    "tokenformer": (  # arXiv 2410.23168, Tables 1 and 9
        "lambada_openai@0:perplexity,acc",
        "hellaswag@0:acc_norm",
        "piqa@0:acc",
        "arc_easy@0:acc",
        "arc_challenge@0:acc_norm",
        "winogrande@0:acc",
    ),
    "kv-shifting": (  # arXiv 2411.19574, Table 2
        "lambada_openai@0:acc",
        "winogrande@0:acc",
        "hellaswag@0:acc_norm",
        "arc_easy@0:acc",
        "arc_challenge@0:acc_norm",
        "cmmlu@5:acc",
        "mmlu@5:acc",
        "hendrycks_math@0:exact_match",
    ),
    "mmlu-forms": ("mmlu_continuation@0:acc", "mmlu@0:acc", "mmlu@5:acc"),  # arXiv 2411.19574, Table 3
}
# Number of bootstrap samples in lm-eval, for figures without a closed-form standard error.
DRAWS = 1000
# Names of network errors in several libraries.
NETWORK_ERRORS = (
    *("ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError", "LocalEntryNotFoundError", "ConnectError"),
)
# lm-eval's aggregations that are ratios of sums, and headwater's name for each.
FORMS = {"mean": "mean", "perplexity": "perplexity", "weighted_perplexity": "perplexity", "bits_per_byte": "bits"}


@dataclass(frozen=True)
class TaskRequest:
    """A task or task group of lm-eval. shots: None for its own number; metrics: those to show, None for all."""

    name: str
    shots: int | None
    metrics: tuple[str, ...] | None


@dataclass(frozen=True)
class Score:
    """One figure of one model. items: the scores behind it; None for a figure that is not a ratio of sums.

    task: the task, or the text, which has neither shots nor facts.
    """

    task: str
    shots: int | None
    metric: str
    higher_is_better: bool | None
    value: float
    stderr: float | None
    items: Items | None
    facts: dict[str, Any] | None


@dataclass(frozen=True)
class RunOptions:
    """limit: items of a task, None for all. context: tokens that a model sees, None for all it takes."""

    batch_size: int
    limit: int | None
    context: int | None
    seed: int


def parse_tasks(name: str, shots: int | None = None) -> list[TaskRequest]:
    """Parse a name from the command line, `name[@shots]`, or one of `GROUPS`."""
    requests = []
    for member in GROUPS.get(name, (name,)):
        task_shots, _, metrics = member.partition(":") if name in GROUPS else (member, "", "")
        task, _, number = task_shots.partition("@")
        if number and not number.isdecimal():
            raise HeadwaterError(f"--tasks takes NAME or NAME@SHOTS, e.g. mmlu@5, not {member!r}.")
        requests.append(
            TaskRequest(task, int(number) if number else shots, tuple(metrics.split(",")) if metrics else None)
        )
    return requests


class Tasks:
    """Load the requested tasks. Raises `HeadwaterError` for missing names, files and data.

    files: a folder of local task files, or one of them; paths of data files in them are relative to that folder.
    """

    def __init__(self, names: Sequence[str], files: Path | None = None, shots: int | None = None) -> None:
        local = set() if files is None else local_tasks(files)
        if not (names or local):
            raise HeadwaterError(f"There is no task in {str(files)!r}: no .yaml file there has a line `task: NAME`.")
        requests = [request for name in names or sorted(local) for request in parse_tasks(name, shots)]
        self.folder = files.parent if files is not None and files.is_file() else files
        prepare_lm_eval()
        from lm_eval.tasks import TaskManager

        tasks = {request.name for request in requests}
        folder = None if self.folder is None else str(self.folder.resolve())
        self.manager = TaskManager(include_path=folder, include_defaults=not tasks <= local)
        for name in sorted(tasks - set(self.manager.all_tasks)):
            near = nearest(name, [*self.manager.all_tasks, *GROUPS])  # listing all tasks takes time
            hint = near if near.startswith("did you") else "`lm_eval ls tasks` lists them all."
            raise HeadwaterError(f"There is no task {name!r}; {hint}")
        self.loaded = [(request, self._load_task(request)) for request in requests]

    def _load_task(self, request: TaskRequest) -> Any:
        try:
            with silence_output(), contextlib.chdir(self.folder or "."):
                loaded = self.manager.load([request.name])
        except ModuleNotFoundError as error:
            raise HeadwaterError(f"The task {request.name!r} needs more packages: {first_line(error)}") from error
        except Exception as error:  # lm-eval and datasets can raise anything for a task's file and dataset
            if _is_network(error):
                raise HeadwaterError(
                    f"The task {request.name!r} needs data of the Hugging Face hub, which is not available here; pass "
                    "local task files with --task-files, or set HF_HUB_OFFLINE=1 to use an earlier download."
                ) from error
            raise HeadwaterError(
                f"The task {request.name!r} cannot be loaded: {type(error).__name__}: {first_line(error)}"
            ) from error
        for task in loaded["tasks"].values():
            # As in lm-eval's own command, a task that says 0 stays at 0; others use the requested number.
            if task.get_config("num_fewshot") is None or (request.shots is not None and task.get_config("num_fewshot")):
                task.set_config(key="num_fewshot", value=request.shots or 0)
        return loaded

    def run_tasks(self, candidate: Candidate, model: PreTrainedModel, options: RunOptions) -> Iterator[Score]:
        """Yield all figures of one model, in the requested order."""
        lm = wrap_model(candidate, model, options)
        from lm_eval.evaluator import evaluate

        for request, loaded in self.loaded:
            random.seed(options.seed)
            np.random.seed(options.seed % 2**32)
            torch.manual_seed(options.seed)
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(seed=options.seed)
            with watch_task(request.name, candidate, lm) as facts:
                results = evaluate(lm, loaded, limit=options.limit, bootstrap_iters=DRAWS, log_samples=True)
            is_group = request.name in results.get("groups", {})
            for name in [request.name] if is_group else list(loaded["tasks"]):
                yield from TaskResult(name, loaded["tasks"], results, is_group).list_scores(request.metrics, facts)


def wrap_model(candidate: Candidate, model: PreTrainedModel, options: RunOptions, **settings: Any) -> Any:
    """Wrap a model for lm-eval. settings: more of `HFLM`'s."""
    prepare_lm_eval()
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):
        def loglikelihood_rolling(self, *args: Any, **options: Any) -> Any:
            # lm-eval begins a text with `prefix_token_id`, and would score it again where the tokenizer adds it too.
            adds_begin, self.add_bos_token = self.add_bos_token, False  # type: ignore[has-type]
            try:
                return super().loglikelihood_rolling(*args, **options)
            finally:
                self.add_bos_token = adds_begin

    return Model(
        pretrained=model,
        tokenizer=candidate.tokenizer,
        backend="causal",
        batch_size=options.batch_size,
        max_length=options.context,
        prefix_token_id=candidate.begin,
        add_bos_token=None,  # the tokenizer decides
        **settings,
    )


@contextlib.contextmanager
def watch_task(name: str, candidate: Candidate, lm: Any) -> Iterator[dict[str, Any]]:
    """Let lm-eval run a task silently, and turn what it raises into a `HeadwaterError`.

    Yields facts, filled in at the end: how many prompts of a known length were cut to the context, if any. lm-eval says
    so only in its log, once.
    """
    facts: dict[str, Any] = {}
    cut: list[bool] = []
    score, encode = lm._loglikelihood_tokens, lm.tok_batch_encode

    def score_counted(requests: list[tuple[Any, list[int], list[int]]], *args: Any, **options: Any) -> Any:
        cut.extend(len(prompt) + len(answer) > lm.max_length + 1 for _, prompt, answer in requests)
        return score(requests, *args, **options)

    def encode_counted(strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
        if left_truncate_len is not None:  # prompts of `generate_until`
            cut.extend(len(lm.tok_encode(text)) > left_truncate_len for text in strings)
        return encode(strings, *args, left_truncate_len=left_truncate_len, **options)

    lm._loglikelihood_tokens, lm.tok_batch_encode = score_counted, encode_counted
    try:
        with silence_output():
            yield facts
    except AssertionError as error:
        raise HeadwaterError(
            f"The task {name!r} does not fit into the {lm.max_length} tokens of {candidate.name}: {first_line(error)}"
        ) from error
    except HeadwaterError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise HeadwaterError(f"The task {name!r} cannot be run: {type(error).__name__}: {first_line(error)}") from error
    finally:
        del lm._loglikelihood_tokens, lm.tok_batch_encode
    if any(cut):
        facts["cut_prompts"] = {candidate.name: sum(cut)}


class TaskResult:
    """lm-eval's results for a task or a group of tasks: one row of its table, and the items behind it."""

    def __init__(self, name: str, tasks: dict[str, Any], results: dict[str, Any], is_group: bool) -> None:
        self.name, self.results = name, results
        self.members = list(tasks) if is_group else [name]
        self.task = tasks[self.members[0]]
        self.row = results["groups" if is_group else "results"][name]

    def list_scores(self, metrics: tuple[str, ...] | None, more_facts: dict[str, Any]) -> Iterator[Score]:
        """Yield its figures. metrics: those to show, None for all."""
        member, facts = self.members[0], self._read_facts() | more_facts
        for key, value in self.row.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if metrics is not None and metric not in metrics:
                continue
            items = self._read_items(metric, filter_name, value)
            stderr = self.row.get(f"{metric}_stderr,{filter_name}") if items is None else items.stderr
            yield Score(
                task=self.name,
                shots=int(self.results["n-shot"].get(member, 0)),
                metric=metric if filter_name == "none" else f"{metric}, {filter_name}",
                higher_is_better=self.results["higher_is_better"].get(member, {}).get(metric),
                value=float(value),
                stderr=stderr if isinstance(stderr, float) else None,
                items=items,
                facts=facts,
            )

    def _read_facts(self) -> dict[str, Any]:
        """Read the versions and hashes of its tasks."""
        from lm_eval.utils import hash_string

        texts = {
            member: "".join(
                sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]
                for sample in self.results["samples"][member]
            )
            for member in self.members
        }
        return {
            "task": self.name,
            "versions": {member: self.results["versions"].get(member) for member in self.members},
            "hashes": {member: hash_string(text) for member, text in texts.items()},
        }

    def _read_items(self, metric: str, filter_name: str, value: float) -> Items | None:
        """Read the items of a figure, if it is a ratio of sums over them, checked against lm-eval's own figure."""
        samples = [sample for member in self.members for sample in self.results["samples"][member]]
        scores = [sample.get(metric) for sample in samples if sample["filter"] == filter_name]
        form = FORMS.get(getattr(self.task.aggregation().get(metric), "__name__", ""))
        if form is None or not scores or any(score is None for score in scores):
            return None
        try:
            pairs = np.array([score if isinstance(score, (tuple, list)) else (score, 1.0) for score in scores], float)
            items = Items(form, pairs[:, 0], pairs[:, 1])
            return items if np.isclose(items.figure, value, rtol=1e-6) else None
        except (ValueError, TypeError, IndexError):
            return None


def local_tasks(files: Path) -> set[str]:
    """List the names of all tasks in a task file or a folder of them. Raises `HeadwaterError` for an invalid one."""
    if not files.exists():
        raise HeadwaterError(f"There is no task file or folder {str(files)!r}.")
    prepare_lm_eval()
    from lm_eval.tasks._yaml_loader import load_yaml

    names: set[str] = set()
    for file in sorted(files.rglob("*.yaml")) if files.is_dir() else [files]:
        try:
            content = load_yaml(file, resolve_func=False)
        except Exception as error:  # a parser's, or a missing include's
            reason = " ".join(str(error).split()) or type(error).__name__
            raise HeadwaterError(f"The task file {str(file)!r} cannot be read: {reason}") from error
        # Files with neither key are included by others.
        names |= {content[kind] for kind in ("task", "group") if isinstance(content.get(kind), str)}
    return names


def _is_network(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None and type(chain).__name__ not in NETWORK_ERRORS:
        chain = chain.__cause__ or chain.__context__
    return chain is not None


def prepare_lm_eval() -> None:
    """Import lm-eval without its messages. Raises `HeadwaterError` if it is not installed."""
    # lm-eval reads this at every bootstrap. Without it, it starts one process per core.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ModuleNotFoundError as error:  # also where lm-eval is there, without what its models need
        raise MissingExtra(error.name or "lm-eval", "evaluate") from error
    from datasets import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Silence what lm-eval prints: it would break the command's own progress."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
