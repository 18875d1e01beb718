"""What an interrupted benchmark keeps."""

import os
import signal
from functools import partial

import pytest

from headwater.util.precision import Precision
from headwater_lab.bench.paired import PairedTimes, TurnsInterrupted, take_turns
from headwater_lab.bench.shapes import StepShape
from headwater_lab.bench.training_speed import bench_steps, mechanism_pair

TINY = StepShape(layers=1, width=64, vocab_size=17, context=8, batch_size=1)


def test_quartiles_lie_within_the_measured_ratios():
    assert PairedTimes([2.0, 1.0], [1.0, 1.0]).quartiles == (1.25, 1.75)


def test_heads_have_the_channels_that_the_help_names(run):
    assert StepShape(width=192).config(8)["num_attention_heads"] == 3
    code, _, err = run("bench", "train", "--width", 100)
    assert (code, "width must be a multiple of 64, not 100, since heads have 64 channels." in err) == (2, True)


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_whole_turns_are_kept(turns):
    calls = []

    def run(name):
        calls.append(name)
        if len(calls) == 2 * (1 + turns) + 2:  # in the second run of a turn, after one turn to warm up
            raise KeyboardInterrupt
        return len(calls)

    with pytest.raises(KeyboardInterrupt) as stop:
        take_turns({"a": lambda: run("a"), "b": lambda: run("b")}, 9)
    assert isinstance(stop.value, TurnsInterrupted) == (turns >= 2)
    if turns >= 2:
        assert [len(stop.value.results[name]) for name in "ab"] == [turns, turns]
        assert stop.value.results["a"][:2] == [3, 6]  # the order alternates


@pytest.mark.parametrize(("at", "rows"), [(("first", 2), 0), (("first", 6), 1), (("second", 1), 1), (("second", 8), 2)])
def test_rows_of_an_interrupted_benchmark(at, rows, request):
    # A shell that starts the tests in the background lets them ignore SIGINT.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    pairs = [(name, mechanism_pair({"kv_shift": {}}, TINY)) for name in ("first", "second")]

    def interrupt(name, done, total):
        assert total == 3 + 9
        if (name, done) == at:
            os.kill(os.getpid(), signal.SIGINT)

    settings = "without", "title", Precision("32-true"), 9, False, "cpu"
    if not rows:
        with pytest.raises(KeyboardInterrupt):
            bench_steps(pairs, *settings, interrupt)
        return
    benchmark = bench_steps(pairs, *settings, interrupt)
    assert not benchmark.is_whole
    assert len(benchmark.rows) == rows
    assert all(float(row["ratio"]) > 0 for row in benchmark.rows)
    assert bench_steps(pairs, *settings).is_whole


def test_the_command_prints_the_rows_and_says_that_it_was_stopped(run, monkeypatch):
    from headwater_lab.bench import training_speed

    def stop_second(mechanisms, shape):
        if "svformer" in mechanisms:
            raise KeyboardInterrupt
        return mechanism_pair(mechanisms, shape)

    monkeypatch.setattr(training_speed, "mechanism_pair", stop_second)
    sizes = "--layers=1", "--width=64", "--vocab-size=17", "--context=8", "--batch-size=1", "--pairs=2"
    code, out, err = run("bench", "mechanisms", "kv_shift", "svformer", *sizes)
    assert code == 130
    assert "Stopped" in err
    assert "kv_shift" in out
    assert "svformer" not in out
    assert "kv_shift  0/5" in err
