"""Runs that branch off a shorter one equal runs of their own, to the last bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trials import same_end, train_until

from headwater.util.errors import HeadwaterError
from headwater.util.files import sha256_of
from headwater_lab.comparison.pool import run_trials, train_job
from headwater_lab.comparison.running import list_jobs
from headwater_lab.comparison.trials import list_trials, order_jobs
from headwater_lab.training.branching import can_branch
from headwater_lab.training.checkpoints import find_damage, list_checkpoints, step_of
from headwater_lab.training.loop import train
from headwater_lab.training.records import RunRecord, read_record
from headwater_lab.training.saving import write_sums

# Accumulation, dropout, log points across the branch, an average of the weights, and evaluations before and after.
WSD = {"schedule": "wsd", "decay_fraction": 0.4, "gradient_accumulation_steps": 2, "ema_decay": 0.9}
REPORTS = {"log_every": 4, "evaluate_every": 5, "save_every": 1, "keep_checkpoints": 100}


@pytest.fixture
def budget(recipe):
    """Make the recipe of a run of so many steps: of 10 and 20, the decays begin after 6 and 12."""
    return lambda steps, **training: recipe(training={**WSD, "steps": steps, **training}, reporting=REPORTS)


def equal_files(a, b):
    for name in ("model.safetensors", "training.safetensors"):
        x, y = load_file(a / name), load_file(b / name)
        assert x.keys() == y.keys()
        assert all(torch.equal(x[key], y[key]) for key in x)


def comparable(record):
    """Everything of a record but the clock, notices (of busy cores), and where the run branched off."""
    content = record.model_dump(exclude={"seconds", "data_wait_seconds", "recorded", "trunk", "speed", "notices"})
    return content | {"speed": [point.step for point in record.speed]}


@pytest.mark.parametrize(
    "training",
    [{}, {"optimizer": "muon", "decay_form": "1-sqrt", "min_learning_rate_ratio": 0.1}],
    ids=["adamw", "muon"],
)
def test_a_branch_equals_a_run_of_its_own_at_every_step(budget, tmp_path, training):
    train(budget(10, **training), tmp_path / "short")
    whole = train(budget(20, **training), tmp_path / "whole")
    branch = train(budget(20, **training), tmp_path / "branch", trunk=tmp_path / "short")
    checkpoints = list_checkpoints(tmp_path / "branch")
    assert [step_of(path) for path in checkpoints] == list(range(6, 21))
    for path in checkpoints:  # the branch point, and every step after it
        assert find_damage(path) is None
        own = tmp_path / "whole" / "checkpoints" / path.name
        equal_files(path, own)
        old, new = (json.loads((checkpoint / "training.json").read_text()) for checkpoint in (own, path))
        assert old.pop("trunk") is None
        assert new.pop("trunk") == {"folder": "../short", "identity": budget(10, **training).identity, "step": 6}
        unlike = {name for name in old if old[name] != new[name]}
        assert unlike <= {"seconds", "waited", "run_id"}
    for step in range(1, 7):  # before the branch point, its trunk is the run
        equal_files(*(tmp_path / run / "checkpoints" / f"step-{step:06d}" for run in ("short", "whole")))
    assert comparable(branch) == comparable(whole)
    same_end(tmp_path / "whole", tmp_path / "branch")
    assert branch.trunk is not None
    assert branch.trunk.step == 6
    assert read_record(tmp_path / "branch" / branch.trunk.folder).identity == branch.trunk.identity
    # The trunk has not changed, though the branch shares its files.
    same_end(tmp_path / "short", tmp_path / "short")
    assert all(find_damage(path) is None for path in list_checkpoints(tmp_path / "short"))


def test_trunk_and_branches_stopped_after_every_step_end_the_same(budget, tmp_path):
    train(budget(20), tmp_path / "whole")
    for step in (3, 6, 7, 9):
        train_until(step, budget(10), tmp_path / "short", resume=True)
    train(budget(10), tmp_path / "short", resume=True)
    trunk = tmp_path / "short"
    for step in (7, 12, 13, 19):
        train_until(step, budget(20), tmp_path / "branch", resume=True, trunk=trunk)
        shutil.rmtree(trunk, ignore_errors=True)  # a branch needs its trunk no longer
    record = train(budget(20), tmp_path / "branch", resume=True, trunk=trunk)
    same_end(tmp_path / "whole", tmp_path / "branch")
    assert record.trunk is not None
    assert record.trunk.step == 6


def test_the_step_before_the_decay_is_always_saved_and_never_removed(recipe, tmp_path):
    """Whatever the intervals; a branch of a branch begins at the branch's own."""
    reports = {"log_every": 5, "save_every": None, "evaluate_every": None, "keep_checkpoints": 1}
    made = [recipe(training=WSD | {"steps": steps}, reporting=reports) for steps in (5, 10, 15)]
    train(made[0], tmp_path / "0")
    train(made[1], tmp_path / "1", trunk=tmp_path / "0")
    record = train(made[2], tmp_path / "2", trunk=tmp_path / "1")
    assert [[step_of(path) for path in list_checkpoints(tmp_path / run)] for run in "012"] == [[3, 5], [6, 10], [9, 15]]
    assert record.trunk.step == 6
    train(made[2], tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8}, r"trained with training.batch_size=4, and this recipe has 8; a branch differs only in"),
        ({"schedule": "cosine", "decay_fraction": 0.2}, "Only a run with training.schedule=wsd can branch off"),
        ({"steps": 5}, "no checkpoint from before its decay and this run's, which begins after step 3"),
    ],
)
def test_what_is_no_branch_is_refused_and_leaves_nothing(recipe, tmp_path, changes, message):
    train(recipe(training=WSD | {"steps": 10}), tmp_path / "short")
    with pytest.raises(HeadwaterError, match=message):
        train(recipe(training={**WSD, "steps": 20, **changes}), tmp_path / "branch", trunk=tmp_path / "short")
    assert not (tmp_path / "branch").exists()


