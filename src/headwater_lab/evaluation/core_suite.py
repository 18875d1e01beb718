"""CORE, the suite of 22 tasks of DCLM (arXiv 2406.11794), on local files in llm-foundry's format.

lm-evaluation-harness tokenizes, batches and scores. Its tasks cannot express CORE: they normalize a choice's likelihood
by characters or bytes, CORE by tokens. So prompts, ranking and baselines are here.

Few-shot examples are other items of the same file. Bits per byte are OLMES's: of the right answer, averaged over items.
"""

import hashlib
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.data.reading import describe_unreadable, json_rows, open_file
from headwater_lab.evaluation.candidates import Candidate
from headwater_lab.evaluation.paired_differences import Items, average_items
from headwater_lab.evaluation.tasks import RunOptions, Score, Tasks, watch_task, wrap_model

SUITE = "core"
# Items whose prompts are in memory at a time, as tokens: those of some tasks would take gigabytes.
CHUNK = 2000


@dataclass(frozen=True)
class CoreTask:
    """file: its name without suffix. delimiter: text between a question and the space before its answer.

    baseline, old_baseline: accuracy in percent that counts as 0, in versions 2 and 1 of DCLM's table.
    """

    file: str
    shots: int = 10
    baseline: float = 0
    old_baseline: float | None = None
    delimiter: str = ""

    def center_items(self, items: Items, version: int) -> Items:
        """Rescale accuracy so that the baseline is 0 and 1 stays 1."""
        percent = self.baseline if version == 2 or self.old_baseline is None else self.old_baseline
        baseline = percent / 100
        return Items("mean", (items.values - baseline * items.weights) / (1 - baseline), items.weights, items.strata)


ANSWER = "\nAnswer:"
TASKS = {
    "hellaswag_zeroshot": CoreTask("hellaswag", 0, 25),
    "jeopardy": CoreTask("jeopardy_all", delimiter=ANSWER),
    "bigbench_qa_wikidata": CoreTask("bigbench_qa_wikidata"),
    "arc_easy": CoreTask("arc_easy", baseline=25, delimiter=ANSWER),
    "arc_challenge": CoreTask("arc_challenge", baseline=25, delimiter=ANSWER),
    "copa": CoreTask("copa", 0, 50),
    "commonsense_qa": CoreTask("commonsense_qa", 10, 40.3, 20),
    "piqa": CoreTask("piqa", baseline=50, delimiter=ANSWER),
    "openbook_qa": CoreTask("openbook_qa", 0, 25),
    "lambada_openai": CoreTask("lambada_openai", 0),
    "hellaswag": CoreTask("hellaswag", baseline=25),
    "winograd": CoreTask("winograd_wsc", 0, 50),
    "winogrande": CoreTask("winogrande", 0, 50),
    "bigbench_dyck_languages": CoreTask("bigbench_dyck_languages"),
    "agi_eval_lsat_ar": CoreTask("agi_eval_lsat_ar", 3, 25, 20),
    "bigbench_cs_algorithms": CoreTask("bigbench_cs_algorithms"),
    "bigbench_operators": CoreTask("bigbench_operators"),
    "bigbench_repeat_copy_logic": CoreTask("bigbench_repeat_copy_logic"),
    "squad": CoreTask("squad"),
    "coqa": CoreTask("coqa", 0),
    "boolq": CoreTask("boolq", baseline=62, delimiter=ANSWER),
    "bigbench_language_identification": CoreTask("bigbench_language_identification", 10, 25, 9.1),
}


@dataclass(frozen=True)
class CoreItem:
    """pairs: (context, answer) of each choice, or one pair to be continued exactly. gold: index of the right one."""

    pairs: list[tuple[str, str]]
    gold: int
    category: str


def parse_item(row: dict[str, Any]) -> CoreItem:
    """Parse an item: `query`, `choices`, `gold`; `context_options`, `continuation`, `gold`; `context`, `continuation`.

    Raises `ValueError`, which says what is wrong.
    """
    contexts = row.get("context_options", [row.get("query", row.get("context"))])
    answers = row.get("choices", [row.get("continuation")])
    if not all(isinstance(texts, list) for texts in (contexts, answers)):
        raise ValueError("'choices' or 'context_options' is not a list")
    if not all(isinstance(text, str) and text.strip() for text in [*contexts, *answers]):
        raise ValueError("its context or an answer is missing, empty or not a text")
    pairs = [(context.strip(), answer.strip()) for context in contexts for answer in answers]
    lists = row.keys() & {"choices", "context_options"}
    gold = row.get("gold") if lists else 0
    if type(gold) is not int or not 0 <= gold < len(pairs) or len(pairs) < 1 + len(lists):
        raise ValueError(f"'gold' must be the index of one of two or more choices, not {gold!r} of {len(pairs)}")
    return CoreItem(pairs, gold, str(row.get("category", "")))


