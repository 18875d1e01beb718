"""Runs in one file take the place of training, and no others than those that training would give."""

import json

import pytest
from made import RECIPE, changed, one_table, put, record, written

from conftest import forking
from headwater.compare import trial_of
from headwater.errors import HeadwaterError
from headwater.papers import keep, prepare, restore
from headwater.papers.table import tables
from headwater.records import read_record, write_record

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
    tables.cache_clear()


def told(file, work):
    lines = []
    restore(file, work, lines.append)
    return lines


def left(work, arm, seed=0, **changes):
    """A finished record in a run's folder, as training would leave it."""
    recipe = work.recipes[0][1]
    trial = trial_of(recipe, arm, seed, work.trials)
    given = {"config_hash": trial.recipe.digest(), "recipe": trial.recipe.model_dump(mode="json")} | changes
    one = record(seed, 1.0, **given)
    one.experiment = trial.experiment
    trial.folder.mkdir(parents=True)
    write_record(one, trial.folder)
    return trial.folder


def test_runs_in_the_file_are_not_trained_and_new_ones_are_added(paper, run):
    file = paper / "runs.jsonl"
    code, first, _ = run("reproduce", "paper/task", "--out", paper / "one", "--records", file)
    assert code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["run"] for line in lines] == [
        f"cpu/trials/task/{arm}-{seed}" for arm in ("shift", "vanilla") for seed in (0, 1)
    ]
    code, second, said = run("reproduce", "paper/task", "--out", paper / "two", "--records", file)
    assert code == 0
    assert "4 runs from" in said
    assert "all 4 runs are finished" in said
    assert first.partition("report:")[0] == second.partition("report:")[0]
    for line in lines:
        ours = read_record(paper / "two" / line["run"])
        assert ours == read_record(paper / "one" / line["run"]).model_copy(update={"documents": []})
        assert not (paper / "two" / line["run"] / "checkpoints").exists()
    code, _, said = run("reproduce", "paper/task", "compare.seeds=[0,1,2]", "--out", paper / "three", "--records", file)
    assert code == 0
    assert "6 runs, 4 of them finished" in said
    after = file.read_text().splitlines()
    assert [json.loads(line)["run"].rpartition("-")[2] for line in after] == ["0", "1", "2"] * 2
    assert {json.dumps(line) for line in lines} < {json.dumps(json.loads(line)) for line in after}


def test_rates_are_kept_with_the_runs_that_chose_them(paper, run):
    file = paper / "runs.jsonl"
    assert run("reproduce", "paper/tuned", "--out", paper / "one", "--records", file)[0] == 0
    assert len(file.read_text().splitlines()) == 2 * 2 + 2
    work = prepare("paper/tuned", "cpu", paper / "two")
    assert told(file, work)[0].startswith("6 runs from")
    assert work.missing() == []


def test_what_has_other_settings_is_left_out(paper):
    work = prepare("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    left(work, "shift", config_hash="another")
    file = paper / "runs.jsonl"
    keep(file, work)
    again = prepare("paper/task", "cpu", paper / "two")
    taken, other = told(file, again)
    assert taken.startswith("1 run from")
    assert other == f"1 run in {str(file)!r} had other settings than the recipe has now; left out"
    assert not (again.trials / "task" / "shift-0").exists()
    assert told(file, again)[0] == other, "what is there stays"


def test_what_is_of_another_text_is_left_out(paper):
    work = prepare("paper/text", "cpu", paper / "one")
    built = work.recipes[0][1].data.build().description
    left(work, "vanilla", data=built)
    left(work, "shift", data=built | {"sha256": "another"})
    file = paper / "runs.jsonl"
    keep(file, work)
    again = prepare("paper/text", "cpu", paper / "two")
    taken, other = told(file, again)
    assert taken.startswith("1 run from")
    assert "1 run in" in other
    assert "had other data than is here" in other
    assert not (again.trials / "text" / "shift-0").exists()


def test_a_run_that_has_not_ended_is_not_kept(paper):
    work = prepare("paper/task", "cpu", paper / "one")
    left(work, "vanilla", status="running")
    left(work, "shift", status="diverged")
    keep(paper / "runs.jsonl", work)
    assert [json.loads(line)["run"] for line in (paper / "runs.jsonl").read_text().splitlines()] == [
        "cpu/trials/task/shift-0"
    ]


def test_models_are_not_in_the_file(paper):
    work = prepare("paper/inside", "cpu", paper / "one")
    left(work, "shift")
    keep(paper / "runs.jsonl", work)
    again = prepare("paper/inside", "cpu", paper / "two")
    assert "paper/inside looks into models" in told(paper / "runs.jsonl", again)[0]
    assert len(again.missing()) == 2


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda line: line[:-20], "Line 1 of"),
        (lambda line: line.replace("cpu/trials", "../trials"), "is not a folder below the output folder"),
        (lambda line: line.replace("cpu/trials", "/cpu/trials"), "is not a folder below the output folder"),
    ],
)
def test_a_damaged_file_is_one_sentence(paper, run, damage, complaint):
    work = prepare("paper/task", "cpu", paper / "one")
    left(work, "vanilla")
    file = paper / "runs.jsonl"
    keep(file, work)
    file.write_text(damage(file.read_text().strip()))
    before = file.read_text()
    with pytest.raises(HeadwaterError, match=complaint):
        restore(file, work, print)
    code, _, said = run("reproduce", "paper/task", "--out", paper / "two", "--records", file)
    assert code == 2
    assert complaint in " ".join(said.split())
    assert file.read_text() == before
