"""Progress without a terminal: plain lines, from the first second, never cut."""

import io
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from headwater.testing.small_models import build
from headwater_lab.api.comparing import watched_trials
from headwater_lab.api.observer import Observer, estimate_time_left
from headwater_lab.cli import arguments, progress
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.data.text import TextSettings
from headwater_lab.training.trained_models import measure_model
from headwater_lab.util.terminal import Terminal


@pytest.fixture
def lines(monkeypatch, capsys):
    """The clock, and what has been printed since the last call."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock, lambda: capsys.readouterr().err.splitlines()


def test_a_task_has_a_first_line_a_last_line_and_few_between(lines):
    clock, printed = lines
    with ProgressReport() as report:
        report.show("run", 0, 200, unit="step")
        assert printed() == ["run  step 0/200"]
        for step in range(1, 101):
            clock[0] += 0.25
            report.show("run", step, 200, info="loss 3.5")
        between = printed()
    assert len(between) == 2  # of 25 seconds
    assert between[0].startswith("run  step 40/200  loss 3.5  ")
    assert between[0].endswith(" left")
    assert [line.split("  ")[1] for line in printed()] == ["step 100/200"]


@pytest.fixture
def timed_report():
    """A report, and the clock of its estimates."""
    report, seconds = ProgressReport(), [0.0]
    report.get_time = lambda: seconds[0]
    with report:
        yield report, seconds


def test_rare_updates_of_two_workers_give_the_mean_speed(timed_report):
    report, seconds = timed_report
    report.show("comparison", 0, 1000)
    for done in (100, 200, 300):
        seconds[0] += 140  # both workers finish 50 steps at almost the same time
        report.show("comparison", done - 50, 1000)
        seconds[0] += 1
        report.show("comparison", done, 1000)
    assert estimate_time_left(report.tasks[0]) == timedelta(seconds=987)  # 700 steps of 1.41 seconds


def test_work_done_before_says_nothing_of_the_speed(timed_report):
    report, seconds = timed_report
    report.show("resumed", 700, 1000)
    report.show("comparison", 0, 1000)
    report.show("comparison", 800, 1000, done_before=True)
    for step in range(1, 11):
        seconds[0] += 2
        report.show("resumed", 700 + step, 1000)
        report.show("comparison", 800 + step, 1000)
    report.show("comparison", 910, 1000, done_before=True)
    assert [estimate_time_left(task).total_seconds() for task in report.tasks] == [2 * 290, 2 * 90]


def test_nothing_is_printed_before_the_work_begins_nor_twice(lines):
    _, printed = lines
    report = ProgressReport()
    report.stop()
    assert printed() == []  # the run was refused
    report.show("run", 0, 2)
    report.stop()
    report.stop()
    assert printed() == ["run  0/2"]


def test_a_line_is_as_long_as_it_is_and_literal(lines, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    _, printed = lines
    with ProgressReport() as report:
        report.show("[b]name\x1b", 0, info="loss 1.0  " + "long " * 20)
    assert printed() == [r"[b]name\x1b  loss 1.0  " + "long " * 20]


def test_a_terminal_that_cannot_redraw_has_lines(lines, monkeypatch):
    _, printed = lines
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress, "stderr", Terminal(stderr=True, force_terminal=True))
    with ProgressReport() as report:
        report.show("run", 0, 2)
        assert printed() == ["run  0/2"]


def test_a_trial_that_ends_has_a_line(lines):
    _, printed = lines
    with ProgressReport() as report:
        for done, visible in ((0, True), (4, False)):
            report.show("runs/a-0", done, 4, title="  a · seed 0", unit="step", visible=visible)
        assert printed() == ["a · seed 0  step 0/4", "a · seed 0  step 4/4"]


def test_a_training_run_in_a_log(run, tmp_path):
    recipe = {
        "name": "tiny",
        "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8},
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "training": {"steps": 3, "batch_size": 2, "gradient_accumulation_steps": 2, "threads": 1, "warmup_steps": 1},
        "reporting": {"tensorboard": False, "log_every": 1},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    code, _, err = run("train", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run"))
    assert code == 0
    assert err.splitlines()[0].startswith("tiny  step 0/3")
    assert re.search(r"(?m)^tiny  step 3/3  loss \d", err)


def test_a_measurement_reports_each_batch(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"some words of text {name}\n\n" * 4000)
    model = build(vocab_size=257).float()
    data = TextSettings(source=str(tmp_path / "*.txt"), context=16, held_out=0.5, held_out_bytes=40_000).build()
    batches = []
    assert "loss" in measure_model(model, data, lambda: batches.append(1))
    assert len(batches) > 1


def test_bars_do_not_draw_over_a_result(monkeypatch):
    terminal = Terminal(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr(progress, "stderr", terminal)
    # stdout is another console on the same terminal.
    monkeypatch.setattr(arguments, "stdout", Terminal(file=terminal.file, width=80, force_terminal=True))
    with ProgressReport() as report:
        report.show("run", 1, 2)
        report.show("another", 1, 2)
        report.say("the result")
    bars, _, after = terminal.file.getvalue().partition("the result")
    assert "run" in bars
    assert not re.search(r"\x1b\[\d*[AK]", after), "the cursor moves up, or a line is erased"


def test_a_comparison_says_which_steps_an_earlier_run_did():
    shown = []

    class Watch(Observer):
        def show(self, name, done, total=None, **changes):
            shown.append((name, done, changes.get("done_before")))

    recipe = SimpleNamespace(training=SimpleNamespace(steps=9))
    jobs = [SimpleNamespace(folder=Path(name), label=name, recipe=recipe) for name in "ab"]
    on_change = watched_trials("comparison", 18, Watch())
    on_change(jobs[0], 9, "finished")
    on_change(jobs[1], 0, "running")
    on_change(jobs[1], 4, "running")
    assert [call for call in shown if call[0] == "comparison"] == [
        ("comparison", 9, True), ("comparison", 9, False), ("comparison", 13, False),
    ]  # fmt: skip
