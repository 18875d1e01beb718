"""Every verdict that the stored runs decide: tables of the papers and of the ledger, judged without training."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from product import SCALES, judged_table, read_tables, stored_comparisons, write_stored_runs

RESULTS = Path(__file__).parents[2] / "results"
DIGITS = 6


def rounded(value: float | None) -> float | str | None:
    """A number as it may stand in JSON, to six digits, which no platform's rounding reaches."""
    if value is None or not math.isfinite(value):
        return value if value is None else str(value)
    return float(f"{value:.{DIGITS - 1}e}")


def judged(verdict: str, count: int, estimate: float | None, interval: tuple[float, float] | None) -> list[Any]:
    return [verdict, count, rounded(estimate), *map(rounded, interval or ())]


def count_shipped(tables: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Count the verdicts of each table at each scale, as `headwater reproduce --list` shows them.

    Where runs of a table are not stored, those that were printed when it was trained.
    """
    counts: dict[str, dict[str, dict[str, int]]] = {}
    lists = {
        tuple(name.split(", ")): [claim[0] for claim in table["claims"].values()] for name, table in tables.items()
    }
    printed = json.loads((RESULTS / "verdicts-without-records.json").read_text())["tables"]
    lists |= {(name, "cpu"): [claim["verdict"] for claim in table["claims"]] for name, table in printed.items()}
    for (name, scale), judged_claims in sorted(lists.items()):
        if judged_claims:
            counts.setdefault(name, {})[scale] = dict(sorted(Counter(judged_claims).items()))
    return counts


def verdicts() -> dict[str, Any]:
    """What the stored runs say, and nothing of which they say nothing.

    tables: of each at each scale, verdict, number of seeds, estimate and interval of each claim, and mean and deviation
    of each cell. comparisons: of each arm, verdict, number of runs, difference and interval.
    """
    by_table: dict[str, Any] = {}
    by_comparison: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder = Path(name)
        write_stored_runs([RESULTS / "ledger.jsonl", RESULTS / "papers.jsonl"], folder)
        for table in read_tables():
            for scale in SCALES:
                if (result := judged_table(table, scale, folder)) is not None:
                    by_table[f"{table}, {scale}"] = {
                        "claims": {claim: judged(*values) for claim, values in result["claims"].items()},
                        "cells": {cell: [*map(rounded, values)] for cell, values in result["cells"].items()},
                    }
        for trials in sorted(folder.glob("*/trials*")):
            for comparison, arms in stored_comparisons(trials).items():
                path = f"{trials.relative_to(folder).as_posix()}/{comparison}"
                by_comparison[path] = {arm: judged(*values) for arm, values in arms.items()}
    return {"tables": by_table, "comparisons": by_comparison}