def write_prompts(
    items: Sequence[CoreItem], index: int, shots: int, delimiter: str, seed: int
) -> list[tuple[str, str]]:
    """Write (prompt, continuation) for each choice of an item. Examples are drawn from the others by (seed, index)."""
    draws = random.Random(f"{seed}:{index}").sample(range(len(items) - 1), shots)
    head = ""
    for example in (items[draw + (draw >= index)] for draw in draws):
        context, answer = example.pairs[example.gold]
        head += f"{context}{delimiter} {answer}\n"
    return [(f"{head}{context}{delimiter}", f" {answer}") for context, answer in items[index].pairs]


@dataclass(frozen=True)
class LoadedTask:
    """A task with the items of its file. label: its row in tables."""

    label: str
    task: CoreTask
    shots: int
    file: Path
    items: list[CoreItem]

    @cached_property
    def facts(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.file.read_bytes()).hexdigest()
        return {"task": self.label, "file": self.file.name, "sha256": digest}

    def score_items(self, lm: Any, options: RunOptions) -> tuple[Items, Items]:
        """Score items, `limit` of them drawn at random: (accuracy, bits per byte)."""
        size = min(options.limit or len(self.items), len(self.items))
        chosen = sorted(random.Random(options.seed).sample(range(len(self.items)), size))
        results = []
        for start in range(0, size, CHUNK):
            requests = [
                (prompt, *lm._encode_pair(*prompt))
                for index in chosen[start : start + CHUNK]
                for prompt in write_prompts(self.items, index, self.shots, self.task.delimiter, options.seed)
            ]
            likelihoods = lm._loglikelihood_tokens(requests, disable_tqdm=True)
            results += [(*pair, len(answer)) for pair, (_, _, answer) in zip(likelihoods, requests, strict=True)]
        scores: dict[str, list[tuple[float, float]]] = {}  # by category: most tasks have one
        choices = iter(results)
        for item in (self.items[index] for index in chosen):
            scored = [next(choices) for _ in item.pairs]
            means = [likelihood / tokens for likelihood, _, tokens in scored]
            likelihood, is_greedy, _ = scored[item.gold]
            right = is_greedy if len(scored) == 1 else means.index(max(means)) == item.gold
            bits = -likelihood / math.log(2) / len(item.pairs[item.gold][1].encode())
            scores.setdefault(item.category, []).append((float(right), bits))
        accuracy, bits_per_byte = (
            average_items([Items("mean", np.array(group)[:, column], np.ones(len(group))) for group in scores.values()])
            for column in (0, 1)
        )
        return accuracy, bits_per_byte


