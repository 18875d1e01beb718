"""Runs in one file take the place of training, and no others than those that training would give."""

import json
import math
import re
from pathlib import Path

import pytest
from made import RECIPE, changed, one_table, put, record, written

from conftest import forking
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import make_trial
from headwater_lab.papers.kept import keep_runs, restore_runs
from headwater_lab.papers.result import reproduce_table
from headwater_lab.papers.table import read_tables
from headwater_lab.papers.work import prepare_work, train_table
from headwater_lab.training.records import read_record, write_record

CLAIM = {"test": "better", "says": "It is better.", "arm": "shift", "against": "vanilla", "measure": "loss"}
TEXT = {"kind": "text", "tokenizer": "bytes", "context": 8, "held_out_bytes": 100}


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with forking():
        yield


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Tables of a task, of a text, with tuned rates, and one that looks into its models."""
    (tmp_path / "corpus.txt").write_text("def add(a, b):\n    return a + b\n" * 2000)
    recipes = {
        "task": changed(RECIPE | {"name": "task"}, compare={"seeds": [0, 1]}),
        "text": changed(RECIPE | {"name": "text"}, compare={"seeds": [0]})
        | {"data": TEXT | {"source": str(tmp_path / "corpus.txt")}},
        "tuned": changed(RECIPE | {"name": "tuned"}, compare={"seeds": [0], "learning_rates": [1e-3, 1e-2]}),
    }
    made = {f"paper/{name}": one_table([written(tmp_path, one)], claims=[CLAIM]) for name, one in recipes.items()}
    looks = [{"label": "row", "cells": [{"arm": "shift", "measure": "similarity:0-1"}]}]
    made["paper/inside"] = one_table([tmp_path / "task.yaml"], columns=[{"name": "alike"}], rows=looks)
    put(made, tmp_path, monkeypatch)
    yield tmp_path
    read_tables.cache_clear()


def told(file, work):
    lines = []
    restore_runs(file, work, lines.append)
    return lines


def added(file, work):
    messages = []
    keep_runs(file, work, messages.append)
    return messages


def lines(file):
    """The records of a file, by run."""
    return {one["run"]: one["record"] for one in map(json.loads, file.read_text().splitlines())}


def changed_line(file, which, **changes):
    found = lines(file)
    (run,) = (run for run in found if run.endswith(which))
    found[run] |= changes
    file.write_text("".join(json.dumps({"run": run, "record": one}) + "\n" for run, one in found.items()))


def left(work, arm, seed=0, **changes):
    """A finished record in a run's folder, as training would leave it."""
    recipe = work.recipes[0][1]
    trial = make_trial(recipe, arm, seed, work.trials)
    options = {"identity": trial.recipe.identity, "recipe": trial.recipe.model_dump(mode="json")} | changes
    one = record(seed, 1.0, **{name: value for name, value in options.items() if name != "seconds"})
    one = one.model_copy(update={"experiment": trial.experiment, "seconds": options.get("seconds", 1.0)})
    trial.folder.mkdir(parents=True)
    write_record(one, trial.folder)
    return trial.folder


def runs_on_another_text(paper):
    """A file with all runs of `paper/text`."""
    work = prepare_work("paper/text", "cpu", paper / "one")
    built = work.recipes[0][1].data.build().description
    for arm in ("vanilla", "shift"):
        left(work, arm, data=built | {"sha256": "another"})
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    return file


def test_runs_in_the_file_are_not_trained_and_new_ones_are_added(paper, run):
    file = paper / "runs.jsonl"
    code, first, _ = run("reproduce", "paper/task", "--out", paper / "one", "--keep", file)
    assert code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["run"] for line in lines] == [
        f"cpu/trials/task/{arm}-{seed}" for arm in ("shift", "vanilla") for seed in (0, 1)
    ]
    code, judged, _ = run("reproduce", "--records", file, "--no-train")
    assert code == 0
    assert judged.count("It is better.") == 1  # of the one table that has runs in the file, and reads no models
    assert " ".join(first.partition("result:")[0].split()) == " ".join(judged.split())
    assert run("reproduce", "paper/task", "--out", paper / "one", "--no-train")[:2] == (0, judged)
    for where in (["--records", file], ["--out", paper / "one"]):
        code, _, stderr = run("reproduce", "paper/text", "--no-train", *where)
        assert (code, "has no run of these tables at cpu scale" in stderr) == (2, True)
        stored = re.findall(r"results/[\w.-]+\w", stderr)
        assert len(stored) == 3
        assert all((Path(__file__).parents[2] / name).is_file() for name in stored)
    code, _, stderr = run("reproduce", "paper/task", "training.steps=1", "--records", file, "--no-train")
    assert "training.steps=1 has no effect with --no-train and --records" in stderr
    before = file.read_text()
    code, second, stderr = run("reproduce", "paper/task", "--out", paper / "two", "--records", file)
    assert file.read_text() == before
    assert code == 0
    assert "4 runs from" in stderr
    assert "all 4 runs are finished" in stderr
    assert first.partition("result:")[0] == second.partition("result:")[0]
    for line in lines:
        ours = read_record(paper / "two" / line["run"])
        assert ours == read_record(paper / "one" / line["run"]).model_copy(update={"documents": []})
        assert not (paper / "two" / line["run"] / "checkpoints").exists()
    another = paper / "more.jsonl"
    three = ("paper/task", "compare.seeds=[0,1,2]", "--out", paper / "three")
    code, _, stderr = run("reproduce", *three, "--records", file, "--keep", another)
    assert code == 0
    assert "6 runs, 4 of them finished" in stderr
    assert file.read_text() == before
    after = another.read_text().splitlines()
    assert [json.loads(line)["run"].rpartition("-")[2] for line in after] == ["0", "1", "2"] * 2
    assert {json.dumps(line) for line in lines} < {json.dumps(json.loads(line)) for line in after}


