"""What the golden files are made of: every name of headwater's that they use, under names that stay."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.main import get_command

from headwater import HeadwaterConfig as TextConfig
from headwater import HeadwaterForCausalLM as TextModel
from headwater import HeadwaterForImageClassification as ImageModel
from headwater import HeadwaterVisionConfig as ImageConfig
from headwater.config.presets import PRESETS
from headwater.conversion.export import export as export_model
from headwater.kernels.autotune import forbid_autotuning as without_timings
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.processor import describe_cpu as cpu_name
from headwater_lab.api.comparing import compare as compare_arms
from headwater_lab.api.training import train as train_recipe
from headwater_lab.cli import app
from headwater_lab.data.base import DATA
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.papers.arms import RESTORED
from headwater_lab.papers.kept import read_runs as read_kept_runs
from headwater_lab.papers.result import reproduce_table as judge_table
from headwater_lab.papers.table import SCALES, VERDICTS, read_tables
from headwater_lab.papers.table import reads_models as looks_into_models
from headwater_lab.papers.work import prepare_work as prepare_table
from headwater_lab.recipe.recipe_files import load_recipe as read_recipe_file
from headwater_lab.recipe.recipe_files import shipped_recipes
from headwater_lab.reports import read_comparisons, result_rows
from headwater_lab.training.records import write_record

# Of the installed package and of the command line, for processes of their own and for those that may not import them.
PACKAGES = ("headwater",)
COMMAND = ("-m", "headwater_lab")
# What `headwater reproduce --list` shows.
SHIPPED = VERDICTS

DATA_KINDS = tuple(DATA.built_in)
MECHANISM_NAMES = tuple(MECHANISMS.built_in)

__all__ = [
    "COMMAND",
    "DATA_KINDS",
    "MECHANISM_NAMES",
    "PACKAGES",
    "PRESETS",
    "SCALES",
    "ImageConfig",
    "ImageModel",
    "TextConfig",
    "TextModel",
    "byte_tokenizer",
    "compared",
    "cpu_name",
    "estimate",
    "export_model",
    "figures_of",
    "identities",
    "judged_table",
    "read_tables",
    "run_command",
    "shipped_recipes",
    "stored_comparisons",
    "train_recipe",
    "without_timings",
    "write_stored_runs",
]


def run_command(*arguments: str) -> str:
    """What a command prints to stdout, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        get_command(app)([*arguments], standalone_mode=False)
    return output.getvalue()


def estimate(preset: str) -> list[dict[str, Any]]:
    """The output of `plan PRESET --json`."""
    return json.loads(run_command("plan", preset, "--json"))


def figures_of(record: Any) -> dict[str, Any]:
    """What a record says that is the same wherever and whenever the run is trained."""
    return {
        "status": record.status,
        "measure": record.metric,
        "parameters": record.parameters,
        "cache_bytes_per_token": record.cache_bytes_per_token,
        "tokens": record.tokens,
        "flops": float(record.flops),
        "order": record.data_order,
        "data": {name: record.data.get(name) for name in ("sha256", "held_out_sha256")},
        "losses": [[point.step, point.loss] for point in record.curve],
        "evaluations": [[point.step, dict(point.metrics)] for point in record.held_out],
    }


def arms_of(comparison: Any) -> dict[str, Any]:
    """What a comparison's statistics say of each arm."""
    arms = {}
    for summary in comparison.summaries:
        paired = summary.paired
        arms[summary.arm] = {
            "verdict": summary.verdict(comparison.lower_is_better),
            "mean": summary.mean,
            "spread": summary.spread,
            "difference": summary.difference,
            "interval": None if summary.interval is None else list(summary.interval),
            "p": None if paired is None else paired.p,
            "detectable": None if paired is None else paired.detectable,
        }
    return arms


def compared(recipe: dict[str, Any], folder: str) -> dict[str, Any]:
    """What is said of a recipe's comparison, and its records."""
    (comparison,) = compare_arms(recipe, folder).comparisons
    rows = result_rows(comparison)
    table = [{name or "arm": cell for name, cell in row.items() if not name.endswith("/s")} for row in rows]
    records = {f"{record.experiment.arm}, {record.seed}": figures_of(record) for record in comparison.records}
    return {"arms": arms_of(comparison), "table": table, "records": records}


def stored_comparisons(folder: Path) -> dict[str, Any]:
    """What is said of the comparisons whose runs lie below a folder: by name and size, each arm's verdict, number of
    runs, difference and interval."""
    stored = {}
    for comparison in read_comparisons(folder):
        name = comparison.name if comparison.size is None else f"{comparison.name} @ {comparison.size}"
        stored[name] = {
            summary.arm: (
                summary.verdict(comparison.lower_is_better),
                summary.runs,
                summary.difference,
                summary.interval,
            )
            for summary in comparison.summaries
        }
    return stored


def write_stored_runs(files: Iterable[Path], folder: Path) -> None:
    """Write the runs in files such as `results/ledger.jsonl` where tables look for them."""
    for file in files:
        for run in read_kept_runs(file):
            place = folder / run.run
            place.mkdir(parents=True, exist_ok=True)
            (place / RESTORED).touch()
            write_record(run.record, place)


def judged_table(name: str, scale: str, folder: Path) -> dict[str, Any] | None:
    """A table's claims and cells that the runs in a folder decide; None if there are none.

    claims: by their words, (verdict, seeds, estimate, interval); cells: by row and column, (mean, deviation).
    """
    table = read_tables()[name]
    if table.computed or table.scales[scale].nothing or looks_into_models(table):
        return None
    work = prepare_table(name, scale, folder)
    if not any(place and (work.trials / place.recipe.name).is_dir() for place in work.arms.values()):
        return None
    result = judge_table(work)
    claims = {
        claim.says: (claim.verdict, claim.seeds, claim.estimate, claim.interval)
        for claim in result.claims
        if claim.estimate is not None or claim.interval is not None
    }
    cells = {
        f"{row} | {column}": (ours.value, ours.spread)
        for row, line in zip(result.rows, result.cells, strict=True)
        for column, (_, ours) in zip(result.columns, line, strict=True)
        if ours.value is not None
    }
    return {"claims": claims, "cells": cells} if claims or cells else None


def identities(path: Path) -> dict[str, str]:
    """The identity of each run of a recipe's file, by a label: of the recipe itself, and of each arm at each size with
    seed 0. Of a recipe with stages there is one for each stage."""
    recipe = read_recipe_file(path)
    runs = {"": recipe}
    section = recipe.compare
    for size in (section.sizes or [None]) if section else ():
        for arm in section.arms:
            runs[arm if size is None else f"{arm} @ {size}"] = recipe.arm(arm, 0, size)
    by_label = {}
    for label, run in runs.items():
        by_label[label] = run.identity
        if run.stages:
            stages = run.chain(lambda name, stage: path.parent / f"{name}-{stage.seed}-{stage.identity[-8:]}")
            for name, (stage, _) in zip(run.stage_names, stages, strict=True):
                by_label[f"{label} > {name}"] = stage.identity
    return by_label
