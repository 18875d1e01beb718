"""Comparisons read from saved records: which runs belong together, and which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.earlier import find_conflict
from headwater_lab.comparison.equivalent_flops import EquivalentFlops, measure_equivalent_flops
from headwater_lab.comparison.statistics import Summary, choose_decisive, plan_of, summarize_arms
from headwater_lab.training.records import Experiment, RunRecord, SeedPlan, changed_data, list_records, read_record

UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token"}


@dataclass(frozen=True, repr=False)
class Comparison:
    """The runs of one experiment at one size.

    budgets: arms that are the baseline with other budgets.
    records: finished and diverged runs that count. The baseline's come first, then the other
        arms', the best last, except for those without a mean.
    tuning: the trials of learning rates, of all sizes; failed: runs that need attention; unfinished: runs that are
        running or were interrupted. beyond: the number of runs that finished after their arm was
    decided. folders: of finished runs, by (arm, seed). projections: FLOPs for which laws predict the losses.
    """

    name: str
    title: str
    baseline: str
    threshold: float | Literal["baseline"] | None
    size: str | None
    records: list[RunRecord]
    budgets: list[str] = field(default_factory=list)
    tuning: list[RunRecord] = field(default_factory=list)
    failed: list[RunRecord] = field(default_factory=list)
    unfinished: list[RunRecord] = field(default_factory=list)
    folders: dict[tuple[str, int], Path] = field(default_factory=dict)
    beyond: int = 0
    projections: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Comparison(name={self.name!r}, size={self.size!r}, arms={self.arms}, seeds={self.seeds})"

    @property
    def plan(self) -> SeedPlan | None:
        """The plan by which seeds were added until the comparison was decided; None if they were fixed."""
        return plan_of(self.records)

    @cached_property
    def summaries(self) -> list[Summary]:
        return summarize_arms(self.records, self.baseline, self.threshold, self.budgets)

    @cached_property
    def equivalent_flops(self) -> list[EquivalentFlops]:
        """The baseline's FLOPs for each arm's result; empty without `budgets`."""
        return measure_equivalent_flops(self.records, self.baseline, self.budgets) if self.budgets else []

    @property
    def changed_data(self) -> str:
        """A sentence if its runs had different data; otherwise ""."""
        return changed_data(self.records)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(record.arm for record in self.records))

    @property
    def seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def metric(self) -> str:
        return self.records[0].metric

    @property
    def unit(self) -> str:
        return name_unit(self.metric, self.trained_on)

    @property
    def trained_on(self) -> str:
        """The unit of training: tokens or images."""
        return self.records[0].unit

    @property
    def lower_is_better(self) -> bool:
        return self.records[0].lower_is_better

    @property
    def domains(self) -> list[str]:
        return next((record.domains for record in self.records if record.held_out), [])

    @property
    def heading(self) -> str:
        """The title, with the size if there are several."""
        return self.title if self.size is None else f"{self.title} · {self.size}"

    def runs(self, arm: str) -> list[RunRecord]:
        return [record for record in self.records if record.arm == arm]

    def finished(self, arm: str) -> list[RunRecord]:
        return [record for record in self.runs(arm) if record.status == "finished"]


def name_unit(metric: str, trained_on: str = "tokens") -> str:
    """Write a metric in words. trained_on: tokens or images."""
    kind, _, domain = metric.partition("/")
    units = UNITS | ({"loss": "nats per image"} if trained_on == "images" else {})
    if kind == "accuracy" and domain:
        return f"{domain} accuracy"
    return f"{units[kind]} of {domain}" if domain and kind in units else units.get(metric, metric.replace("_", " "))


def read_comparisons(folder: Path) -> list[Comparison]:
    """Read the comparisons whose records are under `folder`, one for each size, the smaller first.

    The folder of a run that belongs to none is read as a comparison with a single arm.

    Raises `HeadwaterError` if there are none with a finished run, and if runs of one contradict each other: an arm with
    several settings, two runs of one seed, several baselines or plans.
    """
    groups: dict[tuple[str, str | None], list[tuple[RunRecord, Path]]] = {}
    tuning: dict[str, list[RunRecord]] = {}
    for path in list_records(folder):
        record = read_record(path)
        experiment = record.experiment
        if experiment is None and path.parent == folder:
            experiment = Experiment(name=record.name, title="", arm=record.name, baseline=record.name)
            record = record.model_copy(update={"experiment": experiment})
        if experiment is None:
            continue
        if experiment.phase == "tuning":
            tuning.setdefault(experiment.name, []).append(record)
        else:
            groups.setdefault((experiment.name, experiment.size), []).append((record, path.parent))
    results = [
        _make_comparison(runs, tuning.get(name, []))
        for (name, _), runs in groups.items()
        if any(_is_finished(record) for record, _ in runs)
    ]
    names = list(dict.fromkeys(result.name for result in results))
    if not results:
        raise HeadwaterError(
            f"There are no finished runs of a comparison under {str(folder)!r}; train some with `headwater compare`, "
            "or name the folder of a run."
        )

    def rank(result: Comparison) -> tuple[int, int, int]:
        return names.index(result.name), result.records[0].parameters, result.records[0].tokens

    return sorted(results, key=rank)


def _is_finished(record: RunRecord) -> bool:
    return record.status == "finished" and record.result is not None


def _has_ended(record: RunRecord) -> bool:
    return _is_finished(record) or record.status == "diverged"


def _make_comparison(runs: Sequence[tuple[RunRecord, Path]], tuning: list[RunRecord]) -> Comparison:
    if wrong := find_conflict(runs):
        raise HeadwaterError(
            f"{wrong}, so they do not fit into one table; report their folders separately, or remove one."
        )
    records = [record for record, _ in runs]
    experiment = next(filter(_is_finished, records)).experiment
    assert experiment is not None
    ended = list(filter(_has_ended, records))
    decided = choose_decisive(ended, experiment.baseline)
    measured = {_find_key(record) for record in ended}
    return Comparison(
        name=experiment.name,
        title=experiment.title or experiment.name,
        baseline=experiment.baseline,
        threshold=experiment.threshold,
        budgets=experiment.budget_arms,
        size=experiment.size,
        records=_sort_records(decided, experiment.baseline),
        tuning=tuning,
        failed=[record for record in records if record.status == "failed"],
        unfinished=[record for record in records if record.status != "failed" and _find_key(record) not in measured],
        folders={_find_key(record): folder for record, folder in runs if _is_finished(record)},
        beyond=len(ended) - len(decided),
        projections=experiment.projections,
    )


def _sort_records(records: Sequence[RunRecord], baseline: str) -> list[RunRecord]:
    """Sort the baseline's first, then the other arms', the best last, except for those without a mean."""
    means = {summary.arm: summary.mean for summary in summarize_arms(records, baseline)}
    sign = 1 if records[0].lower_is_better else -1

    def rank(record: RunRecord) -> tuple[bool, bool, float, str, int]:
        arm = record.arm
        mean = means[arm]
        return arm != baseline, mean is None, -sign * (mean or 0.0), arm, record.seed

    return sorted(records, key=rank)


def _find_key(record: RunRecord) -> tuple[str, int]:
    return record.arm, record.seed


def group_by_experiment(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Group comparisons, as `read_comparisons` sorts them, by name: the sizes of each."""
    return [list(sizes) for _, sizes in groupby(comparisons, key=lambda comparison: comparison.name)]


def differ_in_cost(records: Sequence[RunRecord]) -> bool:
    """Whether runs differ in FLOPs per token, or started from trained models."""
    rates = [record.flops / record.tokens for record in records if record.tokens]
    return bool(rates) and (max(rates) > 1.02 * min(rates) or any(record.origin for record in records))