@pytest.mark.slow
def test_rates_are_kept_with_the_runs_that_chose_them(paper, run):
    file = paper / "runs.jsonl"
    assert run("reproduce", "paper/tuned", "--out", paper / "one", "--keep", file)[0] == 0
    assert len(file.read_text().splitlines()) == 2 * 2 + 2
    work = prepare_work("paper/tuned", "cpu", paper / "two")
    assert told(file, work)[0].startswith("6 runs from")
    assert work.list_missing() == []


def test_what_has_other_settings_is_left_out_and_replaced_once_it_has_run(paper):
    work = prepare_work("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    folder = left(work, "shift")
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    changed_line(file, "shift-0", identity="another")
    again = prepare_work("paper/task", "cpu", paper / "two")
    taken, other = told(file, again)
    assert taken.startswith("1 run from")
    assert other == f"left out 1 run of {str(file)!r}: the recipe has other settings now"
    assert not (again.trials / "task" / "shift-0").exists()
    assert added(file, work) == [f"1 run added to {str(file)!r}"]
    assert lines(file)["cpu/trials/task/shift-0"]["identity"] == read_record(folder).identity


def test_stale_and_repeated_runs_do_not_replace_lines(paper):
    work = prepare_work("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    file = paper / "runs.jsonl"
    file.touch()  # an empty file holds no runs
    keep_runs(file, work, print)
    before = file.read_text()
    other = prepare_work("paper/task", "cpu", paper / "two")
    left(other, "vanilla", seconds=2.0)  # the same run again
    left(other, "shift", identity="of an older recipe")
    assert added(file, other) == []
    assert file.read_text() == before


def test_runs_on_another_text_than_the_files_are_not_added(paper):
    work = prepare_work("paper/text", "cpu", paper / "one")
    left(work, "vanilla", data={"sha256": "one"})
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    before = file.read_text()
    other = prepare_work("paper/text", "cpu", paper / "two")
    left(other, "shift", data={"sha256": "another"})
    assert "1 run not added to" in added(file, other)[0]
    assert file.read_text() == before


def test_a_run_of_ones_own_is_not_replaced(paper):
    work = prepare_work("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    again = prepare_work("paper/task", "cpu", paper / "two")
    folder = left(again, "vanilla", identity="of an older recipe")
    before = read_record(folder)
    assert told(file, again) == []
    assert read_record(folder) == before


def test_restored_runs_on_another_text_are_told_before_others_are_trained_beside_them(paper, run):
    file = runs_on_another_text(paper)
    assert told(file, prepare_work("paper/text", "cpu", paper / "two"))[0].startswith("2 runs from")
    assert run("reproduce", "paper/text", "--out", paper / "two")[0] == 0  # there is nothing to train
    code, _, stderr = run("reproduce", "paper/text", "compare.seeds=[0,1]", "--out", paper / "two")
    assert code == 2
    assert "which differs from the data here; choose another --out" in " ".join(stderr.split())
    assert not (paper / "two" / "cpu" / "trials" / "text" / "vanilla-1").exists()


def test_verdicts_on_runs_with_different_data_are_refused(paper):
    work = prepare_work("paper/text", "cpu", paper / "one")
    left(work, "vanilla", data={"sha256": {"a": "one"}})
    left(work, "shift", data={"sha256": {"a": "another"}})
    with pytest.raises(HeadwaterError, match="had different data"):
        reproduce_table(work)


def test_a_run_that_has_not_ended_is_not_kept_and_one_that_diverged_is(paper):
    work = prepare_work("paper/task", "cpu", paper / "one")
    left(work, "vanilla", status="running")
    left(work, "shift", status="diverged", seconds=float("nan"))
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    assert list(lines(file)) == ["cpu/trials/task/shift-0"]
    again = prepare_work("paper/task", "cpu", paper / "two")
    assert told(file, again)[0].startswith("1 run from")
    assert math.isnan(read_record(again.trials / "task" / "shift-0").seconds)


def test_tables_that_look_into_models_train_what_only_has_a_record(paper):
    work = prepare_work("paper/task", "cpu", paper / "one")
    for seed in (0, 1):
        left(work, "shift", seed)
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    shared = prepare_work("paper/task", "cpu", paper / "two")
    assert told(file, shared)[0].startswith("2 runs from")
    inside = prepare_work("paper/inside", "cpu", paper / "two")
    assert "paper/inside needs the models themselves" in told(file, inside)[0]
    assert len(inside.list_missing()) == 2
    train_table(inside, 1, lambda *_: None)
    assert inside.list_missing() == []
    assert list((inside.trials / "task" / "shift-0" / "checkpoints").glob("step-*"))
    assert reproduce_table(inside).cells[0][0][1].value is not None


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda line: line[:-20], "Line 1 of"),
        (lambda line: line.replace("cpu/trials", "../trials"), "not a folder below the output folder"),
        (lambda line: line.replace("cpu/trials", "/cpu/trials"), "not a folder below the output folder"),
        (lambda text: f"{text}\n{text.splitlines()[0]}", "Lines 1 and 2 of"),
    ],
)
def test_a_damaged_file_is_one_sentence(paper, run, damage, complaint):
    work = prepare_work("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    file = paper / "runs.jsonl"
    keep_runs(file, work, print)
    file.write_text(damage(file.read_text().strip()))
    before = file.read_text()
    with pytest.raises(HeadwaterError, match=complaint):
        restore_runs(file, work, print)
    for option in ("--keep", "--records"):
        code, _, stderr = run("reproduce", "paper/task", "--out", paper / "two", option, file)
        assert code == 2
    assert complaint in " ".join(stderr.split())
    assert file.read_text() == before
