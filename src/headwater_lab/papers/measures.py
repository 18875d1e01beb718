"""The contents of a table's cells: measures of finished runs, seed by seed."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from headwater.util.errors import HeadwaterError
from headwater.util.files import read_bytes, replace_text
from headwater_lab.comparison.scaling import Axis, EquivalentSize, fit_scaling
from headwater_lab.comparison.statistics import steps_to
from headwater_lab.comparison.trials import make_slug
from headwater_lab.evaluation import evaluate
from headwater_lab.evaluation.tasks import TaskRequest, parse_tasks
from headwater_lab.inspection.sample import sample_tokens
from headwater_lab.inspection.scalars import Census, Scalars, collect_scalars, take_census
from headwater_lab.inspection.watch import read_sample
from headwater_lab.papers.arms import FinishedRun, SizedArm, finished_runs, list_law_arms
from headwater_lab.papers.table import Measure, Pair, PaperTable, list_measures
from headwater_lab.training.checkpoints import load_model, newest_checkpoint
from headwater_lab.training.records import RunRecord, changed_data
from headwater_lab.training.trained_models import open_trained

FACTS: dict[str, Callable[[RunRecord], float]] = {
    "parameters": lambda record: record.parameters,
    "tokens": lambda record: record.total_tokens,
    "flops": lambda record: record.flops,
    "total_flops": lambda record: record.total_flops,
    "stage_flops": lambda record: record.stages[-1].flops if record.stages else record.flops,
    "tokens_per_second": lambda record: record.tokens_per_second,
    "cache": lambda record: record.cache_bytes_per_token,
}
# The only measured fact. All others are counted. More is better.
SPEED = "tokens_per_second"
COUNTED = FACTS.keys() - {SPEED}
HALVES = ("easier", "harder")
# Default number of rows of training data, as in `headwater inspect`.
ROWS = 16


@dataclass
class Runs:
    """The runs of a table: their folders, and what has been read from them.

    unlearned: from a claim of divergence, the result of a model that has learned nothing.
    """

    table: PaperTable
    arms: Mapping[str, SizedArm | None]
    out: Path
    task_files: Path | None = None
    device: str = "cpu"
    by_arm: dict[str, dict[int, FinishedRun]] = field(init=False)
    _inside: dict[Path, tuple[Census | None, list[Scalars]]] = field(default_factory=dict)
    _similarity: dict[Path, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_arm = {name: finished_runs(arm, self.out) for name, arm in self.arms.items() if arm is not None}
        if changed := changed_data(run.record for runs in self.by_arm.values() for run in runs.values()):
            raise HeadwaterError(changed)

    def find_seeds(self, name: str) -> dict[int, FinishedRun]:
        return self.by_arm.get(name, {})

    def lower_is_better(self, measure: Measure, name: str) -> bool:
        if measure == "result":
            return next((run.record.lower_is_better for run in self.find_seeds(name).values()), True)
        if measure.startswith("task:"):
            return "perplexity" in measure
        higher_is_better = ("accuracy", *HALVES, "hardest", "saved", "census", "scalar", SPEED)
        return not measure.startswith(higher_is_better)

    def measure_seeds(self, measure: Measure, name: str) -> dict[int, float]:
        """Measure an arm's runs by seed; diverged runs have no value."""
        return {
            seed: self.measure_run(measure, run)
            for seed, run in self.find_seeds(name).items()
            if not run.record.has_diverged or measure in FACTS
        }

    def measure_run(self, measure: Measure, run: FinishedRun) -> float:
        """Measure a run. Raises `HeadwaterError` if it has no such measure, or its checkpoint is gone."""
        kind, _, argument = measure.partition(":")
        if kind == "task":
            return self._find_task(run, argument)
        if kind in ("census", "scalar"):
            if run.checkpoint_folder not in self._inside:  # read each model once for all measures
                model = load_model(newest_checkpoint(run.checkpoint_folder))
                self._inside[run.checkpoint_folder] = take_census(model), collect_scalars(model)
            counts, learned = self._inside[run.checkpoint_folder]
            return _sum_census(counts, argument, run) if kind == "census" else _average_scalars(learned, argument, run)
        if kind == "similarity":
            if run.checkpoint_folder not in self._similarity:
                trained = open_trained(run.checkpoint_folder)
                self._similarity[run.checkpoint_folder] = read_sample(
                    trained.model, sample_tokens(trained, None, ROWS, None)
                ).hidden
            start, end = map(int, argument.split("-"))
            return float(np.mean(self._similarity[run.checkpoint_folder][start : end + 1]))
        if measure in FACTS:
            return float(FACTS[measure](run.record))
        return _held_out(run.record, measure)

    def count_steps(self, name: str) -> dict[int, int | None]:
        """Count the steps to the recipe's threshold by seed; None if it was never reached."""
        arm = self.arms[name]
        assert arm is not None
        assert arm.threshold is not None, f"{arm.recipe.name} has no compare.threshold"
        return {seed: steps_to(run.record, arm.threshold) for seed, run in self.find_seeds(name).items()}

    def find_lost(self, name: str, unlearned: float) -> dict[int, bool]:
        """Find by seed whether a run diverged, or ended no better than a model that has learned nothing."""

        def is_lost(record: RunRecord) -> bool:
            if record.has_diverged or record.result is None:
                return record.has_diverged
            return record.result >= unlearned if record.lower_is_better else record.result <= unlearned

        return {seed: is_lost(run.record) for seed, run in self.find_seeds(name).items()}

    @property
    def unlearned(self) -> float:
        """The threshold of claims of divergence; infinite without one."""
        return next((c.unlearned for c in self.table.claims if c.test in ("diverges", "stays")), math.inf)

    def find_equivalent_size(self, name: str) -> tuple[EquivalentSize, Axis] | str:
        """Find the baseline that equals an arm at a size, "ARM @ SIZE", by the fitted law, or why there is none."""
        arm = self.arms[name]
        assert arm is not None
        members = {member.name.partition(": ")[2]: member for member in list_law_arms(arm)}
        trained = {name: finished_runs(member, self.out) for name, member in members.items()}
        gaps = (describe_missing(name, members[name], runs) for name, runs in trained.items())
        if missing := "; ".join(filter(None, gaps)):
            return f"not trained: {missing}"
        records = [run.record for runs in trained.values() for run in runs.values()]
        if any(map(attrgetter("has_diverged"), records)):
            return "a run diverged, and a law of the others is meaningless"
        try:
            law = fit_scaling(records)
        except HeadwaterError as error:
            return str(error)
        sizes = [size for size in law.equivalent_sizes if (size.arm, size.size) == (arm.arm, arm.size)] if law else []
        if law is None or not sizes:
            return "a law needs three or more sizes, with the same seeds at each"
        return sizes[0], law.axis

    def _find_task(self, run: FinishedRun, argument: str) -> float:
        """Find a figure of lm-evaluation-harness, which is stored with the run, so that it is evaluated only once."""
        name, _, metric = argument.rpartition(":")
        figures = self._evaluate_tasks(run, name)
        if metric != "mean":
            (request,) = parse_tasks(name)
            return _find_figure(figures, request, metric)
        metrics = [(request, metric) for request in parse_tasks(name) for metric in request.metrics or ()]
        values = [_find_figure(figures, request, metric) for request, metric in metrics if "perplexity" not in metric]
        return float(np.mean(values))

    @functools.cached_property
    def _task_digest(self) -> str:
        """Compute a checksum of the folder of task files."""
        assert self.task_files is not None
        digest = hashlib.sha256()
        for path in sorted(path for path in self.task_files.rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(self.task_files)}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    def _evaluate_tasks(self, run: FinishedRun, name: str) -> list[dict[str, Any]]:
        path = run.folder / f"evaluation-{make_slug(name)}.json"
        key = {"identity": run.record.identity, "lm_eval": version("lm_eval")}
        if self.task_files is not None:  # without task files, accept an evaluation with any
            key["task_files"] = self._task_digest
        if path.exists():
            saved = json.loads(read_bytes(path))
            if key.items() <= saved["of"].items():
                return list(saved["figures"])
        result = evaluate([str(run.checkpoint_folder)], [name], task_files=self.task_files, device=self.device)
        figures = []
        for row in result.rows:
            (figure,) = row.figures.values()
            figures.append({"task": row.task, "metric": row.metric, "shots": row.shots, "value": figure.value})
        replace_text(path, json.dumps({"of": key, "figures": figures, "versions": result.versions}, indent=1))
        return figures


