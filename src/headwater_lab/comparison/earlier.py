"""Runs that are there before a comparison begins: a table must not mix the results of several questions.

Other settings, arms or plans need another folder. Baseline, threshold, budgets and title may change, for all runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError, NotTrusted
from headwater_lab.comparison.trials import Trial, at_rate, trial_of
from headwater_lab.comparison.tuning import found_rate
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.training.checkpoints import checkpoints
from headwater_lab.training.records import (
    ENDED,
    Experiment,
    RunRecord,
    SeedPlan,
    read_record,
    record_files,
    write_record,
)

Found = Sequence[tuple[RunRecord, Path]]


def earlier_runs(recipe: Recipe, trials: Sequence[Trial], out: Path, shared: bool) -> list[tuple[RunRecord, Path]]:
    """The runs of the recipe's comparison below `out`, with their folders, except for those that tune learning rates.

    shared: only those in the folders of `trials`. Unreadable records are left to training.
    """
    folders = [one.folder for one in trials] if shared else [path.parent for path in record_files(out)]
    found = []
    for folder in folders:
        try:
            record = read_record(folder)
        except HeadwaterError:
            continue
        one = record.experiment
        if one is not None and one.name == recipe.name and one.phase == "comparison":
            found.append((record, folder))
    return found


def check_arms(recipe: Recipe, runs: Found, out: Path) -> None:
    """Raise `HeadwaterError` if any run is of an arm or a size that the recipe does not have, or in another folder."""
    section = recipe.compare
    assert section is not None
    for record, folder in runs:
        one = _of(record)
        sizes: list[str | None] = [*section.sizes] or [None]
        if one.arm not in section.arms or one.size not in sizes:
            what = (
                f"arm {one.arm!r}" if one.arm not in section.arms else f"size {one.size!r}" if one.size else "one size"
            )
            raise HeadwaterError(
                f"{str(folder)!r} holds a run of the {what}, which the recipe {recipe.name!r} does not have, and the "
                "tables would compare it with the others; choose another --out, or remove it."
            )
        own = trial_of(recipe, one.arm, record.seed, out, one.size)
        if own.folder.resolve() != folder.resolve():
            raise HeadwaterError(
                f"{str(folder)!r} holds a run of {own.label}, whose place is {str(own.folder)!r}, and the tables would "
                "take both; choose another --out, or remove one."
            )


def check_plans(plan: SeedPlan | None, runs: Found) -> None:
    """Raise `HeadwaterError` if any run was trained for another plan, whose error rate a change would break.

    Runs of a comparison with fixed seeds become part of the plan.
    """
    for record, folder in runs:
        given = _of(record).seed_plan
        if given is not None and given != plan:
            raise HeadwaterError(
                f"{str(folder)!r} was run until decided, with {_shown(given)}, but now the recipe has {_shown(plan)}; "
                "the error rate holds only for a plan made before the results, so choose the same plan or another "
                "--out."
            )


def check_settings(recipe: Recipe, rates: Mapping[str, float], runs: Found, out: Path) -> None:
    """Raise `HeadwaterError` if any run that counts has other settings than the recipe now says for its arm and seed.

    rates: the tuned learning rates of some arms; others' are read from the runs that tuned them.
    """
    section = recipe.compare
    assert section is not None
    known = dict(rates)
    for record, folder in runs:
        one = _of(record)
        own = trial_of(recipe, one.arm, record.seed, out, one.size).recipe
        if section.learning_rates:
            if one.arm not in known:
                found = found_rate(recipe, one.arm, out)
                known[one.arm] = record.recipe["training"]["learning_rate"] if found is None else found
            own = at_rate(own, known[one.arm])
        if record.identity != own.identity and (record.status in ENDED or checkpoints(folder)):
            raise HeadwaterError(
                f"{str(folder)!r} holds a run with other settings; choose another --out, or remove it."
            )
        before = record.recipe.get("reporting", {}).get("evaluate_every")
        if section.threshold is not None and record.status in ENDED and before != own.reporting.evaluate_every:
            raise HeadwaterError(
                f"{str(folder)!r} was evaluated with reporting.evaluate_every={json.dumps(before)}, and the recipe now "
                f"has {json.dumps(own.reporting.evaluate_every)}: when an arm gets to compare.threshold would depend "
                "on it; set it back, or choose another --out."
            )


def adopt(recipe: Recipe, runs: Found, out: Path) -> None:
    """Write what the recipe now says about its comparison, such as another threshold, into the runs that are there."""
    for record, folder in runs:
        one = _of(record)
        now = trial_of(recipe, one.arm, record.seed, out, one.size).experiment
        if one != now:
            write_record(record.model_copy(update={"experiment": now}), folder)


def mixed(runs: Found) -> str:
    """A sentence if runs of one comparison, at one size, cannot stand in one table; "" if they can."""
    first: dict[tuple[str, int], Path] = {}
    settings: dict[str, tuple[dict[str, Any], Path]] = {}
    whole: tuple[Experiment, Path] | None = None
    plan: tuple[SeedPlan, Path] | None = None
    for record, folder in runs:
        if record.status not in ENDED:
            continue
        one = _of(record)
        other = first.setdefault((one.arm, record.seed), folder)
        if other != folder:
            return f"{str(other)!r} and {str(folder)!r} both hold {one.arm!r} with seed {record.seed}"
        given, where = settings.setdefault(one.arm, (record.recipe, folder))
        if not _same_settings(given, record.recipe):
            return f"{str(where)!r} and {str(folder)!r} hold runs of {one.arm!r} with different settings"
        known, where = whole = whole or (one, folder)
        if known.baseline != one.baseline:
            return f"{str(where)!r} was compared with {known.baseline!r} and {str(folder)!r} with {one.baseline!r}"
        if one.seed_plan is not None:
            planned, where = plan = plan or (one.seed_plan, folder)
            if planned != one.seed_plan:
                return f"{str(where)!r} and {str(folder)!r} were run until decided by different plans"
    return ""


def _same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs differ at most in their seeds, names and reporting."""
    aside = ("name", "title", "seed", "reporting", "compare")
    plain = [{key: value for key, value in recipe.items() if key not in aside} for recipe in (one, other)]
    if json.dumps(plain[0]) == json.dumps(plain[1]):  # the order of mechanisms counts
        return True
    try:
        return len({parse({**recipe, "seed": 0}, "a record").identity for recipe in plain}) == 1
    except NotTrusted:
        raise
    except HeadwaterError:
        return False


def _of(record: RunRecord) -> Experiment:
    assert record.experiment is not None
    return record.experiment


def _shown(plan: SeedPlan | None) -> str:
    if plan is None:
        return "fixed seeds"
    return (
        f"{plan.min_seeds} to {len(plan.seeds)} seeds from {plan.seeds[0]} on, a margin of {plan.margin:g} and "
        f"the arms {', '.join(plan.arms)} against {plan.baseline}"
    )
