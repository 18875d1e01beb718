"""No step of a training run waits for the device: nothing on the way asks for a number."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.recipe import parse
from headwater.registry import REGISTRY
from headwater.training.loop import TrainingRun, train

LEARNING = {"value_residual": {"mode": "learnable"}, "kv_shift": {"window": 3}}


class WaitError(AssertionError):
    pass


class NoWaits(TorchDispatchMode):
    """Refuses whatever copies a number to the host, or has a shape that depends on numbers."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.refused:
            raise WaitError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


def test_the_mode_refuses():
    with NoWaits(), pytest.raises(WaitError):
        bool(torch.ones(2).all())
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.ones(2).all())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("documents", [None, "position_ids", "document_starts"])
@pytest.mark.parametrize("position", ["rope", "learned", "alibi", "none"])
@pytest.mark.parametrize("name", [None, *sorted(REGISTRY)])
def test_no_mechanism_waits(name, position, documents):
    """On fake tensors, which have no numbers to wait for, as on a GPU."""
    mechanisms = {} if name is None else {name: LEARNING.get(name, {})}
    config = HeadwaterConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        position=position,
        mechanisms=mechanisms,
    )
    with FakeTensorMode():
        model = HeadwaterForCausalLM(config).train()
        ids = torch.zeros(2, 16, dtype=torch.long)
        given = {} if documents is None else {documents: ids if documents == "position_ids" else ids.bool()}
        count = torch.zeros((), dtype=torch.long)
        out = model(ids, labels=ids, shift_labels=ids, num_items_in_batch=count, skip_logits=True, **given)
        out.loss.backward()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_a_run_does_not_wait(accumulate, tmp_path, monkeypatch):
    """Data, forward and backward passes, clipping, the optimizer; the outcome of the step before is on the host."""
    values = {
        "data": {"kind": "induction", "vocabulary": 12, "length": 16, "held_out": 8},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mechanisms": {"kv_shift": {}, "value_residual": {}},
        },
        "training": {"steps": 6, "batch_size": 4, "accumulate": accumulate, "warmup_steps": 2, "threads": 1},
        "reporting": {"log_every": 6, "tensorboard": False},
    }
    step, steps = TrainingRun.step, []

    def watched(self, stop):
        if self.progress.step:  # the optimizer makes its state in the first
            with NoWaits():
                step(self, stop)
            steps.append(self.progress.step)
        else:
            step(self, stop)

    settle, settled = TrainingRun.settle, []

    def on_the_host(self):
        settled.append(None if self.outcome is None else self.progress.step - self.outcome.step)
        with _disable_current_modes():
            settle(self)

    monkeypatch.setattr(TrainingRun, "step", watched)
    monkeypatch.setattr(TrainingRun, "settle", on_the_host)
    record = train(parse(values, "test"), tmp_path / "run")
    assert steps == [2, 3, 4, 5, 6]
    assert settled[1:6] == [1] * 5, "each step looks at the one before"
    assert record.status == "finished"
