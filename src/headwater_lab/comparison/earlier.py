"""Runs that exist before a comparison begins: a table must not mix the results of different experiments.

Other settings, arms or plans need another folder. Baseline, threshold, budgets and title may change, for all runs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError, NotTrusted
from headwater_lab.comparison.pool import check_same_run
from headwater_lab.comparison.trials import Trial, choose_rate, find_tried_rate, make_trial
from headwater_lab.comparison.tuning import find_tuned_rate
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.training.records import (
    ENDED,
    Experiment,
    RunRecord,
    SeedPlan,
    find_record,
    list_records,
    write_record,
)

EarlierRuns = Sequence[tuple[RunRecord, Trial]]


def find_earlier_runs(recipe: Recipe, trials: Sequence[Trial], out: Path, shared: bool) -> EarlierRuns:
    """Find the runs of the recipe's comparison below `out`, except those that tune learning rates, and their trials.

    shared: only those in the folders of `trials`. Training reports unreadable records. Raises `HeadwaterError` for a
    run of the recipe's name that belongs to no comparison, since no table could include both, or not in the recipe's:
    it has an arm or a size that the recipe lacks, is in another folder, or was trained under another plan, whose error
    rate a change would invalidate. Runs of a comparison with fixed seeds become part of the plan.
    """
    folders = [trial.folder for trial in trials] if shared else [path.parent for path in list_records(out)]
    runs = []
    for folder in folders:
        if (record := find_record(folder)) is None:
            continue
        experiment = record.experiment
        if experiment is None and record.name == recipe.name and not shared:
            raise HeadwaterError(
                f"{str(folder)!r} holds a run {recipe.name!r} of no comparison, and the tables would include it; "
                "choose another --out (out=), or remove it."
            )
        if experiment is not None and experiment.name == recipe.name and experiment.phase == "comparison":
            runs.append((record, _find_trial(recipe, experiment, record.seed, folder, out)))
    for record, trial in runs:
        plan = trial.experiment.seed_plan
        if record.experiment and record.experiment.seed_plan not in (None, plan):
            earlier_plan = _describe_plan(record.experiment.seed_plan)
            raise HeadwaterError(
                f"{str(trial.folder)!r} was run until decided, with {earlier_plan}, but now the recipe has "
                f"{_describe_plan(plan)}; the error rate holds only for a plan made before the results, so choose the "
                "same plan or another --out."
            )
    return runs


def _find_trial(recipe: Recipe, experiment: Experiment, seed: int, folder: Path, out: Path) -> Trial:
    """Find the trial of a run in a folder. Raises `HeadwaterError` if it has none in the recipe's comparison."""
    section = recipe.compare
    assert section is not None
    if experiment.arm not in section.arms or experiment.size not in (section.sizes or [None]):
        subject = f"size {experiment.size!r}" if experiment.size else "one size"
        subject = subject if experiment.arm in section.arms else f"arm {experiment.arm!r}"
        raise HeadwaterError(
            f"{str(folder)!r} holds a run of the {subject}, which the recipe {recipe.name!r} does not have, and "
            "the tables would compare it with the others; choose another --out, or remove it."
        )
    trial = make_trial(recipe, experiment.arm, seed, out, experiment.size)
    if trial.folder.resolve() != folder.resolve():
        raise HeadwaterError(
            f"{str(folder)!r} holds a run of {trial.label}, which belongs in {str(trial.folder)!r}, and the tables "
            "would include both; choose another --out, or remove one."
        )
    return trial


def check_data(trials: Sequence[Trial], comparison: Sequence[Trial]) -> None:
    """Raise `HeadwaterError` if some of these trials are to be trained on other data than trials of the comparison.

    A folder, or a file of records, may be from another machine. The data are built only if a trial is missing.
    """
    records = {trial.folder: find_record(trial.folder) for trial in (*comparison, *trials) if not trial.recipe.stages}
    ended = {folder: record for folder, record in records.items() if record is not None and record.status in ENDED}
    missing = [trial.recipe.data for trial in trials if trial.folder in records and trial.folder not in ended]
    for settings in {data.model_dump_json(): data for data in missing}.values():
        values = settings.model_dump(mode="json")
        if earlier := {folder: record for folder, record in ended.items() if record.recipe.get("data") == values}:
            _check_same_data(earlier, settings.build().description)


