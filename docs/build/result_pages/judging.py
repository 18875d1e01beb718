"""Judge the tables of the papers and of the ledger by the finished runs in results/, with the product's functions."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from headwater_lab.papers.places import RESTORED, finished_runs

from headwater_lab.comparison.trials import make_slug
from headwater_lab.papers.claims import Judged
from headwater_lab.papers.computing import Fact
from headwater_lab.papers.kept import KeptRun, read_runs
from headwater_lab.papers.measures import COUNTED
from headwater_lab.papers.result import Reproduction, compute_table, describe_evidence, reproduce_table
from headwater_lab.papers.table import PaperTable, ScaleName, read_tables, reads_models
from headwater_lab.papers.work import prepare_work
from headwater_lab.reports import read_comparisons
from headwater_lab.reports.comparison import Comparison
from headwater_lab.training.records import RunRecord, write_record

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
RECORDS = ("ledger.jsonl", "papers.jsonl")
WITHOUT_RECORDS = "verdicts-without-records.json"
SCALES: tuple[ScaleName, ...] = ("cpu", "gpu")  # no table has been run at the third
# Kinds of claims: measured in runs, counted without a run (parameters, FLOPs, bytes), computed from formulas.
MEASURED, COUNTED_EXACTLY, COMPUTED = "measured", "counted", "computed"


@dataclass(frozen=True)
class Claim:
    """A claim with its verdict.

    number: its place in the table, from 1. kind: measured in runs, counted (parameters, FLOPs, bytes), or computed.
    recorded: whether the verdict is recomputed here from runs in the repository (or computed); otherwise it was stored.
    """

    table: str
    scale: str
    number: int
    says: str
    verdict: str
    seeds: int | None
    evidence: str
    kind: str
    recorded: bool
    date: str
    hardware: str
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    arms: str = ""


@dataclass(frozen=True)
class TableResult:
    """A table at a scale. result: its cells and claims from the runs at hand; None if there are no runs.

    reason: why no verdict is given.
    """

    name: str
    scale: str
    table: PaperTable
    result: Reproduction | None
    claims: Sequence[Claim]
    reason: str = ""

    @property
    def command(self) -> str:
        return f"headwater reproduce {self.name}" + (f" --scale {self.scale}" if self.scale != "cpu" else "")

    @property
    def from_records(self) -> str:
        """The command that recomputes the verdicts from the stored runs; '' where none are stored."""
        if self.result is None or self.result.work is None:
            return ""
        file = "ledger" if self.name.startswith("ledger/") else "papers"
        return f"{self.command} --records results/{file}.jsonl"


@dataclass(frozen=True)
class Verdicts:
    """Everything that the stored runs decide. arms: comparisons by the folder of their runs."""

    tables: Sequence[TableResult]
    comparisons: Sequence[Comparison]

    @property
    def claims(self) -> list[Claim]:
        return [claim for table in self.tables for claim in table.claims]

    def find_claim(self, table: str, number: int, scale: str = "cpu") -> Claim:
        return next(
            claim for claim in self.claims if (claim.table, claim.number, claim.scale) == (table, number, scale)
        )

    def find_comparison(self, name: str, size: str | None = None) -> Comparison:
        return next(item for item in self.comparisons if (item.name, item.size) == (name, size))


def describe_hardware(records: Sequence[RunRecord]) -> str:
    """Describe the machines of some runs: processors or GPUs, and PyTorch's versions."""
    devices = sorted({record.environment.device_name or record.environment.device for record in records})
    versions = sorted({record.environment.torch for record in records})
    return f"{'; '.join(devices)}; PyTorch {', '.join(versions)}" if devices else ""


@functools.cache
def read_dates() -> dict[str, str]:
    """When each comparison's runs were recorded."""
    return {name: str(date) for name, date in yaml.safe_load((RESULTS / "runs.yaml").read_text()).items()}


