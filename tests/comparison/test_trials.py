"""What is trained, by whom, and what becomes of trials that die or diverge."""

import time
from pathlib import Path

import pytest
import torch
from saved import DIVERGES, SHIFT, Here, changed_times, record, tiny

import headwater_lab as lab
import processes
from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison import pool
from headwater_lab.comparison.pool import read_finished, run_trials
from headwater_lab.comparison.running import list_jobs, run_comparison
from headwater_lab.comparison.statistics import summarize_arms
from headwater_lab.comparison.trials import list_trials, make_trial
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.checkpoints import STAGES
from headwater_lab.training.records import read_record, write_record
from headwater_lab.util.workers import show_one_gpu


def test_trials_come_seed_by_seed_each_with_its_folder(tmp_path):
    made = tiny({"arms": {"base": {}, "KV shift!": SHIFT}, "sizes": {"S": {}, "2 L": {"model": {"hidden_size": 16}}}})
    trials = list_trials(made, tmp_path)
    assert [trial.label for trial in trials[:4]] == [
        "base · S · seed 0", "KV shift! · S · seed 0", "base · 2 L · seed 0", "KV shift! · 2 L · seed 0"
    ]  # fmt: skip
    assert len(trials) == 8
    assert trials[3].folder == tmp_path / "tiny" / "2-l" / "kv-shift-0"
    assert trials[3].recipe.model["hidden_size"] == 16
    assert trials[3].recipe.identity == make_trial(made, "KV shift!", 0, tmp_path, "2 L").recipe.identity
    with pytest.raises(HeadwaterError, match=r"has no size 'XL'"):
        make_trial(made, "base", 0, tmp_path, "XL")


def test_names_in_any_script_have_folders_of_their_own(tmp_path):
    arms = {"base": {}, "α = 1": {}, "β = 1": {}, "λ": {}, "√2": {}, "!": {}, "?": {}, "値": {}}
    trials = list_trials(tiny({"arms": arms, "seeds": [0]}), tmp_path)
    assert [trial.folder.name for trial in trials[:5]] == ["base-0", "α-1-0", "β-1-0", "λ-0", "2-0"]
    assert len({trial.folder for trial in trials}) == len(arms)
    assert all(trial.folder.parent == tmp_path / "tiny" for trial in trials)


def test_a_trial_alone_is_the_one_of_the_comparison(tmp_path):
    """`headwater train --arm` with equal budgets."""
    made = tiny({"arms": {"base": {}, "shift": SHIFT | {"training": {"batch_size": 8}}}, "match": "tokens"})
    digests = {trial.label: trial.recipe.identity for trial in list_trials(made, tmp_path)}
    assert make_trial(made, "shift", 1, tmp_path).recipe.identity == digests["shift · seed 1"]
    assert make_trial(made, "shift", 1, tmp_path).recipe.training.steps == 6


