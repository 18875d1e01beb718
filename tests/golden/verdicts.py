"""Every verdict that the stored runs decide: tables of the papers and of the ledger, judged without training."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from product import SCALES, judged_table, tables, write_stored_runs

RESULTS = Path(__file__).parents[2] / "results"
DIGITS = 6


def rounded(value: float | None) -> float | str | None:
    """A number as it may stand in JSON, to six digits, which no platform's rounding reaches."""
    if value is None or not math.isfinite(value):
        return value if value is None else str(value)
    return float(f"{value:.{DIGITS - 1}e}")


def verdicts() -> dict[str, Any]:
    """Each table at each scale: of each claim, the verdict, number of seeds, estimate and ends of its interval; of each
    cell, mean and deviation. Left out is what no run says anything about."""
    judged: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        write_stored_runs(sorted(RESULTS.glob("*.jsonl")), Path(folder))
        for name in tables():
            for scale in SCALES:
                if (result := judged_table(name, scale, Path(folder))) is not None:
                    judged[f"{name}, {scale}"] = {
                        "claims": {
                            claim: [verdict, seeds, rounded(estimate), *map(rounded, interval or ())]
                            for claim, (verdict, seeds, estimate, interval) in result["claims"].items()
                        },
                        "cells": {cell: [*map(rounded, values)] for cell, values in result["cells"].items()},
                    }
    return judged
