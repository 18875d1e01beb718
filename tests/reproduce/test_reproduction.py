"""Small tables trained for real: which runs, where they lie, what stands in the cells, the page, the command."""

import json
import math
import shlex
import statistics
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from made import RECIPE, changed, one_table, put, record, runs, save, written

import headwater_lab as lab
from conftest import forking
from headwater.util.errors import HeadwaterError
from headwater_lab.papers.arms import (
    FinishedRun,
    SizedArm,
    finished_runs,
    list_references,
    trials_folder,
)
from headwater_lab.papers.claims import Judged
from headwater_lab.papers.measures import Runs, tasks_of
from headwater_lab.papers.result import (
    add_names,
    describe_evidence,
    measure_cell,
    reproduce_command,
    reproduce_table,
    terminal_tables,
    write_result,
)
from headwater_lab.papers.table import Column, PaperTable, TableCell, read_tables
from headwater_lab.papers.work import prepare_work, train_table
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.training.records import HeldOutPoint

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
COMPARISON = {
    "columns": [
        {"name": "Accuracy, %", "times": 100, "digits": 1},
        {"name": "Loss", "measure": "loss"},
        {"name": "of parameters", "measure": "parameters", "digits": 4},
    ],
    "rows": [
        {"label": "as it is", "cells": [{"paper": 50.0, "arm": "vanilla"}, {"paper": "3.10", "arm": "vanilla"}, {}]},
        {
            "label": "shifted",
            "cells": [
                {"paper": "-", "arm": "shift", "minus": "vanilla"},
                {"arm": "shift", "minus": "vanilla"},
                {"arm": "shift", "over": "vanilla"},
            ],
        },
        {"label": "counts", "cells": [{"arm": "shift", "measure": "steps"}, {"arm": "shift", "measure": "flops"}, {}]},
    ],
    "claims": [
        {"test": "better", "says": "It is better.", "arm": "shift", "against": "vanilla", "measure": "loss"},
        {"test": "better", "says": "It has less.", "arm": "vanilla", "against": "shift", "measure": "parameters"},
    ],
}
GROWN = {
    "name": "grown",
    "data": RECIPE["data"],
    "model": RECIPE["model"] | {"mechanisms": {"pattention": {"attention_pairs": 4, "ffn_pairs": 8}}},
    "training": RECIPE["training"] | {"steps": 2},
    "reporting": RECIPE["reporting"],
    "stages": [
        {"name": "more", "grow": {"attention_pairs": 6, "ffn_pairs": 12}, "training": {"steps": 3}},
        {"name": "never", "training": {"steps": 1}},
    ],
}


def cells(*of):
    return [{"label": "row", "cells": list(of)}]


def silent(recipes, **fields):
    """A table whose miniature cannot show anything."""
    table = one_table(recipes, **fields)
    table["scales"]["cpu"]["cannot_show"] = "It is too small."
    return table


def run_commands(work, run):
    for command in work.list_commands():
        code, _, complaint = run(*shlex.split(command)[1:])
        assert code == 0, complaint