def _find_figure(figures: Sequence[Mapping[str, Any]], request: TaskRequest, metric: str) -> float:
    for figure in figures:
        if (figure["task"], figure["metric"]) == (request.name, metric) and request.shots in (None, figure["shots"]):
            return float(figure["value"])
    names = ", ".join(f"{figure['task']} {figure['metric']}" for figure in figures)
    raise HeadwaterError(f"The evaluation of {request.name!r} has no {metric!r}; it has {names}.")


def describe_missing(name: str, arm: SizedArm, runs: Mapping[int, FinishedRun]) -> str:
    """Name the seeds of an arm, called `name`, that have no run; "" if all have one."""
    seeds = sorted(set(arm.seeds) - set(runs))
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} of {name}" if seeds else ""


def _held_out(record: RunRecord, measure: Measure) -> float:
    measures = record.held_out[-1].metrics
    if measure == "perplexity":
        return math.exp(measures["loss"])
    if measure in (*HALVES, "hardest"):
        accuracies = [value for name, value in measures.items() if name.startswith("accuracy/")]
        if len(accuracies) < 2:
            raise HeadwaterError(f"{record.name!r} has no accuracy/… from easy to hard; it has {', '.join(measures)}.")
        middle = -(-len(accuracies) // 2)
        halves = {"easier": accuracies[:middle], "harder": accuracies[middle:]}
        return float(np.mean(halves.get(measure, accuracies[-1:])))
    name = record.metric if measure == "result" else measure
    if name not in measures:
        raise HeadwaterError(f"{record.name!r} has no measure {name!r}; it has {', '.join(measures)}.")
    return measures[name]


def _sum_census(counts: Census | None, fields: str, run: FinishedRun) -> float:
    if counts is None:
        raise HeadwaterError(f"{run.record.name!r} does not mix keys and values with earlier tokens' ones.")
    return float(sum(asdict(counts)[name] for name in fields.split("+")))


def _average_scalars(learned: list[Scalars], argument: str, run: FinishedRun) -> float:
    symbol, _, layers = argument.partition(":")
    start, end = map(int, layers.split("-"))
    chosen = [scalars for scalars in learned if scalars.symbol == symbol and start <= scalars.layer <= end]
    values = [value for scalars in chosen for value in scalars.values]
    if not values:
        raise HeadwaterError(f"{run.record.name!r} has no scalars {symbol} in layers {start} to {end}.")
    return float(np.mean(values))


def tasks_of(table: PaperTable) -> list[str]:
    """List the tasks and groups of tasks that a table's cells and claims need, as arguments of `evaluate`."""
    measures = list_measures(table)
    measures += [measure for claim in table.claims if isinstance(claim, Pair) for *_, measure in claim.pairs]
    names = [measure.removeprefix("task:").rpartition(":")[0] for measure in measures if measure.startswith("task:")]
    return list(dict.fromkeys(names))