@pytest.mark.parametrize(
    ("compare", "training", "message"),
    [
        ({"arms": {"base": {}, "a b": {}, "A-b": {}}}, {}, "The arms 'a b' and 'A-b' of 'tiny' differ only in case or"),
        ({}, {"devices": 2}, "trains each model on 2 devices"),
    ],
)
def test_what_cannot_be_trained_side_by_side_is_refused(tmp_path, compare, training, message):
    with pytest.raises(HeadwaterError, match=message):
        list_trials(tiny(compare, training=training), tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"seeds": [1, 2, 1]}, "seeds has an entry twice"),
        ({"learning_rates": [0.1, 0.2], "tuning_seeds": [8, 8]}, "tuning_seeds has an entry twice"),
        ({"learning_rates": [1e-3, 1e-2], "tuning_seeds": [1]}, r"share \[1\]"),
        ({"learning_rates": [0]}, "learning_rates"),
        ({"learning_rates": [1e-3, 1.0000000001e-3]}, "names a rate twice"),
        ({"arms": {"base": {}, "other": {"seed": 3}}}, r"arms.other.seed has no effect"),
        ({"sizes": {"S": {"name": "small"}}}, r"sizes.S.name has no effect"),
        (
            {"arms": {"base": {}, "wide": {"model": {"hidden_size": 16}}}, "budget_arms": ["wide"]},
            "differs from 'base' in model",
        ),
        (
            {"arms": {"base": {}, "long": {"training": {"steps": 20}}}, "budget_arms": ["long", "long"]},
            "budget_arms has an entry twice",
        ),
        ({"sizes": {"S": {"arms": {"bas": {}}}}}, "did you mean 'base'"),
        ({"sizes": {"S": {"model": {"hiden_size": 3}}}}, "of size 'S': model has no field 'hiden_size'"),
    ],
)
def test_wrong_fields_are_one_sentence(section, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        tiny(section)
    assert "\n" not in str(error.value)


def test_a_trial_with_other_settings_is_not_taken_for_done(tmp_path):
    (job,) = list_trials(tiny({}), tmp_path)[0].jobs
    job.folder.mkdir(parents=True)
    done = record("base", 0, 1.0)
    write_record(done.model_copy(update={"status": "failed"}), job.folder)
    assert read_finished(job) is None
    for status, there in (("finished", True), ("diverged", True), ("stopped", False), ("failed", False)):
        write_record(done.model_copy(update={"identity": job.recipe.identity, "status": status}), job.folder)
        assert (read_finished(job) is not None) == there
    (job.folder / "checkpoints" / "step-000003").mkdir(parents=True)
    write_record(done, job.folder)
    with pytest.raises(HeadwaterError, match="holds a run with other settings"):
        read_finished(job)


def test_arms_start_from_the_same_shared_parameters():
    from headwater import HeadwaterForCausalLM

    made = tiny({"arms": {"base": {}, "shift": SHIFT}})
    data = made.data.build()
    a, b = (HeadwaterForCausalLM(made.arm(arm, 1).config_for(data)) for arm in ("base", "shift"))
    shared = dict(a.named_parameters())
    assert all((shared[name] == p).all() for name, p in b.named_parameters() if name in shared)
    assert len(dict(b.named_parameters())) > len(shared)


def test_a_killed_worker_is_reported_the_rest_goes_on_and_a_second_call_repairs(tmp_path, forked_workers):
    made = tiny({"arms": {"base": {}, "diverges": DIVERGES}}, training={"steps": 90}, reporting={"save_every": 30})
    trials, killed = list_trials(made, tmp_path), []

    def kill_one(trial, step, status):
        if status == "running" and step >= 20 and not killed:
            (worker,) = (one for one in processes.Forked.started if one.returncode is None)
            worker.kill()
            killed.append(trial)

    # One worker, so that the one killed is the one that runs the trial.
    outcomes = run_trials(trials, workers=1, on_change=kill_one)
    failed = [outcome for outcome in outcomes if outcome.record is None]
    assert len(killed) == len(failed) == 1
    assert "worker process died" in failed[0].error
    assert "SIGKILL" in failed[0].error
    diverged = [outcome for outcome in outcomes if outcome.record and outcome.record.status == "diverged"]
    assert [outcome.label for outcome in diverged] == ["diverges · seed 0", "diverges · seed 1"]
    assert all("The run diverged" in outcome.error for outcome in diverged)
    there = [t.folder for t, o in zip(trials, outcomes, strict=True) if o.record is not None]
    before = {folder: (folder / "record.json").stat().st_mtime_ns for folder in there}

    again = run_trials(trials, workers=2)
    assert [o.record.status for o in again] == ["finished", "diverged"] * 2
    assert {folder: (folder / "record.json").stat().st_mtime_ns for folder in there} == before
    base, other = summarize_arms([outcome.record for outcome in again], "base")
    assert (base.runs, other.diverged, other.verdict(False)) == (2, 2, "diverged")


def test_a_stage_that_diverges_is_the_trials_end(tmp_path, monkeypatch):
    stages = {"stages": [{"name": "more", "training": {"learning_rate": 1e-3}}]}
    made = tiny({"arms": {"base": stages, "diverges": stages | DIVERGES}, "seeds": [0]})
    trials, here = list_trials(made, tmp_path), Here()

    def run_pool(jobs, workers, report):
        return {job.folder: here.run(job) for job in jobs}

    monkeypatch.setattr(pool, "_run_pool", run_pool)
    for _ in range(2):
        fine, diverged = run_trials(trials)
        assert (fine.record.status, fine.error) == ("finished", None)
        assert diverged.record.status == "diverged"
        assert diverged.record == read_record(trials[1].folder)
        assert diverged.record.experiment == trials[1].experiment
        assert diverged.error.startswith("stage start · seed 0: The run diverged")
        assert len(here.trained) == 3  # the stage after it has nothing to begin with
    assert len(list((tmp_path / "tiny" / STAGES).iterdir())) == 3


@pytest.mark.parametrize(
    ("number", "gpus", "visible", "seen"),
    [(0, 2, None, "0"), (1, 2, None, "1"), (2, 2, None, "0"), (1, 2, "GPU-a,GPU-b", "GPU-b"), (0, 0, "7", None)],
)
def test_each_worker_sees_a_gpu(monkeypatch, number, gpus, visible, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert show_one_gpu(number, gpus).get("CUDA_VISIBLE_DEVICES") == seen


def test_who_follows_a_worker_that_died_has_the_same_gpu(monkeypatch):
    def seen(worker):
        while not (environment := Path(f"/proc/{worker.process.pid}/environ").read_text()):
            time.sleep(0.01)  # it has hardly begun
        return [line for line in environment.split("\0") if line.startswith("CUDA_VISIBLE_DEVICES=")][-1]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    workers = pool._Pool(2)
    try:
        workers.start(2)
        first, second = workers.workers.values()
        assert [seen(first), seen(second)] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
        first.process.kill()
        assert workers.answers.get(timeout=60) == (first, None)
        workers.forget(first)
        workers.start(2)
        assert seen(workers.workers[0]) == "CUDA_VISIBLE_DEVICES=0"
        assert workers.workers[0].process.pid != first.process.pid
    finally:
        workers.end()


def test_workers_that_cannot_start_are_one_sentence(tmp_path, monkeypatch, forked_workers):
    """Not a try without end, and not each trial's fault."""
    monkeypatch.setattr(pool, "__name__", "headwater.no_such_module")
    with pytest.raises(HeadwaterError, match=r"worker processes.*exit code 1"):
        run_trials(list_trials(tiny({}), tmp_path), workers=1)


SHARED = {"model": {"mechanisms": {"svformer": {}}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"base": {}, "one": SHARED}}, "Arm 'one': model: Mechanism 'svformer': no layer comes after"),
        ({"arms": {"base": {}, "one": SHARED}, "learning_rates": [1e-3, 1e-2]}, "Arm 'one': model: Mechanism"),
        (
            {"arms": {"base": {}, "deep": SHARED}, "sizes": {"2": {"model": {"num_hidden_layers": 2}}, "1": {}}},
            "Arm 'deep' of size '1': model: Mechanism 'svformer'",
        ),
        (
            {"arms": {"base": {}, "frozen": {"training": {"trainable_mechanisms": ["svformer"]}}}},
            "Arm 'frozen': training.trainable_mechanisms: the model has no parameters of 'svformer'",
        ),
        (
            {"arms": {"base": {}, "begun": {"start": {"checkpoint": "nowhere"}}}},
            "Arm 'begun': .*nowhere",
        ),
    ],
)
def test_an_arm_that_cannot_be_built_is_refused_before_any_is_trained(tmp_path, monkeypatch, change, message):
    """The others were trained, for hours, before the last one failed."""
    monkeypatch.setattr(pool, "_run_pool", lambda *_: pytest.fail("a trial is trained"))
    made = tiny(change, model={"num_hidden_layers": 1})
    with pytest.raises(HeadwaterError, match=message):
        run_comparison(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_of_the_data_is_named_before_any_is_trained(tmp_path, monkeypatch):
    """Each trial failed for it."""
    monkeypatch.setattr(pool, "_run_pool", lambda *_: pytest.fail("a trial is trained"))
    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "sklearn" else find(name))
    images = {"data": {"kind": "digits", "augmentation": {"crop": None, "flip": 0.0}}}
    made = {"compare": {"baseline": "base", "arms": {"base": {}}, "seeds": [0]}, **images}
    for call in (
        lambda: lab.compare(made, tmp_path / "out"),
        lambda: lab.train(made, tmp_path / "out"),
        lambda: lab.train(made, tmp_path / "out", arm="base"),
    ):
        with pytest.raises(extras.MissingExtra, match=r"This needs sklearn, .*vision\]"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_token_id_is_no_mistake_while_the_vocabulary_is_unknown():
    """Stages were checked with a vocabulary of one token."""
    memory = {"ngram_memory": {"end_of_text": 7, "layers": [0]}}
    values = tiny({}).model_dump(mode="json", exclude={"compare"})
    values["data"] = {"kind": "text", "source": "nowhere.txt", "tokenizer": "nowhere", "context": 16}
    values |= {"model": values["model"] | {"mechanisms": memory}, "stages": [{"name": "more"}]}
    assert parse(values, "test").stage_names == ["start", "more"]


def test_workers_by_default(monkeypatch, tmp_path):
    jobs = list_jobs(tiny({}), tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(pool, "cores", lambda: 5)
    assert pool.count_workers(jobs) == 3
    assert pool.count_workers(list_jobs(tiny({}, training={"device": "cpu"}), tmp_path)) == 5
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pool.count_workers(jobs) == 5


PART = {
    "arms": {"base": {}, "longer": {"training": {"steps": 14}}, "shift": SHIFT, "wide": {"model": {"hidden_size": 16}}},
    "sizes": {"S": {}, "L": {"model": {"num_hidden_layers": 2}}},
    "budget_arms": ["longer"],
    "learning_rates": [0.1, 0.2],
    "tuning_seeds": [9],
    "seeds": [0],
}


def written(folder, section):
    import yaml

    file = folder / "r.yaml"
    file.write_text(yaml.safe_dump(tiny(section).model_dump(mode="json")))
    return file


def test_a_part_of_a_comparison_trains_its_arms_and_what_they_are_compared_with(run, tmp_path, monkeypatch):
    here = Here()
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", here)
    file = written(tmp_path, PART)
    code, out, err = run("compare", file, "--arm", "shift", "--size", "L", "--out", tmp_path / "out")
    assert code == 0, err
    done = {path.parent.name for path in (tmp_path / "out" / "tiny" / "l").rglob("record.json")}
    assert done == {"base-0", "longer-0", "shift-0"}
    assert not (tmp_path / "out" / "tiny" / "s").exists()
    tuned = {path.parent.name.rsplit("-", 2)[0] for path in (tmp_path / "out" / "tiny" / "tuning").rglob("record.json")}
    assert tuned == {"base", "longer", "shift"}
    assert "shift" in out
    assert "wide" not in out


@pytest.mark.slow
def test_the_rest_of_a_comparison_trains_what_a_part_has_not(run, tmp_path, monkeypatch):
    here = Here()
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", here)
    file = written(tmp_path, PART)
    run("compare", file, "--arm", "shift", "--size", "L", "--out", tmp_path / "out")
    before = len(here.trained)
    code, _, err = run("compare", file, "--out", tmp_path / "out")
    assert code == 0, err
    assert len(here.trained) - before == 2 + 4 + 1, "the rates of wide, all arms at S, and wide at L"


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        (PART, ["--arm", "shfit"], "'tiny' has no arm 'shfit'; did you mean 'shift'?"),
        (PART, ["--size", "XL"], "'tiny' has no size 'XL'; "),
        ({"arms": {"base": {}, "shift": SHIFT}}, ["--size", "L"], "compares at one size; leave out --size."),
        (
            {"arms": {"base": {}, "shift": SHIFT}, "sequential": True, "margin": 0.1},
            ["--arm", "base"],
            "name an arm to decide with --arm",
        ),
    ],
)
def test_a_part_that_is_not_there_is_one_sentence(run, tmp_path, section, options, message):
    code, _, err = run("compare", written(tmp_path, section), *options, "--out", tmp_path / "out")
    assert code != 0
    assert message in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_everything_from_the_command_line(run, tmp_path, forked_workers):
    """An arm that diverges, in worker processes; twice, and the second time nothing is trained."""
    short = {"training": {"warmup_steps": 99}}
    arms = {"base": short, "shift": SHIFT | short, "diverges": DIVERGES}
    file = written(tmp_path, {"arms": arms, "seeds": [0]})
    code, out, err = run("compare", file, "--out", tmp_path / "out")
    assert code == 0, err
    assert "diverges · seed 0 diverged: The run diverged" in err
    assert "base · seed 0, and 1 more, noted: The warm-up is longer than the run" in err
    before = changed_times(tmp_path / "out")
    statuses = {str(path.parent.name): read_record(path).status for path in before}
    assert statuses == {"base-0": "finished", "shift-0": "finished", "diverges-0": "diverged"}
    code, _, err = run("compare", file, "--out", tmp_path / "out")
    assert code == 0, err
    assert "diverges · seed 0 diverged" in err
    assert changed_times(tmp_path / "out") == before
    assert Path(tmp_path / "out" / "report.html").exists()
    assert "shift" in out