def test_other_trunks_are_refused(recipe, corpus, tmp_path):
    made = recipe(training=WSD | {"steps": 20})
    train(recipe(), tmp_path / "cosine")
    train(recipe(training=WSD | {"steps": 10}, reporting={"log_every": 2}), tmp_path / "short")
    (tmp_path / "empty").mkdir()
    for trunk, message in {
        "cosine": "training.gradient_accumulation_steps=1, and this recipe has 2",
        "short": "reporting.log_every=2, and this recipe has 3",
        "empty": "has no checkpoints to branch off",
    }.items():
        with pytest.raises(HeadwaterError, match=message):
            train(made, tmp_path / "branch", trunk=tmp_path / trunk)
    made = recipe(training=WSD | {"steps": 20}, reporting={"log_every": 2})
    point = list_checkpoints(tmp_path / "short")[0]
    assert step_of(point) == 6
    (point / "model.safetensors").write_bytes(b"")
    with pytest.raises(HeadwaterError, match=r"damaged: model.safetensors has changed"):
        train(made, tmp_path / "branch", trunk=tmp_path / "short")
    assert not (tmp_path / "branch").exists()


def test_a_run_with_mechanisms_that_follow_its_length_has_no_branches(recipe, tmp_path):
    """As if of code from outside; a comparison then trains each budget from step 0, with the same result."""
    short, long = (recipe(training=WSD | {"steps": steps}) for steps in (10, 20))
    train(short, tmp_path / "short")
    point = list_checkpoints(tmp_path / "short")[0]
    facts = json.loads((point / "training.json").read_text())
    (point / "training.json").write_text(json.dumps(facts | {"kept": {"layers.0": 1.0}}))
    write_sums(point, {file.name: sha256_of(file) for file in point.iterdir() if file.name != "SHA256SUMS"})
    with pytest.raises(HeadwaterError, match="change over the whole length of a run, so none can branch off"):
        train(long, tmp_path / "branch", trunk=tmp_path / "short")
    train_job(long.model_dump(mode="json"), str(tmp_path / "job"), None, str(tmp_path / "short"))
    assert read_record(tmp_path / "job").trunk is None
    shutil.rmtree(point)  # the checkpoints from its decay are left
    train_job(long.model_dump(mode="json"), str(tmp_path / "other"), None, str(tmp_path / "short"))
    same_end(tmp_path / "other", tmp_path / "job")


