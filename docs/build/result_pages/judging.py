"""Judge the tables of the papers and of the ledger by the finished runs in results/, with the product's functions."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headwater_lab.comparison.trials import make_slug
from headwater_lab.papers.kept import judge_recorded, read_runs
from headwater_lab.papers.measures import COUNTED
from headwater_lab.papers.result import Reproduction, compute_table, describe_evidence, describe_machine
from headwater_lab.papers.shared_records import compute_comparisons
from headwater_lab.papers.table import Claim as PaperClaim
from headwater_lab.papers.table import PaperTable, ScaleName, read_tables
from headwater_lab.reports.comparison import Comparison
from headwater_lab.training.records import RunRecord, list_recordings

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
    code: str
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
        return f"{self.command} --no-train --records results/{file}.jsonl"


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
    """Name the machines of some runs."""
    return "; ".join(sorted(set(map(describe_machine, records))))


def describe_recordings(records: Sequence[RunRecord]) -> tuple[str, str]:
    """Write when some runs were recorded, and by which code or with which change of the repository."""
    dates, commits = list_recordings(records)
    is_history = any(record.recorded and record.recorded.source == "history" for record in records)
    text = describe_code("" if is_history else ", ".join(commits), ", ".join(commits))
    return " to ".join(dict.fromkeys(dates[:1] + dates[-1:])), text


def describe_code(commit: str, added: str) -> str:
    """Write which commit measured a figure, or which one added it where that was not recorded; '' without either."""
    return f"commit {commit}" if commit else f"added in commit {added}" if added else ""


@functools.cache
def judge_everything() -> Verdicts:
    """Judge all tables, and summarize all comparisons, whose runs are stored."""
    runs = [run for file in RECORDS for run in read_runs(RESULTS / file)]
    stored = json.loads((RESULTS / WITHOUT_RECORDS).read_text())["tables"]
    tables: list[TableResult] = []
    for scale in SCALES:
        judged = {result.name: result for result in judge_recorded(read_tables(), scale, runs)}
        for name, table in read_tables().items():
            if scale == "cpu":
                result = compute_table(name) if table.computed else judged.get(name)
                tables.append(describe_table(name, scale, table, result, stored.get(name)))
            elif name in judged:
                tables.append(describe_table(name, scale, table, judged[name]))
    return Verdicts(sorted(tables, key=lambda item: make_sort_key(item.name)), compute_comparisons(runs))


def make_sort_key(name: str) -> list[str | int]:
    """Make a key that sorts figure 2 before figure 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def describe_table(
    name: str,
    scale: ScaleName,
    table: PaperTable,
    result: Reproduction | None,
    stored: Mapping[str, Any] | None = None,
) -> TableResult:
    """Describe a table at a scale with its claims.

    stored: verdicts that cannot be recomputed because runs of the table are not in the repository. Holm's correction is
    over all claims of a table, so all of its verdicts are stored.
    """
    settings = table.scales.get(scale)
    reason = "" if settings is None else settings.nothing or settings.cannot_show
    if stored is not None:
        claims = [
            make_stored_claim(name, scale, claim, entry, stored)
            for claim, entry in zip(table.claims, stored["claims"], strict=True)
        ]
    elif result is None:
        claims = []
    elif result.work is None:
        claims = [
            Claim(
                name, scale, number, item.says, item.verdict, None, describe_evidence(item), COMPUTED, True, "", "", ""
            )
            for number, item in enumerate(result.claims, 1)
        ]
    else:
        date, code = describe_recordings(result.records)
        claims = [
            Claim(
                name, scale, number, item.says, item.verdict, item.seeds or None, describe_evidence(item),
                find_kind(claim), True, date, code, "; ".join(result.machines), item.estimate, item.interval,
                name_arms(claim),
            )
            for number, (claim, item) in enumerate(zip(table.claims, result.claims, strict=False), 1)
        ]  # fmt: skip
    return TableResult(name, scale, table, result, claims, reason)


def make_stored_claim(
    name: str, scale: str, claim: PaperClaim, entry: Mapping[str, Any], stored: Mapping[str, Any]
) -> Claim:
    return Claim(
        name, scale, entry["number"], entry["claim"], entry["verdict"], entry["seeds"], entry["evidence"],
        find_kind(claim), False, stored["date"], describe_code("", stored["added"]), "", arms=name_arms(claim),
    )  # fmt: skip


def find_kind(claim: PaperClaim) -> str:
    """Find whether a claim is about what is counted, such as parameters, or about what is measured."""
    return COUNTED_EXACTLY if getattr(claim, "measure", "") in COUNTED else MEASURED


def name_arms(claim: PaperClaim) -> str:
    """Name the arm of a claim, and the one that it is compared with."""
    return f"{claim.arm} against {claim.against}" if hasattr(claim, "against") else claim.arm


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