def trained(work):
    return train_table(work, 1, lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with forking():
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Tables of tiny recipes in the place of the papers', and the first of them trained."""
    folder = tmp_path_factory.mktemp("reproduce")
    tiny = written(folder, changed(RECIPE, compare={"seeds": [0, 1]}))
    corpus = folder / "corpus.txt"
    corpus.write_text("def add(a, b):\n    return a + b\n" * 2000)
    text = GROWN | {"name": "text", "model": RECIPE["model"], "stages": []}
    text["data"] = {"kind": "text", "source": str(corpus), "tokenizer": "bytes", "context": 64}
    stages = [{"arm": "start"}, {"arm": "more"}, {"arm": "more", "measure": "total_flops"}]
    plain = [{"name": name} for name in ("first", "second", "FLOPs")]
    says = {"test": "larger", "says": "It costs more.", "arm": "more", "first": "total_flops", "second": "stage_flops"}
    with pytest.MonkeyPatch.context() as patch:
        made = {
            "paper/tiny": one_table([tiny], **COMPARISON),
            "paper/silent": silent([tiny], **COMPARISON),
            "paper/grown": one_table([written(folder, GROWN)], columns=plain, rows=cells(*stages), claims=[says]),
            "paper/task": one_table(
                [written(folder, text)],
                columns=[{"name": "closing", "measure": "task:closing:acc"}],
                rows=cells({"arm": "start"}),
            ),
            "paper/devices": one_table(
                [written(folder, changed(RECIPE | {"name": "wide"}, training={"devices": 8}, compare={"seeds": [4]}))],
                columns=plain[:1],
                rows=cells({"arm": "shift"}),
            ),
        }
        put(made, folder, patch)
        work = prepare_work("paper/tiny", "cpu", folder / "out")
        outcomes = trained(work)
        assert [one.error for one in outcomes] == [None] * 4
        yield folder / "out"
    read_tables.cache_clear()


@pytest.fixture
def saved(out):
    """(arm, seed) -> the record as JSON."""
    trials = out / "cpu" / "trials" / "tiny"
    return {(arm, seed): json.loads((trials / f"{arm}-{seed}" / "record.json").read_text())
            for arm in ("vanilla", "shift") for seed in (0, 1)}  # fmt: skip


def last(record, measure):
    return record["held_out"][-1]["metrics"][measure]


def test_arms_that_the_table_names_are_trained_and_no_others(out):
    assert {path.name for path in (out / "cpu" / "trials" / "tiny").glob("*-?")} == {
        f"{arm}-{seed}" for arm in ("vanilla", "shift") for seed in (0, 1)
    }


def test_cells_are_the_mean_and_spread_of_the_records(out, saved):
    found = reproduce_table(prepare_work("paper/tiny", "cpu", out))

    def both(values):
        return statistics.mean(values), statistics.stdev(values)

    def close(cell, values, seeds=2):
        mean, spread = both(values)
        assert (cell.value, cell.spread) == (pytest.approx(mean), pytest.approx(spread, abs=1e-12))
        assert cell.seeds == seeds
        return mean, spread

    (accuracy, loss, nothing), (minus, minus_loss, over), (steps, flops, _) = [
        [ours for _, ours in row] for row in found.cells
    ]
    mean, spread = close(accuracy, [100 * last(saved["vanilla", s], "accuracy") for s in (0, 1)])
    assert accuracy.text == f"{mean:.1f} ± {spread:.1f}"
    close(loss, [last(saved["vanilla", s], "loss") for s in (0, 1)])
    close(minus, [100 * (last(saved["shift", s], "accuracy") - last(saved["vanilla", s], "accuracy")) for s in (0, 1)])
    close(minus_loss, [last(saved["shift", s], "loss") - last(saved["vanilla", s], "loss") for s in (0, 1)])
    close(over, [saved["shift", s]["parameters"] / saved["vanilla", s]["parameters"] - 1 for s in (0, 1)])
    close(flops, [saved["shift", s]["flops"] for s in (0, 1)])
    assert steps.text == "never"
    assert nothing.text == ""
    assert [paper for row in found.cells for paper, _ in row] == ["50.0", "3.10", "", "-", "", "", "", "", ""]


def test_the_json_and_the_terminal_say_the_verdicts(out, saved):
    work = prepare_work("paper/tiny", "cpu", out)
    found = reproduce_table(work)
    path = write_result(found, work.folder)
    assert path == out / "cpu" / "paper-tiny" / "result.json"
    content = json.loads(path.read_text())
    better, less = content["claims"]
    differences = [last(saved["vanilla", s], "loss") - last(saved["shift", s], "loss") for s in (0, 1)]
    assert better["estimate"] == pytest.approx(statistics.mean(differences))
    assert (less["verdict"], less["p"]) == ("replicates", None)
    assert content["command"] == "headwater reproduce paper/tiny"
    assert content["runs"] == {"vanilla": [0, 1], "shift": [0, 1]}
    assert content["rows"][0]["cells"][0]["paper"] == "50.0"
    assert content["answer"] == found.answer
    assert "It is tiny." in content["setting"]
    layout, claims = [part for part in terminal_tables(found) if hasattr(part, "columns")]
    assert list(map(str, layout.columns[1].cells)) == ["50.0", "-", ""]
    assert list(map(str, claims.columns[0].cells)) == [one["verdict"] for one in content["claims"]]
    assert str(list(claims.columns[2].cells)[1]) == describe_evidence(found.claims[1])


def test_a_second_call_trains_nothing_and_seeds_share_the_runs(out):
    def times():
        return {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}

    before = times()
    assert len(before) == 4
    assert trained(prepare_work("paper/tiny", "cpu", out)) == []
    single = prepare_work("paper/tiny", "cpu", out, ["compare.seeds=[1]", "compare.threshold=0.001"])
    assert (single.list_missing(), trained(single)) == ([], [])
    assert times() == before
    assert single.folder != prepare_work("paper/tiny", "cpu", out).folder  # it is another result
    renamed = single.table.model_copy(
        update={"scales": {"cpu": single.settings.model_copy(update={"words": {"is": "was"}})}}
    )
    assert reproduce_table(replace(single, table=renamed)).rows[0] == "as it is (ours: was)"
    cell = reproduce_table(single).cells[2][0][1]
    assert (cell.text, cell.seeds) == ("2", 1)
    assert reproduce_command(reproduce_table(single)).endswith("'compare.seeds=[1]' compare.threshold=0.001")
    assert len(prepare_work("paper/tiny", "cpu", out, ["compare.seeds=[0,1,2]"]).list_missing()) == 2


def test_a_threshold_that_chooses_learning_rates_can_choose_others(out):
    def trials(*overrides):
        return prepare_work("paper/tiny", "cpu", out, ["compare.threshold=0.5", *overrides]).trials.name

    tuned = "compare.learning_rates=[0.1, 0.2]"
    assert trials() == trials("compare.threshold=0.1") == "trials"
    assert trials(tuned, "compare.threshold=0.1") != trials(tuned) != trials(tuned, "compare.tuning_seeds=[9]")


@pytest.mark.parametrize(
    "override",
    [
        *("reporting.log_every=1", "reporting.tensorboard=false", "training.timeout_minutes=5", "compare.workers=2"),
        "training.learning_rate={learning_rate}",
    ],
)
def test_overrides_that_change_no_run_share_the_folder(out, override):
    plain = prepare_work("paper/tiny", "cpu", out)
    override = override.format(**plain.recipes[0][1].training.model_dump())
    other = prepare_work("paper/tiny", "cpu", out, [override])
    assert (other.decisive, other.trials, other.list_missing()) == ((), plain.trials, [])
    steps = ["training.steps=3"]
    assert prepare_work("paper/tiny", "cpu", out, [override, *steps, *steps]).trials == trials_folder(out, "cpu", steps)


@pytest.mark.parametrize(
    "override", ["training.steps=3", "compare.arms.shift.training.steps=3", "reporting.evaluate_every=1"]
)
def test_overrides_that_change_a_run_have_a_folder_of_their_own(out, override):
    plain, other = prepare_work("paper/tiny", "cpu", out), prepare_work("paper/tiny", "cpu", out, [override])
    assert other.trials.parent == plain.trials.parent
    assert other.trials != plain.trials
    assert len(other.list_missing()) == 4


def test_runs_of_other_settings_are_not_taken(out, tmp_path):
    work = prepare_work("paper/tiny", "cpu", out)
    there = work.arms["shift"]
    assert set(finished_runs(there, work.trials)) == {0, 1}
    other = prepare_work("paper/tiny", "cpu", out, ["training.learning_rate=0.5"]).arms["shift"]
    assert finished_runs(other, work.trials) == {}
    assert finished_runs(there, tmp_path) == {}
    assert trials_folder(out, "cpu", ["b=1", "a=2"]) == trials_folder(out, "cpu", ["a=2", "b=1"])


def test_stages_are_left_to_the_user_up_to_the_last_that_is_named(out, run):
    work = prepare_work("paper/grown", "cpu", out)
    assert len(work.list_missing()) == 2
    assert trained(work) == []
    code, stdout, complaint = run("reproduce", "paper/grown", "--out", out)
    assert code == 2
    assert "2 runs of this table, on several devices or in stages" in complaint
    assert [line for line in stdout.splitlines() if "--stage" in line] == work.list_commands()
    run_commands(work, run)
    stages = work.trials / "grown" / "stages"
    assert sorted(path.name for path in stages.iterdir()) == ["00-start", "01-more"]
    first, second = (json.loads((stages / name / "record.json").read_text()) for name in ("00-start", "01-more"))
    found = reproduce_table(prepare_work("paper/grown", "cpu", out))
    assert [cell.value for _, cell in found.cells[0]] == [
        last(first, "accuracy"),
        last(second, "accuracy"),
        first["flops"] + second["flops"],
    ]
    assert found.claims[0].verdict == "replicates"  # counted: one seed is enough
    assert not prepare_work("paper/grown", "cpu", out).list_commands()


@pytest.mark.slow
def test_tasks_are_evaluated_once_and_as_evaluate_does(out, run):
    pytest.importorskip("lm_eval")
    from headwater_lab.evaluation import evaluate

    work = prepare_work("paper/task", "cpu", out)
    assert tasks_of(work.table) == ["closing"]
    run_commands(work, run)
    cell = reproduce_table(work, TASKS).cells[0][0][1]
    folder = work.trials / "text" / "stages" / "00-start"
    (row,) = [row for row in evaluate([str(folder)], ["closing"], task_files=TASKS).rows if row.metric == "acc"]
    assert cell.value == next(iter(row.figures.values())).value
    kept = folder / "evaluation-closing.json"
    saved = json.loads(kept.read_text())
    saved["figures"] = [one | {"value": 0.125} for one in saved["figures"]]
    kept.write_text(json.dumps(saved))
    assert reproduce_table(work).cells[0][0][1].value == 0.125  # what is there is read
    assert reproduce_table(work, TASKS).cells[0][0][1].value == 0.125
    for stale in ({"identity": "another"}, {"lm_eval": "0.0"}, {"task_files": "another"}):
        kept.write_text(json.dumps(saved | {"of": saved["of"] | stale}))
        assert reproduce_table(work, TASKS).cells[0][0][1].value == cell.value


def test_the_command_writes_the_result(out, run):
    code, stdout, err = run("reproduce", "paper/tiny", "--out", out)
    assert code == 0, err
    assert "It is better." in stdout
    assert "result: " in stdout
    assert "a claim replicates if the whole interval agrees with it" in " ".join(stdout.split())
    code, stdout, _ = run("reproduce", "--list", "--out", out)
    assert code == 0
    assert "4/4" in stdout
    assert "0/1" in stdout


def test_a_miniature_that_cannot_show_it_says_so_in_place_of_verdicts(out, run):
    code, stdout, before = run("reproduce", "paper/silent", "--out", out)
    assert code == 0
    assert "no verdict" in before, "said before anything is trained"
    assert "cannot show it" in stdout
    assert "It is too small." in stdout
    assert not any(word in stdout for word in ("It is better.", "verdict", "hold"))
    work = prepare_work("paper/silent", "cpu", out)
    saved = json.loads((work.folder / "result.json").read_text())
    assert (saved["claims"], saved["cannot_show"]) == ([], "It is too small.")
    assert saved["rows"][0]["cells"][0]["ours"]["text"], "what was measured is shown"
    assert "cannot show" in run("reproduce", "--list", "--out", out)[1]
    # Fewer seeds are the same miniature, and so are other threads; other runs are another.
    assert not reproduce_table(prepare_work("paper/silent", "cpu", out, ["compare.seeds=[0]"])).claims
    for override in (
        "reporting.log_every=1",
        "reporting.evaluate_every=1",
        "training.threads=1",
        "training.device=cpu",
    ):
        assert prepare_work("paper/silent", "cpu", out, [override]).cannot_show
    assert len(reproduce_table(prepare_work("paper/silent", "cpu", out, ["training.steps=3"])).claims) == 2


def test_runs_on_several_devices_are_left_to_the_user(out, run):
    code, stdout, complaint = run("reproduce", "paper/devices", "--out", out, "training.steps=2")
    assert code == 2
    (line,) = [line for line in stdout.splitlines() if "torchrun" in line]
    trials = trials_folder(out, "cpu", ["training.steps=2"])
    launcher, _, module = shlex.split(line.partition(" train ")[0])[-3:]
    assert (launcher, "--rdzv" in line) == ("--nproc-per-node=8", False)
    assert find_spec(f"{module}.__main__") is not None
    assert line.endswith(f"training.steps=2 --arm shift seed=4 --out {trials / 'wide' / 'shift-4'}")
    assert "1 run of this table, on several devices or in stages, cannot be trained by this command" in complaint
    assert not trials.exists()
    code, stdout, complaint = run("reproduce", "paper/devices", "--out", out, "training.nodes=2", "training.steps=2")
    (line,) = [line for line in stdout.splitlines() if "torchrun" in line]
    assert "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29500 --nproc-per-node=8 -m" in line
    assert "on every node, with the first one's name for FIRST_NODE" in " ".join(complaint.split())


def test_arms_that_all_diverge_are_shown_as_such(out, run):
    code, stdout, complaint = run(
        "reproduce",
        "paper/tiny",
        "--out",
        out,
        "training.learning_rate=1e30",
        "training.max_skipped_steps=1",
        "--workers",
        1,
    )
    assert code == 0
    assert "diverged 2 of 2" in stdout
    assert "no seed separates them" in stdout
    assert "vanilla · seed 0, and 3 more, diverged" in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Name one table"),
        (["paper/tiny", "paper/grown"], "Name one table"),
        (["paper/tinny"], "did you mean 'paper/tiny'"),
        (["paper"], "'paper' is a paper; name one of its tables: `headwater reproduce --list paper`"),
        (["--list", "papr"], "There is no paper 'papr'; did you mean 'paper'"),
        (["paper/tiny", "training.stepz=2"], "training has no field 'stepz'; did you mean 'steps'"),
        (["paper/tiny", "compare.arms.shift=3"], "compare.arms.shift"),
        (["paper/task", "--task-files", "nowhere"], "no task file or folder 'nowhere'"),
        (["paper/task"], "There is no task 'closing'"),
        (["paper/tiny", "--device", "nothing"], "cannot use the device 'nothing'"),
        (["paper/tiny", "--scale", "huge"], "huge"),
        (["--list", "--keep", "runs.jsonl"], "--keep has no effect with --list; leave it out"),
        (["paper/tiny", "--records", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--no-train", "--workers", "2"], "--workers has no effect with --no-train"),
        (["--no-train", "paper/tinny"], "There is no table 'paper/tinny'; did you mean 'paper/tiny'"),
        (["--list", "training.steps=7"], "training.steps=7 has no effect with --list"),
        (["--list", "--scale", "gpu"], "--scale has no effect with --list"),
        (["paper/tiny", "--task-files", "."], "--task-files has no effect for paper/tiny, which has no benchmarks"),
        (["paper/tiny", "--keep", "nowhere/runs.jsonl"], "There is no folder 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence(out, run, arguments, complaint, tmp_path, monkeypatch):
    # lm-eval's index of all its tasks takes seconds: those of one folder stand for them.
    manager = pytest.importorskip("lm_eval.tasks.manager")
    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "piqa" / "manager.py"))
    code, _, stderr = run("reproduce", *arguments, "--out", tmp_path)
    assert code == 2
    assert complaint in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())


def test_a_scale_that_means_nothing_says_why(out, run, tmp_path):
    code, stdout, _ = run("reproduce", "paper/tiny", "--scale", "gpu", "--out", tmp_path)
    assert code == 0
    assert "It has no scale." in stdout
    assert "--scale cpu" in stdout
    with pytest.raises(HeadwaterError, match="It has no scale"):
        prepare_work("paper/tiny", "gpu", tmp_path)


def test_an_arm_that_no_recipe_has_is_named(out, tmp_path, monkeypatch):
    path = written(tmp_path, RECIPE)
    for arm, complaint in (
        ("shifted", "names 0 arms in tiny"),
        ("shift @ large", "must name one of the sizes"),
    ):
        put({"paper/one": one_table([path], columns=[{"name": "x"}], rows=cells({"arm": arm}))}, tmp_path, monkeypatch)
        with pytest.raises(HeadwaterError, match=complaint):
            prepare_work("paper/one", "cpu", tmp_path)
    monkeypatch.undo()
    read_tables.cache_clear()


def test_the_answer_counts_claims(out):
    from dataclasses import replace

    found = reproduce_table(prepare_work("paper/tiny", "cpu", out))
    for verdicts, answer in (
        ([], "No claim is judged."),
        (["replicates"], "The claim replicates at cpu scale."),
        (["inconclusive"], "The claim is inconclusive at cpu scale."),
        (["replicates"] * 2, "All 2 claims replicate at cpu scale."),
        (["inconclusive"] * 2, "All 2 claims are inconclusive at cpu scale."),
        (["fails"] * 2, "All 2 claims fail at cpu scale."),
        (
            ["replicates", "fails", "inconclusive"],
            "Of 3 claims at cpu scale, 1 replicates, 1 fails, 1 is inconclusive.",
        ),
    ):
        claims = [replace(found.claims[0], verdict=verdict) for verdict in verdicts]
        assert replace(found, claims=claims).answer == answer


def test_what_a_difference_is_compared_with_is_trained_and_evaluated_too():
    claim = {"test": "better", "says": "It is more.", "arm": "a", "against": "b", "measure": "task:x:acc"}
    of = PaperTable.model_validate(
        one_table(["x"], claims=[claim | {"than": {"arm": "c", "measure": "task:y@5:acc"}}]),
    )
    assert list_references(of) == ["a", "b", "c"]
    assert tasks_of(of) == ["x", "y@5"]


def test_halves_of_what_goes_from_easy_to_hard(tmp_path):
    of = runs([], {}, tmp_path)
    for values, easier, harder in (([1.0, 0.9, 0.5], 0.95, 0.5), ([1.0, 0.8, 0.4, 0.2], 0.9, 0.3)):
        measures = {"accuracy": 0.1, "loss": 9.0} | {f"accuracy/k={k}": value for k, value in enumerate(values)}
        one = record(held_out=[HeldOutPoint(step=1, tokens=0, metrics=measures)])
        found = [of.measure_run(measure, FinishedRun(one, tmp_path)) for measure in ("easier", "harder", "hardest")]
        assert found == pytest.approx([easier, harder, values[-1]])
    with pytest.raises(HeadwaterError, match="accuracy/"):
        of.measure_run("harder", FinishedRun(record(), tmp_path))
    assert not of.lower_is_better("harder", "shift")


def test_how_alike_tokens_are_is_what_inspect_reads(out):
    from headwater_lab.inspection import inspect_model
    from headwater_lab.training.trained_models import open_trained

    work = prepare_work("paper/tiny", "cpu", out)
    run = finished_runs(work.arms["shift"], work.trials)[0]
    of = Runs(work.table, work.arms, work.trials)
    hidden = inspect_model(open_trained(run.checkpoint_folder), "shift").read.hidden
    assert of.measure_run("similarity:1-1", run) == hidden[1]
    assert of.measure_run("similarity:0-1", run) == pytest.approx((hidden[0] + hidden[1]) / 2)
    assert of.lower_is_better("similarity:0-1", "shift")


def test_cells_of_runs_that_diverged_and_of_steps(tmp_path):
    points = [3.0, 2.0, 1.0, 0.5]
    records = {
        "vanilla": [record(0, 2.0), record(1, 3.0), record(2, 4.0)],
        "shift": [record(0, points), record(1, math.nan), record(2, [3.0, 3.0, 3.0, 0.9])],
    }
    claim = {"test": "stays", "says": "It stays.", "arm": "shift", "unlearned": 0.8}
    of = runs([claim], records, tmp_path, threshold=1.0)
    column = Column(name="Loss", digits=2)

    def text(**cell):
        return measure_cell(TableCell(arm="shift", **cell), column, of).text

    assert text() == "0.70 ± 0.28; diverged 1 of 3"
    assert text(minus="vanilla") == "-2.30 ± 1.13; diverged 1 of 3"  # seeds 0 and 2: -1.5 and -3.1
    assert text(over="vanilla") == "-0.76 ± 0.02; diverged 1 of 3"
    assert text(measure="steps") == "88 ± 18 in 2 of 3"
    assert text(measure="diverged") == "2 of 3"
    assert measure_cell(TableCell(arm="third"), column, of).text == ""


def test_the_papers_figures_keep_their_digits():
    for value, text in ((40.6, "40.6"), (5, "5"), ("3.40", "3.40"), (None, None), ("60B", "60B")):
        assert TableCell(paper=value).paper == text


@pytest.mark.parametrize(
    ("label", "shown"),
    [("30B at 1.5B", "30B at 1.5B (ours: 2.5M, 0.43M)"), ("11.5B", "11.5B"), ("(ours)", "(ours)")],
)
def test_labels_say_which_sizes_are_ours(label, shown):
    assert add_names(label, {"1.5B": "0.43M", "30B": "2.5M"}) == shown
    assert add_names(label, {}) == label


def test_evidence_in_words():
    def write_claim(estimate, interval, kind="mean", why="", verdict="inconclusive"):
        one = Judged("It is so.", verdict, why, "a − b", kind, estimate, interval, 0.05, 0.5, 3)
        return describe_evidence(one)

    assert write_claim(0.00506, (-0.00617, 0.0163)) == "a − b: +0.0051 [-0.0062, +0.0163]"
    assert (
        write_claim(-1.5, (-5.76, 2.76), why="the interval includes 0")
        == "a − b: -1.50 [-5.76, +2.76]; the interval includes 0"
    )
    assert write_claim(1234.5, (1000.0, 1469.0)) == "a − b: +1,234 [+1,000, +1,469]"
    assert write_claim(3.1e12, (3.1e12, 3.1e12)) == "a − b: +3.1e+12 [+3.1e+12, +3.1e+12]"
    assert write_claim(0.0, (0.0, 0.0)) == "a − b: +0.00 [+0.00, +0.00]"
    assert write_claim(0.5, None) == "a − b: +0.500"
    assert write_claim(0.75, (0.35, 0.97), "share") == "a − b: 75% [35%, 97%]"
    # A fitted law's interval comes first.
    assert write_claim(0.12, (-0.05, 0.5), "more") == "a − b: [-5.0%, +50.0%], estimate +12.0%"
    assert write_claim(0.12, (-0.05, math.inf), "more") == "a − b: inconclusive at these sizes"
    assert write_claim(0.5, (-0.5, 99.0), "more", "it is") == "a − b: inconclusive at these sizes; it is"
    assert write_claim(0.5, (-0.5, 99.0), "more", verdict="replicates") == "a − b: [-50.0%, ×100], estimate +50.0%"
    assert write_claim(0.5, None, "more") == "a − b: +50.0%"
    assert write_claim(None, (-0.5, 1.0), "more") == "a − b: [-50.0%, +100.0%]"
    assert write_claim(None, None, why="one seed says nothing") == "one seed says nothing"


def test_what_a_law_saves(tmp_path):
    """1 - N/N' of a baseline that needs N' = 2 N, and its interval turned the same way."""
    values = changed(RECIPE, compare={"sizes": {"small": {}, "middle": {}, "large": {}}})
    path = written(tmp_path, values)
    recipe = load_recipe(path)
    for arm in ("vanilla", "shift"):
        for size, parameters in (("small", 1000), ("middle", 3000), ("large", 10000)):
            for seed in (0, 1, 2):
                loss = (
                    1
                    + 20 * (parameters * (2 if arm == "shift" else 1)) ** -0.4
                    + 1e-3 * (seed if arm == "shift" else 0)
                )
                save(recipe, arm, size, seed, tmp_path / "out", loss, parameters)
    place = SizedArm(recipe, path, "shift", "small")
    of = Runs(PaperTable.model_validate(one_table([path])), {"shift @ small": place}, tmp_path / "out")
    cell = measure_cell(TableCell(arm="shift @ small", measure="saved"), Column(name="", times=100, digits=1), of)
    equal, _ = of.find_equivalent_size("shift @ small")
    saved = [100 * (1 - 1 / (1 + more)) for more in (equal.extra.value, *equal.extra.interval)]
    assert cell.value == pytest.approx(50, abs=2)
    assert cell.text == f"{saved[0]:.1f} [{saved[1]:.1f}, {saved[2]:.1f}]"
    assert cell.seeds == 3


def test_from_python_what_is_missing_is_said(out, tmp_path):
    with pytest.raises(HeadwaterError, match=r"1 run of this table, on several devices .*torchrun"):
        lab.reproduce("paper/devices", out=out, overrides=["training.steps=2"])
    # A folder that is not a run's is left alone, and its trial fails.
    for name in ("shift-1", "vanilla-1"):
        (trials_folder(tmp_path, "cpu", []) / "tiny" / name).mkdir(parents=True)
        (trials_folder(tmp_path, "cpu", []) / "tiny" / name / "thesis.txt").write_text("mine")
    found = lab.reproduce("paper/tiny", out=tmp_path)
    assert [one.label.split()[0] for one in found.failed] == ["vanilla", "shift"]
    assert found.table()
    overrides = ["compare.seeds=[7]"]
    for name in ("shift-7", "vanilla-7"):
        (trials_folder(tmp_path, "cpu", []) / "tiny" / name).mkdir(parents=True)
        (trials_folder(tmp_path, "cpu", []) / "tiny" / name / "thesis.txt").write_text("mine")
    with pytest.raises(HeadwaterError, match=r"No run of paper/tiny is finished: .*failed"):
        lab.reproduce("paper/tiny", out=tmp_path, overrides=overrides)


def test_from_python_mistakes_get_one_sentence(out):
    with pytest.raises(HeadwaterError, match="scale must be cpu, gpu or paper, not 'tpu'"):
        lab.reproduce("paper/tiny", "tpu", out=out)
    with pytest.raises(HeadwaterError, match=r"not cuda:1 alone; set CUDA_VISIBLE_DEVICES=1 instead"):
        lab.reproduce("paper/tiny", out=out, device="cuda:1")
    with pytest.raises(HeadwaterError, match="no scale"):
        lab.reproduce("paper/tiny", "gpu", out=out)
