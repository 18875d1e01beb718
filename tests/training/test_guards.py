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
from headwater.errors import HeadwaterError
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.records import Notice, read_record
from headwater.training.guards import MEMORY, Spikes, replay
from headwater.training.loop import train
from headwater.training.places import checkpoints


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
    steps = {"steps": 6, "accumulate": 2, "schedule": "constant", "warmup_steps": 0}
    record = train(recipe(training=steps, reporting={"save_every": 1, "keep": 9, "log_every": 1}), tmp_path / "run")
    assert record.skipped == 1
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
    made = recipe(training={"steps": 4}, reporting={"log_every": 1, "save_every": 1, "keep": 9})
    record = train(made, tmp_path / "run")
    assert [n.step for n in record.notices] == [3]
    before, after = (load_weights(tmp_path / "run", step) for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)


def load_weights(run, step):
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_so_many_in_a_row_stop_the_run_and_leave_what_it_takes_to_look_into_it(recipe, tmp_path, poisoned, run):
    made = recipe(training={"skip_limit": 3, "accumulate": 2}, reporting={"save_every": 2})
    poisoned({1, 5, 9, 11, 13})  # steps 1, 3, 5, 6, 7
    with pytest.raises(
        HeadwaterError,
        match=r"at step 7 the loss is nan .* 3 steps in a row .* rows are \d+, \d+, .*; `headwater replay",
    ):
        train(made, tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record.status, record.skipped) == ("diverged", 5)
    folder = tmp_path / "run" / "failures" / "step-000007"
    assert len(list(folder.glob("batch-0-*.safetensors"))) == 2
    assert checkpoints(tmp_path / "run")[-1].name == "step-000006"

    found = replay(folder)
    assert found.step == 7
    data = made.data.build()
    assert found.rows == data.rows(made.seed, 6 * 8, 8)
    assert len(set(found.rows)) == 8


