"""Comparisons: statistics by hand, trials in worker processes, and a report made of records alone."""

import json
import multiprocessing
import re

import numpy as np
import pytest
from PIL import Image

from headwater.compare import run_trials, steps_to, summarise, trials_of
from headwater.errors import HeadwaterError
from headwater.recipe import parse
from headwater.records import Experiment, HeldOutPoint, RunRecord, environment, read_record, write_record
from headwater.report import comparisons, reading, write_report


def record(arm, seed, result, curve=(), measure="bits_per_byte"):
    looks = [*curve, result]
    return RunRecord(
        name=f"{arm}-{seed}",
        experiment=Experiment(name="e", title="E", arm=arm, baseline="base"),
        seed=seed,
        status="finished",
        recipe={},
        config_hash="",
        data={},
        measure=measure,
        lower_is_better=measure == "bits_per_byte",
        parameters=10,
        cache_bytes_per_token=4,
        tokens=1000,
        flops=1.0,
        seconds=2.0,
        held_out=[HeldOutPoint(step=10 * i, tokens=100 * i, measures={measure: v}) for i, v in enumerate(looks, 1)],
        environment=environment("cpu"),
    )


def test_differences_are_paired_by_seed_with_students_interval():
    base, other = [3.0, 3.5, 2.5], [2.9, 3.3, 2.45]
    records = [record("base", s, r) for s, r in enumerate(base)] + [record("other", s, r) for s, r in enumerate(other)]
    summary = summarise(records, "base")[1]
    differences = np.subtract(other, base)
    half = 4.302652729911275 * differences.std(ddof=1) / np.sqrt(3)  # t quantile 0.975 with 2 degrees of freedom
    assert summary.difference == pytest.approx(differences.mean())
    assert summary.interval == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert summary.mean == pytest.approx(np.mean(other))
    assert summary.spread == pytest.approx(np.std(other, ddof=1))
    assert summary.tokens_per_second == 500


def test_seeds_that_only_one_arm_has_are_not_paired():
    records = [record("base", 0, 3.0), record("base", 1, 2.0), record("other", 1, 1.5), record("other", 2, 9.0)]
    summary = summarise(records, "base")[1]
    assert summary.difference == pytest.approx(-0.5)
    assert summary.interval is None
    assert summary.verdict(lower_is_better=True) == "open"


@pytest.mark.parametrize(
    ("other", "lower", "verdict"),
    [
        ([2.0, 2.1, 1.9], True, "better"),
        ([2.0, 2.1, 1.9], False, "worse"),
        ([4.0, 4.1, 3.9], True, "worse"),
        ([2.0, 4.1, 3.0], True, "open"),
    ],
)
def test_a_verdict_needs_an_interval_without_zero(other, lower, verdict):
    base = [3.0, 3.05, 2.95]
    records = [record("base", s, r) for s, r in enumerate(base)] + [record("other", s, r) for s, r in enumerate(other)]
    assert summarise(records, "base")[1].verdict(lower) == verdict


def test_steps_to_a_threshold():
    assert steps_to(record("a", 0, 0.999, curve=[0.2, 0.98, 0.991, 0.97], measure="accuracy"), 0.99) == 30
    assert steps_to(record("a", 0, 0.5, measure="accuracy"), 0.99) is None
    assert steps_to(record("a", 0, 1.0, curve=[3.0, 1.4]), 1.5) == 20


@pytest.fixture
def recipe():
    return parse(
        {
            "name": "tiny",
            "title": "A tiny comparison",
            "data": {"kind": "induction", "vocabulary": 8, "length": 12, "held_out": 64},
            "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
            "training": {"steps": 600, "batch_size": 4, "threads": 1},
            "reporting": {"log_every": 5, "evaluate_every": 15, "save_every": 50, "tensorboard": False},
            "compare": {
                "baseline": "vanilla",
                "seeds": [0, 1],
                "threshold": 0.2,
                "arms": {"vanilla": {}, "KV shift": {"model": {"mechanisms": {"kv_shift": {}}}}},
            },
        },
        "test",
    )


def test_a_killed_worker_is_reported_the_rest_goes_on_and_a_second_call_repairs(recipe, tmp_path):
    trials = trials_of(recipe, tmp_path)
    killed: list = []

    def kill_one(trial, step, status):
        if status == "running" and step >= 20 and not killed:
            multiprocessing.active_children()[0].kill()
            killed.append(trial)

    # One worker, so that the one killed is the one that runs the trial.
    outcomes = run_trials(trials, workers=1, on_change=kill_one)
    failed = [outcome for outcome in outcomes if outcome.record is None]
    assert killed
    assert len(failed) == 1
    assert "worker process died" in failed[0].error
    finished = [t.folder for t, o in zip(trials, outcomes, strict=True) if o.record is not None]
    before = {folder: (folder / "record.json").stat().st_mtime_ns for folder in finished}

    again = run_trials(trials, workers=2)
    assert all(outcome.record is not None for outcome in again)
    assert {folder: (folder / "record.json").stat().st_mtime_ns for folder in finished} == before

    page = write_report(tmp_path)
    html = page.read_text()
    assert "A tiny comparison" in html
    assert not re.search(r'(?:src|href)="(?!data:)', html), "the page must need no network"
    for summary in comparisons(tmp_path)[0].summaries:
        assert f"{summary.mean:.3f}" in html
    for kind in ("curves", "bars"):
        with Image.open(tmp_path / f"tiny-{kind}.png") as picture:
            assert picture.width > 800
            assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10, "an empty picture"


def test_arms_start_from_the_same_shared_parameters(recipe, tmp_path):
    from headwater import HeadwaterForCausalLM

    data = recipe.data.build()
    a, b = (HeadwaterForCausalLM(recipe.arm(arm, 1).config_for(data)) for arm in ("vanilla", "KV shift"))
    shared = dict(a.named_parameters())
    assert all((shared[name] == p).all() for name, p in b.named_parameters() if name in shared)
    assert len(dict(b.named_parameters())) > len(shared)


def test_a_trial_with_other_settings_is_not_taken_for_done(recipe, tmp_path):
    trial = trials_of(recipe, tmp_path)[0]
    trial.folder.mkdir(parents=True)
    done = record("vanilla", 0, 1.0)
    write_record(done, trial.folder)
    from headwater.compare import result_of as finished_record

    assert finished_record(trial) is None
    write_record(done.model_copy(update={"config_hash": trial.recipe.digest()}), trial.folder)
    assert finished_record(trial) is not None


def test_the_report_claims_only_what_intervals_carry(tmp_path):
    data = {"base": [3.0, 3.1, 2.9], "good": [2.5, 2.6, 2.4], "unclear": [2.9, 3.3, 2.8]}
    for arm, results in data.items():
        for seed, result in enumerate(results):
            (tmp_path / f"{arm}-{seed}").mkdir()
            write_record(record(arm, seed, result), tmp_path / f"{arm}-{seed}")
    lines = {line.split(":")[0]: line for line in reading(comparisons(tmp_path)[0])}
    assert "against base; better, 95 % interval" in lines["good"]
    assert "open, the interval includes zero" in lines["unclear"]
    assert "base" not in lines


def test_a_folder_without_records_is_one_sentence(tmp_path):
    with pytest.raises(HeadwaterError, match="no finished runs of a comparison"):
        write_report(tmp_path)


def test_records_of_another_schema_are_refused(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(HeadwaterError, match="not a run record of schema 1"):
        read_record(tmp_path)