class CoreSuite:
    """Load tasks of CORE. names: `core` for all whose files are there, `core/NAME` or `core/NAME@SHOTS` for one.

    files: a folder with the files anywhere in it, .jsonl, also packed.
    Raises `HeadwaterError` for names, files and items that are missing or invalid.
    """

    def __init__(self, names: Sequence[str], files: Path | None) -> None:
        if files is None or not files.is_dir():
            raise HeadwaterError("CORE needs --task-files FOLDER, a folder with its tasks in llm-foundry's format.")
        self.folder = files
        self.names = [name for name in TASKS if self._find_file(name)] if SUITE in names else []
        if SUITE in names and not self.names:
            raise HeadwaterError(f"There is no task of CORE in {str(files)!r}: no file there is named like piqa.jsonl.")
        self.loaded = {name: self._load_task(name, None) for name in self.names}
        self.loaded |= {name: self._load_task(*parse_name(name)) for name in names if name != SUITE}

    def _find_file(self, name: str) -> Path | None:
        stem = TASKS[name].file
        files = sorted(file for file in self.folder.rglob(f"{stem}.jsonl*") if file.is_file())
        if len(files) > 1:
            raise HeadwaterError(f"{name} has two files: {str(files[0])!r} and {str(files[1])!r}; remove one.")
        return files[0] if files else None

    def _load_task(self, name: str, shots: int | None) -> LoadedTask:
        task, file = TASKS[name], self._find_file(name)
        if file is None:
            raise HeadwaterError(f"There is no file {task.file}.jsonl in {str(self.folder)!r}, which {name} needs.")
        items = read_items(file)
        shots = task.shots if shots is None else shots
        if len(items) <= shots:
            raise HeadwaterError(f"{str(file)!r} has {len(items)} items; {name} needs more than its {shots} examples.")
        return LoadedTask(f"{SUITE}/{name}", task, shots, file, items)

    @property
    def label(self) -> str:
        """CORE if all tasks are there, otherwise how many of them."""
        return "CORE" if len(self.names) == len(TASKS) else f"CORE-{len(self.names)} of {len(TASKS)}"

    def run_tasks(self, candidate: Candidate, model: PreTrainedModel, options: RunOptions) -> Iterator[Score]:
        """Yield a model's scores by task, and their averages over all tasks of `core`."""
        lm = wrap_model(candidate, model, options, softmax_dtype=torch.promote_types(model.dtype, torch.float32))
        averaged: dict[str, list[Items]] = {}
        for name, loaded in self.loaded.items():
            with watch_task(loaded.label, candidate, lm) as cut:
                right, bits = loaded.score_items(lm, options)
            facts = loaded.facts | cut
            figures = {
                "acc": right,
                "centred, v2": loaded.task.center_items(right, 2),
                "centred, v1": loaded.task.center_items(right, 1),
                "bits per byte": bits,
            }
            for metric, items in figures.items():
                if name in self.names:
                    averaged.setdefault(metric, []).append(items)
                if metric != "centred, v1" or loaded.task.old_baseline is not None:
                    yield make_score(loaded.label, loaded.shots, metric, items, facts)
        missing = [name for name in TASKS if name not in self.names]
        for metric, members in averaged.items():
            label = self.label if options.limit is None else f"{self.label}, {options.limit} items a task"
            yield make_score(label, None, metric, average_items(members), {"task": label, "missing": missing})


def load_suites(names: Sequence[str], files: Path | None, shots: int | None) -> list[Tasks | CoreSuite]:
    """Load lm-eval's tasks, with `shots` examples, and those of CORE. names: none for all of lm-eval's in `files`.

    Raises `HeadwaterError` for shots of CORE alone, whose tasks have their own, and as the suites do.
    """
    of_core = [name for name in names if name == SUITE or name.startswith((f"{SUITE}/", f"{SUITE}@"))]
    others = [name for name in names if name not in of_core]
    if of_core and not others and shots is not None:
        raise HeadwaterError(
            f"--shots is for lm-eval's tasks, and CORE has its own; name {SUITE}/NAME@{shots} for a task with others."
        )
    suites: list[Tasks | CoreSuite] = [CoreSuite(of_core, files)] if of_core else []
    return [Tasks(others, files, shots), *suites] if others or not of_core else suites


def parse_name(name: str) -> tuple[str, int | None]:
    """Parse `core/NAME` or `core/NAME@SHOTS`. Raises `HeadwaterError` for a task that CORE does not have."""
    task, _, shots = name.removeprefix(f"{SUITE}/").partition("@")
    if task not in TASKS or (shots and not shots.isdecimal()):
        hint = f"; {nearest(task, TASKS)}" if task not in TASKS else "."
        raise HeadwaterError(f"--tasks takes {SUITE}, {SUITE}/NAME or {SUITE}/NAME@SHOTS, not {name!r}{hint}")
    return task, int(shots) if shots else None


def make_score(label: str, shots: int | None, metric: str, items: Items, facts: dict[str, Any]) -> Score:
    """Make the score of a figure that is a mean over items."""
    return Score(label, shots, metric, metric != "bits per byte", items.figure, items.stderr, items, facts)


def read_items(file: Path) -> list[CoreItem]:
    """Read a task's items from a file of JSON lines. Raises `HeadwaterError` for one that is none."""
    items = []
    is_xz = file.suffix == ".xz"
    try:
        with lzma.open(file) if is_xz else open_file(file) as stream:
            for number, row in json_rows(stream, file.with_suffix("") if is_xz else file):
                try:
                    items.append(parse_item(row))
                except ValueError as error:
                    raise HeadwaterError(f"Line {number} of {str(file)!r} is no item of CORE: {error}.") from error
    except (lzma.LZMAError, EOFError) as error:
        raise describe_unreadable(file, error) from error
    return items