def test_replay_finds_where_it_stops_being_finite(recipe, tmp_path, run):
    """A weight that makes products overflow, put into a checkpoint that training then cannot go on from."""
    from safetensors.torch import load_file, save_file

    made = recipe(training={"skip_limit": 1, "steps": 6})
    train(recipe(training={"skip_limit": 1, "steps": 4}), tmp_path / "run")
    newest = checkpoints(tmp_path / "run")[-1]
    weights = load_file(newest / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 3e38
    save_file(weights, newest / "model.safetensors", metadata={"format": "pt"})
    from test_checkpoint import resum

    resum(newest)
    with pytest.raises(HeadwaterError, match="at step 5") as error:
        train(made, tmp_path / "run", resume=True)
    folder = tmp_path / "run" / "failures" / "step-000005"
    assert f"headwater replay {folder}" in str(error.value)
    code, out, _ = run("replay", folder)
    assert code == 0
    assert "step 5: loss nan" in out
    assert "first module whose output is not finite: model.layers.1.mlp.up_proj\n" in out
    code, _, err = run("replay", tmp_path)
    assert code == 2
    assert "holds no saved failure" in err


@pytest.mark.parametrize("attention", ["eager", "matmul"])
def test_replay_repeats_the_step_as_the_run_did(attention, recipe, tmp_path, monkeypatch, poisoned):
    """With its attention kernel, its z-loss and its chunks of logits."""
    made = recipe(training={"skip_limit": 1, "attn_implementation": attention, "z_loss": 0.1, "loss_chunk": 5})
    poisoned({1})
    with pytest.raises(HeadwaterError, match="at step 1"):
        train(made, tmp_path / "run")
    monkeypatch.undo()
    ran = []
    forward = HeadwaterForCausalLM.forward

    def seen(self, *given, **more):
        ran.append((self.config._attn_implementation, more["output_z_loss"], more["loss_chunk"]))
        return forward(self, *given, **more)

    monkeypatch.setattr(HeadwaterForCausalLM, "forward", seen)
    found = replay(tmp_path / "run" / "failures" / "step-000001")
    assert set(ran) == {(attention, True, 5)}
    assert found.attention == attention
    assert read_record(tmp_path / "run").environment.attention == attention


def test_broken_weights_are_never_saved(recipe, tmp_path):
    with pytest.raises(HeadwaterError, match="diverged"):
        train(recipe(training={"learning_rate": 1e39, "warmup_steps": 0, "clip": None}), tmp_path / "run")
    for checkpoint in checkpoints(tmp_path / "run"):
        assert all(bool(t.isfinite().all()) for t in load_weights(tmp_path / "run", int(checkpoint.name[5:])).values())


def test_a_loss_that_stands_out_is_a_spike_and_noise_is_none():
    draw = torch.Generator().manual_seed(0)
    spikes = Spikes()
    found = [
        spikes.is_spike(3 * math.exp(-step / 500) + 0.05 * float(torch.randn((), generator=draw)))
        for step in range(2000)
    ]
    assert not any(found)
    assert all(spikes.is_spike(3.0) for _ in range(8)), "the first has not made the others ordinary"
    assert not spikes.is_spike(0.1)
    assert not Spikes().is_spike(1e9), "nothing stands out at the start"


def test_a_spike_is_told_and_recorded(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.training.guards.MEMORY", 5)
    original, count = HeadwaterForCausalLM.forward, iter(range(1, 10**6))

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if self.training and next(count) == 21:
            out.loss = out.loss * 10
        return out

    monkeypatch.setattr(HeadwaterForCausalLM, "forward", forward)
    told = []
    made = recipe(training={"accumulate": 2})
    record = train(made, tmp_path / "run", on_event=lambda step, point: told.append(point))
    assert [n.step for n in record.notices] == [11]
    assert record.notices[0].message.startswith("The loss is ")
    assert [p for p in told if isinstance(p, Notice)] == record.notices
    assert MEMORY == 100


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
def test_memory_that_ends_is_answered_with_what_plan_knows(recipe, tmp_path):
    """A real limit on memory, in a process of its own."""
    file = tmp_path / "recipe.yaml"
    made = recipe(data={"context": 512}, training={"batch_size": 256}, model={"hidden_size": 512})
    file.write_text(yaml.safe_dump(made.model_dump(mode="json")))
    code, _, err = processes.run("train", file, "--out", tmp_path / "run", before=little_memory)
    assert code == 2, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("headwater:")]
    assert "activations of 256 rows of 512 tokens" in sentence
    assert "training.gradient_checkpointing=true" in sentence
    assert "Traceback" not in err


def test_runs_are_listed_with_what_became_of_them(recipe, finished, tmp_path, run):
    finished(recipe(), tmp_path / "done")
    with pytest.raises(HeadwaterError):
        train(recipe(training={"learning_rate": 1e39, "warmup_steps": 0, "clip": None}), tmp_path / "deep" / "broken")

    from trials import PowerCut, cut_at

    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "cut", on_event=cut_at(9))
    record = json.loads((tmp_path / "cut" / "record.json").read_text())
    (tmp_path / "cut" / "record.json").write_text(json.dumps(record | {"status": "running"}))  # as SIGKILL leaves it
    seen = {}

    def look(step, point):
        if point is None and step == 7:
            code, out, _ = run("runs", tmp_path, "--json")
            assert code == 0
            seen.update({row["folder"]: row for row in json.loads(out)})

    train(recipe(), tmp_path / "live", on_event=look)
    status = {folder.rsplit("/", 1)[-1]: row["status"] for folder, row in seen.items()}
    assert status == {"done": "finished", "broken": "diverged", "cut": "interrupted", "live": "running"}
    done = seen[str(tmp_path / "done")]
    whole = read_record(tmp_path / "done")
    assert (done["step"], done["steps"]) == (12, 12)
    assert done["best"] == min(p.measures["bits_per_byte"] for p in whole.held_out)
    assert seen[str(tmp_path / "live")]["step"] == 6, "the last point"
    code, out, _ = run("runs", tmp_path)
    assert "12 / 12" in out
    code, _, err = run("runs", tmp_path / "nowhere")
    assert code == 2
    assert "There are no runs" in err


def test_a_failure_of_an_earlier_try_does_not_stay(recipe, tmp_path, poisoned):
    poisoned({1, 3})
    for seed in (1, 2):
        made = recipe(training={"skip_limit": 1}, seed=seed)
        with pytest.raises(HeadwaterError, match="diverged: at step 1"):
            train(made, tmp_path / "run")
        assert replay(tmp_path / "run" / "failures" / "step-000001").rows == made.data.build().rows(seed, 0, 4)
        poisoned({1})