def test_a_run_whose_rate_has_decayed_is_not_made_longer(recipe, tmp_path):
    train(recipe(training=WSD | {"steps": 10}), tmp_path / "run")
    with pytest.raises(HeadwaterError, match=r"at step 10, and by training.steps=10 or 20 its rate decays after"):
        train(recipe(training=WSD | {"steps": 20}), tmp_path / "run", resume=True)
    train_until(5, recipe(training=WSD | {"steps": 10}), tmp_path / "again")
    train(recipe(training=WSD | {"steps": 20}), tmp_path / "again", resume=True)
    train(recipe(training=WSD | {"steps": 20}), tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "again")


def test_a_damaged_trunk_is_no_trunk(recipe, tmp_path):
    """A comparison then trains the run from its start, which gives the same."""
    short, long = (recipe(training=WSD | {"steps": steps}) for steps in (10, 20))
    train(short, tmp_path / "trunk")
    assert can_branch(tmp_path / "trunk", long)
    for file in (tmp_path / "trunk").glob("checkpoints/*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert not can_branch(tmp_path / "trunk", long)


def test_a_trunk_with_other_settings_or_code_is_no_trunk(recipe, tmp_path, monkeypatch):
    """`compare` then trains the run from its start; --trunk says what is different."""
    short, long = (recipe(training=WSD | {"steps": steps}) for steps in (10, 20))
    train(short, tmp_path / "trunk")
    assert not can_branch(tmp_path / "trunk", recipe(training=WSD | {"steps": 20}, reporting={"log_every": 7}))
    monkeypatch.setattr(RunRecord, "changed_code", ["mine:Optimizer"])
    assert not can_branch(tmp_path / "trunk", long)
    with pytest.raises(HeadwaterError, match=r"mine:Optimizer has changed since .* was started"):
        train(long, tmp_path / "branch", trunk=tmp_path / "trunk")


def test_a_comparison_branches_its_budgets(recipe, tmp_path):
    """Sizes and arms that differ only in steps share a trunk, for each seed; other rates or batches do not."""
    compare = {
        "baseline": "base",
        "seeds": [0],
        "arms": {"base": {}, "twice": {"training": {"steps": 20}}, "hot": {"training": {"learning_rate": 0.01}}},
        "budget_arms": ["twice"],
        "sizes": {"S": {}, "L": {"training": {"steps": 40}, "arms": {"twice": {"training": {"steps": 80}}}}},
    }
    made = recipe(training=WSD | {"steps": 10}, compare=compare)
    trials = list_trials(made, tmp_path / "out")
    labels = {trial.folder: trial.label for trial in trials} | {None: None}
    levels = [[(job.label, labels[job.trunk]) for job in level] for level in order_jobs(trials)]
    assert levels == [
        [("base · S · seed 0", None), ("hot · S · seed 0", None)],
        [("twice · S · seed 0", "base · S · seed 0"), ("hot · L · seed 0", "hot · S · seed 0")],
        [("base · L · seed 0", "twice · S · seed 0")],
        [("twice · L · seed 0", "base · L · seed 0")],
    ]
    assert len(list_jobs(made, tmp_path / "out")) == 6
    short = [trial for trial in trials if trial.recipe.training.steps <= 40]
    outcomes = run_trials(short, workers=2)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    for trial, outcome in zip(short, outcomes, strict=True):
        own = train(trial.recipe, tmp_path / "own" / trial.label, experiment=trial.experiment)
        assert comparable(outcome.record) == comparable(own)
        same_end(trial.folder, tmp_path / "own" / trial.label)
    trunks = [outcome.record.trunk for outcome in outcomes]
    assert [(trial.label, trunk and trunk.step) for trial, trunk in zip(short, trunks, strict=True)] == [
        ("base · S · seed 0", None),
        ("twice · S · seed 0", 6),
        ("hot · S · seed 0", None),
        ("base · L · seed 0", 12),
        ("hot · L · seed 0", 6),
    ]