def _check_same_data(runs: Mapping[Path, RunRecord], description: Mapping[str, Any]) -> None:
    """Raise `HeadwaterError` if a run's data are not those that are described. runs: by folder."""
    for folder, record in runs.items():
        if any(record.data.get(name) != description.get(name) for name in ("sha256", "held_out_sha256")):
            python = record.data.get("python")
            data = "other data" if python is None else f"{record.data['source']!r} of Python {python}"
            raise HeadwaterError(
                f"{str(folder)!r} holds a run trained on {data}, which differs from the data here; choose another "
                "--out, or restore the data."
            )


def check_settings(recipe: Recipe, rates: Mapping[str, float], runs: EarlierRuns, out: Path) -> None:
    """Raise `HeadwaterError` if the settings or code of any run differ from the recipe's for its arm and seed.

    rates: the tuned learning rates of some arms; those for other arms are read from their tuning runs.
    """
    section = recipe.compare
    assert section is not None
    rate_by_arm = dict(rates)
    for record, trial in runs:
        expected, arm = trial.recipe, trial.experiment.arm
        if section.tried_rates:
            if arm not in rate_by_arm:
                tuned = find_tuned_rate(recipe, arm, out)
                rate_by_arm[arm] = find_tried_rate(expected, section, record) if tuned is None else tuned
            expected = choose_rate(expected, section, rate_by_arm[arm])
        check_same_run(record, expected, trial.folder)
        evaluate_every = record.recipe.get("reporting", {}).get("evaluate_every")
        has_ended = section.threshold is not None and record.status in ENDED
        if has_ended and evaluate_every != expected.reporting.evaluate_every:
            raise HeadwaterError(
                f"{str(trial.folder)!r} was evaluated with reporting.evaluate_every={json.dumps(evaluate_every)}, and "
                f"the recipe now has {json.dumps(expected.reporting.evaluate_every)}, which determines when an arm "
                "reaches compare.threshold; set it back, or choose another --out."
            )


def adopt_experiment(runs: EarlierRuns) -> None:
    """Write the recipe's current settings of its comparison, such as another threshold, into the existing runs."""
    for record, trial in runs:
        if record.experiment != trial.experiment:
            write_record(record.model_copy(update={"experiment": trial.experiment}), trial.folder)


def find_conflict(runs: Sequence[tuple[RunRecord, Path]]) -> str:
    """Explain why runs of one comparison, at one size, cannot be in one table; "" if they can."""
    folders: dict[tuple[str, int], Path] = {}
    settings: dict[str, tuple[dict[str, Any], Path]] = {}
    reference: tuple[Experiment, Path] | None = None
    plan: tuple[SeedPlan, Path] | None = None
    for record, folder in runs:
        if record.status not in ENDED:
            continue
        experiment = record.experiment
        assert experiment is not None
        earlier = folders.setdefault((experiment.arm, record.seed), folder)
        if earlier != folder:
            return f"{str(earlier)!r} and {str(folder)!r} both hold {experiment.arm!r} with seed {record.seed}"
        arm_recipe, where = settings.setdefault(experiment.arm, (record.recipe, folder))
        if not _same_settings(arm_recipe, record.recipe):
            return f"{str(where)!r} and {str(folder)!r} hold runs of {experiment.arm!r} with different settings"
        expected, where = reference = reference or (experiment, folder)
        if expected.baseline != experiment.baseline:
            baseline = experiment.baseline
            return f"{str(where)!r} was compared with {expected.baseline!r} and {str(folder)!r} with {baseline!r}"
        if experiment.seed_plan is not None:
            planned, where = plan = plan or (experiment.seed_plan, folder)
            if planned != experiment.seed_plan:
                return f"{str(where)!r} and {str(folder)!r} were run until decided by different plans"
    return ""


def _same_settings(recipe_a: dict[str, Any], recipe_b: dict[str, Any]) -> bool:
    """Whether two runs differ at most in their seeds, names and reporting."""
    aside = ("name", "title", "seed", "reporting", "compare")
    plain = [{key: value for key, value in recipe.items() if key not in aside} for recipe in (recipe_a, recipe_b)]
    if json.dumps(plain[0]) == json.dumps(plain[1]):  # compared as text, because the order of mechanisms matters
        return True
    try:
        return len({parse({**recipe, "seed": 0}, "a record").identity for recipe in plain}) == 1
    except NotTrusted:
        raise
    except HeadwaterError:
        return False


def _describe_plan(plan: SeedPlan | None) -> str:
    if plan is None:
        return "fixed seeds"
    return (
        f"{plan.min_seeds} to {len(plan.seeds)} seeds from {plan.seeds[0]} on, a margin of {plan.margin:g} and "
        f"the arms {', '.join(plan.arms)} against {plan.baseline}"
    )