@functools.cache
def judge_everything() -> Verdicts:
    """Judge all tables, and summarize all comparisons, whose runs are stored."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder = Path(name)
        write_runs([run for file in RECORDS for run in read_runs(RESULTS / file)], folder)
        stored = json.loads((RESULTS / WITHOUT_RECORDS).read_text())["tables"]
        tables = [
            judge_table(name, table, scale, folder, stored.get(name, {}))
            for name, table in sorted(read_tables().items(), key=lambda item: make_sort_key(item[0]))
            for scale in SCALES
            if scale == "cpu" or (table.scales and not table.scales[scale].nothing)
        ]
        comparisons = [
            comparison for trials in sorted(folder.glob("*/trials")) for comparison in read_comparisons(trials)
        ]
        for comparison in comparisons:
            comparison.summaries  # noqa: B018  (computed before the folder goes)
    return Verdicts([table for table in tables if table is not None], comparisons)


def make_sort_key(name: str) -> list[str | int]:
    """Make a key that sorts figure 2 before figure 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def write_runs(runs: Sequence[KeptRun], folder: Path) -> None:
    """Write stored runs where tables look for them."""
    for run in runs:
        path = folder / run.run
        path.mkdir(parents=True, exist_ok=True)
        (path / RESTORED).touch()
        write_record(run.record, path)


def judge_table(
    name: str, table: PaperTable, scale: ScaleName, folder: Path, stored: dict[str, Any]
) -> TableResult | None:
    """Judge a table at a scale; None for a scale at which nothing has been run.

    stored: verdicts that cannot be recomputed because runs of the table are not in the repository.
    """
    if table.computed:
        result = compute_table(name)
        return TableResult(name, scale, table, result, make_facts(name, scale, result.claims))
    settings = table.scales[scale]
    if settings.nothing:
        return TableResult(name, scale, table, None, [], settings.nothing)
    work = prepare_work(name, scale, folder)
    records = [run.record for arm in work.trained for run in finished_runs(arm, work.trials).values()]
    if reads_models(table):
        records = []
    if scale != "cpu":
        stored = {}
    if not records and not stored:
        return TableResult(name, scale, table, None, [], settings.cannot_show) if scale == "cpu" else None
    result = reproduce_table(work) if records else None
    names = sorted({arm.recipe.name for arm in work.trained})
    dates = sorted({read_dates()[item] for item in names if records and item in read_dates()})
    judged = list(result.claims) if result is not None else []
    claims = make_claims(name, table, scale, judged, stored, ", ".join(dates), describe_hardware(records))
    return TableResult(name, scale, table, result, claims, settings.cannot_show)


def make_facts(name: str, scale: str, facts: Sequence[Judged | Fact]) -> list[Claim]:
    """Make the claims of a table that is computed without training."""
    return [
        Claim(name, scale, number, fact.says, fact.verdict, None, describe_evidence(fact), COMPUTED, True, "", "")
        for number, fact in enumerate(facts, 1)
    ]


def make_claims(
    name: str,
    table: PaperTable,
    scale: str,
    judged: Sequence[Judged | Fact],
    stored: dict[str, Any],
    date: str,
    hardware: str,
) -> list[Claim]:
    """Make a table's claims with their verdicts: the stored ones, or those that the runs decide.

    Holm's correction is over all claims of a table, so a table with missing runs has all of its verdicts stored.
    """
    by_number = {item["number"]: item for item in stored.get("claims", ())}
    claims = []
    for number, claim in enumerate(table.claims, 1):
        kind = COUNTED_EXACTLY if getattr(claim, "measure", "") in COUNTED else MEASURED
        arms = f"{claim.arm} against {claim.against}" if hasattr(claim, "against") else claim.arm
        item = judged[number - 1] if judged else None
        if number in by_number:
            entry = by_number[number]
            claims.append(
                Claim(
                    name, scale, number, entry["claim"], entry["verdict"], entry["seeds"], entry["evidence"], kind,
                    False, stored["date"], "", arms=arms,
                )
            )  # fmt: skip
        elif isinstance(item, Judged):
            claims.append(
                Claim(
                    name, scale, number, item.says, item.verdict, item.seeds or None, describe_evidence(item), kind,
                    True, date, hardware, item.estimate, item.interval, arms,
                )
            )  # fmt: skip
    return claims


@functools.cache
def read_said() -> dict[str, dict[str, list[dict[str, str]]]]:
    """What public sources say about claims: by table, and by the claim's arms."""
    return yaml.safe_load((RESULTS / "said.yaml").read_text())


def find_unknown_sources(claims: Sequence[Claim]) -> list[str]:
    """List entries of said.yaml that no claim has, as after a claim's arms were renamed."""
    known = {(claim.table, claim.arms) for claim in claims}
    return [
        f"{table}: {arms}" for table, entries in read_said().items() for arms in entries if (table, arms) not in known
    ]


def make_anchor(name: str) -> str:
    """Make the anchor of a table's section."""
    return make_slug(name)
