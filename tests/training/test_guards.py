"""What a long run must notice."""

import functools
import json
import math
import resource
from pathlib import Path

import pytest
import torch
import yaml

import processes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.journal import list_runs
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record


@pytest.fixture
def poisoned(monkeypatch):
    """Losses of chosen forward passes (counted from 1, over a whole test) are not finite."""

    def poison(bad):
        original, count = HeadwaterForCausalLM.forward, iter(range(1, 10**6))

        def forward(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            if self.training and out.loss is not None and next(count) in bad:
                out.loss = out.loss * float("nan")
            return out

        monkeypatch.setattr(HeadwaterForCausalLM, "forward", forward)

    return poison


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(recipe, tmp_path, poisoned):
    poisoned({9})  # the first half of step 5
    steps = {"steps": 6, "gradient_accumulation_steps": 2, "schedule": "constant", "warmup_steps": 0}
    record = train(
        recipe(training=steps, reporting={"save_every": 1, "keep_checkpoints": 9, "log_every": 1}), tmp_path / "run"
    )
    assert record.skipped_steps == 1
    assert [n.step for n in record.notices] == [5]
    assert "Step 5 was skipped: the loss is nan" in record.notices[0].message
    before, after, later = (load_weights(tmp_path / "run", step) for step in (4, 5, 6))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], later[name]) for name in after)
    assert [p.step for p in record.curve] == [1, 2, 3, 4, 6]
    assert all(math.isfinite(p.loss) for p in record.curve)
    assert record.tokens == 6 * 8 * 32


def test_a_gradient_that_is_not_finite_is_enough(recipe, tmp_path, monkeypatch):
    original, count = HeadwaterForCausalLM.forward, iter(range(1, 10**6))

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if self.training and next(count) == 3:  # √0: the loss is what it was, its gradient is infinite
            out.loss = out.loss + (0 * self.model.embed_tokens.weight.sum()).abs().sqrt()
        return out

    monkeypatch.setattr(HeadwaterForCausalLM, "forward", forward)
    made = recipe(training={"steps": 4}, reporting={"log_every": 1, "save_every": 1, "keep_checkpoints": 9})
    record = train(made, tmp_path / "run")
    assert [n.step for n in record.notices] == [3]
    before, after = (load_weights(tmp_path / "run", step) for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)


def load_weights(run, step):
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_so_many_in_a_row_stop_the_run_and_its_rows_are_named(recipe, tmp_path, poisoned):
    made = recipe(training={"max_skipped_steps": 3, "gradient_accumulation_steps": 2}, reporting={"save_every": 2})
    poisoned({1, 5, 9, 11, 13})  # steps 1, 3, 5, 6, 7
    problem = r"at step 7 the loss is nan .* 3 steps in a row .* It used the rows 48 to 55 of the seed's order\."
    with pytest.raises(HeadwaterError, match=problem):
        train(made, tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record.status, record.skipped_steps) == ("diverged", 5)
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-000006"


def test_broken_weights_are_never_saved(recipe, tmp_path):
    with pytest.raises(HeadwaterError, match="diverged"):
        train(recipe(training={"learning_rate": 1e39, "warmup_steps": 0, "max_grad_norm": None}), tmp_path / "run")
    for checkpoint in list_checkpoints(tmp_path / "run"):
        assert all(bool(t.isfinite().all()) for t in load_weights(tmp_path / "run", int(checkpoint.name[5:])).values())


def little_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 10**9,) * 2)


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(recipe, tmp_path):
    """A real limit on what may be written, in a process of its own."""
    file = tmp_path / "recipe.yaml"
    values = recipe(model={"hidden_size": 64}).model_dump(mode="json")
    file.write_text(yaml.safe_dump(values))
    before = functools.partial(processes.small_files, 200_000)
    code, _, err = processes.run("train", file, "--out", tmp_path / "run", before=before)
    assert code == 2
    (sentence,) = [line for line in err.splitlines() if line.startswith("headwater:")]
    assert "The checkpoint of step 4 could not be saved" in sentence
    assert "--resume" in sentence
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_memory_that_ends_is_answered_with_what_needs_less(recipe, tmp_path):
    """A real limit on memory, in a process of its own."""
    file = tmp_path / "recipe.yaml"
    made = recipe(data={"context": 512}, training={"batch_size": 256}, model={"hidden_size": 512})
    file.write_text(yaml.safe_dump(made.model_dump(mode="json")))
    code, _, err = processes.run("train", file, "--out", tmp_path / "run", before=little_memory)
    assert code == 2, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("headwater:")]
    assert "Out of memory with 256 rows per process" in sentence
    assert "training.gradient_checkpointing=true" in sentence
    assert "Traceback" not in err


def test_runs_are_listed_with_what_became_of_them(recipe, finished, tmp_path, run):
    finished(recipe(), tmp_path / "done")
    with pytest.raises(HeadwaterError):
        train(
            recipe(training={"learning_rate": 1e39, "warmup_steps": 0, "max_grad_norm": None}),
            tmp_path / "deep" / "broken",
        )

    from trials import PowerCut, cut_at

    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "cut", on_event=cut_at(9))
    record = json.loads((tmp_path / "cut" / "record.json").read_text())
    (tmp_path / "cut" / "record.json").write_text(json.dumps(record | {"status": "running"}))  # as SIGKILL leaves it
    seen = {}

    def look(step, point):
        if point is None and step == 7:
            seen.update({listed.folder.name: listed for listed in list_runs(tmp_path, print)})

    train(recipe(), tmp_path / "live", on_event=look)
    status = {name: listed.status for name, listed in seen.items()}
    assert status == {"done": "finished", "broken": "diverged", "cut": "interrupted", "live": "running"}
    assert seen["done"].step == 12
    assert seen["live"].step == 6, "the last point"
    code, out, _ = run("runs", tmp_path)
    assert "12 / 12" in out
    code, _, err = run("runs", tmp_path / "nowhere")
    assert code == 2
    assert "There are no runs" in err
